"""The flat-tokens dataset format: a zarr array per split that holds all sequences end to end.

docs/flat_tokens.md is the specification. "Encoded" tokens are ids as the format stores them.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

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
COUNTS = ("tokens", "sequences", "max_token_id", "bytes")  # a Writer's progress
MAX_ID = 2**30 - 2
NO_TOKEN = 2**31 - 1  # no token's id
FILL = 2 * NO_TOKEN  # the value of entries that were not written, and of padding
CHUNK = 2**18  # tokens or sequences in a chunk: 1 or 2 MiB before compression

Encoded = UInt32[np.ndarray, " tokens"]
# Ids, and whether a sequence starts with each.
Decoded = tuple[UInt32[np.ndarray, "*shape"], Bool[np.ndarray, "*shape"]]

# Decorator: checks the arrays of each call against the annotations. A mismatch is a bug of the
# caller, so it raises TypeError and not UserError.
checked = jaxtyped(typechecker=beartype)


class FlatTokensError(UserError):
    """A dataset, or tokens to write to one, break a rule of the format."""


@checked
def encode(ids: Integer[np.ndarray, " tokens"], starts: Int[np.ndarray, " sequences"]) -> Encoded:
    """Returns the encoded tokens: 2*id+1 if a sequence starts with the token, else 2*id."""
    encoded = np.left_shift(ids, 1, dtype=np.uint32, casting="unsafe")
    encoded[starts] += np.uint32(1)
    return encoded


@checked
def decode(encoded: UInt32[np.ndarray, "*shape"]) -> Decoded:
    """Returns the ids of encoded tokens, and whether a sequence starts with each."""
    return encoded >> np.uint32(1), (encoded & np.uint32(1)).astype(np.bool_)


class Writer(contextlib.AbstractContextManager["Writer"]):
    """Writes one split, sequence by sequence. The split is complete once the `with` block ends.

        with Writer("tokens.zarr", "train") as writer:
            writer.append([5, 3, 8])

    Raises FileExistsError if the split exists. If the block ends with an exception, the split has
    no `max_token_id`, so that readers refuse it. A new Writer then replaces it. With the result of
    the last `flush` as `written`, it continues there instead.
    """

    def __init__(self, path: str, split: str, written: dict[str, Any] | None = None):
        self.name = f"{path}/{split}"
        # Besides the arrays and zarr.json, an interrupted write leaves zarr.<id>.partial.
        known = *ARRAYS, split, ""
        there = (x for x in storage.names(self.name) if not x.startswith((".", "zarr.")))
        if any(x not in known for x in there):
            raise FileExistsError(f"{self.name} is no part of a dataset; choose another output")
        with storage.opening(path):
            self.root = root = storage.group(path, "a")
            complete = split in root and "max_token_id" in root[split].attrs
        if root.metadata.zarr_format != 3:
            raise FileExistsError(f"{path} has zarr's format 2, not 3; choose another output")
        if written is None and complete:
            raise FileExistsError(f"{path} already has a split {split}; choose another output")
        with storage.opening(self.name, "written"):
            if written is None:
                group = root.create_group(split, overwrite=True)  # replaces an unfinished one
                codecs = [ZstdCodec(checksum=True)]  # 4 bytes per chunk let readers detect damage
                new = {"shape": (0,), "chunks": (CHUNK,), "compressors": codecs}
                for name, dtype in ARRAYS.items():
                    fill = FILL if dtype == "uint32" else 0
                    group.create_array(name, dtype=dtype, fill_value=fill, **new)
                written = dict.fromkeys(COUNTS, 0)
            self.group = root[split]
            self.token_count, self.sequence_count = written["tokens"], written["sequences"]
            self.max_token_id, self.text_bytes = written["max_token_id"], written.get("bytes")
            self.tokens, self.starts = (self.group[name] for name in ARRAYS)
            # Truncates to the last flush; the caller appends the rest again.
            self.tokens.resize((self.token_count,))
            self.starts.resize((self.sequence_count + 1,))  # the first start, 0, is the fill value
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []  # tokens and sequence ends

    def append(self, sequence: Sequence[int] | np.ndarray) -> None:
        """Adds one sequence of ids. Raises FlatTokensError if it is empty or has an id outside the
        valid range."""
        ids = np.asarray(sequence)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise FlatTokensError("a sequence must be a list of one or more integer ids")
        if len(invalid := ids[(ids < 0) | (ids > MAX_ID)]):
            problem = f"sequence {self.sequence_count} has the id {invalid[0]}"
            raise FlatTokensError(f"{problem}: ids must be from 0 to 2**30 - 2")
        self.extend(encode(ids, np.zeros(1, np.intp)), np.array([len(ids)]))

    @checked
    def extend(
        self, tokens: Encoded, lengths: Int64[np.ndarray, " sequences"], text_bytes: int = 0
    ) -> None:
        """Adds encoded tokens. `lengths`: how many of them are of each sequence that ends here, 0
        if all came before. `text_bytes`, the texts' UTF-8 size, is given in all calls or none."""
        self.pending.append((tokens, self.token_count + np.cumsum(lengths)))
        self.token_count += len(tokens)
        self.sequence_count += len(lengths)
        self.text_bytes = None if self.text_bytes is None else self.text_bytes + text_bytes
        self.max_token_id = max(self.max_token_id, int(tokens.max(initial=0)) >> 1)
        # Not more often: resizing an array takes as long as writing several chunks, and appending
        # rewrites the last chunk.
        if self.token_count - self.tokens.shape[0] >= 16 * CHUNK:
            self.flush()

    def flush(self) -> dict[str, Any]:
        """Writes all pending sequences. Returns the counts from which a new Writer can continue."""
        if self.pending:
            tokens, ends = zip(*self.pending, strict=True)
            with storage.opening(self.name, "written"):
                self.tokens.append(np.concatenate(tokens))
                self.starts.append(np.concatenate(ends).astype(np.uint64))
            self.pending = []
        counts = self.token_count, self.sequence_count, self.max_token_id, self.text_bytes
        return dict(zip(COUNTS, counts, strict=True))

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.complete()

    def complete(self) -> None:
        """Writes all pending sequences and marks the split complete. Raises FlatTokensError if it
        has no sequences."""
        if not self.sequence_count:
            raise FlatTokensError(f"{self.name} has no sequences; a split needs at least one")
        self.flush()
        with storage.opening(self.name, "written"):
            known = {"bytes": self.text_bytes} if self.text_bytes else {}
            # Last, as this marks the split complete.
            self.group.update_attributes(known | {"max_token_id": self.max_token_id})


