"""Checks a dataset of flat tokens, and prints its sizes and some documents as text.

    python -m tools.flat_tokens_info stdlib.zarr --decode 2

Reads the whole dataset. If a split breaks a rule of the format, prints the first broken rule and
exits with 1.
"""

import sys

import numpy as np

from data.flat_tokens import SPLITS, FlatTokens, tokenizer_of
from data.text import Tokenizer, counted
from runtime.config import within
from runtime.errors import user_errors
from shardlib.errors import UserError
from tools import arguments

MAX_CHARACTERS = 400  # printed of a document


def describe(dataset: FlatTokens) -> str:
    """Returns a line on a split. Raises FlatTokensError if it breaks a rule of the format."""
    dataset.validate()
    lengths = np.diff(dataset.starts(0, dataset.sequence_count))
    arrays = dataset.tokens, dataset.seq_starts
    size, stored = sum(a.nbytes for a in arrays), sum(a.nbytes_stored() for a in arrays)
    return (
        f"{dataset.name}: {counted(dataset.token_count, 'token')}, ids up to {dataset.max_token_id}"
        f"; {counted(dataset.sequence_count, 'document')} of {lengths.min():,}"
        f" to {counted(lengths.max(), 'token')}, median {int(np.median(lengths)):,}; "
        f"{stored / 1e6:,.1f} MB on disk, compressed {size / stored:.1f} times; intact"
    )


def show(dataset: FlatTokens, count: int, tokenizer: str) -> None:
    """Prints `count` documents, evenly spaced over the split, or all if it has fewer."""
    decoder, count = Tokenizer(tokenizer), min(count, dataset.sequence_count)
    for number in np.linspace(0, dataset.sequence_count - 1, count).astype(int).tolist():
        ids, _ = dataset.read(*map(int, dataset.starts(number, number + 1)))
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
    with user_errors():
        args, intact = parser.parse_args(), True
        for split in SPLITS:
            try:
                dataset = FlatTokens(args.path, split)
                print(describe(dataset))
                if args.decode:
                    tokenizer = args.tokenizer or tokenizer_of(args.path)
                    if not tokenizer:
                        parser.error("the dataset doesn't record its tokenizer: add --tokenizer")
                    show(dataset, args.decode, tokenizer)
            except BrokenPipeError:
                raise
            except (UserError, OSError) as error:
                print(f"error: {error}", file=sys.stderr)
                intact = False
        sys.exit(not intact)


if __name__ == "__main__":
    main()
