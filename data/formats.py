"""Reads the rows of files: Arrow, CSV, JSON, parquet and text, compressed or in zip archives.

These readers replace those of `datasets`, which infer one type for all values of a column, recode
the values of other types, and name neither file nor row if they fail. A reader takes an open file,
the column that holds the text, and the settings of `datasets` for the format.
"""

import collections
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
import reprlib
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
from fsspec.utils import infer_compression

from shardlib.errors import UserError

ROWS = 16  # of a parquet file that are in memory as objects
# Arguments of `datasets` for CSV files: those that csv.reader has, too, and the others that apply.
CSV_DIALECT = {"quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace"}
CSV_SETTINGS = {"sep", "names", "encoding", "encoding_errors"}
ARCHIVES = re.compile(r"\.(7z|rar|tar(\.\w+)?|t[bgx]z2?|tzst)$", re.IGNORECASE)  # but not zip


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts: 1 file, 1,000 files."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


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


def open_files(access: Any, files: Iterable[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields each file's name, and a function that opens it; in place of a zip archive, the files
    in it. `access` is a datasets.DownloadConfig."""
    import datasets
    from datasets.utils.file_utils import xopen

    manager = datasets.StreamingDownloadManager(download_config=access)
    opening = functools.partial(xopen, mode="rb", download_config=access)

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
