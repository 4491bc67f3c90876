"""Converts a split of flat tokens to a .bin file of ids, or .bin files to a split.

    python -m tools.bins stdlib.zarr/train train.bin --end-token 0
    python -m tools.bins 'fineweb/*train*.bin' fineweb.zarr/train --end-token 50256

A .bin file gets ids of 16 bits, or of 32 bits if 16 are too few, and no header, like nanoGPT's;
--header writes llm.c's. When writing, --end-token is added to documents that don't end with it; it
may be nowhere else. When reading, a document starts after each; without it, all is one document.
For Megatron-LM's files, the .idx file beside each says where documents start, and the type of ids.
"""

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from data.bins import HEADERS, Bins, bin_files, check_end_token, check_one_split
from data.flat_tokens import CHUNK, MAX_ID, SPLITS, FlatTokens, Writer, encode
from data.formats import counted
from runtime.config import within
from runtime.errors import user_errors
from shardlib.errors import UserError
from tools import arguments

PART = 8 * CHUNK  # tokens in memory
MEGATRON = b"MMIDIDX\0\0"  # how an index begins
# Its id types by code. Signed ones are read as unsigned, so that negative ids exceed MAX_ID.
CODES = {1: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 8: "uint16"}


def split_of(path: str) -> tuple[str, str]:
    """Returns the dataset and the split that a path names. Raises UserError if it names none."""
    dataset, _, split = path.rpartition("/")
    if split not in SPLITS or not dataset:
        raise UserError(f"{path} names no split: write {path}/train or {path}/validation")
    return dataset, split


def to_bin(source: str, output: str, end_token: int | None, header: bool) -> int:
    """Writes a split's ids to a file. Returns how many it wrote."""
    if os.path.exists(output):
        raise UserError(f"{output} exists; choose another output")
    if not output.endswith(".bin"):
        raise UserError(f"{output}: the output of a split must end with .bin")
    data, count = FlatTokens(*split_of(source)), 0
    kind = np.dtype("uint16" if max(data.max_token_id, end_token or 0) < 2**16 else "uint32")
    ends = 0 if end_token is None else data.sequence_count
    if header and data.token_count + ends >= 2**31:
        raise UserError(f"{source} has more ids than the header can count: leave out --header")
    last = end_token  # so that none is written before the first document
    part = pathlib.Path(f"{output}.part")
    with part.open("wb") as file:
        file.write(bytes(1024 * header))
        for low in range(0, data.token_count, PART):
            ids, is_start = data.read(low, min(low + PART, data.token_count))
            if end_token is not None:
                before = np.append([last], ids[:-1])
                if (inside := (before == end_token) & ~is_start).any():
                    where = f"inside a document, as token {low + int(inside.argmax()) - 1}"
                    cure = "choose an id that is only where documents end"
                    raise UserError(f"{source} has the end token {end_token} {where}: {cure}")
                ids = np.insert(ids, np.flatnonzero(is_start & (before != end_token)), end_token)
            ids.astype(kind).tofile(file)
            last, count = int(ids[-1]), count + len(ids)
        if end_token is not None and last != end_token:
            np.array([end_token], kind).tofile(file)
            count += 1
        if header:
            magic = next(numbers for numbers, name in HEADERS.items() if name == kind.name)
            file.seek(0)
            np.array([*magic, count], "<i4").tofile(file)
    part.replace(output)
    return count


