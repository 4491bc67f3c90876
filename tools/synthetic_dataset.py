"""Writes a flat-tokens dataset of four tasks that a small model can learn, all drawn from a seed.

    python -m tools.synthetic_dataset data/synthetic.zarr

Each sequence starts with the id of its task:

    1  copy       random tokens, repeated with period 8
    2  reverse    words of 8 random tokens, each followed by its reversal
    3  distance   a token that encodes k, then random tokens, repeated with period k
    4  mixture    tokens drawn from one of 8 fixed distributions
"""

import math

import numpy as np

from data.flat_tokens import Writer
from runtime.config import within
from runtime.errors import user_errors
from tools import arguments

TASKS = 4
DISTANCES = 16  # ids TASKS+1 to TASKS+DISTANCES encode a distance
FIRST_SYMBOL = TASKS + DISTANCES + 1
COPY_DISTANCE = WORD = 8
MIXTURES = 8


def sequence(rng: np.random.Generator, vocab: int, length: int) -> np.ndarray:
    """Returns one sequence of `length` ids below `vocab` from a random task."""
    task = int(rng.integers(1, TASKS + 1))
    symbols = rng.integers(FIRST_SYMBOL, vocab, length)
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
        count = vocab - FIRST_SYMBOL
        shift = int(rng.integers(MIXTURES)) * count // MIXTURES
        rank = np.exp(rng.random(length) * np.log(count)).astype(np.int64) - 1
        symbols = FIRST_SYMBOL + (rank + shift) % count
    return np.concatenate([head, symbols])[:length]


def main() -> None:
    parser = arguments.parser("tools.synthetic_dataset", __doc__)
    parser.add_argument("output", help="the dataset to write; must not exist")
    add, least = parser.add_argument, FIRST_SYMBOL + MIXTURES + 1
    add("--seed", type=within(int, 0), default=0)
    add("--vocab", type=within(int, least, 10**6), default=128)
    add("--length", type=within(int, 2, 10**6), default=64, help="the longest sequence, in tokens")
    add("--train-tokens", type=within(int, 1), default=300_000)
    add("--validation-tokens", type=within(int, 1), default=20_000)
    with user_errors():
        args = parser.parse_args()
        for split, count in ("train", args.train_tokens), ("validation", args.validation_tokens):
            rng = np.random.default_rng([args.seed, len(split)])
            with Writer(args.output, split) as writer:
                while writer.token_count < count:
                    length = int(rng.integers(args.length // 2, args.length + 1))
                    writer.append(sequence(rng, args.vocab, length))
            print(f"{writer.name}: {writer.sequence_count} sequences, {writer.token_count} tokens")


if __name__ == "__main__":
    main()
