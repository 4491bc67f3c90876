"""Reads and tokenizes a dataset that Hugging Face `datasets` opens, in the order of its files.

A single thread reads documents and gathers them in *units*, which several threads tokenize; the
order doesn't depend on their number. A *position* in that order is JSON and holds everything needed
to resume from there: the state of the `datasets.IterableDataset`, and a *fingerprint* of the
source, because a position means nothing in a source that has changed.
"""

import array
import collections
import contextlib
import csv
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import reprlib
import sys
import weakref
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import fsspec
import jax
import numpy as np
from fsspec.utils import glob_translate, infer_compression
from jaxtyping import Int64, UInt32

from data.flat_tokens import Named, checked, decode, encode
from runtime.config import Section, flat
from runtime.values import NOT_EMPTY, Kept, Name
from shardlib.errors import UserError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
T = TypeVar("T")
DOCUMENTS = 256  # in a unit, at most
ROWS = 16  # of a parquet file that are in memory as objects
# The output's folder, and a file at each depth in it.
IN_OUTPUT = " /zarr.json /train/zarr.json /train/seq_starts/zarr.json /train/seq_starts/c/0"
# Arguments of `datasets` for CSV files: those that csv.reader has, too, and the others that apply.
CSV_DIALECT = {"quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace"}
CSV_SETTINGS = {"sep", "names", "encoding", "encoding_errors"}
UNTAGGED = "bytes of web files"  # that have no ETag
UNIT_CHARACTERS = 2**21  # after which a unit ends: several units are in memory
ARCHIVES = re.compile(r"\.(7z|rar|tar(\.\w+)?|t[bgx]z2?|tzst)$", re.IGNORECASE)  # but not zip


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


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts: 1 file, 1,000 files."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def digest(value: Any) -> str:
    """Returns a short hash of a value's repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# A text that normalizers change.
NORMALIZED = "  \uff21\uff11 \ufb01 e\u0301 \u00c9 12345 don't\r\n\t x  "


def same_vocabulary(one: str, other: str) -> bool:
    """Returns whether two records of `Tokenizer.vocabulary` may be of the same tokenizer. Earlier
    versions recorded only its first word; "" is unknown."""
    return all(x == y for x, y in zip(one.split(), other.split(), strict=False))


class Tokenizer:
    """Converts texts to encoded tokens (see flat_tokens.py) and back.

    `name` is bytes_utf8, a tokenizers JSON file, or a folder or hub repository that transformers
    opens. No special tokens are added, because the dataset's format marks where a document starts.
    `end_token` adds the end-of-text token after each document. The name of a special token within a
    text is tokenized as ordinary text. bytes_utf8 stores each byte as byte + 1, which leaves 0 for
    the start of a document. Raises UserError or OSError if the tokenizer can't be opened, or has no
    end-of-text token to add.
    """

    splits_special = True  # the names of special tokens in a text

    def __init__(self, name: str, end_token: bool = False):
        self.name = name
        self.slow = self._open()
        self.fast: Any = getattr(self.slow, "backend_tokenizer", None)  # if it has one, in Rust
        self.end = [getattr(self.slow, "eos_token_id", None)] if end_token else []
        if None in self.end:
            problem = f"the tokenizer {name} names no end-of-text token, which end_token=true needs"
            cure = "choose one whose tokenizer_config.json has an eos_token, or set end_token=false"
            raise UserError(f"{problem}; {cure}")
        if self.fast:  # called directly: transformers' wrapper costs a third of the speed
            # Our threads call it; its own would idle while units are read or written.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self.fast.no_truncation()
            self.fast.no_padding()
            if getattr(self.fast.model, "dropout", None):  # which makes ids random
                self.fast.model.dropout = None
            self.fast.encode_special_tokens = self.splits_special

    def _open(self) -> Any:
        """Returns transformers' tokenizer, or None for bytes."""
        if self.name == "bytes_utf8":
            return None
        import tokenizers
        import transformers  # takes a second to import; bytes_utf8 doesn't need it
        from transformers import PreTrainedTokenizerFast

        try:
            if self.name.endswith(".json"):
                inner = tokenizers.Tokenizer.from_file(self.name)
                return PreTrainedTokenizerFast(tokenizer_object=inner)
            if re.match(r"[./]|.*/.*/", self.name) and not os.path.exists(self.name):
                raise ValueError("there is no such folder, and names on the hub are OWNER/NAME")
            opened = transformers.AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
            if transformers.utils.has_file(self.name, "tokenizer.json"):
                # A family's class may replace parts of tokenizer.json, which changes ids.
                end, opened = opened.eos_token, PreTrainedTokenizerFast.from_pretrained(self.name)
                if opened.eos_token is None and end in opened.get_vocab():
                    opened.eos_token = end  # only the class names it
            return opened
        except Exception as error:  # tokenizers raises plain Exceptions
            problem = f"the tokenizer {self.name} can't be opened: {error}"
            folder = Path(self.name)
            alone = any(folder.glob("*.model")) and not (folder / "tokenizer.json").exists()
            if alone and not find_spec("sentencepiece"):
                problem = f"the tokenizer {self.name} needs a package: pip install sentencepiece"
            raise UserError(problem.split("\n")[0]) from None

    @checked
    def __call__(
        self, texts: list[str]
    ) -> tuple[UInt32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]:
        """Returns the tokens of all documents, end to end, and the length of each in tokens."""
        kind, first = (np.uint8, 1) if self.name == "bytes_utf8" else (np.uint32, 0)
        parts = self._ids(texts)
        lengths = np.array([len(part) for part in parts], np.int64)
        ids = np.add(np.frombuffer(b"".join(parts), kind), np.uint16(first))
        return encode(ids, (np.cumsum(lengths) - lengths)[lengths > 0]), lengths

    @checked
    def decode(self, ids: UInt32[np.ndarray, " tokens"], without_special: bool = False) -> str:
        """Returns the text of ids of a dataset, with or without the names of special tokens."""
        if self.name == "bytes_utf8":
            return (ids - 1).astype(np.uint8).tobytes().decode(errors="replace")
        options = {"skip_special_tokens": without_special, "clean_up_tokenization_spaces": False}
        return str(self.slow.decode(ids.tolist(), **options))

    def lost(self, text: str) -> Counter[str]:
        """Counts the characters that a text's tokens don't give back."""
        return Counter(text) - Counter(self.decode(decode(self([text])[0])[0]))

    def mistaken(self) -> list[str]:
        """Lists the special tokens whose names in a text become them. A model's own vocabulary may
        have them, too, as Unigram's does."""
        added = self.slow.added_tokens_decoder.items() if self.slow else ()
        assert not self.end  # which each text would have
        special = {str(x): i for i, x in added if x.special}
        with contextlib.suppress(Exception):  # it knows neither a character nor a token for such
            unknown, *given = (decode(self([x])[0])[0] for x in ("\ue000", *special))
            named = zip(special.items(), given, strict=True)
            return [name for (name, i), ids in named if i in ids and i not in unknown]
        return []

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the tokenizer by its definition or, if it is in Python, its vocabulary."""
        if self.name == "bytes_utf8":
            return self.name
        does = self.fast.to_str() if self.fast else sorted(self.slow.get_vocab().items())
        return digest((does, self.end) if self.end else does)

    @functools.cached_property
    def vocabulary(self) -> str:
        """Identifies what the ids of ordinary text stand for, and how some texts are split."""
        words = self.words()
        return f"{digest(sorted(words.items()))} {digest(self.split(self.sample(words)))}"

    def sample(self, ids: Collection[int]) -> list[str]:
        """Returns texts of these ids' words, or of some. A tokenizer with the same words but other
        merges or another normalizer may split them differently."""
        chosen = np.array(sorted(ids)[:: max(1, len(ids) // 4096)], np.uint32)
        return [*map(self.decode, np.array_split(chosen, max(1, len(chosen) // 64))), NORMALIZED]

    def split(self, texts: list[str]) -> list[list[int]]:
        """Returns each text's ids; none if there is no id for a part of it."""
        assert not self.end  # which each text would have
        found = []
        for text in texts:
            found.append(list[int]())
            with contextlib.suppress(Exception):  # tokenizers raises plain Exceptions
                found[-1] = decode(self([text])[0])[0].tolist()
        return found

    def check_unchanged(self, named: Named) -> Self:
        """Returns itself. Raises UserError if it has changed since it was recorded."""
        if named.vocabulary and not same_vocabulary(named.vocabulary, self.vocabulary):
            problem = f"the tokenizer {self.name} has changed since the data was tokenized with it"
            raise UserError(f"{problem}: restore it, or name a copy of the earlier one")
        return self

    def words(self) -> dict[int, str]:
        """Returns the tokens of ordinary text by their ids."""
        if self.name == "bytes_utf8":
            return {byte + 1: f"<0x{byte:02X}>" for byte in range(256)}
        added = self.slow.added_tokens_decoder
        return {i: token for token, i in self.slow.get_vocab().items() if i not in added}

    def _ids(self, texts: list[str]) -> list[Any]:
        """Returns each text's bytes, or a uint32 array of its ids."""
        if self.name == "bytes_utf8":
            return [text.encode() for text in texts]
        if not self.fast:
            how = {"add_special_tokens": False, "split_special_tokens": self.splits_special}
            lists = self.slow(texts, verbose=False, **how)["input_ids"]
        else:
            encoded = self.fast.encode_batch_fast(texts, add_special_tokens=False)
            lists = (part.ids for part in encoded)
        # Converts one list at a time: Python integers take ten times the memory of their values.
        parts = [array.array("I", part) for part in lists]
        for part in filter(None, parts):  # an empty document stays empty
            part.extend(self.end)
        return parts


