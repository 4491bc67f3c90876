"""Reads and tokenizes a dataset that Hugging Face `datasets` opens, in the order of its files.

A single thread reads documents and gathers them in *units*, which several threads tokenize; the
order doesn't depend on their number. A *position* in that order is JSON and holds everything needed
to resume from there: the state of the `datasets.IterableDataset`, and a *fingerprint* of the
source, because a position means nothing in a source that has changed.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import os
import re
import reprlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import fsspec
import jax
import numpy as np
from fsspec.utils import glob_translate
from jaxtyping import Int64, UInt32

from data.formats import ARCHIVES, MAGIC, READERS, SUFFIXES, open_files
from data.tokenizer import digest, open_tokenizer
from runtime.config import Section, flat
from runtime.values import NOT_EMPTY, Kept, Name
from shardlib.errors import UserError

T = TypeVar("T")
DOCUMENTS = 256  # in a unit, at most
# The output's folder, and a file at each depth in it.
IN_OUTPUT = " /zarr.json /train/zarr.json /train/seq_starts/zarr.json /train/seq_starts/c/0"
UNTAGGED = "bytes of web files"  # that have no ETag
UNIT_CHARACTERS = 2**21  # after which a unit ends: several units are in memory
# Arguments that would have no effect: for any dataset, and for CSV and parquet files.
NOT_READ = "split streaming num_proc keep_in_memory verification_mode save_infos trust_remote_code"
NOT_READ += " na_values keep_default_na na_filter usecols columns chunksize filters on_bad_files"


class Unit(NamedTuple):
    """The tokens of some consecutive documents."""

    tokens: UInt32[np.ndarray, " tokens"]  # encoded as in flat_tokens.py, end to end
    lengths: Int64[np.ndarray, " documents"]  # in tokens; an empty document has 0
    sizes: Int64[np.ndarray, " documents"]  # of their texts in UTF-8, in bytes
    position: dict[str, Any]  # after this unit


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, computing the next one in a thread while the caller uses the last."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        upcoming: Any = thread.submit(next, iterator, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, iterator, end)
            yield item


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class TextConfig(Section):
    """How texts are read and tokenized, by a conversion or a stream."""

    column: Name  # holds the text
    # bytes_utf8, a tokenizers JSON file, or what transformers.AutoTokenizer opens.
    tokenizer: Annotated[Kept, NOT_EMPTY]
    train_split: Name
    validation_split: str | None
    # Checkpoints of earlier versions lack these.
    end_token: bool = False  # adds the tokenizer's end-of-text token to each document
    skip_not_text: bool = False  # counts a value that isn't text as empty

    def __post_init__(self) -> None:
        different = self.validation_split != self.train_split
        self.require(different, "validation_split", "training has it, too: name another one")


def _links(pattern: str) -> list[str]:
    """Returns links to folders that the pattern would search if they weren't links."""
    base = re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    depth = 99 if "**" in pattern else pattern.count("/") - base.count("/") - 1
    links = list[str]()
    for top, folders, _ in os.walk(base) if glob.has_magic(pattern) else ():
        if top.count("/") - base.count("/") >= depth:
            folders.clear()
        paths = (os.path.join(top, x) for x in folders)
        links += (os.path.relpath(x, base) for x in paths if os.path.islink(x))
    return sorted(links)


