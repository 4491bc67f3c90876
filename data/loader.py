"""Shuffled batches of flat tokens. A batch depends on nothing but the config and its number.

A *sequence* fills a row of a batch: `length` consecutive tokens of the flat array (packed), or one
document, truncated or padded to `length`. The dataset's sequences are split into `streams`
contiguous parts of equal size, and each stream fills an equal share of every batch's rows.

A stream is shuffled in two stages. In each epoch, its read blocks of `sequences_per_read_block`
neighboring sequences are put in random order. Every `read_blocks_per_shuffle_buffer` consecutive
blocks of that order form a shuffle buffer, whose sequences are shuffled together.

Batch N can therefore be computed without the batches before it, each read is one long contiguous
range, and memory holds one or two shuffle buffers per stream.

A *mixture* takes each row of a batch from one of several datasets, in proportion to their weights.
Each dataset's rows come in the order that they would have without the others.
"""

import abc
import dataclasses
import functools
import itertools
import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int64, UInt32
from pydantic import BeforeValidator, Field

from data import flat_tokens
from data.bins import Bins, bin_files, check_end_token
from data.flat_tokens import FILL, FlatTokens, FlatTokensError, TokenizerId, checked, tokenizer_of
from data.text import ahead
from data.tokenizer import difference
from kernels.attention import balanced
from runtime.config import Section
from runtime.run import say
from runtime.supervise import check_hosts_agree
from runtime.values import NOT_EMPTY, Kept, Name, NonNegativeInt, PositiveInt, one_of
from shardlib.errors import UserError
from shardlib.types import bool_, make_shardings, mesh_shape, pytree_dataclass, typechecked, u32

# Paths by names in metrics. Takes null for {}: Hydra lets no run set a section that is {}.
NamedPaths = Annotated[dict[Name, Kept], BeforeValidator(lambda given: given or {})]


