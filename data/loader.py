"""Flat tokens -> shuffled batches. What a batch holds depends on the config and its number alone.

A *sequence* is a row of a batch: `length` tokens in a row from the flat array (packed), or one
document, cut or padded to `length`. The sequences are divided among `streams` of equal size, each
of which fills its share of every batch's rows from an endless order of its own. An epoch of a
stream is a random order of its read blocks, `sequences_per_read_block` neighbours each; a shuffle
buffer is `read_blocks_per_shuffle_buffer` blocks in that order, their sequences shuffled among each
other. So batch N can be found without looking at those before it, reads are long, and what is held
in memory is a buffer or two per stream.
"""

import abc
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from data.flat_tokens import FlatTokens, FlatTokensError, decode
from data.text import ahead
from runtime.config import Name, NonNegativeInt, PositiveInt, Section
from shardlib.types import bool_, make_shardings, pytree_dataclass, u32


@dataclasses.dataclass(unsafe_hash=True)
class FlatTokensConfig(Section, key="flat_tokens"):
    filespec: Name
    streams: PositiveInt
    read_blocks_per_shuffle_buffer: PositiveInt
    sequences_per_read_block: PositiveInt
    seed: NonNegativeInt
    sequence_packing: bool


@pytree_dataclass
class TokenBatch:
    """Id 0 is no target: it pads a row whose document is shorter."""

    targets: u32["B/d L"]
    is_start: bool_["B/d L"]


def permutation(count: int, *key: int) -> np.ndarray:
    """An order of range(count) that depends on `key` alone.

    Built on a bit generator's raw output, which numpy promises not to change between versions;
    it makes no such promise for `Generator.permutation`.
    """
    # SeedSequence takes (1, 2) and (1, 2, 0) for the same, so the key's length goes with it.
    raw = np.random.Philox(np.random.SeedSequence((len(key), *key))).random_raw(count)
    return np.argsort(raw, kind="stable")


