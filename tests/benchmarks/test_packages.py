"""Tests the dataset that is made of a folder of packages."""

import numpy as np
import tokenizers

from benchmarks import packages
from data.flat_tokens import FlatTokens
from tests.helpers import train_here


def test_the_dataset_of_a_folder(tmp_path, capsys, monkeypatch):
    root, output = tmp_path / "packages", tmp_path / "packages.zarr"
    (root / "a/b").mkdir(parents=True)
    sources = [f"def number_{i}():\n    return {i}\n".encode() * 4 for i in range(30)]
    for i, source in enumerate(sources):
        (root / f"a/b/{i}.py").write_bytes(source)
    (root / "a/copy.py").write_bytes(sources[3])
    (root / "a/short.py").write_bytes(b"pass")
    (root / "a/latin.txt").write_bytes(sources[0] + b"\xe9")
    (root / "a/table.md").write_bytes(b"0" * (packages.TO + 1))
    (root / "a/code.c").write_bytes(sources[1] + b"\n")
    arguments = str(output), f"--root={root}"
    out, message = train_here(capsys, monkeypatch, *arguments, program=packages.main)
    assert not message and "read 30 files: 30 documents with text" in out

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "packages.json"))
    assert tokenizer.token_to_id("<s>") == 1
    found = []
    for split in "train", "validation":
        dataset = FlatTokens(str(output), split)
        ids = dataset.read(0, dataset.token_count)[0].astype(np.int64)
        starts = [*dataset.starts(0, dataset.sequence_count)]
        found += [tokenizer.decode(part.tolist()).encode() for part in np.split(ids, starts)[1:-1]]
    assert sorted(found) == sorted(sources)
