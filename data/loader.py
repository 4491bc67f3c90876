"""Flat tokens -> shuffled batches. What a batch holds depends on the config and the step alone.

A *sequence* is a row of a batch: `length` tokens in a row from the flat array (packed), or one
document, cut or padded to `length`. The sequences are divided among `streams` of equal size, each
of which fills its share of every batch's rows from an endless order of its own. An epoch of a
stream is a random order of its read blocks, `sequences_per_read_block` neighbours each; a shuffle
buffer is `read_blocks_per_shuffle_buffer` blocks in that order, their sequences shuffled among each
other. So step N can be found without looking at the steps before it, reads are long, and what is
held in memory is a buffer or two per stream.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from data.flat_tokens import FlatTokens, FlatTokensError
from shardlib.types import bool_, make_shardings, pytree_dataclass, u32


@dataclasses.dataclass(unsafe_hash=True)
class FlatTokensConfig:
    filespec: str
    streams: int
    read_blocks_per_shuffle_buffer: int
    sequences_per_read_block: int
    seed: int
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

    def _buffer(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        per = self.blocks_per_buffer
        chosen = self.block_order(epoch)[number * per : (number + 1) * per]
        ranges = [
            (
                self.first + block * self.block,
                self.first + min((block + 1) * self.block, self.count),
            )
            for block in map(int, chosen)
        ]
        parts = list(self.loader.threads.map(self.loader.read_block, ranges))
        ids, starts = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = permutation(len(ids), *self.key, epoch, number)
        return ids[order], starts[order]

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequences at positions `start` to `stop` of the order."""
        found = [self.find(position) for position in range(start, stop)]
        rows = [[part[place] for part in self.buffer(e, b)] for e, b, place in found]
        ids, starts = zip(*rows, strict=True)
        return np.stack(ids), np.stack(starts)


class Loader:
    """Batches of `batch` rows of `length` tokens from one split, laid out on the mesh in context.

    `vocab` is the model's. Raises FlatTokensError if the dataset has larger ids, too few sequences
    for one batch, or can't be read.
    """

    def __init__(
        self,
        config: FlatTokensConfig,
        batch: int,
        length: int,
        vocab: int,
        io_threads: int,
        split: str,
    ):
        self.config, self.batch, self.length = config, batch, length
        self.dataset = data = FlatTokens(config.filespec, split)
        self.shardings = make_shardings(TokenBatch)
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

    def read_block(self, sequences: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and starts, both [n, length], of a range of neighbouring sequences."""
        first, last = sequences
        if self.config.sequence_packing:
            ids, starts = self.dataset.read(first * self.length, last * self.length)
            return ids.reshape(-1, self.length), starts.reshape(-1, self.length)
        bounds = self.dataset.starts(first, last)
        ids = np.zeros((last - first, self.length), np.uint32)
        starts = np.zeros((last - first, self.length), np.bool_)
        # One read for all, unless documents are so long that most of it would be thrown away.
        together = bounds[-1] - bounds[0] <= 4 * ids.size
        base = int(bounds[0])
        flat = self.dataset.read(base, int(bounds[-1])) if together else None
        for row, (low, end) in enumerate(itertools.pairwise(map(int, bounds))):
            high = min(end, low + self.length)
            if flat:
                part = [values[low - base : high - base] for values in flat]
            else:
                part = list(self.dataset.read(low, high))
            ids[row, : high - low], starts[row, : high - low] = part
        return ids, starts

    def rows(self, step: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows `first` to `last` of the step's batch: ids and starts, both [last-first, length]."""
        share = self.batch // len(self.streams)
        parts = []
        for i, stream in enumerate(self.streams):
            low, high = max(first - i * share, 0), min(last - i * share, share)
            if low < high:
                parts.append(stream.rows(step * share + low, step * share + high))
        ids, starts = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ids, starts

    def load(self, step: int) -> TokenBatch:
        """The batch of a step. Each host reads the rows that its devices hold, and no others."""
        shape = (self.batch, self.length)
        rows = functools.cache(lambda first, last: self.rows(step, first, last))

        def part(which: int, index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(self.batch)
            return rows(first, last)[which]

        arrays = [
            jax.make_array_from_callback(shape, sharding, functools.partial(part, which))
            for which, sharding in enumerate(jax.tree.leaves(self.shardings))
        ]
        return TokenBatch(*arrays)

    def batches(self, first: int, last: int) -> Iterator[TokenBatch]:
        """The batches of steps `first` to `last`, each prepared while the one before is in use."""
        with ThreadPoolExecutor(1) as ahead:
            upcoming = ahead.submit(self.load, first)
            for step in range(first, last):
                batch = upcoming.result()
                if step + 1 < last:
                    upcoming = ahead.submit(self.load, step + 1)
                yield batch
