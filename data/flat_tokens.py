"""The flat-tokens dataset format: all sequences of a split end to end in one zarr array.

docs/flat_tokens.md is the specification.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import zarr
from beartype import beartype
from jaxtyping import Bool, Int, Int64, Integer, UInt32, jaxtyped
from zarr.codecs import ZstdCodec

from runtime import storage
from runtime.storage import DamageError
from shardlib.errors import UserError

SPLITS = ("train", "validation")
ARRAYS = {"encoded_tokens": "uint32", "seq_starts": "uint64"}
CHUNK = 2**18  # tokens or sequences in a chunk: 1 or 2 MiB before compression

# Ids, and whether a sequence starts at each.
Decoded = tuple[UInt32[np.ndarray, "*shape"], Bool[np.ndarray, "*shape"]]

# Decorator: each call's arrays are as its annotations say. A mistake is ours, and a TypeError.
checked = jaxtyped(typechecker=beartype)


class FlatTokensError(UserError):
    """A dataset, or something about to become one, breaks a rule of the format."""


@checked
def encode(
    ids: Integer[np.ndarray, " tokens"], starts: Int[np.ndarray, " sequences"]
) -> UInt32[np.ndarray, " tokens"]:
    """Ids as they are stored: 2*id+1 where a sequence starts, else 2*id."""
    encoded = np.left_shift(ids, 1, dtype=np.uint32, casting="unsafe")
    encoded[starts] += np.uint32(1)
    return encoded


@checked
def decode(encoded: UInt32[np.ndarray, "*shape"]) -> Decoded:
    """Stored tokens as their ids, and whether a sequence starts there."""
    return encoded >> np.uint32(1), (encoded & np.uint32(1)).astype(np.bool_)


class Writer:
    """Writes one split, sequence by sequence; the split is complete once the `with` block ends.

        with Writer("tokens.zarr", "train") as writer:
            writer.append([5, 3, 8])

    Raises FileExistsError if the split is there already. If the block ends in an exception, the
    split lacks its `max_token_id`: no reader takes it for a dataset, and a new Writer replaces it,
    or, given what `flush` returned, goes on after what had been written by then.
    """

    def __init__(self, path: str, split: str, written: dict[str, int] | None = None):
        self.name = f"{path}/{split}"
        with storage.opening(path):
            root: Any = zarr.open_group(path, mode="a")
        if written is None:
            if split in root and "max_token_id" in root[split].attrs:
                raise FileExistsError(f"{path} has a split {split} already; choose another output")
            group = root.create_group(split, overwrite=True)  # what was there is unfinished
            codecs = [ZstdCodec(checksum=True)]  # readers find damage, at 4 bytes a chunk
            for name, dtype in ARRAYS.items():
                group.create_array(
                    name, shape=(0,), chunks=(CHUNK,), dtype=dtype, compressors=codecs
                )
            written = {"tokens": 0, "sequences": 0, "max_token_id": 0}
        self.group = root[split]
        self.token_count, self.sequence_count = written["tokens"], written["sequences"]
        self.max_token_id = written["max_token_id"]
        self.tokens, self.starts = (self.group[name] for name in ARRAYS)
        # What follows was written after the last flush, and comes again.
        self.tokens.resize((self.token_count,))
        self.starts.resize((self.sequence_count + 1,))  # the first one, 0, is zarr's fill
        self.held: list[tuple[np.ndarray, np.ndarray]] = []  # tokens and ends, not written yet

    def append(self, sequence: Sequence[int] | np.ndarray) -> None:
        """Adds one sequence of ids. Raises FlatTokensError if it is empty or holds an id that can't
        be stored: 0 is reserved, and 2*id+1 has to fit 32 bits."""
        ids = np.asarray(sequence)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise FlatTokensError("a sequence is a list of one or more integer ids")
        if not 1 <= ids.min() <= ids.max() < 2**31:
            wrong = int(ids.min() if ids.min() < 1 else ids.max())
            raise FlatTokensError(
                f"id {wrong} in sequence {self.sequence_count}: "
                "ids are from 1 (0 is reserved) to 2**31 - 1"
            )
        self.extend(encode(ids, np.zeros(1, np.intp)), np.array([len(ids)]))

    @checked
    def extend(
        self, tokens: UInt32[np.ndarray, " tokens"], lengths: Int64[np.ndarray, " sequences"]
    ) -> None:
        """Adds sequences as they are stored, end to end, with the length of each, at least 1."""
        self.held.append((tokens, self.token_count + np.cumsum(lengths)))
        self.token_count += len(tokens)
        self.sequence_count += len(lengths)
        self.max_token_id = max(self.max_token_id, int(tokens.max(initial=0)) >> 1)
        # To grow takes as long as to write some chunks, and the last one is written again.
        if self.token_count - self.tokens.shape[0] >= 16 * CHUNK:
            self.flush()

    def flush(self) -> dict[str, int]:
        """Writes all there is, and returns where it ends, from where a new Writer can go on."""
        if self.held:
            tokens, ends = zip(*self.held, strict=True)
            self.tokens.append(np.concatenate(tokens))
            self.starts.append(np.concatenate(ends).astype(np.uint64))
            self.held = []
        return {
            "tokens": self.token_count,
            "sequences": self.sequence_count,
            "max_token_id": self.max_token_id,
        }

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.complete()

    def complete(self) -> None:
        """Writes all there is, and marks the split complete. Raises FlatTokensError if it is
        empty."""
        if not self.sequence_count:
            raise FlatTokensError(f"{self.name} got no sequences, and a dataset has some")
        self.flush()
        self.group.attrs["max_token_id"] = self.max_token_id  # last: it is the mark


def tokenizer_of(path: str) -> tuple[str, int] | None:
    """The name of the tokenizer by which a dataset was converted and what was added to its ids;
    None where the dataset isn't there or doesn't say."""
    try:
        about: Any = zarr.open_group(path, mode="r").attrs.get("conversion", {})
        return about["settings"]["tokenizer"], about["settings"]["id_offset"]
    except Exception:  # each store raises its own
        return None


class FlatTokens:
    """One split of a dataset, opened for reading.

    Raises FlatTokensError, naming the path and the rule, for what isn't one.
    """

    def __init__(self, path: str, split: str):
        self.path, self.name = path, f"{path}/{split}"
        place, arrays = path, {}
        try:
            root: Any = zarr.open_group(path, mode="r")
            self.group = root.get(split)
            for name in ARRAYS:
                place = f"{self.name}/{name}"
                arrays[name] = root.get(f"{split}/{name}")
        except FileNotFoundError:
            raise FlatTokensError(f"{path} is not there, or not a zarr group") from None
        except Exception as error:  # each store raises its own
            raise FlatTokensError(f"{place} can't be opened: {error}") from None
        if self.group is None:
            raise FlatTokensError(f"{path} has no split {split}")
        for name, dtype in ARRAYS.items():
            array = arrays[name]
            if not isinstance(array, zarr.Array) or array.dtype != dtype or array.ndim != 1:
                raise FlatTokensError(f"{self.name} has no one-dimensional {dtype} array {name}")
        if "max_token_id" not in self.group.attrs:
            raise FlatTokensError(f"{self.name} has no max_token_id: it was not written to its end")
        self.tokens, self.seq_starts = arrays.values()
        self.max_token_id: int = self.group.attrs["max_token_id"]
        self.token_count: int = self.tokens.shape[0]
        self.sequence_count: int = self.seq_starts.shape[0] - 1
        if self.sequence_count < 1:
            raise FlatTokensError(f"{self.name} has no sequences")
        if self._load(self.seq_starts, slice(-1, None))[0] != self.token_count:
            raise FlatTokensError(f"{self.name}: seq_starts does not end with the token count")

    def _load(self, array: zarr.Array, part: slice) -> np.ndarray:
        try:
            return storage.read(array, part)
        except (DamageError, OSError) as error:
            raise FlatTokensError(f"{self.path}/{error}") from error

    @checked
    def read_encoded(self, start: int, stop: int) -> UInt32[np.ndarray, " {stop-start}"]:
        """A range of tokens as they are stored."""
        encoded = self._load(self.tokens, slice(start, stop))
        if encoded.min(initial=2) < 2:
            where = start + int(np.argmin(encoded))
            raise FlatTokensError(
                f"{self.name}/encoded_tokens: token {where} has the reserved id 0, as all of a "
                f"missing chunk have; it is in chunk {where // self.tokens.chunks[0]}"
            )
        return encoded

    def read(self, start: int, stop: int) -> Decoded:
        """A range of tokens: their ids, and whether a sequence starts there."""
        return decode(self.read_encoded(start, stop))

    @checked
    def starts(self, first: int, last: int) -> Int64[np.ndarray, " {last-first+1}"]:
        """Returns where each of the sequences `first` to `last` starts, and where the last ends."""
        starts = self._load(self.seq_starts, slice(first, last + 1)).astype(np.int64)
        if first == 0 and starts[0]:
            raise FlatTokensError(f"{self.name}/seq_starts begins with {starts[0]}, not with 0")
        if not (grows := np.diff(starts) > 0).all():
            where = first + 1 + int(np.argmin(grows))
            raise FlatTokensError(
                f"{self.name}/seq_starts: entry {where} is no larger than the one before it; it is "
                f"in chunk {where // self.seq_starts.chunks[0]}"
            )
        return starts

    def validate(self) -> None:
        """Reads all of it. Raises FlatTokensError for the first rule that doesn't hold."""
        starts = self.starts(0, self.sequence_count)
        largest = 0
        for low in range(0, self.token_count, 8 * CHUNK):
            high = min(low + 8 * CHUNK, self.token_count)
            ids, is_start = self.read(low, high)
            largest = max(largest, int(ids.max()))
            marked = low + np.flatnonzero(is_start)
            listed = starts[(starts >= low) & (starts < high)]
            if len(differ := np.setxor1d(marked, listed)):
                raise FlatTokensError(
                    f"{self.name}: token {differ[0]} is marked as a start in encoded_tokens, or "
                    "listed in seq_starts, but not both"
                )
        if largest != self.max_token_id:
            raise FlatTokensError(
                f"{self.name}: max_token_id is {self.max_token_id}, the largest id {largest}"
            )
