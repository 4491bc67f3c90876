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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, SupportsInt

import jax
import numpy as np
from jaxtyping import Bool, Int64, UInt32

from data.flat_tokens import Decoded, FlatTokens, FlatTokensError, checked, decode, tokenizer_of
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

    def open(self, spec: "BatchSpec", split: str) -> "Loader":
        """Batches of a split, train or validation, for the mesh in context."""
        return Loader(self, spec, split)

    def tokenizer_used(self) -> tuple[str, int] | None:
        """The name of the dataset's tokenizer and what was added to its ids, if it says."""
        return tokenizer_of(self.filespec)


@pytree_dataclass
class TokenBatch:
    """Inputs and targets of the model at each place of each row."""

    inputs: u32["B/d L"]  # the token before the target, or the model's start token
    targets: u32["B/d L"]
    loss_mask: bool_["B/d L"]  # whether the loss counts the target: not where it pads a row
    document: u32["B/d L"]  # number in the row; attention stays within one
    position: u32["B/d L"]  # in the row

    @classmethod
    @checked
    def of(
        cls,
        ids: UInt32[np.ndarray, "B L"],
        is_start: Bool[np.ndarray, "B L"],
        start_token: int,
    ) -> "TokenBatch":
        """The NumPy arrays of a batch whose targets are `ids`, of documents that start where
        `is_start` says. Id 0 is padding. A row that begins within a document begins with input
        0."""
        previous = np.pad(ids[:, :-1], ((0, 0), (1, 0)))
        return cls(
            inputs=np.where(is_start, np.uint32(start_token), previous),
            targets=ids,
            loss_mask=ids != 0,
            document=np.cumsum(is_start, axis=1, dtype=np.uint32),
            position=np.broadcast_to(np.arange(ids.shape[1], dtype=np.uint32), ids.shape),
        )


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """Settings of a run that its batches depend on, whatever they are made from."""

    rows: int
    length: int  # tokens in a row
    vocab: int  # ids are below it
    start_token: int
    skip: tuple[int, ...] = ()  # numbers of batches that are left out; later steps get later ones
    io_threads: int = 32


@checked
def permutation(count: int, *key: int) -> Int64[np.ndarray, " {count}"]:
    """An order of range(count) that depends on `key` alone.

    Built on a bit generator's raw output, which numpy promises not to change between versions;
    it makes no such promise for `Generator.permutation`.
    """
    # SeedSequence takes (1, 2) and (1, 2, 0) for the same, so the key's length goes with it.
    raw = np.random.Philox(np.random.SeedSequence((len(key), *key))).random_raw(count)
    return np.argsort(raw, kind="stable")


class Stream:
    """Sequences `first` to `end` of a dataset, the latter not included, in an endless shuffled
    order."""

    def __init__(self, loader: "Loader", index: int, first: int, end: int):
        self.loader, self.first, self.end, self.count = loader, first, end, end - first
        self.key = (loader.config.seed, index)
        self.block = min(loader.config.sequences_per_read_block, self.count)
        self.blocks_per_buffer = loader.config.read_blocks_per_shuffle_buffer
        # A batch may begin in one epoch or buffer, and end in the next one.
        self.epoch = functools.lru_cache(2)(self._epoch)
        self.buffer = functools.lru_cache(2)(self._buffer)

    @checked
    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the first sequence of each of an epoch's n blocks, in their order, and its place
        in the epoch. The block that holds the last sequence may be short."""
        firsts = permutation(-(-self.count // self.block), *self.key, epoch) * self.block
        lengths = np.minimum(self.block, self.count - firsts)
        return self.first + firsts, np.cumsum(lengths) - lengths

    @checked
    def _buffer(
        self, epoch: int, number: int
    ) -> tuple[UInt32[np.ndarray, "n length"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """A shuffle buffer's n sequences as they are stored, their numbers in the dataset, and the
        order in which it gives them."""
        firsts, _ = self.epoch(epoch)
        firsts = firsts[number * self.blocks_per_buffer :][: self.blocks_per_buffer]
        blocks = [np.arange(first, min(first + self.block, self.end)) for first in firsts]
        numbers = np.concatenate(blocks)
        sequences = np.zeros((len(numbers), self.loader.length), np.uint32)
        parts = np.split(sequences, np.cumsum([len(block) for block in blocks])[:-1])
        list(self.loader.threads.map(self.loader.read_block, firsts, parts))
        return sequences, numbers, permutation(len(numbers), *self.key, epoch, number)

    def sequence(self, position: int) -> tuple[np.ndarray, int]:
        """The order's n-th sequence as it is stored, and its number in the dataset."""
        epoch, place = divmod(position, self.count)
        _, places = self.epoch(epoch)
        number = int(np.searchsorted(places, place, "right") - 1) // self.blocks_per_buffer
        sequences, numbers, order = self.buffer(epoch, number)
        chosen = order[place - places[number * self.blocks_per_buffer]]
        return sequences[chosen], int(numbers[chosen])


