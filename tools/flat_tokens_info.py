"""What is in a dataset of flat tokens, and whether it is whole; some documents as text.

    python -m tools.flat_tokens_info stdlib.zarr --decode 2

Reads all of it. Exits with the first rule that doesn't hold, of each split.
"""

import argparse
import sys
from typing import Any

import numpy as np
import zarr

from data import huggingface
from data.flat_tokens import SPLITS, FlatTokens, FlatTokensError


def describe(dataset: FlatTokens) -> str:
    lengths = np.diff(dataset.starts(0, dataset.sequence_count))
    low, middle, high = (int(np.quantile(lengths, q)) for q in (0, 0.5, 1))
    arrays = dataset.tokens, dataset.seq_starts
    stored, plain = (
        sum(getattr(array, name) for array in arrays) for name in ("nbytes_stored", "nbytes")
    )
    ...
