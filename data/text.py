"""Reads and tokenizes a dataset that Hugging Face `datasets` opens, in a reproducible order.

The dataset's shards (usually its files) are divided into contiguous *lanes*. Each lane is read in
*units* of some documents, and the overall order takes one unit from each lane in turn. A single
thread reads, so the order does not depend on how many threads or processes tokenize. A *position*
in that order is JSON and holds everything needed to resume from there, with a *fingerprint* of the
source: a position means nothing in a source that has changed.
"""

import array
import dataclasses
import functools
import hashlib
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

import fsspec
import numpy as np
from jaxtyping import Int64, UInt16, UInt32

from data.flat_tokens import checked, encode
from shardlib.errors import UserError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
T = TypeVar("T")
LANES = 8  # of the converter, at most: each lane keeps a file open
DOCUMENTS = 256  # in a unit, at most
UNIT_BYTES = 2**21  # approximate limit of a unit's text: several units are in memory
FILE_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text", "xml")  # of local files


@checked
@dataclasses.dataclass(frozen=True)
class Unit:
    """The tokens of some consecutive documents of a lane."""

    tokens: UInt32[np.ndarray, " tokens"]  # encoded as in flat_tokens.py, end to end
    lengths: Int64[np.ndarray, " documents"]  # in tokens; an empty document has 0
    position: dict[str, Any]  # after this unit


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, computing the next one in a thread while the caller uses the last."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        upcoming: Any = thread.submit(next, iterator, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, iterator, end)
            yield item


