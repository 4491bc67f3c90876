"""The flat-tokens dataset format: all sequences of a split end to end in one zarr array.

docs/flat_tokens.md is the specification.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import numpy as np
import zarr
from zarr.codecs import ZstdCodec

from runtime import storage
from runtime.storage import DamageError
from shardlib.errors import UserError

SPLITS = ("train", "validation")
CHUNK = 2**18  # tokens or sequences in a chunk: 1 or 2 MiB before compression


class FlatTokensError(UserError):
    """A dataset, or something about to become one, breaks a rule of the format."""


def encode(ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Ids, int[n], as they are stored, uint32[n]: 2*id+1 where a sequence starts, else 2*id."""
    encoded = np.left_shift(ids, 1, dtype=np.uint32, casting="unsafe")
    encoded[starts] += np.uint32(1)
    return encoded


def decode(encoded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored tokens as their ids, uint32[n], and whether a sequence starts there, bool[n]."""
    return encoded >> np.uint32(1), (encoded & np.uint32(1)).astype(np.bool_)


class _Growing:
    """An array that is written at its end, some chunks at a time, by a thread."""

    def __init__(self, array: zarr.Array, count: int):
        self.array, self.count, chunk = array, count, array.chunks[0]
        self.held = count % chunk  # the last values, not in a whole chunk on disk
        self.buffer = np.empty(8 * chunk, array.dtype)
        self.buffer[: self.held] = array[count - self.held : count]
        self.thread = ThreadPoolExecutor(1)
        self.job: Future[None] | None = None

    def add(self, values: np.ndarray) -> None:
        while len(values):
            part = values[: len(self.buffer) - self.held]
            self.buffer[self.held : self.held + len(part)] = part
            self.held, self.count = self.held + len(part), self.count + len(part)
            values = values[len(part) :]
            if self.held == len(self.buffer):
                self.write()

    def write(self, last: bool = False) -> None:
        """What is held; waits for it if it is the last."""
        if self.job:
            self.job.result()
        values, rest = self.buffer[: self.held], self.held % self.array.chunks[0]
        self.buffer = np.empty_like(self.buffer)
        self.buffer[:rest] = values[len(values) - rest :]
        self.job = self.thread.submit(self._put, self.count - self.held, values, last)
        self.held = rest
        if last:
            self.job.result()

    def _put(self, start: int, values: np.ndarray, last: bool) -> None:
        end = start + len(values)
        if last:
            self.array.resize((end,))
        elif end > self.array.shape[0]:  # seldom, as it takes as long as some chunks do
            self.array.resize((end + 64 * self.array.chunks[0],))
        self.array[start:end] = values


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
            self.group = root.create_group(split, overwrite=True)  # what was there is unfinished
            self.tokens = self._create("encoded_tokens", np.uint32)
            self.starts = self._create("seq_starts", np.uint64)
            self.starts.add(np.zeros(1, np.uint64))
            self.max_token_id = 0
        else:
            self.group = root[split]
            self.tokens = _Growing(self.group["encoded_tokens"], written["tokens"])
            self.starts = _Growing(self.group["seq_starts"], written["sequences"] + 1)
            self.max_token_id = written["max_token_id"]

    def _create(self, name: str, dtype: type[np.unsignedinteger]) -> _Growing:
        array = self.group.create_array(
            name,
            shape=(0,),
            chunks=(CHUNK,),
            dtype=dtype,
            compressors=[ZstdCodec(checksum=True)],  # readers find damage, at 4 bytes a chunk
        )
        return _Growing(array, 0)

    @property
    def token_count(self) -> int:
        return self.tokens.count

    @property
    def sequence_count(self) -> int:
        return self.starts.count - 1

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

    def extend(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Adds sequences as they are stored: uint32[tokens], end to end, and the length of each,
        int[sequences], at least 1. Checks nothing."""
        self.starts.add(self.token_count + np.cumsum(lengths))
        self.tokens.add(tokens)
        self.max_token_id = max(self.max_token_id, int(tokens.max(initial=0)) >> 1)

    def flush(self) -> dict[str, int]:
        """Writes all there is, and returns where it ends, from where a new Writer can go on."""
        for growing in self.tokens, self.starts:
            growing.write(last=True)
        return {
            "tokens": self.token_count,
            "sequences": self.sequence_count,
            "max_token_id": self.max_token_id,
        }

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        if not self.sequence_count:
            raise FlatTokensError(f"{self.name} got no sequences, and a dataset has some")
        self.flush()
        self.group.attrs["max_token_id"] = self.max_token_id  # last: it marks the split complete


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
        try:
            self.group = zarr.open_group(path, mode="r")[split]
        except FileNotFoundError:
            raise FlatTokensError(f"{path} is not there, or not a zarr group") from None
        except KeyError:
            raise FlatTokensError(f"{path} has no split {split}") from None
        except Exception as error:  # each store raises its own
            raise FlatTokensError(f"{path} can't be opened: {error}") from None
        self.tokens = self._array("encoded_tokens", np.uint32)
        self.seq_starts = self._array("seq_starts", np.uint64)
        if "max_token_id" not in self.group.attrs:
            raise FlatTokensError(f"{self.name} has no max_token_id: it was not written to its end")
        self.max_token_id = cast(int, self.group.attrs["max_token_id"])
        self.token_count = self.tokens.shape[0]
        self.sequence_count = self.seq_starts.shape[0] - 1
        if self.sequence_count < 1:
            raise FlatTokensError(f"{self.name} has no sequences")
        if self._load(self.seq_starts, slice(-1, None))[0] != self.token_count:
            raise FlatTokensError(f"{self.name}: seq_starts does not end with the token count")

    def _array(self, name: str, dtype: type[np.unsignedinteger]) -> zarr.Array:
        try:
            array = self.group.get(name) if isinstance(self.group, zarr.Group) else None
        except Exception as error:  # as above
            raise FlatTokensError(f"{self.name}/{name} can't be opened: {error}") from None
        if not isinstance(array, zarr.Array) or array.dtype != dtype or array.ndim != 1:
            raise FlatTokensError(
                f"{self.name} is not flat tokens: it lacks a one-dimensional "
                f"{np.dtype(dtype).name} array {name}"
            )
        return array

    def _load(self, array: zarr.Array, part: slice) -> np.ndarray:
        try:
            return storage.read(array, part)
        except (DamageError, OSError) as error:
            raise FlatTokensError(f"{self.path}/{error}") from error

    def read_encoded(self, start: int, stop: int) -> np.ndarray:
        """A range of tokens as they are stored, uint32[stop-start]."""
        encoded = self._load(self.tokens, slice(start, stop))
        if encoded.min(initial=2) < 2:
            where = start + int(np.argmin(encoded))
            raise FlatTokensError(
                f"{self.name}/encoded_tokens: token {where} has the reserved id 0, as all of a "
                f"missing chunk have; it is in chunk {where // self.tokens.chunks[0]}"
            )
        return encoded

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, uint32[stop-start], and starts, bool[stop-start], of a range of tokens."""
        return decode(self.read_encoded(start, stop))

    def starts(self, first: int, last: int) -> np.ndarray:
        """Where each of the sequences `first` to `last` starts, and where the last of them ends:
        int64[last+1-first]."""
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
