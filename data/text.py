"""Text of a dataset that Hugging Face `datasets` opens -> token ids, in one order.

The dataset's shards, which mostly are its files, are divided among *lanes*, neighbours together. A
lane is read in *units* of some documents, and the order is a unit of each lane in turn. One thread
reads; who tokenizes, threads or processes, doesn't matter to the order. A *position* in that order
is JSON, and holds all that is needed to go on from there.
"""

import array
import dataclasses
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64, UInt16, UInt32

from data.flat_tokens import checked, encode
from shardlib.errors import UserError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch isn't there
T = TypeVar("T")
LANES = 8  # at most, of the converter: more would have more files open at a time
DOCUMENTS = 256  # in a unit, at most
UNIT_BYTES = 2**21  # of text, about, at most: some units are in memory at a time


@checked
@dataclasses.dataclass(frozen=True)
class Unit:
    tokens: UInt32[np.ndarray, " tokens"]  # document after document, as flat tokens are stored
    lengths: Int64[np.ndarray, " documents"]  # in tokens; an empty document has 0
    position: dict[str, Any]  # after it


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each made by a thread while the one before is in use."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        upcoming: Any = thread.submit(next, iterator, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, iterator, end)
            yield item


class Tokenizer:
    """Texts -> the tokens of all as they are stored, and the length of each.

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

    @checked
    def __call__(self, texts: Any) -> tuple[UInt32[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
        """Of an Arrow array of texts; a null is an empty one."""
        ids, lengths = self._bytes(texts) if self.name == "bytes_utf8" else self._ids(texts)
        return encode(ids, (np.cumsum(lengths) - lengths)[lengths > 0]), lengths

    @checked
    def decode(self, ids: UInt32[np.ndarray, " tokens"]) -> str:
        if self.name == "bytes_utf8":
            return (ids - 1).astype(np.uint8).tobytes().decode(errors="replace")
        own = (ids.astype(np.int64) - self.id_offset).tolist()
        return str(self.slow.decode(own, clean_up_tokenization_spaces=False))

    @checked
    def _ids(self, texts: Any) -> tuple[UInt32[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
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
    @checked
    def _bytes(texts: Any) -> tuple[UInt16[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
        """Each byte plus 1, and the lengths, from Arrow's own memory."""
        import pyarrow

        column = texts.combine_chunks().cast(pyarrow.large_string()).fill_null("")
        _, offsets, values = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        found = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
        return np.add(found, 1, dtype=np.uint16), np.diff(ends)


tokenizer = functools.cache(Tokenizer)  # one for all threads of a process


@dataclasses.dataclass(frozen=True)
class Source:
    """A split of a dataset, and how its text becomes ids."""

    load_dataset: dict[str, Any]  # arguments of datasets.load_dataset
    split: str
    column: str  # holds the text
    tokenizer: str  # bytes_utf8, or what transformers.AutoTokenizer opens
    id_offset: int  # added to a tokenizer's ids
    documents: int = DOCUMENTS  # in a unit

    def check(self) -> tuple["Source", int]:
        """Itself with fewer documents in a unit if they are long, as far as the first ones tell,
        and the number of its shards. Raises UserError or OSError where the split, its column or
        the tokenizer can't be had."""
        tokenizer(self.tokenizer, self.id_offset)
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
        fit = 1 + UNIT_BYTES * len(rows) // max(size, 1)
        return dataclasses.replace(self, documents=min(self.documents, fit)), dataset.num_shards

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

    def read(
        self, lanes: Sequence[int], position: dict[str, Any]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The texts of each unit of some lanes, in turn, and the position after it."""
        dataset = self._open().select_columns([self.column]).with_format("arrow")
        states = list(position["lanes"])  # of each lane; what has ended has none

        def read_lane(lane: int) -> Iterator[Any]:
            part = dataset.shard(len(states), lane)
            if states[lane]:
                part.load_state_dict(states[lane])
            for table in part.iter(self.documents):
                states[lane] = part.state_dict()
                # A copy: a slice would be sent to a process with all that it is a slice of.
                yield table[self.column].take(np.arange(len(table)))
            states[lane] = None

        def turn(lane: int) -> int:
            return (lane - position["turn"]) % len(states)

        left = [lane for lane in lanes if states[lane] is not None]
        readers = deque((lane, read_lane(lane)) for lane in sorted(left, key=turn))
        while readers:
            lane, reader = readers.popleft()
            try:
                texts = next(reader, None)
            except Exception as error:  # each of the libraries below raises its own
                raise OSError(f"the split {self.split} can't be read: {error}") from error
            if texts is not None:
                readers.append((lane, reader))
                yield texts, {"turn": (lane + 1) % len(states), "lanes": list(states)}


def start(lanes: int) -> dict[str, Any]:
    """The position before the first unit."""
    return {"turn": 0, "lanes": [{}] * lanes}


def units(
    source: Source, lanes: Sequence[int], position: dict[str, Any], processes: int
) -> Iterator[Unit]:
    """Those of some lanes that come after a position, tokenized by so many processes of a thread
    each; if it is one, by this process, in a thread for each core. Raises UserError or OSError for
    what can't be read or tokenized."""
    pool: Executor
    how = source.tokenizer, source.id_offset  # no more: processes are sent it with each unit
    if processes == 1:
        count = cores()
        pool = ThreadPoolExecutor(count)
    else:
        count = processes
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin_worker)
    upcoming: deque[Future[Unit]] = deque()
    with pool:
        try:
            for texts, after in ahead(source.read(lanes, position)):
                upcoming.append(pool.submit(_unit, *how, texts, after))
                if len(upcoming) > count + 1:
                    yield upcoming.popleft().result()
            for made in upcoming:
                yield made.result()
        except BrokenProcessPool:
            raise OSError("a process that tokenizes died") from None


def _unit(name: str, id_offset: int, texts: Any, position: dict[str, Any]) -> Unit:
    return Unit(*tokenizer(name, id_offset)(texts), position)


def _begin_worker() -> None:
    """Leaves Ctrl-C to the first process, and ends with it: one that is killed can't end others."""
    parent = multiprocessing.parent_process()
    assert parent, "this is a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def cores() -> int:
    return len(os.sched_getaffinity(0))