class Batches(abc.ABC):
    """The batches of a split, each made while the one before is in use, and laid out on the mesh
    that was in context at first."""

    waited = 0.0  # seconds, for the batch given last
    position: Any = None  # JSON: where a stream goes on after that batch

    def __init__(self, spec: BatchSpec):
        self.spec, self.shape = spec, (spec.rows, spec.length)
        self.shardings = make_shardings(TokenBatch)
        places = self.shardings.targets.addressable_devices_indices_map(self.shape).values()
        # Those rows that this host's devices hold: it makes no others.
        self.held = sorted({row for rows, _ in places for row in range(spec.rows)[rows]})

    def resume(self, position: Callable[[], Any]) -> None:
        """Goes on where a stream was when a checkpoint was written. Here a batch depends on its
        number alone."""
        self.position = None

    def number(self, step: int) -> int:
        """The number of a step's batch."""
        for skipped in sorted({*self.spec.skip}):
            step += skipped <= step
        return step

    @abc.abstractmethod
    def make(self, numbers: Iterator[int]) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        """The ids and the starts, [held, L], of the rows `held` of the batches of these numbers,
        which increase, and the position after each batch."""

    @abc.abstractmethod
    def origin(self, number: int) -> str:
        """Names the place in the dataset that a batch is from."""

    def origin_of(self, step: int) -> str:
        """Names a step's batch and the place that it is from."""
        number = self.number(step)
        return f"batch {number} is of {self.origin(number)}"

    def _lay_out(self, numbers: Iterator[int]) -> Iterator[tuple[TokenBatch, Any]]:
        """The batches of these numbers on the mesh, and the position after each."""
        for ids, is_start, position in self.make(numbers):
            held = TokenBatch.of(ids, is_start, self.spec.start_token)
            yield jax.make_array_from_process_local_data(self.shardings, held, self.shape), position

    def from_step(self, first: int, last: int) -> Iterator[tuple[int, TokenBatch]]:
        """Steps `first` to `last`, the latter not included, with their batches."""
        if first == 0:
            self.position = None
        asked = time.perf_counter()
        made = ahead(self._lay_out(map(self.number, range(first, last))))
        for step, (batch, position) in zip(range(first, last), made, strict=True):
            self.waited, self.position = time.perf_counter() - asked, position
            yield step, batch
            asked = time.perf_counter()


class Loader(Batches):
    """Batches of a split of flat tokens. Raises FlatTokensError if the dataset has ids that are too
    large, too few sequences for one batch, or can't be read."""

    def __init__(self, config: FlatTokensConfig, spec: BatchSpec, split: str):
        super().__init__(spec)
        self.config, (batch, length) = config, self.shape
        self.length = length
        self.dataset = data = FlatTokens(config.filespec, split)
        self.threads = ThreadPoolExecutor(spec.io_threads)
        if data.max_token_id >= spec.vocab:
            raise FlatTokensError(
                f"{data.name} has ids up to {data.max_token_id}; model.vocab={spec.vocab} must be "
                "larger"
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
            Stream(self, i, first, end) for i, (first, end) in enumerate(itertools.pairwise(bounds))
        ]

    @checked
    def read_block(self, first: SupportsInt, rows: UInt32[np.ndarray, "n length"]) -> None:
        """Fills rows with the sequences from `first` on, as they are stored."""
        first, last, read = int(first), int(first) + len(rows), self.dataset.read_encoded
        if self.config.sequence_packing:
            rows[:] = read(first * self.length, last * self.length).reshape(rows.shape)
            return
        bounds = self.dataset.starts(first, last).tolist()
        # One read for all, unless documents are so long that most of it would be thrown away.
        together = bounds[-1] - bounds[0] <= 4 * rows.size
        text = read(bounds[0], bounds[-1]) if together else None
        for row, (low, end) in zip(rows, itertools.pairwise(bounds), strict=True):
            high = min(end, low + self.length)
            part = read(low, high) if text is None else text[low - bounds[0] : high - bounds[0]]
            row[: len(part)] = part

    def sequence(self, number: int, row: int) -> tuple[np.ndarray, int]:
        """A row of a batch as it is stored, and its number in the dataset."""
        share = self.shape[0] // len(self.streams)
        stream, place = divmod(row, share)
        return self.streams[stream].sequence(number * share + place)

    def rows(self, number: int, held: Iterable[int]) -> Decoded:
        """Some rows of a batch."""
        return decode(np.stack([self.sequence(number, row)[0] for row in held]))

    def make(self, numbers: Iterator[int]) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        return ((*self.rows(number, self.held), None) for number in numbers)

    def origin(self, number: int) -> str:
        rows = range(self.shape[0])
        found = ", ".join(str(self.sequence(number, row)[1]) for row in rows)
        kind = f"packed {self.length} tokens each" if self.config.sequence_packing else "documents"
        return f"{self.dataset.name}: sequences {found} ({kind})"
