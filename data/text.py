"""Text of a dataset that Hugging Face `datasets` opens -> token ids, whoever reads it in one order.

The dataset's shards, which mostly are its files, are divided among *lanes*, neighbours together. A
lane is read in *units* of some documents, and the order is a unit of each lane in turn. So
processes can read lanes of their own, and what comes does not depend on how many they are. A
*position* in that order is JSON, and holds all that is needed to go on from there.
"""

import array
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import queue
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.flat_tokens import encode
from shardlib.errors import UserError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch isn't there
S = TypeVar("S")
T = TypeVar("T")
LANES = 8  # at most, of the converter: more would have more files open at a time
DOCUMENTS = 256  # in a unit, at most
UNIT_BYTES = 2**21  # of text, about, at most: some units are in memory at a time


class Unit(NamedTuple):
    tokens: np.ndarray  # uint32[tokens], document after document, as flat tokens are stored
    lengths: np.ndarray  # int64[documents], in tokens; an empty document has 0
    position: dict[str, Any]  # after it


class _Part(NamedTuple):
    """What a worker makes: a unit of one lane; or, without tokens, a lane's end."""

    lane: int
    tokens: tuple[np.ndarray, np.ndarray] | None
    state: dict[str, Any] | None  # of the lane, after it


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each made by a thread while the one before is in use."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        upcoming: Any = thread.submit(next, iterator, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, iterator, end)
            yield item


