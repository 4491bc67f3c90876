import re

import pytest

from benchmarks import data_and_checkpoints


@pytest.mark.slow
def test_the_table(train_here, monkeypatch):
    monkeypatch.setattr(data_and_checkpoints, "COPIES", 1)
    monkeypatch.setattr(data_and_checkpoints, "ROUNDS", 1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # undoes what the program sets
    arguments = "--config-name=local_test_synthetic", "training.tokens={batch: 64, len: 512}"
    out, message = train_here(*arguments, program=data_and_checkpoints.main)
    assert not message
    # Its tokenizer has no start token.
    head, *rows = [line for line in out.splitlines() if not line.startswith("note: ")]
    assert re.split("  +", head.strip()) == ["speed", "bound", "its speed", "ratio", "range"]
    assert len(rows) == 5
    for row in rows:
        _, speed, _, bound, ratio, least_and_most = re.split("  +", row)
        assert speed.endswith("/s") and bound.endswith("/s")
        assert all(float(n) > 0 for n in re.findall(r"([\d.e+]+)%", ratio + least_and_most)), row
