"""The tool writes the dataset in the repository."""

from data.flat_tokens import SPLITS
from tests.files import documents
from tests.helpers import ROOT
from tests.processes import python


def test_the_dataset_in_the_repository_is_what_the_tool_writes(tmp_path):
    path = tmp_path / "x.zarr"
    assert not python("-m", "tools.synthetic_dataset", path).returncode
    for split in SPLITS:
        assert documents(path, split) == documents(ROOT / "data/synthetic.zarr", split)