class Stream:
    """Sequences `first` to `first + count` of a dataset, in an endless shuffled order."""

    def __init__(self, loader: "Loader", index: int, first: int, count: int):
        self.loader, self.first, self.count = loader, first, count
        self.key = (loader.config.seed, index)
        self.block = min(loader.config.sequences_per_read_block, count)
        self.blocks = -(-count // self.block)
        self.blocks_per_buffer = loader.config.read_blocks_per_shuffle_buffer
        self.block_order = functools.lru_cache(2)(
            lambda epoch: permutation(self.blocks, *self.key, epoch)
        )
        self.short_block = functools.lru_cache(2)(
            lambda epoch: int(np.argmax(self.block_order(epoch)))
        )
        self.buffer = functools.lru_cache(2)(self._buffer)

    def find(self, position: int) -> tuple[int, int, int]:
        """The epoch, the shuffle buffer and the place in it of the order's n-th sequence."""
        epoch, place = divmod(position, self.count)
        # All buffers are of one size but the last, and the one that holds the stream's last block,
        # which may be short. After that one, count as if it were full.
        missing = self.blocks * self.block - self.count
        size = self.blocks_per_buffer * self.block
        full = (self.short_block(epoch) // self.blocks_per_buffer + 1) * size
        if place >= full - missing:
            place += missing
        return epoch, *divmod(place, size)

    def blocks_of(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a shuffle buffer: its blocks' first sequences, their lengths, and the order in which
        it gives its sequences."""
        per = self.blocks_per_buffer
        first = self.block_order(epoch)[number * per : (number + 1) * per] * self.block
        counts = np.minimum(first + self.block, self.count) - first
        return self.first + first, counts, permutation(counts.sum(), *self.key, epoch, number)

    def _buffer(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The buffer's sequences as they are stored, uint32[n, length], and their order."""
        first, counts, order = self.blocks_of(epoch, number)
        sequences = np.zeros((counts.sum(), self.loader.length), np.uint32)
        parts = np.split(sequences, np.cumsum(counts)[:-1])
        list(self.loader.threads.map(self.loader.read_block, first, parts))
        return sequences, order

    def sequence(self, position: int) -> int:
        """Which one of the dataset's it is."""
        epoch, number, place = self.find(position)
        first, counts, order = self.blocks_of(epoch, number)
        block = int(np.searchsorted(np.cumsum(counts), order[place], "right"))
        return int(first[block] + order[place] - counts[:block].sum())

    def fill(self, rows: np.ndarray, position: int) -> None:
        """With the sequences from `position` of the order on, as they are stored."""
        while len(rows):
            epoch, number, place = self.find(position)
            sequences, order = self.buffer(epoch, number)
            chosen = order[place : place + len(rows)]
            np.take(sequences, chosen, axis=0, out=rows[: len(chosen)], mode="clip")
            rows, position = rows[len(chosen) :], position + len(chosen)


def numbers_without(skip: Sequence[int]) -> Iterator[int]:
    """From 0, of which a run's steps get one each."""
    return (number for number in itertools.count() if number not in skip)


class Batches(abc.ABC):
    """Batches of `shape`, rows and tokens, each made while the one before is in use, and laid out
    on the mesh that was in context at first."""

    waited = 0.0  # seconds, for the batch given last
    position: Any = None  # JSON: where a stream goes on after that batch

    def __init__(self, batch: int, length: int):
        self.shape = batch, length
        self.shardings = make_shardings(TokenBatch)

    def lay_out(
        self, rows: Callable[[tuple[int, int]], tuple[np.ndarray, np.ndarray]]
    ) -> TokenBatch:
        """A batch of the ids and the starts that a function gives for each range of rows that this
        host's devices hold."""

        def part(which: int, index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(self.shape[0])
            return rows((first, last))[which]

        arrays = [
            jax.make_array_from_callback(self.shape, sharding, functools.partial(part, which))
            for which, sharding in enumerate(jax.tree.leaves(self.shardings))
        ]
        return TokenBatch(*arrays)

    @abc.abstractmethod
    def make(self, numbers: Iterator[int]) -> Iterator[tuple[TokenBatch, Any]]:
        """The batches of these numbers, which increase, with the position after each."""

    @abc.abstractmethod
    def origin(self, number: int) -> str:
        """Where in the dataset a batch is from."""

    def batches(self, first: int, last: int, skip: Sequence[int] = ()) -> Iterator[TokenBatch]:
        """The batches of steps `first` to `last`. Those whose numbers are in `skip` are left out,
        so that all later steps have later batches."""
        if first == 0:
            self.position = None
        asked = time.perf_counter()
        numbers = itertools.islice(numbers_without(skip), first, last)
        for batch, position in ahead(self.make(numbers)):
            self.waited, self.position = time.perf_counter() - asked, position
            yield batch
            asked = time.perf_counter()


class Loader(Batches):
    """Batches of `batch` rows of `length` tokens from one split, laid out on the mesh in context.

    `vocab` is the model's. Raises FlatTokensError if the dataset has larger ids, too few sequences
    for one batch, or can't be read.
    """

    def __init__(
        self,
        config: FlatTokensConfig,
        io_threads: int,
        batch: int,
        length: int,
        vocab: int,
        split: str,
    ):
        super().__init__(batch, length)
        self.config, self.length = config, length
        self.dataset = data = FlatTokens(config.filespec, split)
        self.threads = ThreadPoolExecutor(io_threads)
        if data.max_token_id >= vocab:
            raise FlatTokensError(
                f"{data.name} has ids up to {data.max_token_id}; model.vocab={vocab} must be larger"
            )
        count = data.token_count // length if config.sequence_packing else data.sequence_count
        if batch % config.streams:
            raise FlatTokensError(
                f"flat_tokens.streams={config.streams} doesn't divide training.tokens.batch={batch}"
            )
        if count < batch:
            raise FlatTokensError(
                f"{data.name} has {count} sequences of {length} tokens, "
                f"too few for a batch of {batch}"
            )
        bounds = [count * i // config.streams for i in range(config.streams + 1)]
        self.streams = [
            Stream(self, i, low, high - low)
            for i, (low, high) in enumerate(itertools.pairwise(bounds))
        ]

    def read_block(self, first: int, rows: np.ndarray) -> None:
        """Fills rows, [n, length], with the sequences from `first` on, as they are stored."""
        first, last = int(first), int(first) + len(rows)
        if self.config.sequence_packing:
            flat = self.dataset.read_encoded(first * self.length, last * self.length)
            rows[:] = flat.reshape(rows.shape)
            return
        bounds = self.dataset.starts(first, last)
        # One read for all, unless documents are so long that most of it would be thrown away.
        together = bounds[-1] - bounds[0] <= 4 * rows.size
        base = int(bounds[0])
        text = self.dataset.read_encoded(base, int(bounds[-1])) if together else None
        for row, low, end in zip(
            rows, *map(np.ndarray.tolist, (bounds[:-1], bounds[1:])), strict=True
        ):
            high = min(end, low + self.length)
            if text is None:
                row[: high - low] = self.dataset.read_encoded(low, high)
            else:
                row[: high - low] = text[low - base : high - base]

    def rows(self, number: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows `first` to `last` of a batch: ids and starts, both [last-first, length]."""
        share = self.shape[0] // len(self.streams)
        rows = np.empty((last - first, self.length), np.uint32)
        for i, stream in enumerate(self.streams):
            low, high = max(first - i * share, 0), min(last - i * share, share)
            if low < high:
                part = rows[low + i * share - first : high + i * share - first]
                stream.fill(part, number * share + low)
        return decode(rows)

    def load(self, number: int) -> TokenBatch:
        """A batch. Each host reads the rows that its devices hold, and no others."""
        return self.lay_out(functools.cache(lambda rows: self.rows(number, *rows)))

    def make(self, numbers: Iterator[int]) -> Iterator[tuple[TokenBatch, Any]]:
        return ((self.load(number), None) for number in numbers)

    def origin(self, number: int) -> str:
        share = self.shape[0] // len(self.streams)
        rows = range(number * share, (number + 1) * share)
        found = ", ".join(str(stream.sequence(row)) for stream in self.streams for row in rows)
        kind = f"packed {self.length} tokens each" if self.config.sequence_packing else "documents"
        return f"{self.dataset.name}: sequences {found} ({kind})"
