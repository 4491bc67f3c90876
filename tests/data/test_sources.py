"""Adding a source of tokens takes a class and a line."""

import dataclasses

import numpy as np
import pytest

from data.loader import Batches
from runtime.config import NonNegativeInt, Section
from tests.helpers import SMALL, edited, rows, train_here


class Counting(Batches):
    """Batches in which row i of batch n counts up from first + n + i."""

    first = 0

    def make(self, numbers):
        for number in numbers:
            start = self.first + number + np.array(self.local_rows, np.uint32)
            ids = 1 + (start[:, None] + np.arange(self.shape[1] + 1, dtype=np.uint32)) % 100
            yield ids, np.broadcast_to(np.arange(self.shape[1] + 1) == 1, ids.shape), None

    def origin(self, number):
        return "counting"


@dataclasses.dataclass(unsafe_hash=True)
class CountingConfig(Section, key="counting"):
    first: NonNegativeInt

    def open(self, spec, split):
        batches = Counting(spec)
        batches.first = self.first
        return batches


@pytest.mark.slow
def test_a_third_source_is_trained_on(tmp_path, capsys, monkeypatch):
    last = "    hf_dataset: HuggingFaceConfig | None\n"
    sources = edited(
        "data/sources.py",
        (last, f"{last}    counting: CountingConfig | None = None\n"),
        ("from runtime", "from tests.data.test_sources import CountingConfig\nfrom runtime"),
    )
    train = edited("train.py", ("from data.sources import", f"from {sources.__name__} import"))
    arguments = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]
    arguments += ["check=types"]  # the processes that compare numbers don't have this source
    arguments += ["training.steps=20", f"paths.root_working_dir={tmp_path}", "paths.model_name=r"]
    overrides = "flat_tokens=null", "counting={first: 5}", "training.validation_interval=10"
    _, message = train_here(capsys, monkeypatch, *arguments, *overrides, program=train.main)
    assert not message
    losses = [row["loss"] for row in rows(tmp_path / "r")]
    assert losses[-1] < losses[0] - 1, "it learns to count"
    assert "validation_loss" in rows(tmp_path / "r")[9]
    _, message = train_here(capsys, monkeypatch, *arguments, overrides[1], program=train.main)
    assert message.startswith(
        "error: set one of these, and leave the others null: flat_tokens, hf_dataset, counting"
    )
    _, message = train_here(
        capsys, monkeypatch, *arguments, overrides[0], "counting={first: -5}", program=train.main
    )
    assert message == "error: counting.first=-5: it must be at least 0 and below 2147483648"
