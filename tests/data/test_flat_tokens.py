"""The flat-tokens format: writing and reading back, both storage formats, and refused datasets."""

import json
import os
import pickle

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import data.flat_tokens
from data.flat_tokens import FlatTokens, FlatTokensError, Writer, encode
from data.loader import TokenBatch
from tests import golden
from tests.files import write_tokens

ids = st.integers(0, 2**30 - 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=30),
    st.integers(1, 7),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.booleans(),
)
@example([[0, 0], [0, 2**30 - 2]], 1, [1], False)  # a chunk of the id 0 alone, and the largest id
def test_a_writer_goes_on_from_where_another_flushed(
    tmp_path_factory, sequences, chunk, pieces, lost_work
):
    """Tokens that the first writer wrote after its last flush are discarded."""
    path = str(tmp_path_factory.mktemp("flat") / "x.zarr")
    written, remaining = None, list(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.flat_tokens, "CHUNK", chunk)
        for piece in pieces:
            writer = Writer(path, "train", written)
            for sequence in remaining[:piece]:
                writer.append(sequence)
            written, remaining = writer.flush(), remaining[piece:]
            if lost_work:
                writer.extend(np.arange(2, 41, dtype=np.uint32), np.array([30, 9]))
                writer.flush()
        with Writer(path, "train", written) as writer:
            if remaining:
                lengths = np.array([len(part) for part in remaining])
                tokens = encode(np.concatenate(remaining), np.cumsum(lengths) - lengths)
                writer.extend(tokens, lengths)
    dataset = FlatTokens(path, "train")
    dataset.validate()
    flat = [i for sequence in sequences for i in sequence]
    middle = len(flat) // 2
    assert dataset.read(0, len(flat))[0].tolist() == flat
    assert dataset.read(middle, len(flat))[0].tolist() == flat[middle:]
    assert np.diff(dataset.seq_starts[:]).tolist() == [len(s) for s in sequences]
    assert (dataset.sequence_count, dataset.max_token_id) == (len(sequences), max(flat))


def test_arrays_of_another_type_or_length_are_refused():
    with pytest.raises(TypeCheckError, match=r"'ids'.*\n.*f64\[3\]"):
        encode(np.ones(3), np.zeros(1, np.intp))
    with pytest.raises(TypeCheckError, match="'is_start'"):
        TokenBatch.of(np.ones((2, 5), np.uint32), np.ones((2, 3), bool), 0)


def make_group(
    path, zarr_format=3, tokens=(11, 6, 16, 3), starts=(0, 3, 4), largest=8, dtype="u4", **options
):
    """Writes a split with zarr alone. The options are of the array of tokens."""
    group = zarr.open_group(str(path), mode="w", zarr_format=zarr_format).create_group("train")
    options = {"fill_value": 0, "chunks": (2,)} | options
    group.create_array("encoded_tokens", data=np.asarray(tokens, dtype), **options)
    group.create_array("seq_starts", data=np.asarray(starts, np.uint64), chunks=(2,), fill_value=0)
    group.attrs["max_token_id"] = largest
    return str(path)


def write_as_seqax(path, batches):
    """Writes batches of sequences as seqax's converter does: zarr format 2, no fill value of the
    tokens, starts as differences, and arrays that grow with each batch."""
    lz4 = numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    root = zarr.open_group(path, mode="w-", zarr_format=2)
    for split in "validation", "train":
        group = root.create_group(split, attributes={"max_token_id": 0})
        tokens = group.create_array(
            "encoded_tokens", shape=(0,), chunks=(64,), dtype=np.uint32, compressors=lz4,
            fill_value=None,
        )  # fmt: skip
        starts = group.create_array(
            "seq_starts", shape=(1,), chunks=(16,), dtype=np.uint64, compressors=lz4,
            filters=[numcodecs.Delta("i8")], fill_value=0,
        )  # fmt: skip
        for batch in batches:
            ids, ends = np.concatenate(batch), np.cumsum([len(part) for part in batch])
            group.attrs["max_token_id"] = max(group.attrs["max_token_id"], int(ids.max()))
            starts.append((tokens.shape[0] + ends).astype(np.uint64))
            tokens.append(encode(ids, np.append(0, ends[:-1])))
    return str(path)


