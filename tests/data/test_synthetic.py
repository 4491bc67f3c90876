"""The dataset in the repository holds the four tasks that docs/flat_tokens.md describes."""

import collections

import numpy as np
import pytest

from data.flat_tokens import FlatTokens
from tests.helpers import ROOT


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_tasks_of_the_dataset_in_the_repository(split):
    dataset = FlatTokens(str(ROOT / "data/synthetic.zarr"), split)
    dataset.validate()
    ids, _ = dataset.read(0, dataset.token_count)
    sequences = np.split(ids.astype(int), dataset.seq_starts[1:-1].astype(int))
    assert {len(x) for x in sequences} <= set(range(32, 65))
    assert all(x[1 + (x[0] == 3) :].min() >= 21 and x.max() < 128 for x in sequences)
    copies, reversals, distances, mixtures = (
        [x[1:] for x in sequences if x[0] == task] for task in (1, 2, 3, 4)
    )
    assert min(map(len, (copies, reversals, distances, mixtures))) > len(sequences) / 6
    for row in copies:
        assert (row[8:] == row[:-8]).all()
    for row in reversals:
        for start in range(0, len(row) - 15, 16):
            assert (row[start : start + 8][::-1] == row[start + 8 : start + 16]).all()
    for head, *row in distances:
        assert 1 <= head - 4 <= 16 and row[head - 4 :] == row[: 4 - head]
    modes = collections.Counter(int(np.bincount(row).argmax()) for row in mixtures)
    assert {mode for mode, _ in modes.most_common(8)} == {21 + 107 * i // 8 for i in range(8)}