def by_threads(count: int, function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """The function of each item, in order; so many are at work while one more waits."""
    with ThreadPoolExecutor(count) as threads:
        upcoming: deque[Any] = deque()
        for item in items:
            upcoming.append(threads.submit(function, item))
            if len(upcoming) > count + 1:
                yield upcoming.popleft().result()
        for left in upcoming:
            yield left.result()


class Tokenizer:
    """Texts -> the tokens of all as they are stored, uint32[tokens], and the length of each,
    int64[texts].

    No special tokens are added, as the datasets' format marks where a sequence starts, and one's
    name in a text is text. Raises UserError or OSError where there is no such tokenizer.
    """

    def __init__(self, name: str, id_offset: int):
        self.name, self.id_offset = name, id_offset
        if name == "bytes_utf8":
            return
        import transformers  # takes a second, and bytes don't need it

        try:
            self.slow = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0]
            raise UserError(f"tokenizer={name} can't be opened: {problem}") from None
        self.fast = self.slow.backend_tokenizer if self.slow.is_fast else None
        if self.fast:  # the library itself: what is wrapped around it costs a third of the speed
            # Our own threads call it: its own would wait while a unit is read, and written.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self.fast.no_truncation()
            self.fast.no_padding()
            self.fast.encode_special_tokens = True

    def __call__(self, texts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Of an Arrow array of texts; a null is an empty one."""
        ids, lengths = self._bytes(texts) if self.name == "bytes_utf8" else self._ids(texts)
        return encode(ids, (np.cumsum(lengths) - lengths)[lengths > 0]), lengths

    def _ids(self, texts: Any) -> tuple[np.ndarray, np.ndarray]:
        strings = [text or "" for text in texts.to_pylist()]
        lists: Iterable[Any]
        if self.fast:
            encoded = self.fast.encode_batch_fast(strings, add_special_tokens=False)
            lists = (part.ids for part in encoded)
        else:
            lists = self.slow(strings, add_special_tokens=False, verbose=False)["input_ids"]
        # One list of Python's integers at a time: they take ten times the memory of their values.
        parts = [array.array("I", part) for part in lists]
        lengths = np.array([len(part) for part in parts], np.int64)
        ids = np.concatenate([np.frombuffer(part, np.uint32) for part in parts])
        if not self.id_offset and not ids.all():
            raise UserError(f"{self.name} uses id 0, which the format reserves: set id_offset=1")
        ids += np.uint32(self.id_offset)
        return ids, lengths

    @staticmethod
    def _bytes(texts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Each byte plus 1, and the lengths, from Arrow's own memory."""
        import pyarrow

        column = texts.combine_chunks().cast(pyarrow.large_string()).fill_null("")
        _, offsets, values = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        found = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
        return np.add(found, 1, dtype=np.uint16), np.diff(ends)


@dataclasses.dataclass(frozen=True)
class Source:
    """A split of a dataset, and how its text becomes ids."""

    load_dataset: dict[str, Any]  # arguments of datasets.load_dataset
    split: str
    column: str  # holds the text
    tokenizer: str  # bytes_utf8, or what transformers.AutoTokenizer opens
    id_offset: int  # added to a tokenizer's ids
    documents: int = DOCUMENTS  # in a unit

    def check(self) -> tuple[int, int]:
        """The number of shards, and how many documents make a unit, if they are all as long as the
        first ones. Raises UserError or OSError where the split or its column can't be had."""
        dataset = self._open()
        try:
            rows = list(itertools.islice(dataset, 64))
        except ValueError as error:  # Arrow's, too
            raise UserError(f"the split {self.split} can't be read: {error}") from error
        if not rows:
            raise UserError(f"the split {self.split} has no documents")
        if not isinstance(rows[0].get(self.column), str):
            types = ", ".join(f"{name}: {type(value).__name__}" for name, value in rows[0].items())
            raise UserError(f"column={self.column} is no text; the columns are {types}")
        size = sum(len(row[self.column] or "") for row in rows)
        return dataset.num_shards, min(DOCUMENTS, 1 + UNIT_BYTES * len(rows) // max(size, 1))

    def _open(self) -> Any:
        import datasets  # two seconds
        from pyarrow.dataset import ParquetFragmentScanOptions

        # Of a parquet file, not more at a time than is used: by default all of it is kept.
        sparing = ParquetFragmentScanOptions(pre_buffer=False)
        options = {"fragment_scan_options": sparing, "batch_size": self.documents}
        arguments = {"streaming": True, **self.load_dataset, "split": self.split}
        try:
            try:
                dataset = datasets.load_dataset(**arguments, **options)
            except (TypeError, ValueError) as error:  # of what isn't parquet
                if not any(name in str(error) for name in options):
                    raise
                dataset = datasets.load_dataset(**arguments)
        except ValueError as error:
            raise UserError(str(error)) from None
        except (TypeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"load_dataset: {error}") from None
        if isinstance(dataset, datasets.Dataset):  # streaming=false: it was downloaded whole
            dataset = dataset.to_iterable_dataset(max(1, min(LANES, len(dataset))))
        return dataset

    def parts(
        self, lanes: Sequence[int], position: dict[str, Any], threads: int
    ) -> Iterator[_Part]:
        """Those of some lanes, in turn."""
        dataset = self._open().select_columns([self.column]).with_format("arrow")
        tokenizer = Tokenizer(self.tokenizer, self.id_offset)
        states = position["lanes"]

        def read(lane: int) -> Iterator[tuple[Any, dict[str, Any]]]:
            part = dataset.shard(len(states), lane)
            if states[lane]:
                part.load_state_dict(states[lane])
            for table in part.iter(self.documents):
                yield table[self.column], part.state_dict()

        def in_turn() -> Iterator[tuple[int, Any, dict[str, Any] | None]]:
            readers = {lane: read(lane) for lane in lanes}
            order = _order(lanes, position)
            while order:
                lane = order.popleft()
                try:
                    texts, state = next(readers[lane], (None, None))
                except Exception as error:  # each of the libraries below raises its own
                    raise OSError(f"the split {self.split} can't be read: {error}") from error
                if texts is not None:
                    order.append(lane)
                yield lane, texts, state

        def part(item: tuple[int, Any, dict[str, Any] | None]) -> _Part:
            lane, texts, state = item
            return _Part(lane, None if texts is None else tokenizer(texts), state)

        return by_threads(threads, part, in_turn())


def start(lanes: int) -> dict[str, Any]:
    """The position before the first unit."""
    return {"turn": 0, "lanes": [{}] * lanes}


def units(
    source: Source, lanes: Sequence[int], position: dict[str, Any], processes: int
) -> Iterator[Unit]:
    """Those of some lanes that come after a position. Each process reads and tokenizes lanes of its
    own; one does so in threads of this process. Raises UserError or OSError for what can't be
    read or tokenized."""
    threads = max(1, cores() // processes)
    with contextlib.ExitStack() as stack:
        worker_of: dict[int, Iterator[_Part]] = {}
        for i in range(processes):
            share = lanes[i::processes]
            if processes == 1:
                worker = ahead(source.parts(share, position, threads))
            else:
                worker = stack.enter_context(_elsewhere(source, share, position, threads))
            worker_of |= dict.fromkeys(share, worker)
        states, order = list(position["lanes"]), _order(lanes, position)
        while order:
            part = next(worker_of[order.popleft()])
            states[part.lane] = part.state
            if part.tokens is not None:
                order.append(part.lane)
                after = {"turn": (part.lane + 1) % len(states), "lanes": list(states)}
                yield Unit(*part.tokens, after)


def share_done(position: dict[str, Any], shards: int) -> float:
    """By the shards that were read to their ends."""
    lanes, done = position["lanes"], 0
    for lane, state in enumerate(lanes):
        found = re.search(r'"shard_idx": (\d+)', json.dumps(state))
        whole = len(range(lane, shards, len(lanes)))
        done += whole if state is None else int(found[1]) if found else 0
    return done / shards


def _order(lanes: Sequence[int], position: dict[str, Any]) -> deque[int]:
    """The lanes that have not ended, from the one whose turn it is. What ended has no state."""
    count = len(position["lanes"])
    left = (lane for lane in lanes if position["lanes"][lane] is not None)
    return deque(sorted(left, key=lambda lane: (lane - position["turn"]) % count))


@contextlib.contextmanager
def _elsewhere(
    source: Source, lanes: Sequence[int], position: dict[str, Any], threads: int
) -> Iterator[Iterator[_Part]]:
    """The parts that a process of its own makes."""
    context = multiprocessing.get_context("spawn")
    parts = context.Queue(4)
    worker = context.Process(target=_work, args=(parts, source, lanes, position, threads))
    worker.start()

    def received() -> Iterator[_Part]:
        while True:
            try:
                part = parts.get(timeout=1)
            except queue.Empty:
                if worker.is_alive():
                    continue
                code = f"exit code {worker.exitcode}"
                raise OSError(f"a process that tokenizes died, with {code}") from None
            if isinstance(part, Exception):
                raise part
            yield part

    try:
        yield received()
    finally:
        worker.terminate()
        worker.join()


def _work(
    parts: Any, source: Source, lanes: Sequence[int], position: dict[str, Any], threads: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first one says so
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for part in source.parts(lanes, position, threads):
            parts.put(part)
    except (UserError, OSError) as error:
        parts.put(UserError(str(error)))  # others may not come through


def _end_with_parent() -> None:
    """A process that is killed can't end those it started."""
    parent = multiprocessing.parent_process()
    assert parent, "this is a worker"
    parent.join()
    os._exit(1)


def cores() -> int:
    return len(os.sched_getaffinity(0))
