"""`.bin` files: they give the rows of the same tokens in zarr, and what isn't whole is refused."""

import functools
import os
import re
import shutil
import struct

import jax
import numpy as np
import pytest

from data.bins import Bins
from data.flat_tokens import FlatTokens, Writer, encode
from data.loader import WeightedDataset
from shardlib.errors import UserError
from tests import golden
from tests.data.test_loader import open_loader
from tests.files import rows, write_tokens
from tests.helpers import small_run

END, VOCAB = 300, 1000
RANDOM = np.random.default_rng(0)
# Documents that end in END, as nanoGPT's do, of ids in which END is nowhere else.
DOCUMENTS = [np.append(RANDOM.integers(301, VOCAB, n), END) for n in RANDOM.integers(1, 40, 60)]
TOKENS = np.concatenate(DOCUMENTS)


def write_shards(folder, shards, magic=20240520, version=1, kind="<u2"):
    """Writes files as modded-nanogpt and llm.c do: 256 numbers of 32 bits, then the ids."""
    folder.mkdir(exist_ok=True)
    for number, ids in enumerate(shards):
        header = struct.pack("<3i", magic, version, len(ids)).ljust(1024, b"\0")
        content = header + np.asarray(ids).astype(kind).tobytes()
        (folder / f"train_{number:06}.bin").write_bytes(content)
    return str(folder)


def write_megatron(file, documents, kind="<u2", code=8, of_document=1):
    """Writes a file and its index, as megatron/core/datasets/indexed_dataset.py does, of so many
    sequences of a document."""
    ids = np.concatenate(documents).astype(kind)
    lengths = np.array([len(document) for document in documents])
    places = (np.cumsum(lengths) - lengths) * ids.itemsize
    firsts = np.append(np.arange(0, len(lengths), of_document), len(lengths))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
    index += lengths.astype("<i4").tobytes() + places.astype("<i8").tobytes()
    index += firsts.astype("<i8").tobytes()
    file.write_bytes(ids.tobytes())
    file.with_suffix(".idx").write_bytes(index)
    return str(file)


def write_zarr(path, documents=DOCUMENTS):
    return write_tokens(path, documents, ["train"])


def plain(folder, kind="<u2"):
    file = folder / f"{kind[1:]}.bin"
    TOKENS.astype(kind).tofile(file)
    return str(file)


WIDE = {"bin_dtype": "uint32"}
FORMS = {
    "nanoGPT's": (plain, {}),
    "of 32 bits": (lambda x: plain(x, "<u4"), WIDE),
    "shards with headers": (lambda x: write_shards(x / "x", np.split(TOKENS, [5, 6, 400])), {}),
    "a pattern": (lambda x: write_shards(x / "x", np.split(TOKENS, [500])) + "/train_*.bin", {}),
    "a recursive one": (lambda x: write_shards(x / "x", [TOKENS]) and f"{x}/**/*.bin", {}),
    "of Llama 3 in llm.c": (lambda x: write_shards(x / "x", [TOKENS], 20240801, 7, "<u4"), {}),
}


opened = functools.partial(open_loader, vocab=VOCAB, length=12)


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_those_of_the_same_tokens_in_zarr(form, tmp_path):
    """At the first steps and at some long after, in two streams, to the bit."""
    write, changes = FORMS[form]
    ours = opened(write(tmp_path), streams=2, end_token=END, **changes)
    theirs = opened(write_zarr(tmp_path / "x.zarr"), streams=2)
    for steps in (0, 9), (1000, 1002):
        both = zip(ours.from_step(*steps), theirs.from_step(*steps), strict=True)
        for (_, one), (_, other) in both:
            jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one, other)))
            assert (one.start > 0).any(), "some row has a document's start"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_file_without_the_end_token_beside_others_is_noted(split, here, capsys):
    plain(here)
    shutil.copy("u2.bin", "whole.bin")
    np.full(500, 7, "u2").tofile("text.bin")
    mixture = tuple(WeightedDataset(f"{x}.bin", 1) for x in ("u2", "whole", "text"))
    changes = {"mixture": mixture} if split == "train" else {"validation": {"a": "text.bin"}}
    opened(None if split == "train" else "text.bin", split=split, end_token=END, **changes)
    end = f"flat_tokens.end_token={END}: its tokens count as one document"
    assert capsys.readouterr().out == f"note: no id in text.bin is {end}\n"


