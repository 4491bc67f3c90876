"""Conversion of a split to `.bin` files and back."""

import os
import pathlib
import struct

import numpy as np
import pytest

from data.bins import Bins
from tests import golden
from tests.data.test_bins import DOCUMENTS, END, TOKENS, cut, plain, write_megatron, write_zarr
from tests.files import documents
from tools import bins


@pytest.fixture
def convert(train_here, monkeypatch, here):
    """A function that runs the program in a folder, in parts of a few tokens, and returns its
    message."""
    monkeypatch.setattr(bins, "PART", 50)
    return lambda *given: train_here(*given, program=bins.main)[1]


def lists(documents):
    return [part.tolist() for part in documents]


@pytest.mark.parametrize("header", [[], ["--header"]])
def test_a_split_is_written_and_read_back(convert, tmp_path, header):
    write_zarr("x.zarr")
    assert not convert("x.zarr/train", "x.bin", f"--end-token={END}", *header)
    content = (tmp_path / "x.bin").read_bytes()
    if header:
        assert struct.unpack("<3i", content[:12]) == (20240520, 1, len(TOKENS))
        assert content[12:1024] == bytes(1012)
    assert content[1024 * len(header) :] == TOKENS.astype("<u2").tobytes(), "no second end token"
    assert not convert("x.bin", "y.zarr/validation", f"--end-token={END}")
    assert documents("y.zarr", "validation") == lists(DOCUMENTS)
    assert not convert("x.bin", "z.zarr/train")
    assert documents("z.zarr") == [TOKENS.tolist()]


def test_an_end_token_after_each_document_that_has_none(convert):
    write_zarr("x.zarr", [[1, 2], [END], [3, 4, END], *[[7] * n for n in range(1, 60)]])
    assert not convert("x.zarr/train", "x.bin", f"--end-token={END}")
    wanted = [1, 2, END, END, 3, 4, END]
    wanted += [i for n in range(1, 60) for i in [*[7] * n, END]]
    assert np.fromfile("x.bin", "<u2").tolist() == wanted
    assert not convert("x.zarr/train", "y.bin")
    assert np.fromfile("y.bin", "<u2").tolist()[:5] == [1, 2, END, 3, 4]


def test_ids_beyond_16_bits_have_32(convert, tmp_path):
    write_zarr("x.zarr", [[70_000, 2], [5]])
    assert not convert("x.zarr/train", "x.bin", "--header")
    assert struct.unpack("<3i", (tmp_path / "x.bin").read_bytes()[:12]) == (20240801, 7, 3)
    assert Bins("x.bin", None, "uint16").read_encoded(0, 3).tolist() == [140_001, 4, 10]
    os.remove("x.bin")
    assert not convert("x.zarr/train", "x.bin")
    assert np.fromfile("x.bin", "<u4").tolist() == [70_000, 2, 5]


def test_megatrons_documents(convert, tmp_path):
    """Converts two files, one with 32-bit ids, and sequences that are parts of a document."""
    write_megatron(tmp_path / "a.bin", DOCUMENTS[:20])
    write_megatron(tmp_path / "b.bin", DOCUMENTS[20:], "<i4", 4, of_document=3)
    assert not convert("*.bin", "x.zarr/train")
    together = [np.concatenate(DOCUMENTS[i : i + 3]) for i in range(20, len(DOCUMENTS), 3)]
    assert documents("x.zarr") == lists(DOCUMENTS[:20] + together)


def index(change):
    """Writes Megatron's files, and changes the index."""

    def write(folder):
        write_megatron(folder / "x.bin", DOCUMENTS)
        content = (folder / "x.idx").read_bytes()
        (folder / "x.idx").write_bytes(change(content))

    return write


def both(folder):
    write_zarr("x.zarr")
    plain(folder)


MISTAKES = {
    "no split": (plain, ["u2.bin", "x.zarr"]),
    "a file that nothing would read": (both, ["x.zarr/train", "x"]),
    "no split of a source": (both, ["x.zarr", "x.bin"]),
    "a file that is there": (both, ["x.zarr/train", "u2.bin"]),
    "a split that is there": (both, ["u2.bin", "x.zarr/train"]),
    "an end token inside a document": (
        lambda folder: write_zarr("x.zarr", [[1] * 48, [2, END, 3]]),
        ["x.zarr/train", "x.bin", f"--end-token={END}"],
    ),
    "no file": (lambda folder: None, ["x.bin", "x.zarr/train"]),
    "a header to read": (plain, ["u2.bin", "x.zarr/train", "--header"]),
    "a type to write": (both, ["x.zarr/train", "x.bin", "--dtype=uint16"]),
    "an end token beside an index": (index(bytes), ["x.bin", "x.zarr/train", "--end-token=0"]),
    "an index that is cut off": (index(lambda x: x[:-30]), ["x.bin", "x.zarr/train"]),
    "an index of another format": (index(lambda x: b"x" + x), ["x.bin", "x.zarr/train"]),
    # Ends with the number of the sequence that each document starts with.
    "an index without its last documents": (
        index(lambda x: x[:26] + b"\x02" + x[27 : 34 + 12 * len(DOCUMENTS) + 16]),
        ["x.bin", "x.zarr/train"],
    ),
    "files for validation, too": (
        lambda _: [
            write_megatron(pathlib.Path(f"x_{x}.bin"), DOCUMENTS) for x in ("train", "valid")
        ],
        ["x_*.bin", "x.zarr/train"],
    ),
    "an index of floats": (index(lambda x: x[:17] + b"\x07" + x[18:]), ["x.bin", "x.zarr/train"]),
    "a file that doesn't fit its index": (
        lambda folder: cut(write_megatron(folder / "x.bin", DOCUMENTS), 100),
        ["x.bin", "x.zarr/train"],
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_message(convert, tmp_path, case):
    write, given = MISTAKES[case]
    write(tmp_path)
    message = convert(*given)
    assert message and "\n" not in message
    golden.check("datasets.txt", f"tools.bins: {case}", message)
