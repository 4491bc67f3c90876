"""Tests the dataset that is made of a folder of packages."""

import tokenizers

from benchmarks import packages
from data.flat_tokens import SPLITS
from tests.files import documents


def test_the_dataset_of_a_folder(tmp_path, train_here):
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
    out, message = train_here(*arguments, program=packages.main)
    assert not message and "read 30 files: 30 documents with text" in out

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "packages.json"))
    assert tokenizer.token_to_id("<s>") == 1
    found = [part for split in SPLITS for part in documents(output, split)]
    assert sorted(tokenizer.decode(part).encode() for part in found) == sorted(sources)