def test_any_range_of_shards_is_read(tmp_path):
    """Reads the token before a range from another shard, too."""
    data = Bins(write_shards(tmp_path / "x", np.split(TOKENS, [1, 2, 3, 77, 400])), END, "uint16")
    wanted = FlatTokens(write_zarr(tmp_path / "x.zarr"), "train")
    assert data.token_count == len(TOKENS)
    for start in range(90):
        for stop in range(start + 1, 90, 7):
            np.testing.assert_array_equal(
                data.read_encoded(start, stop), wanted.read_encoded(start, stop)
            )


def random_ids(folder, count, top, kind):
    ids = np.random.default_rng(1).integers(0, top, count).astype(kind)
    ids.tofile(folder / "x.bin")
    return str(folder / "x.bin")


def text(folder):
    return str(shutil.copy(__file__, folder / "x.bin"))


def cut(path, size):
    os.truncate(path, size)
    return path


def shards(folder, **options):
    return f"{write_shards(folder / 'x', [TOKENS], **options)}/train_000000.bin"


def beside(name):
    """Writes a file to train on, and another one of this name in its folder."""
    return lambda folder: os.path.dirname(shutil.copy(shards(folder), folder / "x" / name))


def beginning(content):
    """Writes a file that begins with this content."""
    return lambda folder: (folder / "x.bin").write_bytes(99 * content) and f"{folder}/x.bin"


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_few_ids_many_of_them_0_are_read(kind, tmp_path):
    data = Bins(random_ids(tmp_path, 1000, 5, kind), None, kind)
    assert data.read_encoded(0, 1000).max() == 2 * 4