@dataclasses.dataclass
class Source:
    """A split of a dataset and the way its text is tokenized. Raises UserError for an argument of
    datasets.load_dataset that doesn't apply."""

    load_dataset: dict[str, Any]  # arguments of datasets.load_dataset; `~` in paths is replaced
    split: str
    config: TextConfig
    documents: int = DOCUMENTS  # in a unit, at most
    output: str = ""  # the folder to convert to, which may not be among the files read
    lossy: bool = False  # the tokenizer loses text, so tokens per byte mean nothing
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for name in {*NOT_READ.split()} & {*self.load_dataset}:
            problem = "doesn't apply: files are streamed, and only their text is read. Leave it out"
            cure = "train_split and validation_split choose splits"
            raise UserError(f"load_dataset.{name} {problem}; {cure}")
        paths = {k: self.load_dataset.get(k) for k in ("path", "data_dir", "data_files")}
        paths = jax.tree.map(lambda x: os.path.expanduser(str(x).removeprefix("file://")), paths)
        self.load_dataset = self.load_dataset | paths
        path, folder = self.load_dataset["path"] or "", self.load_dataset["data_dir"] or ""
        self.column, self.tokenizer = self.config.column, self.config.tokenizer
        self.section = self.config.prefix
        # Local paths are relative to it. Without `..`, as `datasets` lists files.
        self.folder = Path(os.path.abspath(Path("" if path in READERS else path, folder)))

    @functools.cached_property
    def access(self) -> Any:
        """The datasets.DownloadConfig with which files are opened."""
        from datasets import DownloadConfig  # takes two seconds

        token, stores = map(self.load_dataset.get, ("token", "storage_options"))
        return DownloadConfig(token=token, storage_options=stores or {})

    def check(self) -> dict[str, Any]:
        """Returns the fingerprint. Adds a note for files read twice. If the tokenizer loses part of
        the first documents, notes that and sets `lossy`. Raises UserError or OSError if the split,
        these documents or the tokenizer can't be opened."""
        for texts, position in self.read({}):
            if any(texts):
                text = "".join(texts)[: 2**16]  # a tokenizer in Python takes seconds for more
                lost = open_tokenizer(self.tokenizer).lost(text)
                share = lost.total() / len(text)
                if share > 0.001:
                    self.lossy = True
                    such = f"{share:.1%} of the characters, such as {lost.most_common(1)[0][0]!r}"
                    self.notes.append(f"the tokenizer {self.tokenizer} loses or changes {such}")
                if special := open_tokenizer(self.tokenizer).mistaken():
                    such = f"{', '.join(special[:3])} in a text for special tokens"
                    self.notes.append(f"the tokenizer {self.tokenizer} takes {such}")
                return position["source"]
        raise UserError(f"the split {self.split} has no text")

    def _check_patterns(self) -> None:
        """Raises UserError for an entry of `data_files` that matches no file (`datasets` would
        ignore it), is a folder, would match files in the output, or is read as a pattern though a
        file has that name."""
        from datasets.data_files import resolve_pattern, sanitize_patterns

        load, output = self.load_dataset, os.path.realpath(self.output)
        if load["path"] not in READERS and not self.folder.is_dir():
            return  # it is on the hub
        for pattern in itertools.chain(*sanitize_patterns(load["data_files"] or "**").values()):
            local, found = "://" not in pattern, list[str]()
            place = os.path.join(self.folder, pattern) if local else pattern
            name = f"load_dataset.data_files={pattern}"
            if os.path.isdir(place):
                raise UserError(f"{name} is a folder: add /*")
            base = "" if os.path.isabs(pattern) else str(self.folder)
            literal = place if os.path.exists(place) else base
            if local and glob.has_magic(literal):
                raise UserError(f"{literal} would be read as a pattern: rename it, without *?[]")
            with contextlib.suppress(FileNotFoundError):
                found = resolve_pattern(place, "", download_config=self.access)
            if load["data_files"] and not found:
                where = f" in {self.folder}" if place != pattern else ""
                raise UserError(f"{name} matches no file{where}")
            every = fsspec.filesystem("file").glob(place) if local else []
            special = {x for x in every if re.search("/__(?!pycache__/)[^/]*/", x)}
            if left := {*filter(os.path.isfile, special)}.difference(found):
                listed = reprlib.repr(sorted("__" + x.partition("/__")[2] for x in left))
                self.notes.append(f"{name} leaves out folders like __x__: {listed}")
            if local and load["data_files"] and (links := _links(os.path.abspath(place))):
                self.notes.append(f"{name} leaves out links to folders: {reprlib.repr(links)}")
            matches = re.compile(glob_translate(os.path.realpath(place))).match
            if self.output and any(matches(output + file) for file in IN_OUTPUT.split(" ")):
                raise UserError(f"output={self.output} is in {place}, which is read: move it out")

    def _open(self) -> tuple[Any, dict[str, Any]]:
        """Returns an IterableDataset of the split's texts, and its fingerprint."""
        import datasets  # takes two seconds
        from datasets.iterable_dataset import ExamplesIterable

        try:
            self._check_patterns()
            builder = datasets.load_dataset_builder(**self.load_dataset)
            files = self._files(builder.config.data_files or {})
            for name, _ in files:
                if ARCHIVES.search(name):
                    raise UserError(f"{name} is an archive: unpack it, and choose the files in it")
                if "::" in name and "://" not in name:
                    raise UserError(f"{name} would be read as two addresses: rename it")
            kind = type(builder).__module__.rpartition(".")[2]
            if not (reader := READERS.get(kind)):
                formats = ", ".join(READERS)
                raise UserError(f"its files are {kind}: only {formats} files are read")
            by = self.load_dataset.get("sample_by", "document")
            if by not in ("document", "line"):
                raise UserError(f"load_dataset.sample_by={by}: choose document or line")
            builder.config.sample_by = by

            def rows(open_file: Callable[[], Any]) -> Iterator[dict[str, Any]]:
                with open_file() as file:
                    yield from reader(file, self.column, builder.config)

            found = open_files(self.access, (name for name, _ in files))
            shards = [(name, functools.partial(rows, open_file)) for name, open_file in found]
        except Exception as error:  # the libraries below raise errors of many types
            where = f"{self.section or 'load_dataset.'}path={self.load_dataset['path']}: "
            says_where = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
            raise UserError(f"{'' if says_where else where}{error}") from None
        dataset = datasets.IterableDataset(ExamplesIterable(self._texts, {"shards": shards}))
        return dataset, self._fingerprint(files, len(shards))

    def _files(self, splits: dict[str, Any]) -> list[tuple[str, Any]]:
        """Returns the files of the split, each with its ETag if it is in a bucket. Raises UserError
        if the split doesn't exist, or if a local folder, whose files `datasets` sorts into splits
        by name, has a text file in no split."""
        from datasets.data_files import resolve_pattern

        def listed(files: Iterable[str]) -> str:
            return reprlib.repr(sorted(map(os.path.basename, files)))

        folder, card = self.folder, self.folder / "README.md"
        card_text = card.read_text() if card.is_file() else ""
        front, *_ = card_text.split("\n---")
        listing = front.startswith("---") and "data_files:" in front  # of each split's
        by_name = folder.is_dir() and not listing and not self.load_dataset["data_files"]
        for saved in (folder, folder / self.split) if by_name else ():
            if (saved / "state.json").is_file() and any(saved.glob("data-*.arrow")):
                inner = f"path: arrow, data_files: {saved}/data-*.arrow"  # without map's caches
                cure = f"a conversion takes 'load_dataset={{{inner}}}'"
                raise UserError(f"{folder} is from Dataset.save_to_disk: {cure}")
        found = "; ".join(f"{name} has {listed(files)}" for name, files in splits.items())
        cure = "rename the files, as in train-1.jsonl"
        wanted = self.split.split("+") if splits else []
        for name in {*wanted} - {*splits}:
            raise UserError(f"there is no split {name}: {found}. Choose one of these, or {cure}")
        files = resolve_pattern("**", str(folder)) if by_name else []
        left = {*files}.difference([str(card)], *splits.values())
        if texts := [file for file in left if SUFFIXES & {*Path(file.lower()).suffixes}]:
            problem = f"{folder} has files in no split, {listed(texts)}: by their names, {found}"
            raise UserError(f"{problem}. Move them elsewhere, or {cure}")
        # Links to folders aren't followed, nor listed above.
        inside = folder.rglob("*") if by_name else ()
        left |= {str(x) for x in inside if x.is_symlink() and not x.is_file()}
        if left:
            self.notes.append(f"{folder} has files that aren't read: {listed(left)}")
        parts = [splits[name] for name in wanted]
        pairs = [x for part in parts for x in zip(part, part.origin_metadata, strict=False)]
        names = [x if "://" in x else os.path.realpath(x) for x, _ in pairs]
        self.names = {*names}  # of the files last listed
        for name, times in Counter(names).items():
            if times > 1:
                self.notes.append(f"{name} is read {times} times")
            other = re.sub(r"\.(bz2|gz|lz4|xz|zst)$", "", name)
            if other != name and other in self.names:
                self.notes.append(f"{name} is read, and {other}: do they have the same texts?")
        return pairs

    def _texts(self, shards: list[tuple[str, Callable[[], Any]]]) -> Iterator[tuple[str, str]]:
        """Yields each row's shard, by name, and text."""
        for name, rows in shards:
            number, columns = 0, dict[str, None]()
            try:
                for number, found in enumerate(rows(), 1):
                    # A column may be a field of another column: `meta.text`.
                    row = found if self.column in found else found | flat(found)
                    columns |= dict.fromkeys(row)
                    yield name, self._text(f"{name}, row {number}", row.get(self.column))
            except UserError:
                raise
            except UnicodeDecodeError as error:
                begin = bytes(error.object[:4])
                for magic, cure in MAGIC.items():
                    if not number and begin.startswith(magic):
                        raise UserError(f"{name} {cure}") from None
                problem = f"row {number + 1} or a later one, isn't {error.encoding}: {error.reason}"
                cure = "Save it as UTF-8 or, if it isn't parquet or Arrow, let the converter read "
                cure += "it with +load_dataset.encoding=latin-1, or whatever it is, or with "
                cure += "+load_dataset.encoding_errors=replace"
                raise UserError(f"{name}, {problem}. {cure}") from None
            except Exception as error:  # the libraries below raise errors of many types
                # These aren't about the file: a setting is wrong, or the disk or the net fails.
                other = isinstance(error, LookupError | TypeError) or getattr(error, "errno", None)
                cure = "" if other else ". Correct the file, or take it out"
                problem = " ".join(str(error).split()).rstrip(".")
                raise OSError(f"{name}, row {number + 1} can't be read: {problem}{cure}") from error
            if number and self.column not in columns:
                key, names = f"{self.section}column", ", ".join(columns)
                raise UserError(f"{name} has no {key}={self.column}; the columns are {names}")

    def _text(self, place: str, value: Any) -> str:
        """Returns the text of a row. A null counts as an empty text."""
        with contextlib.suppress(UnicodeEncodeError):  # JSON can spell half of a character
            if isinstance(value, str):
                value.encode()
                return value
        if value is None or self.config.skip_not_text:
            return ""
        problem = f"{self.section}column={self.column} is {reprlib.repr(value)}, which is no text"
        cure = f"Set {self.section}skip_not_text=true to leave out such rows, or correct the row"
        raise UserError(f"{place}: {problem}. {cure}")

    def _fingerprint(self, files: list[tuple[str, Any]], shards: int) -> dict[str, Any]:
        from datasets import config
        from datasets.utils.file_utils import xopen

        hub = {"endpoint": config.HF_ENDPOINT, "token": self.access.token}
        # The folder differs between copies of local files, and between revisions on the hub.
        known, untagged = list[Any](), 0
        for name, tag in files:
            info: dict[str, Any] = {"size": 0, "blob_id": tag}
            if name.startswith("hf://") or "://" not in name:  # its folder was just listed
                info = fsspec.core.url_to_fs(name, **hub)[0].info(name)
            elif not tag:
                with xopen(name, "rb", download_config=self.access) as file:
                    untagged += getattr(file, "size", 0) or 0
            known.append((os.path.basename(name), info["size"], info.get("blob_id")))
        found = {"files": len(files), "bytes": sum(size for _, size, _ in known)}
        found |= {"names and sizes": digest(known), "shards": shards}
        found |= {UNTAGGED: untagged} if untagged else {}
        return found | {"tokenizer": open_tokenizer(self.tokenizer, self.config.end_token).digest}

    def read(
        self, position: dict[str, Any], host: int = 0, hosts: int = 1
    ) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yields the texts of each unit of a host from a position on, and the position after it.
        The position {} is before the first unit of any source."""
        from datasets.distributed import split_dataset_by_node

        dataset, found = self._open()
        found |= {"hosts": hosts}
        if position:
            check_source(self.split, position.get("source", {}), found)
        # Each host reads its own shards if there are enough. Else it reads all rows and skips some.
        by = "shards" if dataset.num_shards >= hosts else "examples"
        dataset = split_dataset_by_node(dataset, host, hosts, by)
        if "state" in position:
            dataset.load_state_dict(position["state"])
        texts, size = list[str](), 0
        for text in dataset:
            texts.append(text)
            size += len(text)
            if len(texts) == self.documents or size >= UNIT_CHARACTERS:
                yield texts, {"state": dataset.state_dict(), "source": found}
                texts, size = [], 0
        if texts:
            yield texts, {"state": dataset.state_dict(), "source": found}


def check_source(split: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError if a split's fingerprint has changed."""
    keys = [x for x in {**now, **before} if x != UNTAGGED or x in before]  # earlier ones have none
    pairs = [(key, before.get(key), now.get(key)) for key in keys]
    if differ := [f"{key} {then}, now {here}" for key, then, here in pairs if then != here]:
        problem = f"has changed since the part before was read: {'; '.join(differ)}"
        cure = "delete an unfinished conversion, or clone a run's weights into a new one"
        restore = "Restore it, or the version of this code that read it"
        raise UserError(f"the split {split} {problem}. {restore}, or start over: {cure}")


def units(
    source: Source, position: dict[str, Any] | None, threads: int, host: int = 0, hosts: int = 1
) -> Generator[Unit, None, None]:
    """Yields a host's tokenized units from a position on; none if the position is None, the end.
    Close the generator if you leave it early. Raises UserError or OSError if something can't be
    read or tokenized."""
    if position is None:
        return
    opened = open_tokenizer(source.tokenizer, source.config.end_token)

    def tokenize(texts: list[str], after: dict[str, Any]) -> Unit:
        sizes = np.array([len(text.encode()) for text in texts], np.int64)
        return Unit(*opened(texts), sizes, after)

    upcoming: deque[Future[Unit]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for texts, after in ahead(source.read(position, host, hosts)):
            upcoming.append(pool.submit(tokenize, texts, after))
            if len(upcoming) > threads + 1:
                yield upcoming.popleft().result()
        for unit in upcoming:
            yield unit.result()


def cores() -> int:
    """Returns the number of cores that this process may use or, on macOS, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
