"""What is in a dataset of flat tokens, whether it is whole, and some of its documents as text.

    python -m tools.flat_tokens_info stdlib.zarr --decode 2

Reads all of it. A split that breaks a rule of the format is named with the first one.
"""

import argparse
import sys

import numpy as np

from data.flat_tokens import SPLITS, FlatTokens, FlatTokensError, tokenizer_of
from data.text import Tokenizer

SHOWN = 400  # characters of a document


def describe(dataset: FlatTokens) -> str:
    """Raises FlatTokensError for what isn't whole."""
    dataset.validate()
    lengths = np.diff(dataset.starts(0, dataset.sequence_count))
    arrays = dataset.tokens, dataset.seq_starts
    size, stored = sum(a.nbytes for a in arrays), sum(a.nbytes_stored() for a in arrays)
    return (
        f"{dataset.name}: {dataset.token_count:,} tokens, ids up to {dataset.max_token_id}; "
        f"{dataset.sequence_count:,} documents of {lengths.min():,} to {lengths.max():,} tokens, "
        f"half of them up to {int(np.median(lengths)):,}; {stored / 1e6:,.1f} MB on disk, "
        f"{size / stored:.1f} times less than in memory; whole"
    )


def show(dataset: FlatTokens, count: int, tokenizer: str, id_offset: int) -> None:
    """Prints documents from all over the split."""
    decoder = Tokenizer(tokenizer, id_offset)
    for number in np.linspace(0, dataset.sequence_count - 1, count).astype(int).tolist():
        ids, _ = dataset.read(*map(int, dataset.starts(number, number + 1)))
        text = decoder.decode(ids)
        end = "" if len(text) <= SHOWN else " ..."
        print(f"--- document {number}, {len(ids):,} tokens\n{text[:SHOWN]}{end}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.flat_tokens_info", description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="documents of a split")
    parser.add_argument("--tokenizer", help="if the dataset doesn't say by which it was made")
    parser.add_argument("--id_offset", type=int, default=0, help="the same")
    given, whole = parser.parse_args(), True
    for split in SPLITS:
        try:
            dataset = FlatTokens(given.path, split)
            print(describe(dataset))
            if given.decode:
                named = (given.tokenizer, given.id_offset) if given.tokenizer else None
                named = named or tokenizer_of(given.path)
                if not named:
                    parser.error("the dataset doesn't say by which tokenizer it was made: add one")
                show(dataset, given.decode, *named)
        except (FlatTokensError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            whole = False
    sys.exit(not whole)


if __name__ == "__main__":
    main()
