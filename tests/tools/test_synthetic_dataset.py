"""The tool writes the dataset in the repository."""

import numpy as np

from data.flat_tokens import FlatTokens
from tests.helpers import ROOT
from tests.processes import python


def test_the_dataset_in_the_repository_is_what_the_tool_writes(tmp_path):
    path = str(tmp_path / "x.zarr")
    assert not python("-m", "tools.synthetic_dataset", path).returncode
    for split in "train", "validation":
        fresh, shipped = (FlatTokens(str(p), split) for p in (path, ROOT / "data/synthetic.zarr"))
        shipped.validate()
        np.testing.assert_array_equal(fresh.tokens[:], shipped.tokens[:])
        np.testing.assert_array_equal(fresh.seq_starts[:], shipped.seq_starts[:])