tokenizer = functools.cache(Tokenizer)  # shared by the threads of a process


def difference(one: Named, other: Named) -> str:
    """Says how two tokenizers differ, or returns "" if each id that is ordinary text in both is the
    same text, and both split texts of these alike. Two names also differ if either tokenizer can't
    be opened."""
    known = one.vocabulary and other.vocabulary
    if same_vocabulary(one.vocabulary, other.vocabulary) if known else one.name == other.name:
        return ""
    try:
        a, b = (tokenizer(x.name).check_unchanged(x) for x in (one, other))
    except UserError as error:
        return str(error).rstrip(".")
    words, others = a.words(), b.words()
    common = words.keys() & others.keys()
    first = min((i for i in common if words[i] != others[i]), default=None)
    if first is not None:
        return f"id {first} is {words[first]!r} for the first, {others[first]!r} for the second"
    texts = a.sample(common)
    for x, y in zip(a.split(texts), b.split(texts), strict=True):
        # An added token, such as one for tools, may stand for a part of a text.
        if x != y and {*x} <= words.keys() and {*y} <= others.keys():
            return "they split the same text differently"
    return ""


def extends(one: Named, other: Named) -> bool:
    """Returns whether a tokenizer has all of another's tokens, and more. False if it has changed or
    can't be opened."""
    with contextlib.suppress(UserError):
        more, fewer = (tokenizer(x.name).check_unchanged(x).slow for x in (one, other))
        if more is not None and fewer is not None:
            return bool(more.get_vocab().items() > fewer.get_vocab().items())
    return False


