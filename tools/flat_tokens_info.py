"""Checks a dataset of flat tokens, and prints its sizes and some documents as text.

    python -m tools.flat_tokens_info stdlib.zarr --decode 2
    python -m tools.flat_tokens_info train.bin --end-token 50256

Reads both splits completely, or the .bin files. If one breaks a rule of the format, prints the
first broken rule and exits with 1.
"""

import functools
import sys
from typing import Any

import numpy as np

from data.bins import HEADERS, Bins, bin_files, check_end_token
from data.flat_tokens import SPLITS, FlatTokens, TokenizerId, decode, tokenizer_of
from data.formats import counted
from data.tokenizer import Tokenizer, open_tokenizer
from runtime.config import within
from runtime.errors import user_errors
from shardlib.errors import UserError
from tools import arguments

MAX_CHARACTERS = 400  # printed per document


def describe(data: FlatTokens | Bins, lengths: np.ndarray, largest: int) -> str:
    """Describes a split in a line, given the lengths of its documents and its largest id."""
    if isinstance(data, FlatTokens):
        arrays = data.tokens, data.seq_starts
        size, packed = sum(a.nbytes for a in arrays), sum(a.nbytes_stored() for a in arrays)
        stored = f"{packed / 1e6:,.1f} MB on disk, compressed {size / packed:.1f} times"
    else:
        more = "; ..." if len(data.files) > 3 else ""
        stored = f"{counted(len(data.files), 'file')}: {'; '.join(data.files[:3])}{more}"
    text = f" of {data.bytes_per_token:.2f} bytes" if data.bytes_per_token else ""
    tokens = f"{counted(data.token_count, 'token')}{text}, ids up to {largest}"
    longest, median = counted(lengths.max(), "token"), f"median {int(np.median(lengths)):,}"
    documents = f"{counted(len(lengths), 'document')} of {lengths.min():,} to {longest}, {median}"
    return f"{data.name}: {tokens}; {documents}; {stored}; intact"


def show(data: FlatTokens | Bins, bounds: np.ndarray, count: int, decoder: Tokenizer) -> None:
    """Prints `count` documents, evenly spaced over the split, or all if it has fewer."""
    documents = len(bounds) - 1
    chosen = np.linspace(0, documents - 1, min(count, documents)).astype(int).tolist()
    for number in chosen:
        ids, _ = decode(data.read_encoded(*bounds[number : number + 2].tolist()))
        text = decoder.decode(ids)
        end = "" if len(text) <= MAX_CHARACTERS else " ..."
        print(f"--- document {number}, {counted(len(ids), 'token')}\n{text[:MAX_CHARACTERS]}{end}")


def main() -> None:
    parser = arguments.parser("tools.flat_tokens_info", __doc__)
    parser.add_argument("path")
    parser.add_argument(
        "--decode", type=within(int, 0), default=0, metavar="N", help="documents per split"
    )
    parser.add_argument("--tokenizer", help="if the dataset doesn't record its tokenizer")
    parser.add_argument("--end-token", type=within(int, 0), metavar="ID", help="of .bin files")
    parser.add_argument("--dtype", choices=HEADERS.values(), default="uint16", help="of .bin files")
    with user_errors():
        args, problems = parser.parse_args(), set[str]()
        sets: list[Any] = [functools.partial(FlatTokens, args.path, split) for split in SPLITS]
        if bin_files(args.path):
            sets = [functools.partial(Bins, args.path, args.end_token, args.dtype)]
        elif args.end_token is not None or args.dtype != "uint16":
            parser.error("--end-token and --dtype are for .bin files")
        for opened in sets:
            try:
                dataset = opened()
                check_end_token([dataset] if isinstance(dataset, Bins) else [])
                bounds, largest = dataset.validate()
                print(describe(dataset, np.diff(bounds), largest))
                if args.decode:
                    given = args.tokenizer and TokenizerId(args.tokenizer)
                    if not (named := given or tokenizer_of(args.path)):
                        parser.error("the dataset doesn't record its tokenizer: add --tokenizer")
                    decoder = open_tokenizer(named.name).check_unchanged(named)
                    show(dataset, bounds, args.decode, decoder)
            except BrokenPipeError:
                raise
            except (UserError, OSError) as error:
                if str(error) not in problems:
                    print(f"error: {error}", file=sys.stderr)
                problems.add(str(error))
        sys.exit(bool(problems))


if __name__ == "__main__":
    main()
