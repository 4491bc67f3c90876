"""The tool's output for intact and damaged datasets."""

import functools
import pathlib

import numpy as np
import pytest
import zarr

import data.flat_tokens
from tests.files import write_tokens
from tools import flat_tokens_info


@pytest.fixture
def info(ended):
    return functools.partial(ended, flat_tokens_info.main)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A dataset of twelve documents per split, in chunks of 8 tokens or starts."""
    monkeypatch.setattr(data.flat_tokens, "CHUNK", 8)
    texts = [[byte + 1 for byte in x.encode()] for x in ("the first", "naïve ☃", "end")]
    return pathlib.Path(write_tokens(tmp_path / "x.zarr", [*texts, *[[5]] * 9]))


def test_a_whole_dataset(path, info):
    out, errors, code = info(path, "--decode=12", "--tokenizer=bytes_utf8")
    assert (errors, code) == ("", 0)
    train = f"{path}/train: 31 tokens, ids up to 227; 12 documents of 1 to 10 tokens, median"
    assert out.startswith(train) and out.count("intact\n") == 2
    assert out.count("--- document 1, 10 tokens\nnaïve ☃\n") == 2


def test_the_tokenizer_is_the_one_it_was_made_by(path, info):
    assert "add --tokenizer" in info(path, "--decode=1")[1]
    for settings in {}, {"id_offset": 0}:  # as earlier versions recorded
        conversion = {"settings": {"tokenizer": "bytes_utf8", **settings}}
        zarr.open_group(path).attrs["conversion"] = conversion
        assert "the first" in info(path, "--decode=1")[0]
    conversion["settings"]["id_offset"] = 1
    zarr.open_group(path).attrs["conversion"] = conversion
    _, errors, code = info(path, "--decode=1")
    assert code == 1 and "has the ids of bytes_utf8 plus 1: convert it again" in errors


DAMAGE = {
    "train/encoded_tokens/c/2": "train/encoded_tokens: chunk 2 can't be read: ",
    "validation/seq_starts/c/0": "validation/seq_starts: chunk 0 can't be read: ",
}


@pytest.mark.parametrize("chunk", DAMAGE)
def test_damage_is_named(path, info, chunk):
    (path / chunk).write_bytes((path / chunk).read_bytes()[:-5])
    out, errors, code = info(path)
    assert code == 1 and errors.count("\n") == 1 and DAMAGE[chunk] in errors
    assert out.count("intact\n") == 1, "the other split is intact"


def test_an_error_of_both_splits_is_said_once(tmp_path, info):
    error = f"error: {tmp_path}/x.zarr doesn't exist or isn't a zarr group\n"
    assert info(tmp_path / "x.zarr") == ("", error, 1)


def test_bin_files(tmp_path, info):
    ids = [ord(x) + 1 for x in "the first\nthe other\n"]
    for name, part in ("a", ids[:4]), ("b", ids[4:]):
        np.array(part, np.uint16).tofile(tmp_path / f"{name}.bin")
    given = "--end-token=11", "--decode=2", "--tokenizer=bytes_utf8"
    out, errors, code = info(tmp_path, *given)
    assert (errors, code) == ("", 0)
    line = f"{tmp_path}: 20 tokens, ids up to 117; 2 documents of 10 to 10 tokens, median 10; "
    line += "2 files: a.bin, 4 ids of uint16; b.bin, 16 ids of uint16; intact\n"
    assert out.startswith(line) and out.endswith("--- document 1, 10 tokens\nthe other\n\n")
    _, errors, code = info(str(tmp_path), "--end-token=99")
    assert code == 1 and "is end_token=99: choose the id that ends documents" in errors
    (tmp_path / "b.bin").write_bytes(b"x")
    out, errors, code = info(tmp_path)
    assert (out, code) == ("", 1) and "b.bin can't be read: 1 bytes aren't 1 ids of 2 b" in errors
