from data.flat_tokens import SPLITS
from tests import synthetic_dataset
from tests.files import documents
from tests.helpers import ROOT


def test_the_dataset_in_the_repository_is_what_the_program_writes(tmp_path):
    path = str(tmp_path / "x.zarr")
    synthetic_dataset.write(path)
    for split in SPLITS:
        assert documents(path, split) == documents(ROOT / "data/synthetic.zarr", split)