def problem_of_start(used: Tokenizer, start: int) -> str:
    """Says why a tokenizer doesn't suit a model whose documents begin with the id `start`: it puts
    another id first, or it puts none first and `start` is an ordinary word. Else returns ""."""
    slow, word, first = used.slow, used.words().get(start), None
    if slow is not None:
        ids, alone = slow("a")["input_ids"], slow("a", add_special_tokens=False)["input_ids"]
        first = slow.bos_token_id if ids[:1] == alone[:1] else ids[0]
    if first == start or (first is None and word is None):
        return ""
    problem = "isn't the start token of" if word is None else f"is the word {word!r} of"
    own = first is not None and f", whose own is {first}, {slow.convert_ids_to_tokens(first)!r}"
    return f"model.start_token={start} {problem} the tokenizer {used.name}{own or ''}"


# --- Rows of a file -------------------------------------------------------------------------------

# These readers replace those of `datasets`, which infer one type for all values of a column, recode
# the values of other types, and name neither file nor row if they fail. A reader takes an open
# file, the column that holds the text, and the settings of `datasets` for the format.


def field_rows(whole: Any, field: str) -> list[Any]:
    """Returns the rows in an object's field: a list of rows, or columns as lists by name."""
    rows = whole.get(field) if isinstance(whole, dict) else None
    columns = rows if isinstance(rows, dict) else {}
    lists = [column for column in columns.values() if isinstance(column, list)]
    if len(lists) == len(columns) and len({*map(len, lists)}) == 1:
        return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]
    if isinstance(rows, list) and all(isinstance(row, dict | str) for row in rows):
        return rows
    problem = "holds neither a list of objects nor columns of one length"
    raise ValueError(f"load_dataset.field={field} {problem} in {reprlib.repr(whole)}")


