"""The synthetic tasks are as described, and the tool writes the dataset in the repository."""

import subprocess
import sys

import numpy as np
import pytest

from data.flat_tokens import FlatTokens
from tests.helpers import ROOT
from tools.synthetic_dataset import DISTANCES, FIRST_SYMBOL, MIXTURES, TASKS, WORD, sequence


def test_the_dataset_in_the_repository_is_what_the_tool_writes(tmp_path):
    path = str(tmp_path / "x.zarr")
    subprocess.run([sys.executable, "-m", "tools.synthetic_dataset", path], cwd=ROOT, check=True)
    for split in "train", "validation":
        fresh, shipped = (FlatTokens(str(p), split) for p in (path, ROOT / "data/synthetic.zarr"))
        shipped.validate()
        np.testing.assert_array_equal(fresh.tokens[:], shipped.tokens[:])
        np.testing.assert_array_equal(fresh.seq_starts[:], shipped.seq_starts[:])


def sequences(task, count=50, length=57, vocab=100):
    rng = np.random.default_rng(3)
    actual = []
    while len(actual) < count:
        row = sequence(rng, vocab, length)
        assert len(row) == length
        assert row.min() >= 1 and row.max() < vocab
        if row[0] == task:
            actual.append(row)
    return np.stack(actual)


def test_copy_repeats_at_a_fixed_distance():
    rows = sequences(1)[:, 1:]
    assert (rows[:, 8:] == rows[:, :-8]).all()
    assert len(np.unique(rows[:, :8])) > 50


def test_reverse_reverses_each_word():
    rows = sequences(2)[:, 1:]
    for start in range(0, 56 - 2 * WORD + 1, 2 * WORD):
        word, reversal = rows[:, start : start + WORD], rows[:, start + WORD : start + 2 * WORD]
        assert (word[:, ::-1] == reversal).all()
    assert (rows[:, 0] != rows[:, 16]).any(), "each pair has a different word"


def test_distance_repeats_at_the_distance_it_states():
    for row in sequences(3):
        distance = row[1] - TASKS
        assert 1 <= distance <= DISTANCES
        assert (row[2 + distance :] == row[2:-distance]).all()


def test_mixture_draws_from_few_skewed_distributions():
    rows = sequences(4, length=2000, count=200)[:, 1:]
    most_common = [np.bincount(row).argmax() for row in rows]
    assert len(set(most_common)) == MIXTURES
    assert min(most_common) == FIRST_SYMBOL


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["--seed=1", "--vocab=50"])
def test_arguments_change_the_dataset(tmp_path, argument):
    path = str(tmp_path / "x.zarr")
    small = ["--train-tokens=500", "--validation-tokens=100"]
    command = [sys.executable, "-m", "tools.synthetic_dataset", path, argument, *small]
    subprocess.run(command, cwd=ROOT, check=True)
    dataset = FlatTokens(path, "train")
    dataset.validate()
    shipped = FlatTokens(str(ROOT / "data/synthetic.zarr"), "train")
    assert dataset.read(0, 400)[0].tolist() != shipped.read(0, 400)[0].tolist()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