def digest(value: Any) -> str:
    """Returns a short hash of a value whose repr says all about it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Tokenizer:
    """Converts texts to encoded tokens (see flat_tokens.py) and back.

    `name` is bytes_utf8, a tokenizers JSON file, or a folder or hub repository that transformers
    opens. No special tokens are added, because the dataset's format marks where a document starts,
    unless `end_token` asks for the end-of-text token after each document. The name of a special
    token within a text is tokenized as ordinary text. The id of a byte is the byte plus 1, which
    leaves 0 for the start of a document. Raises UserError or OSError if the tokenizer can't be
    opened, or lacks an end-of-text token that is asked for.
    """

    def __init__(self, name: str, end_token: bool = False):
        self.name = name
        self.slow = self._open()
        self.fast: Any = (
            self.slow.backend_tokenizer if getattr(self.slow, "is_fast", False) else None
        )
        self.end = [getattr(self.slow, "eos_token_id", None)] if end_token else []
        if None in self.end:
            raise UserError(
                f"end_token=true: tokenizer={name} names no end-of-text token; choose a folder or "
                "repository whose tokenizer_config.json has an eos_token"
            )
        if self.fast:  # called directly: transformers' wrapper costs a third of the speed
            # Called from several threads; its own would idle while units are read or written.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self.fast.no_truncation()
            self.fast.no_padding()
            self.fast.encode_special_tokens = True

    def _open(self) -> Any:
        """Returns transformers' tokenizer, or None for bytes."""
        if self.name == "bytes_utf8":
            return None
        import tokenizers
        import transformers  # takes a second to import; bytes_utf8 doesn't need it

        try:
            if self.name.endswith(".json"):
                inner = tokenizers.Tokenizer.from_file(self.name)
                return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
            return transformers.AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
        except Exception as error:  # what tokenizers raises is a plain Exception
            problem = f"tokenizer={self.name} can't be opened: {error}"
            raise UserError(problem.split("\n")[0]) from None

    @checked
    def __call__(self, texts: Any) -> tuple[UInt32[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
        """Returns the tokens of all documents of an Arrow array, end to end, and the length of each
        in tokens. Null counts as an empty text."""
        ids, lengths = self._bytes(texts) if self.name == "bytes_utf8" else self._ids(texts)
        return encode(ids, (np.cumsum(lengths) - lengths)[lengths > 0]), lengths

    @checked
    def decode(self, ids: UInt32[np.ndarray, " tokens"], without_special: bool = False) -> str:
        """Returns the text of ids of a dataset, with or without the names of special tokens."""
        if self.name == "bytes_utf8":
            return (ids - 1).astype(np.uint8).tobytes().decode(errors="replace")
        options = {"skip_special_tokens": without_special, "clean_up_tokenization_spaces": False}
        return str(self.slow.decode(ids.tolist(), **options))

    @functools.cached_property
    def digest(self) -> str:
        """Identifies what it does to a text, or, if it is written in Python, its vocabulary."""
        if self.name == "bytes_utf8":
            return self.name
        does = self.fast.to_str() if self.fast else sorted(self.slow.get_vocab().items())
        return digest((does, self.end) if self.end else does)

    @checked
    def _ids(self, texts: Any) -> tuple[UInt32[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
        strings = [text or "" for text in texts.to_pylist()]
        lists: Iterable[Any]
        if self.fast:
            encoded = self.fast.encode_batch_fast(strings, add_special_tokens=False)
            lists = (part.ids for part in encoded)
        else:
            lists = self.slow(strings, add_special_tokens=False, verbose=False)["input_ids"]
        # Converts one list at a time: Python integers take ten times the memory of their values.
        parts = [array.array("I", part) for part in lists]
        for part in filter(None, parts):  # an empty document stays empty
            part.extend(self.end)
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.concatenate([np.frombuffer(part, np.uint32) for part in parts]), lengths

    @staticmethod
    @checked
    def _bytes(texts: Any) -> tuple[UInt16[np.ndarray, " n"], Int64[np.ndarray, " texts"]]:
        """Returns each byte plus 1 and the lengths, read directly from Arrow's buffers."""
        import pyarrow

        column = texts.combine_chunks().cast(pyarrow.large_string()).fill_null("")
        _, offsets, values = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        text = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
        return np.add(text, 1, dtype=np.uint16), np.diff(ends)


tokenizer = functools.cache(Tokenizer)  # shared by the threads of a process


@dataclasses.dataclass(frozen=True)
class Source:
    """A split of a dataset and the way its text is tokenized."""

    load_dataset: dict[str, Any]  # arguments of datasets.load_dataset
    split: str
    column: str  # that holds the text
    tokenizer: str  # this and the next: as in Tokenizer
    end_token: bool = False
    documents: int = DOCUMENTS  # in a unit

    def open_tokenizer(self) -> Tokenizer:
        return tokenizer(self.tokenizer, self.end_token)

    def check(self) -> tuple["Source", dict[str, Any]]:
        """Returns the source, with smaller units if its first documents are long, and its
        fingerprint, which has the number of its shards. Raises UserError or OSError if the split,
        the column or the tokenizer can't be opened."""
        self.open_tokenizer()
        self._check_files()
        dataset, found = self._open()
        try:
            rows = list(itertools.islice(dataset, 64))
        except Exception as error:  # the libraries below raise errors of many types
            raise OSError(f"the split {self.split} can't be read: {error}") from error
        if not rows:
            raise UserError(f"the split {self.split} has no documents")
        given = [row for row in rows if row.get(self.column) is not None]
        wrong = [row for row in given if not isinstance(row[self.column], str)]
        if wrong or not given:
            types = ", ".join(f"{k}: {type(v).__name__}" for k, v in (wrong or rows)[0].items())
            raise UserError(f"column={self.column} is not a text column; the columns are {types}")
        size = sum(len(row[self.column]) for row in given)
        fit = 1 + UNIT_BYTES * len(rows) // max(size, 1)
        source = dataclasses.replace(self, documents=min(self.documents, fit))
        return source, found | {"documents at a time": source.documents}

    def _check_files(self) -> None:
        """Raises UserError for an entry of `data_files` that matches no local file: `datasets`
        ignores a pattern without matches."""
        files: Any = self.load_dataset.get("data_files") or []
        files = files.get(self.split, []) if isinstance(files, dict) else files
        folder = os.path.abspath(self.load_dataset.get("data_dir") or "")
        for pattern in [files] if isinstance(files, str) else files:
            local = self.load_dataset.get("path") in FILE_FORMATS and "://" not in pattern
            if local and not fsspec.filesystem("file").glob(os.path.join(folder, pattern)):
                raise UserError(f"load_dataset.data_files={pattern} matches no file in {folder}")
            if local and os.path.isdir(os.path.join(folder, pattern)):
                raise UserError(f"load_dataset.data_files={pattern} is a folder: add /*")

    def _open(self) -> tuple[Any, dict[str, Any]]:
        """Returns the split and its fingerprint."""
        import datasets  # takes two seconds
        from pyarrow.dataset import ParquetFragmentScanOptions

        # Without these options, all of a parquet file that has been read stays in memory.
        unbuffered = ParquetFragmentScanOptions(pre_buffer=False)
        options = {"fragment_scan_options": unbuffered, "batch_size": self.documents}
        load = dict(self.load_dataset)
        streams, processes = load.pop("streaming", True), load.pop("num_proc", None)
        try:
            try:
                builder = datasets.load_dataset_builder(**load, **options)
            except (TypeError, ValueError) as error:  # other formats don't have these options
                if not any(name in str(error) for name in options):
                    raise
                builder = datasets.load_dataset_builder(**load)
            if streams:
                dataset = builder.as_streaming_dataset(self.split)
            else:
                builder.download_and_prepare(num_proc=processes)
                dataset = builder.as_dataset(self.split)
                dataset = dataset.to_iterable_dataset(max(1, min(LANES, len(dataset))))
        except ValueError as error:
            raise UserError(str(error)) from None
        except StopIteration:  # an empty JSON file
            raise UserError(f"the split {self.split} has no documents") from None
        except Exception as error:  # the libraries below raise errors of many types
            raise UserError(f"load_dataset: {error}") from None
        return dataset, self._fingerprint(builder, dataset.num_shards)

    def _fingerprint(self, builder: Any, shards: int) -> dict[str, Any]:
        from datasets import config

        lists: Any = builder.config.data_files or {}
        lists = [lists[self.split]] if self.split in lists else lists.values()
        hub = {"endpoint": config.HF_ENDPOINT, "token": self.load_dataset.get("token")}
        # The folder differs between copies of local files, and between revisions on the hub.
        files: list[Any] = []
        pairs = (zip(part, part.origin_metadata, strict=False) for part in lists)
        for name, origin in itertools.chain(*pairs):
            info: dict[str, Any] = {"size": 0, "blob_id": origin}  # in a bucket: an ETag
            if name.startswith("hf://") or "://" not in name:  # its folder was just listed
                info = fsspec.core.url_to_fs(name, **hub)[0].info(name)
            files.append((os.path.basename(name), info["size"], info.get("blob_id")))
        return {
            "files": len(files),
            "bytes": sum(size for _, size, _ in files),
            "names and sizes": digest(files),
            "shards": shards,
            "documents at a time": self.documents,
            "tokenizer": self.open_tokenizer().digest,
        }

    def read(
        self, lanes: Sequence[int], position: dict[str, Any]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields the texts of each unit of `lanes` from a position on, and the position after."""
        dataset, found = self._open()
        before = position.get("source", {})
        differ = [f"{k} {v}, now {found.get(k)}" for k, v in before.items() if v != found.get(k)]
        if differ:
            raise UserError(
                f"the split {self.split} has changed since the part before was read: "
                f"{'; '.join(differ)}. Restore it, or begin anew: delete an unfinished "
                "conversion, or clone a run's weights into a new one"
            )
        dataset = dataset.select_columns([self.column]).with_format("arrow")
        states = list(position["lanes"])  # of each lane; None at its end

        def read_lane(lane: int) -> Iterator[Any]:
            part = dataset.shard(len(states), lane)
            if states[lane]:
                part.load_state_dict(states[lane])
            for table in part.iter(self.documents):
                states[lane] = part.state_dict()
                # Copied, because pickling a slice would send all of the underlying buffer.
                yield table[self.column].take(np.arange(len(table)))
            states[lane] = None

        def turn(lane: int) -> int:
            return (lane - position["turn"]) % len(states)

        unfinished = [lane for lane in lanes if states[lane] is not None]
        readers = deque((lane, read_lane(lane)) for lane in sorted(unfinished, key=turn))
        while readers:
            lane, reader = readers.popleft()
            try:
                texts = next(reader, None)
            except Exception as error:  # the libraries below raise errors of many types
                raise OSError(f"the split {self.split} can't be read: {error}") from error
            if texts is not None:
                readers.append((lane, reader))
                turn_after = (lane + 1) % len(states)
                yield texts, {"turn": turn_after, "lanes": list(states), "source": found}


def start(lanes: int, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the position before the first unit, of any source if there is no fingerprint."""
    return {"turn": 0, "lanes": [{}] * lanes, "source": fingerprint or {}}


def units(
    source: Source, lanes: Sequence[int], position: dict[str, Any], processes: int
) -> Iterator[Unit]:
    """Yields the tokenized units of `lanes` from a position on.

    Tokenizes in `processes` worker processes of one thread each, or, if that is 1, in this process
    with a thread per core. Raises UserError or OSError if something can't be read or tokenized.
    """
    pool: Executor
    workers = cores() if processes == 1 else processes
    if processes == 1:
        pool = ThreadPoolExecutor(workers)
    else:
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    upcoming: deque[Future[Unit]] = deque()
    with pool:
        try:
            for texts, after in ahead(source.read(lanes, position)):
                upcoming.append(pool.submit(_unit, source, texts, after))
                if len(upcoming) > workers + 1:
                    yield upcoming.popleft().result()
            for unit in upcoming:
                yield unit.result()
        except BrokenProcessPool:
            raise OSError("a tokenizer process died") from None


def _unit(source: Source, texts: Any, position: dict[str, Any]) -> Unit:
    return Unit(*source.open_tokenizer()(texts), position)


def _begin_worker() -> None:
    """Makes a worker ignore Ctrl-C, which the main process handles, and exit when the main process
    does, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent, "this is a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