def json_rows(file: Any, column: str, config: Any) -> Iterator[dict[str, Any]]:
    with io.TextIOWrapper(file, config.encoding, config.encoding_errors) as lines:
        first = next((x for line in lines if (x := line.removeprefix("\ufeff")).strip()), "")
        if config.field or first.lstrip().startswith("["):
            whole = json.loads(first + lines.read())
            rows = field_rows(whole, config.field) if config.field else whole
        else:
            rows = (json.loads(line) for line in itertools.chain([first], lines) if line.strip())
        for row in rows:
            yield row if isinstance(row, dict) else {"text": row}


def table_rows(schema: Any, batches: Iterable[Any], column: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of Arrow record batches, with this column alone or, for `meta.text`, `meta`.
    If both are missing, yields one row that only names the columns."""
    for batch in batches:
        names = [name for name in batch.schema.names if f"{column}.".startswith(f"{name}.")]
        if not names:
            yield dict.fromkeys(schema.names)
            collections.deque(batches, 0)  # reads the rest, which `arrow_rows` looks behind
            return
        name = max(names, key=len)  # a column's own name may have a dot
        for value in batch.column(name):
            yield {name: value.as_py()}


def parquet_rows(file: Any, column: str, config: Any) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    # With pre_buffer, the part of a file that has been read would stay in memory.
    parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
    batches = parquet.iter_batches(ROWS, columns=[column])
    yield from table_rows(parquet.schema_arrow, batches, column)


def arrow_rows(file: Any, column: str, config: Any) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:  # Arrow has two file formats
        opened = batches = pyarrow.ipc.open_stream(file)
    except pyarrow.ArrowInvalid:
        opened = pyarrow.ipc.open_file(file)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    yield from table_rows(opened.schema, batches, column)
    if opened is batches and file.read(1):
        raise ValueError("it has more than one stream")
    stream = opened is batches and file.seekable() and file.seek(-8, os.SEEK_END)
    if stream and file.read() != b"\xff\xff\xff\xff\0\0\0\0":
        raise EOFError("the stream ended before its end marker")


def csv_rows(file: Any, column: str, config: Any) -> Iterator[dict[str, Any]]:
    settings, default = config.pd_read_csv_kwargs, type(config)()
    for name in settings.keys() - CSV_SETTINGS - CSV_DIALECT:
        if settings[name] != getattr(default, name):
            problem = "isn't among the settings with which CSV files are read here"
            raise UserError(f"load_dataset.{name} {problem}: leave it out")
    dialect = {name: settings[name] for name in CSV_DIALECT} | {"delimiter": config.sep}
    csv.field_size_limit(sys.maxsize)
    encoding, errors = config.encoding or "utf-8-sig", config.encoding_errors
    with io.TextIOWrapper(file, encoding, errors, newline="") as lines:
        rows = filter(None, csv.reader(lines, strict=True, **dialect))
        try:
            names = config.names or [x.removeprefix("\ufeff") for x in next(rows, [])]
            if names.count(column) > 1:
                raise ValueError(f"two columns are named {column}")
            for row in rows:
                if len(row) < len(names) or any(row[len(names) :]):
                    found, wanted = counted(len(row), "field"), counted(len(names), "column")
                    raise ValueError(f"it has {found} for {wanted}")
                yield dict(zip(names, row, strict=False))
        except csv.Error as error:
            cure = """if its quotes are written \\", set '+load_dataset.escapechar="\\\\"'"""
            raise ValueError(f"{error}; {cure}") from None


def text_rows(file: Any, column: str, config: Any) -> Iterator[dict[str, Any]]:
    whole = config.sample_by == "document"
    # newline="" keeps line ends as they are.
    with io.TextIOWrapper(file, config.encoding, config.encoding_errors, newline="") as text:
        for number, row in enumerate([text.read()] if whole else text):
            kept = row if number else row.removeprefix("\ufeff")  # the byte order mark isn't text
            if not number and row.startswith("version https://git-lfs"):
                raise LookupError("it is a pointer of Git LFS: get the file with git lfs pull")
            yield {"text": kept if whole or config.keep_linebreaks else kept.rstrip("\r\n")}


# How files that aren't UTF-8 begin.
MAGIC = {
    b"\x1f\x8b": "is compressed: end its name with .gz",
    b"PAR1": "is a parquet file: set load_dataset.path=parquet",
    b"PK\x03\x04": "is a zip archive, or a document such as .docx: choose files of text",
    b"\xff\xfe\0\0": "is UTF-32: set +load_dataset.encoding=utf-32",
    b"\xff\xfe": "is UTF-16: set +load_dataset.encoding=utf-16",
    b"\xfe\xff": "is UTF-16: set +load_dataset.encoding=utf-16",
}
READERS = {
    "arrow": arrow_rows,
    "csv": csv_rows,
    "json": json_rows,
    "parquet": parquet_rows,
    "text": text_rows,
}
SUFFIXES = {f".{x}" for x in (*READERS, "jsonl", "jsonlines", "ndjson", "tsv", "txt", "zip")}
# Arguments that would have no effect: for any dataset, and for CSV and parquet files.
NOT_READ = "split streaming num_proc keep_in_memory verification_mode save_infos trust_remote_code"
NOT_READ += " na_values keep_default_na na_filter usecols columns chunksize"


def decompressed(kind: str, file: Any, **_: Any) -> Any:
    """Opens a compressed file. Reading it raises OSError or EOFError if it ends early."""
    import pyarrow

    zipped = kind == "gzip"  # may end in zeros, which Arrow refuses
    stream = gzip.GzipFile(fileobj=file) if zipped else pyarrow.input_stream(file, compression=kind)
    if not (whole := io.BufferedReader(stream)).peek(1) and not file.tell():
        raise EOFError("it is empty, which no compressed file is")
    return whole


# These replace fsspec's, which need packages for lz4 and zstd, and with some packages don't notice
# that a file ends early.
for kind, suffix in {"bz2": "bz2", "gzip": "gz", "lz4": "lz4", "zstd": "zst"}.items():
    opener = functools.partial(decompressed, kind)
    fsspec.compression.register_compression(kind, opener, suffix, force=True)


def opened(builder: Any, files: Iterable[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields each file's name, and a function that opens it; in place of a zip archive, the files
    in it."""
    import datasets
    from datasets.utils.file_utils import xopen

    options = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager = datasets.StreamingDownloadManager(download_config=options)
    opening = functools.partial(xopen, mode="rb", download_config=options)

    def place(name: str) -> tuple[list[str], str]:  # a folder's files come before its folders
        *folders, name = os.path.normpath(name).split("/")
        return folders, name

    @functools.lru_cache(1)  # one stays open while its files are read
    def archive(file: str) -> zipfile.ZipFile:
        whole = opening(file)
        try:
            found = zipfile.ZipFile(whole)
        except zipfile.BadZipFile as error:
            whole.close()
            raise UserError(f"{file} can't be read: {error}") from None
        weakref.finalize(found, whole.close)
        return found

    def alone(file: str) -> Any:
        if (inside := manager.extract(file)).startswith("zip://::"):  # by its first bytes
            raise UserError(f"{file} is a zip archive: rename it, with .zip at the end")
        return opening(inside)

    def member(file: str, name: str) -> Any:  # which may be compressed, too
        kind = infer_compression(name)
        return fsspec.compression.compr[kind](archive(file).open(name), mode="rb")

    for file in files:
        if not re.search(r"\.zip(\?|$)", file.partition("::")[0], re.IGNORECASE):
            yield file, functools.partial(alone, file)
            continue
        for name in sorted({*archive(file).namelist()}, key=place):
            folders, last = place(name)
            hidden = any(x.startswith(".") and x != ".." for x in (*folders, last))
            if name.endswith("/") or hidden or "__MACOSX" in folders:
                continue
            if ARCHIVES.search(name) or name.lower().endswith(".zip"):
                raise UserError(f"{name} in {file} is an archive, too: unpack them")
            yield f"{name} in {file}", functools.partial(member, file, name)


# --- The dataset ----------------------------------------------------------------------------------


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
    """Returns links to folders in which a pattern without links would find files."""
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
        for name in ("filters", "on_bad_files"):
            if self.load_dataset.get(name) is not None:
                cure = "filter the files before you read them here"
                raise UserError(f"load_dataset.{name} isn't implemented: {cure}")
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

    def check(self) -> dict[str, Any]:
        """Returns the fingerprint. Adds a note for files read twice. If the tokenizer loses part of
        the first documents, notes that and sets `lossy`. Raises UserError or OSError if the split,
        these documents or the tokenizer can't be opened."""
        for texts, position in self.read({}):
            if any(texts):
                text = "".join(texts)[: 2**16]  # a tokenizer in Python takes seconds for more
                lost = tokenizer(self.tokenizer).lost(text)
                share = lost.total() / len(text)
                if share > 0.001:
                    self.lossy = True
                    such = f"{share:.1%} of the characters, such as {lost.most_common(1)[0][0]!r}"
                    self.notes.append(f"the tokenizer {self.tokenizer} loses or changes {such}")
                if special := tokenizer(self.tokenizer).mistaken():
                    such = f"{', '.join(special[:3])} in a text for special tokens"
                    self.notes.append(f"the tokenizer {self.tokenizer} takes {such}")
                return position["source"]
        raise UserError(f"the split {self.split} has no text")

    def _check_patterns(self) -> None:
        """Raises UserError for an entry of `data_files` that matches no file (`datasets` would
        ignore it), is a folder, would match files in the output, or is read as a pattern though a
        file has that name."""
        from datasets import DownloadConfig
        from datasets.data_files import resolve_pattern, sanitize_patterns

        load, output = self.load_dataset, os.path.realpath(self.output)
        if load["path"] not in READERS and not self.folder.is_dir():
            return  # it is on the hub
        stores = load.get("storage_options") or {}
        access = DownloadConfig(token=load.get("token"), storage_options=stores)
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
                found = resolve_pattern(place, "", download_config=access)
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

            found = opened(builder, (name for name, _ in files))
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
        from datasets import DownloadConfig, config
        from datasets.utils.file_utils import xopen

        token, stores = map(self.load_dataset.get, ("token", "storage_options"))
        hub = {"endpoint": config.HF_ENDPOINT, "token": token}
        access = DownloadConfig(token=token, storage_options=stores or {})
        # The folder differs between copies of local files, and between revisions on the hub.
        known, untagged = list[Any](), 0
        for name, tag in files:
            info: dict[str, Any] = {"size": 0, "blob_id": tag}
            if name.startswith("hf://") or "://" not in name:  # its folder was just listed
                info = fsspec.core.url_to_fs(name, **hub)[0].info(name)
            elif not tag:
                with xopen(name, "rb", download_config=access) as file:
                    untagged += getattr(file, "size", 0) or 0
            known.append((os.path.basename(name), info["size"], info.get("blob_id")))
        found = {"files": len(files), "bytes": sum(size for _, size, _ in known)}
        found |= {"names and sizes": digest(known), "shards": shards}
        found |= {UNTAGGED: untagged} if untagged else {}
        return found | {"tokenizer": tokenizer(self.tokenizer, self.config.end_token).digest}

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
    opened = tokenizer(source.tokenizer, source.config.end_token)

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