def of_megatron(file: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a file's ids and where its documents start, by the .idx file beside it, whose format
    is in megatron/core/datasets/indexed_dataset.py. Raises UserError if the two don't match."""
    index = f"{file.removesuffix('bin')}idx"
    try:
        content = np.memmap(index, np.uint8, "r")
        kind = np.dtype(CODES[int(content[17])] if content[:9].tobytes() == MEGATRON else "")
        count, documents = np.frombuffer(content, "<u8", 2, 18).tolist()
        # The lengths of sequences and their offsets in bytes; the first sequence of each document.
        lengths = np.frombuffer(content, "<i4", count, 34)
        places = np.frombuffer(content, "<i8", count, 34 + 4 * count)
        firsts = np.frombuffer(content, "<i8", documents, 34 + 12 * count)
        whole = [*firsts[[0, -1]]] == [0, count] and (np.diff(firsts) >= 0).all()
        ids, end = np.memmap(file, kind, "r"), int(places[-1]) // kind.itemsize + int(lengths[-1])
    except (ValueError, IndexError, KeyError, TypeError):
        raise UserError(f"{index} isn't an index of Megatron-LM for ids, or was cut off") from None
    if len(ids) != end:
        cause = "was it cut off?" if len(ids) < end else "is the index another file's?"
        raise UserError(f"{file} has {len(ids):,} ids, {index} says {end:,}: {cause}")
    if not whole:  # an early merge_file_ left out the documents of all files but the first
        problem = f"{index} doesn't list the documents of all {count:,} sequences"
        cure = "end its last document, or convert the files it was merged from"
        raise UserError(f"{problem}: {cure}")
    return ids, np.unique(places[firsts[firsts < count]] // kind.itemsize)


def megatron_parts(source: str) -> Iterator[np.ndarray]:
    """Yields the encoded tokens of Megatron-LM's files, part by part."""
    for file in bin_files(source):
        ids, starts = of_megatron(file)
        for low in range(0, len(ids), PART):
            part = ids[low : low + PART]
            if part.max() > MAX_ID:
                raise UserError(f"{file} has the id {part.max()}: ids must be from 0 to {MAX_ID}")
            first, last = np.searchsorted(starts, (low, low + len(part)))
            yield encode(part, starts[first:last] - low)


def from_bins(source: str, output: str, end_token: int | None, kind: str | None) -> int:
    """Writes the ids in files as a split. Returns how many it wrote."""
    files = bin_files(source)
    if not any(map(os.path.exists, files)):
        raise UserError(f"{source} matches no local file")
    check_one_split(source, files)
    if any(os.path.exists(f"{file.removesuffix('bin')}idx") for file in files):
        if kind or end_token is not None:
            problem = f"{source}: the .idx file says where documents start, and the type of ids"
            raise UserError(f"{problem}: leave out --end-token and --dtype")
        parts = megatron_parts(source)
    else:
        data = Bins(source, end_token, kind or "uint16")
        check_end_token([data])
        bounds = range(0, data.token_count, PART)
        parts = (data.read_encoded(low, min(low + PART, data.token_count)) for low in bounds)
    with Writer(*split_of(output)) as writer:
        for encoded in parts:
            low = writer.token_count
            # Where a document starts, another one ends; the last one in a part may go on.
            ends = low + np.flatnonzero(encoded & 1)
            writer.extend(encoded, np.diff(ends[ends > 0], prepend=low))
        writer.extend(np.zeros(0, np.uint32), np.zeros(1, np.int64))  # the end of the last one
    return writer.token_count


def main() -> None:
    parser = arguments.parser("tools.bins", __doc__)
    parser.add_argument(
        "source", help="DATASET.zarr/SPLIT, or .bin files: one, a pattern, a folder"
    )
    parser.add_argument("output", help=".bin, or DATASET.zarr/SPLIT")
    parser.add_argument("--end-token", type=within(int, 0), metavar="ID")
    parser.add_argument("--header", action="store_true", help="write llm.c's header")
    parser.add_argument("--dtype", choices=HEADERS.values(), help="of ids read, by default uint16")
    with user_errors():
        args = parser.parse_args()
        if bin_files(args.source):
            if args.header:
                raise UserError("--header is for writing a .bin file: leave it out")
            count = from_bins(args.source, args.output, args.end_token, args.dtype)
        elif args.dtype:
            raise UserError("--dtype is for reading .bin files: leave it out")
        else:
            count = to_bin(args.source, args.output, args.end_token, args.header)
        print(f"{args.output}: {counted(count, 'token')}")


if __name__ == "__main__":
    main()
