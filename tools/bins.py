"""Converts a split of flat tokens to a .bin file of ids, or .bin files to a split.

    python -m tools.bins stdlib.zarr/train train.bin --end-token 0
    python -m tools.bins 'fineweb/*train*.bin' fineweb.zarr/train --end-token 50256

A .bin file has ids of 16 bits, or of 32 bits if 16 are too few, and no header, as nanoGPT reads it;
--header writes llm.c's. --end-token is written after each document that doesn't end with it, and is
where documents end in .bin files that are read. Without it nothing marks documents there, and what
is read is one.
"""

import os
import pathlib

import numpy as np

from data.bins import HEADERS, Bins, bin_files
from data.flat_tokens import CHUNK, SPLITS, FlatTokens, Writer
from data.text import counted
from runtime.config import within
from runtime.errors import user_errors
from shardlib.errors import UserError
from tools import arguments

PART = 8 * CHUNK  # tokens in memory


def split_of(path: str) -> tuple[str, str]:
    """Returns the dataset and the split that a path names. Raises UserError if it names none."""
    dataset, _, split = path.rpartition("/")
    if split not in SPLITS or not dataset:
        raise UserError(f"{path} names no split: write {path}/train or {path}/validation")
    return dataset, split


def to_bin(source: str, output: str, end_token: int | None, header: bool) -> int:
    """Writes a file of a split's ids. Returns their number."""
    if os.path.exists(output):
        raise UserError(f"{output} exists; choose another output")
    data, count = FlatTokens(*split_of(source)), 0
    last = end = -1 if end_token is None else end_token  # no document ends before the first
    kind = np.dtype("uint16" if max(data.max_token_id, end) < 2**16 else "uint32")
    part = pathlib.Path(f"{output}.part")
    with part.open("wb") as file:
        file.write(bytes(1024 * header))
        for low in range(0, data.token_count, PART):
            ids, is_start = data.read(low, min(low + PART, data.token_count))
            unended = is_start & (np.append(np.int64(last), ids[:-1]) != end) & (end >= 0)
            ids = np.insert(ids, np.flatnonzero(unended), end)
            last, count = int(ids[-1]), count + len(ids)
            ids.astype(kind).tofile(file)
        if end >= 0 and last != end:
            np.array([end], kind).tofile(file)
            count += 1
        if header:
            magic = next(numbers for numbers, name in HEADERS.items() if name == kind.name)
            file.seek(0)
            np.array([*magic, count], "<i4").tofile(file)
    part.replace(output)
    return count


def from_bins(source: str, output: str, end_token: int | None, kind: str) -> int:
    """Writes a split of the ids in files. Returns their number."""
    data = Bins(source, end_token, kind)
    with Writer(*split_of(output)) as writer:
        for low in range(0, data.token_count, PART):
            high = min(low + PART, data.token_count)
            encoded = data.read_encoded(low, high)
            # Where a document starts another one ends; the last one in a part may go on.
            ends = low + np.flatnonzero(encoded & 1)
            ends = np.append(ends[ends > 0], [high] * (high == data.token_count)).astype(np.int64)
            writer.extend(encoded, np.diff(ends, prepend=low))
    return data.token_count


def main() -> None:
    parser = arguments.parser("tools.bins", __doc__)
    parser.add_argument(
        "source", help="DATASET.zarr/SPLIT, or .bin files: one, a pattern, a folder"
    )
    parser.add_argument("output", help=".bin, or DATASET.zarr/SPLIT")
    parser.add_argument("--end-token", type=within(int, 0), metavar="ID")
    parser.add_argument("--header", action="store_true", help="write llm.c's header")
    parser.add_argument("--dtype", choices=HEADERS.values(), default="uint16", help="of ids read")
    with user_errors():
        args = parser.parse_args()
        if bin_files(args.source):
            count = from_bins(args.source, args.output, args.end_token, args.dtype)
        else:
            count = to_bin(args.source, args.output, args.end_token, args.header)
        print(f"{args.output}: {counted(count, 'token')}")


if __name__ == "__main__":
    main()