class TokenizerId(NamedTuple):
    """A tokenizer, as a dataset or a checkpoint records it."""

    name: str
    vocabulary: str = ""  # its `Tokenizer.vocabulary` then; "" if it isn't known


def tokenizer_of(path: str) -> TokenizerId | None:
    """Returns the tokenizer that a dataset records, or None if it records none or doesn't exist."""
    with contextlib.suppress(Exception):  # stores raise errors of many types
        made: Any = storage.attributes(path)["conversion"]
        return TokenizerId(str(made["settings"]["tokenizer"]), made.get("vocabulary", ""))
    return None


class FlatTokens:
    """One split of a dataset, opened for reading.

    Raises FlatTokensError, with the path and the broken rule, if it isn't a valid split.
    """

    def __init__(self, path: str, split: str):
        self.path, self.name = path, f"{path}/{split}"
        entry, arrays = path, {}
        try:
            root: Any = storage.group(path, "r")
            self.group = root.get(split)
            for name, dtype in ARRAYS.items():
                entry = f"{self.name}/{name}"
                array = root.get(f"{split}/{name}")
                if isinstance(array, zarr.Array) and 0 in array.chunks:  # zarr opens these
                    raise ValueError("its chunks are empty")
                if isinstance(array, zarr.Array) and array.dtype == dtype and array.ndim == 1:
                    arrays[name] = array
        except FileNotFoundError:
            cure = ": convert it with tools.bins" if path.endswith(".bin") else ""
            raise FlatTokensError(f"{path} doesn't exist or isn't a zarr group{cure}") from None
        except Exception as error:  # stores raise errors of many types
            raise FlatTokensError(f"{entry} can't be opened: {error}") from None
        if self.group is None:
            raise FlatTokensError(f"{path} has no split {split}")
        # Earlier versions of the converter could shift ids.
        match root.attrs.get("conversion"):
            case {"settings": {"tokenizer": name, "id_offset": int(n)}} if n:
                raise FlatTokensError(f"{path} has the ids of {name} plus {n}: convert it again")
        for name, dtype in ARRAYS.items():
            if name not in arrays:
                raise FlatTokensError(f"{self.name} has no one-dimensional {dtype} array {name}")
        if "max_token_id" not in self.group.attrs:
            raise FlatTokensError(f"{self.name} has no max_token_id: its conversion is unfinished")
        self.tokens, self.seq_starts = arrays.values()
        # Datasets of earlier versions and of seqax have the fill value 0, and no id 0.
        self.no_token = int(self.tokens.fill_value or 0) >> 1
        largest: Any = self.group.attrs["max_token_id"]
        if type(largest) is not int or not 0 <= largest <= MAX_ID:
            raise FlatTokensError(f"{self.name}: max_token_id is {largest!r}, which is not an id")
        self.max_token_id, size = largest, self.group.attrs.get("bytes")
        self.token_count = self.rows_from = self.tokens.shape[0]
        self.sequence_count = self.seq_starts.shape[0] - 1
        if not 1 <= self.sequence_count <= self.token_count:
            raise FlatTokensError(f"{self.name} has no sequences, or more of them than tokens")
        if self._load(self.seq_starts, slice(-1, None))[0] != self.token_count:
            raise FlatTokensError(f"{self.name}: seq_starts doesn't end with the token count")
        self.bytes_per_token = size / self.token_count if type(size) is int and size > 0 else 0.0

    def _load(self, array: zarr.Array, part: slice) -> np.ndarray:
        try:
            return storage.read(array, part)
        except (DamageError, OSError) as error:
            raise FlatTokensError(f"{self.path}/{error}") from error

    @checked
    def read_encoded(self, start: int, stop: int) -> UInt32[np.ndarray, " {stop-start}"]:
        """Returns the encoded tokens of a range."""
        encoded = self._load(self.tokens, slice(start, stop))
        if (largest := int(encoded.max(initial=0)) >> 1) <= self.max_token_id < self.no_token:
            return encoded  # the usual case: no token is missing or too large
        if len(missing := np.flatnonzero(encoded >> 1 == self.no_token)):
            at = start + int(missing[0])
            why = f"chunk {at // self.tokens.chunks[0]} is missing, or has the fill value"
            raise FlatTokensError(f"{self.name}/encoded_tokens: there is no token {at}: {why}")
        if largest > self.max_token_id:
            problem = f"token {start + int(np.argmax(encoded))} is {largest}"
            raise FlatTokensError(f"{self.name}: {problem}, above max_token_id={self.max_token_id}")
        return encoded

    def read(self, start: int, stop: int) -> Decoded:
        """Returns the ids of a range of tokens, and whether a sequence starts with each."""
        return decode(self.read_encoded(start, stop))

    @checked
    def starts(self, first: int, last: int) -> Int64[np.ndarray, " {last-first+1}"]:
        """Returns where each sequence from `first` up to but excluding `last` starts, and where
        the final one ends."""
        starts = self._load(self.seq_starts, slice(first, last + 1))
        if first == 0 and starts[0]:
            raise FlatTokensError(f"{self.name}/seq_starts begins with {starts[0]}, not with 0")
        if not (grows := starts[1:] > starts[:-1]).all():
            at = first + 1 + int(np.argmin(grows))
            entry = f"entry {at}, in chunk {at // self.seq_starts.chunks[0]}, is not larger than"
            raise FlatTokensError(f"{self.name}/seq_starts: {entry} the entry before it")
        if starts[-1] > self.token_count:
            problem = f"entry {last} is {starts[-1]}, more than the token count"
            raise FlatTokensError(f"{self.name}/seq_starts: {problem}")
        return starts.astype(np.int64)

    def validate(self) -> tuple[np.ndarray, int]:
        """Reads the whole split. Raises FlatTokensError for the first broken rule. Returns what
        `scan` does."""
        listed = self.starts(0, self.sequence_count)
        bounds, largest = scan(self)
        if len(differ := np.setxor1d(bounds, listed)):
            where = "only one of encoded_tokens and seq_starts"
            raise FlatTokensError(f"{self.name}: token {differ[0]} is a start in {where}")
        if largest != self.max_token_id:
            problem = f"max_token_id is {self.max_token_id}, but the largest id is {largest}"
            raise FlatTokensError(f"{self.name}: {problem}")
        return bounds, largest


def scan(data: Any) -> tuple[np.ndarray, int]:
    """Reads all of a FlatTokens or Bins. Returns its documents' starts and the last one's end, and
    the largest id. Raises FlatTokensError for what `read_encoded` refuses."""
    starts, largest = [], 0
    for low in range(0, data.token_count, 8 * CHUNK):
        encoded = data.read_encoded(low, min(low + 8 * CHUNK, data.token_count))
        starts.append(low + np.flatnonzero(encoded & 1))
        largest = max(largest, int(encoded.max()) >> 1)
    return np.append(np.concatenate(starts), data.token_count), largest