@dataclasses.dataclass(unsafe_hash=True)
class WeightedDataset(Section, key="flat_tokens.mixture"):
    filespec: Annotated[Kept, NOT_EMPTY]
    # Divided by the sum of all weights, it is the dataset's share of the rows.
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclasses.dataclass(unsafe_hash=True)
class FlatTokensConfig(Section, key="flat_tokens"):
    filespec: Annotated[Kept, NOT_EMPTY] | None
    mixture: tuple[WeightedDataset, ...]  # empty, or several datasets instead of `filespec`
    streams: PositiveInt
    read_blocks_per_shuffle_buffer: PositiveInt
    sequences_per_read_block: PositiveInt
    seed: NonNegativeInt
    sequence_packing: bool
    other_rows: bool = False  # lets a run resume with settings that choose other rows
    # Of .bin files: the id after which a document starts, and the type of ids without a header.
    end_token: NonNegativeInt | None = None
    bin_dtype: Annotated[str, one_of("uint16 uint32")] = "uint16"
    # Datasets to validate on, instead of the training datasets' split `validation`.
    validation: NamedPaths = dataclasses.field(default_factory=dict, hash=False)

    def open(self, spec: "BatchSpec", split: str) -> "Batches":
        """Returns the batches of a split, train or validation, for the mesh in context."""
        if split == "validation":
            # Runs validate on the same rows, however their training is shuffled.
            fixed: Any = {"seed": 0, "streams": 1, "sequences_per_read_block": 64}
            fixed["read_blocks_per_shuffle_buffer"] = max(1, 2**16 // spec.length)  # 4M tokens
            return Mixture(dataclasses.replace(self, **fixed), spec, split)
        if bool(self.mixture) == bool(self.filespec):
            weighted = "flat_tokens.mixture=[{filespec: DATASET, weight: 0.7}, ...]"
            cure = f"set one of flat_tokens.filespec=DATASET and {weighted}"
            raise UserError(f"{cure}, and leave the other one null or []")
        trained, held_out = (
            {os.path.realpath(file) for path in paths for file in bin_files(path)}
            for paths in ([x.filespec for x in self.datasets], self.validation.values())
        )
        if (self.end_token, self.bin_dtype) != (None, "uint16") and not trained | held_out:
            raise UserError("flat_tokens.end_token and bin_dtype need .bin files: leave them out")
        if both := trained & held_out:
            cure = "leave it out of one of them"
            raise UserError(f"training reads {min(both)}, and flat_tokens.validation too: {cure}")
        return Mixture(self, spec, split)

    def open_split(self, path: str, split: str, vocab: int) -> FlatTokens | Bins:
        """Opens a split of one of the datasets, whose ids must be below `vocab`."""
        if not bin_files(path):
            return FlatTokens(path, split)
        if split == "validation" and path not in self.validation.values():
            cure = "name files to validate on, as in 'flat_tokens.validation={web: val.bin}'"
            raise FlatTokensError(f"{path} has no validation split: {cure}")
        if not self.sequence_packing:
            cure = "needs a dataset in zarr: convert it with tools.bins"
            raise FlatTokensError(f"{path}: flat_tokens.sequence_packing=false {cure}")
        return Bins(path, self.end_token, self.bin_dtype, vocab)

    @property
    def datasets(self) -> tuple[WeightedDataset, ...]:
        """The datasets to train on."""
        return self.mixture or (WeightedDataset(self.filespec or "", 1),)

    def tokenizer_used(self, remote: bool = False) -> TokenizerId | None:
        """Returns the first tokenizer that a dataset records, if any. Opens remote datasets only if
        `remote`, as the config may come from somebody else's checkpoint."""
        paths = [x.filespec for x in self.datasets if remote or "://" not in x.filespec]
        return next(filter(None, map(tokenizer_of, paths)), None)


@pytree_dataclass
class TokenBatch:
    """A batch of B rows of L tokens for the model, which predicts `targets[b, l]` from
    `inputs[b, :l+1]`, restricted to the target's document."""

    inputs: u32["B/d L/c"]  # the token before the target; where a document starts, the start token
    targets: u32["B/d L/c"]
    loss_mask: bool_["B/d L/c"]  # false where the target is padding, which the loss leaves out
    position: u32["B/d L/c"]  # index in the row
    start: u32["B/d L/c"]  # where the target's document starts, or 0 if that is before the row

    @classmethod
    @checked
    def of(
        cls, ids: UInt32[np.ndarray, "B n"], is_start: Bool[np.ndarray, "B n"], start_token: int
    ) -> "TokenBatch":
        """Returns the batch, as NumPy arrays. Column 0 of `ids` is the token before each row, the
        others are targets. `is_start` marks the first token of each document. NO_TOKEN is
        padding."""
        there = ids != flat_tokens.NO_TOKEN
        if not there.all():
            ids = np.where(there, ids, np.uint32(0))
        is_start, targets, inputs = is_start[:, 1:], ids[:, 1:], ids[:, :-1].copy()
        inputs[is_start] = start_token
        position = np.broadcast_to(np.arange(targets.shape[1], dtype=np.uint32), targets.shape)
        # The positions where documents start, and each row's position 0.
        begins = is_start.copy()
        begins[:, 0] = True
        begins = np.flatnonzero(begins).astype(np.uint32)
        lengths = np.diff(begins, append=targets.size)
        start = np.repeat(begins % targets.shape[1], lengths).reshape(targets.shape)
        return cls(
            inputs=inputs, targets=targets, loss_mask=there[:, 1:], position=position, start=start
        )

    def note_of_padding(self) -> str:
        """Returns a line on the share of padding, or ""."""
        if self.loss_mask.all():  # exact, unlike a mean
            return ""
        share = 1 - self.loss_mask.mean()
        return f"note: {share:.1%} of the batch is padding, which counts in tokens/s and MFU"


@typechecked
def random_batch(sizes: Mapping[str, int], start_token: int, parts: int) -> TokenBatch:
    """Returns a batch with these sizes of B, L and V, as NumPy arrays, on which the checks try a
    step. Rows have documents of one token or more, shorter ones in later rows, and end in padding.
    Their positions are in the order of a mesh that splits rows into `parts` parts."""
    random, rows, length = np.random.default_rng(0), sizes["B"], sizes["L"]
    ids = random.integers(0, sizes["V"], (rows, length + 1))
    often = (np.arange(rows) / rows)[:, None] ** 3  # how often a document starts, by row
    is_start = np.pad(random.random((rows, length)) < often, ((0, 0), (1, 0)))
    is_start[rows // 2 :, length // 2] = True  # so that some devices have no long document
    ends = random.integers(1, length + 1, (rows, 1))
    ids = np.where(np.arange(length + 1) > ends, flat_tokens.NO_TOKEN, ids).astype(np.uint32)
    batch = TokenBatch.of(ids, is_start, start_token)
    return jax.tree.map(lambda x: x[:, balanced(length, parts)], batch)


@checked
def rows_of(
    encoded: UInt32[np.ndarray, " tokens"], length: int
) -> UInt32[np.ndarray, "rows {length+1}"]:
    """Returns the rows of a range of tokens, each preceded by the token before it. The range begins
    with the token before the first row."""
    return np.lib.stride_tricks.sliding_window_view(encoded, length + 1)[::length]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The settings of a run that its batches depend on, for any source of tokens."""

    rows: int
    length: int  # tokens in a row
    vocab: int  # all ids must be smaller
    start_token: int
    skip: tuple[int, ...] = ()  # batches that no step uses; later steps use later batches instead
    io_threads: int = 32

    def check_vocabulary(self, where: str, largest: int) -> None:
        """Raises FlatTokensError, beginning with `where`, if an id isn't in the vocabulary."""
        if largest >= self.vocab:
            raise FlatTokensError(f"{where} {largest}; model.vocab={self.vocab} must be larger")


@checked
def permutation(count: int, *key: int) -> Int64[np.ndarray, " {count}"]:
    """A random permutation of range(count) that depends only on `key`.

    Uses a bit generator's raw output, which NumPy promises not to change between versions. It makes
    no such promise for `Generator.permutation`.
    """
    # SeedSequence doesn't distinguish (1, 2) from (1, 2, 0), so the key's length is part of it.
    raw = np.random.Philox(np.random.SeedSequence((len(key), *key))).random_raw(count)
    return np.argsort(raw, kind="stable")


class Buffer(NamedTuple):
    """A shuffle buffer of n sequences."""

    position: int  # of its first sequence in the stream's order
    order: np.ndarray  # int64[n], the order in which a run uses the sequences
    numbers: np.ndarray  # int64[n], the sequences' numbers in the dataset
    sequences: np.ndarray  # uint32[n, L + 1], encoded, each preceded by the token before it
    reads: Iterator[None]  # ends once all of `sequences` is read


class Stream:
    """The sequences from `first` up to but excluding `end`, in an endless shuffled order."""

    def __init__(self, dataset: "Shuffled", index: int, first: int, end: int):
        self.dataset, self.first, self.end, self.count = dataset, first, end, end - first
        self.key = (dataset.config.seed, index)
        self.block = min(dataset.config.sequences_per_read_block, self.count)
        self.blocks_per_buffer = dataset.config.read_blocks_per_shuffle_buffer
        # Two each: a batch may span two epochs or two buffers.
        self.epoch = functools.lru_cache(2)(self._epoch)
        self.buffer = functools.lru_cache(2)(self._buffer)

    @checked
    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first sequence of each of the epoch's n blocks, in shuffled order, and where
        in the epoch each block begins. The block that holds the last sequence may be shorter."""
        firsts = permutation(-(-self.count // self.block), *self.key, epoch) * self.block
        lengths = np.minimum(self.block, self.count - firsts)
        return self.first + firsts, np.cumsum(lengths) - lengths

    def _buffer(self, epoch: int, number: int) -> Buffer:
        """Begins to read a shuffle buffer."""
        firsts, places = self.epoch(epoch)
        begin = number * self.blocks_per_buffer
        firsts = firsts[begin:][: self.blocks_per_buffer]
        blocks = [np.arange(first, min(first + self.block, self.end)) for first in firsts]
        numbers = np.concatenate(blocks)
        sequences = np.empty((len(numbers), self.dataset.length + 1), np.uint32)
        parts = np.split(sequences, np.cumsum([len(block) for block in blocks])[:-1])
        reads = self.dataset.threads.map(self.dataset.read_block, map(int, firsts), parts)
        order = permutation(len(numbers), *self.key, epoch, number)
        return Buffer(epoch * self.count + int(places[begin]), order, numbers, sequences, reads)

    def find(self, positions: np.ndarray) -> Iterator[tuple[Buffer, np.ndarray]]:
        """Yields each buffer that has sequences at these increasing positions of the order, and
        their indices in it. In the second half of a buffer, begins to read the next one."""
        while len(positions):
            epoch, place = divmod(int(positions[0]), self.count)
            firsts, begins = self.epoch(epoch)
            number = int(np.searchsorted(begins, place, "right") - 1) // self.blocks_per_buffer
            buffer = self.buffer(epoch, number)
            try:
                list(buffer.reads)  # waits for them; after an error cancels the others
            except BaseException:
                self.buffer.cache_clear()  # drops the buffer, which isn't fully read
                raise
            count = np.searchsorted(positions, buffer.position + len(buffer.order))
            places = positions[:count] - buffer.position
            yield buffer, buffer.order[places]
            positions = positions[count:]
            if 2 * places[-1] >= len(buffer.order):
                is_last = (number + 1) * self.blocks_per_buffer >= len(firsts)
                self.buffer(*((epoch + 1, 0) if is_last else (epoch, number + 1)))


SAME_FILES = "Each reads its own rows: give all the same files"


class Batches(abc.ABC):
    """Base class: the batches of a split, sharded over the mesh in context at construction. Each
    batch is read in a thread while the previous one is in use."""

    name = "a batch"  # in messages
    count: int | None = None  # rows of an epoch, if known
    waited = 0.0  # seconds that the caller waited for the last batch
    # JSON, for a checkpoint: of flat tokens `made_of`; of a stream, where it continues after the
    # last batch. Setting it moves the stream there.
    position: Any = None
    made_of: Any = None  # of flat tokens: what tells each dataset from others, and their tokenizer
    files: frozenset[str] = frozenset()  # of a stream
    bytes_per_token: float | None = None  # the mean in the split's text as UTF-8, if known

    def __init__(self, spec: BatchSpec):
        self.spec, self.shape = spec, (spec.rows, spec.length)
        self.shardings = make_shardings(TokenBatch)
        places = self.shardings.targets.addressable_devices_indices_map(self.shape).values()
        # This host prepares only the rows on its devices.
        self.local_rows = sorted({row for rows, _ in places for row in range(spec.rows)[rows]})
        parts = mesh_shape()["c"]
        self.order = balanced(spec.length, parts) if parts > 1 else slice(None)

    def epochs(self, batches: int) -> str:
        """Says how often so many batches take each dataset's rows, as in "0.4 and 12 epochs"; ""
        for a stream."""
        return ""

    def number(self, step: int) -> int:
        """Returns the number of a step's batch."""
        for skipped in sorted({*self.spec.skip}):
            if skipped <= step:
                step += 1
        return step

    @abc.abstractmethod
    def make(self, numbers: Iterator[int]) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        """Yields, for each of these increasing batch numbers, the ids and document starts of this
        host's rows, [local_rows, L + 1] each, as arguments of TokenBatch.of, and the position after
        the batch."""

    @abc.abstractmethod
    def origin(self, number: int) -> str:
        """Returns a description of where in the dataset a batch comes from, for messages."""

    def origin_of(self, step: int) -> str:
        """Returns a description of a step's batch and where it comes from, for messages."""
        number = self.number(step)
        return f"batch {number} is from {self.origin(number)}"

    def _rows(self, numbers: Iterator[int]) -> Iterator[tuple[TokenBatch, Any]]:
        """Yields this host's rows of each of these batches, and the position after it."""
        for ids, is_start, position in self.make(numbers):
            rows = TokenBatch.of(ids, is_start, self.spec.start_token)
            largest = max(int(x.max(initial=0)) for x in (rows.inputs, rows.targets))
            self.spec.check_vocabulary(f"{self.name} has the id", largest)
            yield jax.tree.map(lambda x: x[:, self.order], rows), position

    def from_step(self, first: int, last: int) -> Iterator[tuple[int, TokenBatch]]:
        """Yields each step from `first` up to but excluding `last`, with its batch."""
        if first == 0:
            self.position = None
        begin = time.perf_counter()
        batches = ahead(self._rows(map(self.number, range(first, last))))
        for step, (rows, position) in zip(range(first, last), batches, strict=True):
            batch = jax.make_array_from_process_local_data(self.shardings, rows, self.shape)
            # On GPUs a program's first run may fail in cuDNN if a batch is copied there meanwhile.
            jax.block_until_ready(batch)
            self.waited, self.position = time.perf_counter() - begin, position
            yield step, batch
            begin = time.perf_counter()


class Shuffled:
    """The sequences of a split of flat tokens, in the order in which a run uses them. Raises
    FlatTokensError if the dataset can't be read, has ids that don't fit the vocabulary, or has too
    few sequences for one batch."""

    def __init__(self, path: str, config: FlatTokensConfig, spec: BatchSpec, split: str):
        self.config, self.rows, self.length = config, spec.rows, spec.length
        data: Any = config.open_split(path, split, spec.vocab)
        self.data, self.threads = data, ThreadPoolExecutor(spec.io_threads)
        # The token before a sequence, by the sequence's number, where the block before was read.
        self.ends = {0: FILL}
        spec.check_vocabulary(f"{data.name} has ids up to", data.max_token_id)
        spec.check_vocabulary("flat_tokens.end_token is", config.end_token or 0)
        count = data.token_count // self.length if config.sequence_packing else data.sequence_count
        if spec.rows % config.streams:
            problem = f"doesn't divide training.tokens.batch={spec.rows}"
            raise FlatTokensError(f"flat_tokens.streams={config.streams} {problem}")
        if count < spec.rows:
            few = f"too few for training.tokens.batch={spec.rows}: lower it, or add text"
            few = few if count else "too few for a row: lower training.tokens.len, or add text"
            raise FlatTokensError(f"{data.name} has {count} rows of {self.length} tokens, {few}")
        self.count = count
        bounds = [count * i // config.streams for i in range(config.streams + 1)]
        parts = enumerate(itertools.pairwise(bounds))
        self.streams = [Stream(self, i, first, end) for i, (first, end) in parts]

    @checked
    def read_block(self, first: int, rows: UInt32[np.ndarray, "rows n"]) -> None:
        """Fills `rows` with the encoded sequences from `first` on, each preceded by the token
        before it; documents, whose first input is the start token, are preceded by FILL."""
        last, read = first + len(rows), self.data.read_encoded
        if self.config.sequence_packing:
            # Reading the token before a block may unpack another chunk, so each block's last token
            # is remembered.
            known = self.ends.get(first)
            tokens = read(first * self.length - (known is None), last * self.length)
            tokens = tokens if known is None else np.append(np.uint32(known), tokens)
            rows[:] = rows_of(tokens, self.length)
            self.ends[last] = int(tokens[-1])
            return
        rows[:] = FILL
        rows = rows[:, 1:]
        bounds = self.data.starts(first, last).tolist()
        # A single read, unless documents are so long that most of it would be discarded.
        single = bounds[-1] - bounds[0] <= 4 * rows.size
        text = read(bounds[0], bounds[-1]) if single else None
        for row, (low, end) in zip(rows, itertools.pairwise(bounds), strict=True):
            high = min(end, low + self.length)
            part = read(low, high) if text is None else text[low - bounds[0] : high - bounds[0]]
            row[: len(part)] = part

    @checked
    def sequences(
        self, rows: Int64[np.ndarray, " n"]
    ) -> tuple[UInt32[np.ndarray, "n _"], Int64[np.ndarray, " n"]]:
        """Returns the encoded sequences of increasing rows, each preceded by the token before it,
        and their numbers in the dataset. Row 0 is the first of batch 0."""
        encoded, found = np.empty((len(rows), self.length + 1), np.uint32), np.empty_like(rows)
        share = self.rows // len(self.streams)
        rounds, places = np.divmod(rows, share)  # each batch takes a round from each stream
        for i, stream in enumerate(self.streams):
            here = np.flatnonzero(rounds % len(self.streams) == i)
            positions = rounds[here] // len(self.streams) * share + places[here]
            for buffer, chosen in stream.find(positions):
                now, here = np.split(here, [len(chosen)])
                encoded[now], found[now] = buffer.sequences[chosen], buffer.numbers[chosen]
        return encoded, found

    def describe(self, rows: np.ndarray) -> str:
        """Returns where in the dataset rows come from. Row 0 is the first of batch 0."""
        numbers = ", ".join(map(str, self.sequences(rows)[1]))
        kind = f"packed {self.length} tokens each" if self.config.sequence_packing else "documents"
        return f"{self.data.name}: sequences {numbers} ({kind})"


def sample(data: FlatTokens | Bins) -> int:
    """Returns a checksum of 64 tokens at each of 8 places, the first and the last among them."""
    size = min(64, data.token_count)
    places = np.linspace(0, data.token_count - size, 8).astype(int).tolist()
    return zlib.crc32(b"".join(data.read_encoded(i, i + size).tobytes() for i in places))


class Mixture(Batches):
    """Batches whose rows come from several datasets, in the order of `config.mixture`, or all from
    `config.filespec`.

    Of the first n rows of a run, a dataset has its share, give or take (datasets - 1) / 2 rows.
    Raises FlatTokensError as Shuffled does, and for datasets of different tokenizers.
    """

    def __init__(self, config: FlatTokensConfig, spec: BatchSpec, split: str):
        super().__init__(spec)
        paths = *(x.filespec for x in config.datasets), *config.validation.values()
        recorded = {*filter(None, map(tokenizer_of, paths))}
        # One whose vocabulary is known comes first: the others are compared with it.
        first, *others = sorted(recorded, key=lambda x: (not x.vocabulary, x)) or [TokenizerId("")]
        for other in others:
            if problem := difference(first, other):
                both = f"{first.name} and {other.name}: {problem}"
                both = f"flat_tokens has datasets of different tokenizers, {both}"
                raise FlatTokensError(f"{both}. Convert them with the same one")
        files = (bin_files(x.filespec) or [x.filespec.rstrip("/")] for x in config.datasets)
        there = ([x if "://" in x else os.path.realpath(x) for x in each] for each in files)
        places = (", ".join(each) for each in there)
        for path, times in Counter(places).items():
            if times > 1:  # shuffled alike, it would repeat a batch's rows
                problem = f"{path} is in flat_tokens.mixture {times} times"
                raise FlatTokensError(f"{problem}: name it once, with the sum of the weights")
        self.datasets = [Shuffled(x.filespec, config, spec, split) for x in config.datasets]
        data = [dataset.data for dataset in self.datasets]
        self.count = self.datasets[0].count if len(data) == 1 else None
        bins = [x for x in data if isinstance(x, Bins)]
        if split == "train":
            check_end_token(bins)
        for each in bins:
            if not each.ended:
                end = f"flat_tokens.end_token={config.end_token}"
                say(f"note: no id in {each.name} is {end}: its tokens count as one document")
        self.made_of = {
            "tokens": [x.rows_from for x in data],
            "samples": [*map(sample, data)],
            "tokenizer": first.name or None,
            "vocabulary": first.vocabulary,
        }
        check_hosts_agree({"a dataset": self.made_of}, SAME_FILES)
        # Fractions of the decimals as written, so that the counts of a long run are exact.
        weights = [Fraction(str(dataset.weight)) for dataset in config.datasets]
        sizes = [x.bytes_per_token * w for x, w in zip(data, weights, strict=True)]
        known = all(sizes) and config.sequence_packing  # else rows have less than all tokens
        self.bytes_per_token = float(sum(sizes) / sum(weights)) if known else None
        self.shares = [weight / sum(weights[i:]) for i, weight in enumerate(weights)]

    def counts(self, rows: int) -> list[int]:
        """Returns how many of the first `rows` rows of a run each dataset has. Each takes its
        rounded share of the rows that the datasets before it left, so no dataset's count falls as
        `rows` grows. Differences of rounded cumulative shares could fall."""
        counts = []
        for share in self.shares:
            counts.append(math.floor(rows * share + Fraction(1, 2)))
            rows -= counts[-1]
        return counts

    def epochs(self, batches: int) -> str:
        counts = zip(self.counts(batches * self.spec.rows), self.datasets, strict=True)
        return f"{' and '.join(f'{rows / x.count:.3g}' for rows, x in counts)} epochs"

    def parts(self, number: int, indices: Sequence[int]) -> Iterator[tuple[Shuffled, np.ndarray]]:
        """Yields each dataset, and the numbers of its rows at these increasing indices of a
        batch."""
        size, left = self.spec.rows, np.array(indices)
        before, after = self.counts(number * size), self.counts((number + 1) * size)
        for dataset, first, end in zip(self.datasets, before, after, strict=True):
            yield dataset, first + left[left < end - first]
            left = left[left >= end - first] - (end - first)

    def rows(self, number: int, indices: Sequence[int]) -> flat_tokens.Decoded:
        """Returns the ids and the document starts of these rows of a batch."""
        parts = [dataset.sequences(rows)[0] for dataset, rows in self.parts(number, indices)]
        return flat_tokens.decode(np.concatenate(parts))

    def make(self, numbers: Iterator[int]) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        return ((*self.rows(number, self.local_rows), self.made_of) for number in numbers)

    def origin(self, number: int) -> str:
        parts = self.parts(number, range(self.spec.rows))
        return "; ".join(dataset.describe(rows) for dataset, rows in parts if len(rows))