# What is written, the settings, and in which of them a cure is.
REFUSED = {
    "no file": (lambda folder: f"{folder}/x.bin", {}),
    "a pattern that matches nothing": (lambda folder: f"{folder}/*.bin", {}),
    "an empty file": (lambda folder: cut(plain(folder), 0), {}),
    "an odd size": (lambda folder: cut(plain(folder), 999), {}),
    "a size that is no multiple of 4": (lambda folder: cut(plain(folder, "<u4"), 2002), WIDE),
    "cut off behind its header": (lambda folder: cut(shards(folder), 2000), {}),
    "more than its header says": (lambda folder: shards(folder, kind="<u4"), {}),
    "another magic number": (lambda folder: shards(folder, magic=20240521), {}),
    "another version": (lambda folder: shards(folder, version=2), {}),
    "32 bits read as 16": (lambda folder: random_ids(folder, 999, 50000, "<u4"), {}),
    "16 bits read as 32": (lambda folder: random_ids(folder, 1000, 50000, "<u2"), WIDE),
    "few ids of 32 bits read as 16": (lambda folder: random_ids(folder, 999, 5, "<u4"), {}),
    "64 bits read as 16": (lambda folder: random_ids(folder, 999, 5, "<i8"), {}),
    "64 bits read as 32": (lambda folder: random_ids(folder, 999, 50000, "<i8"), WIDE),
    "text read as 16 bits": (text, {}),
    "text read as 32 bits": (text, WIDE),
    "ids of characters in 8 bits": (lambda folder: random_ids(folder, 2000, 65, "u1"), {}),
    "an id beyond the vocabulary": (plain, {"vocab": 999}),
    "an id of 32 bits beyond the vocabulary": (
        lambda folder: shards(folder, magic=20240801, version=7, kind="<u4"),
        {"vocab": 999},
    ),
    "an end token beyond the vocabulary": (plain, {"vocab": END}),
    "an end token that ends nothing": (plain, {"end_token": END - 1}),
    "an end token that ends nothing in a mixture": (
        lambda folder: shutil.copy(plain(folder), folder / "b.bin") and None,
        {
            "end_token": END - 1,
            "mixture": tuple(WeightedDataset(f"{x}.bin", 1) for x in ("u2", "b")),
        },
    ),
    "a file by two patterns of a mixture": (
        lambda folder: plain(folder) and None,
        {"mixture": tuple(WeightedDataset(f"{x}.bin", 1) for x in ("u2", "u*"))},
    ),
    "a folder with files for validation": (beside("val_0.bin"), {}),
    "a folder with files for a test": (beside("test_0.bin"), {}),
    "a file to validate on, by a link": (
        lambda folder: os.symlink(plain(folder), folder / "x.bin") or f"{folder}/x*.bin",
        {"validation": {"a": "u2.bin"}},
    ),
    "NumPy's": (beginning(np.lib.format.MAGIC_PREFIX), {}),
    "lit-gpt's": (beginning(b"LITPKDS"), {}),
    "a pointer of Git LFS": (beginning(b"version https://git-lfs.github.com/spec/v1\n"), {}),
    "Megatron-LM's": (lambda folder: write_megatron(folder / "x.bin", DOCUMENTS), {}),
    "a document per row": (plain, {"sequence_packing": False}),
    "no validation split": (plain, {"split": "validation"}),
    "an end token for zarr": (lambda folder: write_zarr(folder / "x.zarr"), {}),
    "too few rows": (lambda folder: cut(plain(folder), 2 * 95), {}),
    "a remote file": (lambda folder: "gs://bucket/x.bin", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_trained_on_gets_one_message(case, here):
    write, changes = REFUSED[case]
    with golden.raises("datasets.txt", f".bin: {case}", UserError, (str(here), "...")):
        list(opened(write(here), **{"end_token": END} | changes).from_step(0, 20))


def test_a_checkpoint_records_the_files_and_their_order(tmp_path):
    """But not their folder, as a dataset may move."""

    def made_of(*shards, folder="x"):
        path = write_shards(tmp_path / folder, shards)
        return opened(path, end_token=END).made_of["tokens"]

    first, second = np.split(TOKENS, [600])
    before = made_of(first, second)
    assert made_of(first, second, folder="y") == before
    assert made_of(second, first) != before
    os.rename(tmp_path / "y/train_000000.bin", tmp_path / "y/train_000002.bin")
    assert opened(f"{tmp_path}/y", end_token=END).made_of["tokens"] != before


def test_a_run_with_two_validation_sets(tmp_path, train_here):
    """Both have the same tokens, one of them in zarr that knows its bytes: 3 for a token."""
    run = small_run(tmp_path, "model.vocab=1000", "training.steps=2")
    run += [f"flat_tokens.filespec={plain(tmp_path)}", f"flat_tokens.end_token={END}"]
    with Writer(f"{tmp_path}/x.zarr", "validation") as writer:
        for document in DOCUMENTS:
            encoded = encode(document, np.zeros(1, int))
            writer.extend(encoded, np.array([len(document)]), 3 * len(document))
    (tmp_path / "x.zarr/a.bin").touch()  # it stays a dataset in zarr
    copy = shutil.copy(f"{tmp_path}/u2.bin", f"{tmp_path}/copy.bin")
    sets = f"flat_tokens.validation={{a.b: {tmp_path}/x.zarr, c: {copy}}}"
    run += [sets, "training.validation_interval=2", "training.validation_at_start=true"]
    out, message = train_here(*run, "training.validation_batches=3")
    assert not message
    first, last = rows(tmp_path / "run")
    for row, when in (first, "_at_start"), (last, ""):
        loss = row[f"validation_loss{when}/a.b"]
        assert 6 < loss < 8 and row[f"validation_loss{when}/c"] == loss
        assert row[f"validation_bits_per_byte{when}/a.b"] == loss / np.log(2) / 3
        assert f"validation_bits_per_byte{when}/c" not in row
    shown = f"validation loss/a.b {loss:.4f}  validation loss/c {loss:.4f}"
    assert re.search(rf"^step 1/2  loss [\d.]+  {shown}  ", out, re.MULTILINE)