def test_a_dataset_of_seqax_is_read(tmp_path):
    generator = np.random.default_rng(0)
    sequences = [generator.integers(1, 50_000, n) for n in generator.integers(1, 40, 90)]
    path = write_as_seqax(tmp_path / "x.zarr", [sequences[:7], sequences[7:8], sequences[8:]])
    description = json.loads((tmp_path / "x.zarr/train/seq_starts/.zarray").read_text())
    assert description["filters"] == [{"id": "delta", "dtype": "<i8", "astype": "<i8"}]
    for split in "validation", "train":
        dataset = FlatTokens(path, split)
        dataset.validate()
        ids, is_start = dataset.read(0, dataset.token_count)
        assert ids.tolist() == np.concatenate(sequences).tolist()
        assert dataset.starts(0, 90)[:-1].tolist() == np.flatnonzero(is_start).tolist()
    (tmp_path / "x.zarr/train/encoded_tokens/2").unlink()
    with pytest.raises(FlatTokensError, match="there is no token 128: chunk 2 is missing"):
        FlatTokens(path, "train").validate()


DAMAGE = {
    "the last start is not the end": {"starts": (0, 3)},
    "starts that do not increase": {"starts": (0, 3, 3, 4)},
    "starts that do not begin at 0": {"starts": (1, 3, 4)},
    "a start not listed": {"tokens": (11, 7, 16, 3)},
    "no token where the fill value is 0": {"tokens": (11, 0, 16, 3)},
    "no token where it is not": {"tokens": (11, 2**32 - 1, 16, 3), "fill_value": 2**32 - 2},
    "another largest id": {"largest": 9},
    "ids above the largest": {"largest": 7},
    "tokens of another dtype": {"dtype": "i8"},
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(here, case):
    with golden.raises("datasets.txt", case, FlatTokensError):
        FlatTokens(make_group("x.zarr", **DAMAGE[case]), "train").validate()


@pytest.mark.parametrize("largest", ["x", -1, 2**30 - 1, 1.5, True, [8]], ids=str)
def test_a_largest_id_that_is_none(here, largest):
    with pytest.raises(FlatTokensError) as error:
        FlatTokens(make_group("x.zarr", largest=largest), "train")
    assert str(error.value) == f"x.zarr/train: max_token_id is {largest!r}, which is not an id"


def test_a_block_with_damage_is_not_read(tmp_path):
    dataset = FlatTokens(make_group(tmp_path / "x.zarr", largest=7), "train")
    assert dataset.read(0, 2)[0].tolist() == [5, 3]
    with pytest.raises(FlatTokensError, match=r"token 2 is 8, above max_token_id=7$"):
        dataset.read(1, 4)
    starts = (0, 9, 2**63 + 1, 4)
    dataset = FlatTokens(make_group(tmp_path / "y.zarr", starts=starts), "train")
    with pytest.raises(FlatTokensError, match=r"entry 1 is 9, more than the token count$"):
        dataset.starts(0, 1)
    with pytest.raises(FlatTokensError, match="entry 3, in chunk 1, is not larger than the entry"):
        dataset.starts(2, 3)


PICKLE, DELTA = {"id": "pickle"}, {"id": "delta", "dtype": "<u8"}


class Fails:
    """Ends the tests, if it is unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def chunks_of(*shape):
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}}}


def packed_by(*names):
    configured = [{"name": name, "configuration": {"level": 1}} for name in names]
    return {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *configured]}


TOKENS, STARTS = "encoded_tokens can't be opened", "seq_starts can't be opened"
UNREADABLE = "encoded_tokens: chunk 0 can't be read"
DESCRIPTIONS = [
    ("", {"attributes": 7}, "x.zarr can't be opened"),
    *[("/encoded_tokens", {"shape": [value]}, TOKENS) for value in (-5, "x")],
    *[("/encoded_tokens", {"shape": [value]}, "end with the token count") for value in (5, 2**70)],
    *[("/seq_starts", {"shape": [value]}, "no sequences, or more of them") for value in (1, 7)],
    *[("/seq_starts", {"shape": shape}, STARTS) for shape in ([], [3, 1], None)],
    *[("/encoded_tokens", chunks_of(value), TOKENS) for value in (0, "x")],
    *[("/encoded_tokens", chunks_of(value), UNREADABLE) for value in (3, 2**40, 2**62, 2**70)],
    *[("/seq_starts", chunks_of(*shape), STARTS) for shape in ([2, 2], [0])],
    ("/seq_starts", chunks_of(2**40), "seq_starts: chunk 0 can't be read"),
    *[("/encoded_tokens", packed_by(*names), UNREADABLE) for names in (["gzip"], ["zstd", "zstd"])],
    ("/encoded_tokens", {"codecs": []}, TOKENS),
    ("/encoded_tokens", {"data_type": "x"}, TOKENS),
    ("/encoded_tokens", {"zarr_format": 9}, TOKENS),
]


@pytest.mark.parametrize(("where", "change", "message"), DESCRIPTIONS, ids=str)
def test_a_description_that_parses_but_can_not_be(tmp_path, where, change, message):
    path = make_group(tmp_path / "x.zarr")
    file = tmp_path / f"x.zarr/train{where}/zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FlatTokensError, match=message) as error:
        FlatTokens(path, "train").validate()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"compressor": PICKLE}, {"filters": [DELTA, PICKLE]}], ids=str)
def test_a_description_that_would_run_code(tmp_path, change):
    """zarr refuses a codec that unpickles chunks, for arrays of numbers."""
    path = make_group(tmp_path / "x.zarr", 2)
    array = tmp_path / "x.zarr/train/seq_starts"
    description = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps(description | {"compressor": None} | change))
    for chunk in "01":
        (array / chunk).write_bytes(pickle.dumps(Fails()))
    with pytest.raises(FlatTokensError, match="can't be opened: No Zarr data type"):
        FlatTokens(path, "train")


def test_a_split_without_arrays(tmp_path):
    zarr.open_group(tmp_path / "x.zarr", mode="w").create_group("train")
    with pytest.raises(FlatTokensError, match="has no one-dimensional uint32 array encoded_tokens"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")
    with pytest.raises(FlatTokensError, match="has no split validation"):
        FlatTokens(str(tmp_path / "x.zarr"), "validation")


STRANGE = [[], [3, -2], [2**30 - 1], [2**31 - 1], [2**31], [[1]], [1.5]]


@pytest.mark.parametrize("sequence", STRANGE, ids=str)
def test_what_cannot_be_stored(tmp_path, sequence):
    with Writer(str(tmp_path / "x.zarr"), "train") as writer:
        writer.append([1])
        with golden.raises("datasets.txt", f"append {sequence}", FlatTokensError):
            writer.append(sequence)
    assert FlatTokens(str(tmp_path / "x.zarr"), "train").token_count == 1


def test_ids_of_any_integer_type(tmp_path):
    for kind in np.uint8, np.int16, np.uint64:
        path = write_tokens(tmp_path / f"{kind.__name__}.zarr", [np.array([5, 3, 8], kind)])
        assert FlatTokens(path, "train").read(0, 3)[0].tolist() == [5, 3, 8]


def test_an_interrupted_write_is_no_dataset(tmp_path):
    with pytest.raises(KeyboardInterrupt), Writer(str(tmp_path / "x.zarr"), "train") as writer:
        writer.append([1, 2, 3])
        raise KeyboardInterrupt
    with pytest.raises(FlatTokensError, match="its conversion is unfinished"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")
    write_tokens(tmp_path / "x.zarr", [[7, 8]])  # replaces the unfinished split
    assert FlatTokens(str(tmp_path / "x.zarr"), "train").read(0, 2)[0].tolist() == [7, 8]
    with pytest.raises(FlatTokensError), Writer(str(tmp_path / "y.zarr"), "train"):
        pass


@pytest.mark.parametrize("kind", [2, 3])
def test_other_arrays_are_not_replaced(tmp_path, kind):
    root = zarr.open_group(tmp_path / "x.zarr", zarr_format=kind)
    root.create_array("train/pixels", data=np.ones(9))
    for split in ("train", "validation")[: 4 - kind]:
        with pytest.raises(FileExistsError, match="choose another output"):
            Writer(str(tmp_path / "x.zarr"), split)
    assert zarr.open_array(tmp_path / "x.zarr/train/pixels")[:].all()
