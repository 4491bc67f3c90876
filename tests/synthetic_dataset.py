"""Writes the dataset in the repository: four tasks that a small model can learn, drawn from a seed.

    python -m tests.synthetic_dataset data/synthetic.zarr

Each sequence starts with the id of its task:

    1  copy       random tokens, repeated with period 8
    2  reverse    words of 8 random tokens, each followed by its reversal
    3  distance   a token that encodes k, then random tokens, repeated with period k
    4  mixture    tokens drawn from one of 8 fixed distributions
"""

import math
import sys

import numpy as np

from data.flat_tokens import Writer

VOCAB, LONGEST = 128, 64  # ids, and the tokens of the longest sequence
TOKENS = {"train": 300_000, "validation": 20_000}
TASKS = 4
DISTANCES = 16  # ids TASKS+1 to TASKS+DISTANCES encode a distance
FIRST_SYMBOL = TASKS + DISTANCES + 1
COPY_DISTANCE = WORD = 8
MIXTURES = 8


def sequence(rng, length):
    """Returns one sequence of `length` ids from a random task."""
    task = int(rng.integers(1, TASKS + 1))
    symbols = rng.integers(FIRST_SYMBOL, VOCAB, length)
    head = [task]
    if task == 1:
        symbols = np.resize(symbols[:COPY_DISTANCE], length)  # np.resize repeats them
    elif task == 2:
        words = np.resize(symbols, (math.ceil(length / (2 * WORD)), WORD))
        symbols = np.concatenate([words, words[:, ::-1]], axis=1).reshape(-1)
    elif task == 3:
        distance = int(rng.integers(1, DISTANCES + 1))
        head.append(TASKS + distance)
        symbols = np.resize(symbols[:distance], length)
    else:
        # Distribution m is Zipf's law over the symbols, shifted by m / MIXTURES of their range.
        count = VOCAB - FIRST_SYMBOL
        shift = int(rng.integers(MIXTURES)) * count // MIXTURES
        rank = np.exp(rng.random(length) * np.log(count)).astype(np.int64) - 1
        symbols = FIRST_SYMBOL + (rank + shift) % count
    return np.concatenate([head, symbols])[:length]


def write(path):
    for split, count in TOKENS.items():
        rng = np.random.default_rng([0, len(split)])
        with Writer(path, split) as writer:
            while writer.token_count < count:
                writer.append(sequence(rng, int(rng.integers(LONGEST // 2, LONGEST + 1))))


if __name__ == "__main__":
    write(sys.argv[1])
