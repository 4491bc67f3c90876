import json
import re

import jax
import numpy as np
import pytest

import train
from runtime import chips
from tests.helpers import SMALL, mesh, small_config, train_here
from tools import benchmark


@pytest.mark.slow
def test_the_table_and_the_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "MIN_STEPS", 3)
    monkeypatch.setattr(benchmark, "MAX_STEPS", 4)
    chip = chips.CHIPS["h200"]._replace(flops=1e9)
    monkeypatch.setattr(chips, "find_chip", lambda kind: chip)
    out, message = train_here(
        capsys, monkeypatch, "--config-name=local_test_synthetic", *SMALL,
        "training.grad_clip=inf", f"paths.root_working_dir={tmp_path}", program=benchmark.main,
    )  # fmt: skip
    assert not message and not list(tmp_path.iterdir()), "it writes nothing"
    *table, line = out.splitlines()
    record = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert record["config"]["training"]["grad_clip"] == "Infinity"
    assert record["config"]["model"]["d_model"] == 32
    steps, waits = (np.array(record[name]) for name in ("step_seconds", "data_wait_seconds"))
    assert len(steps) == len(waits) == 4 and (steps > waits).all() and (waits >= 0).all()
    assert record["cpu_seconds_per_step"] > 0
    assert re.fullmatch(r"[0-9a-f]{40}\+?", record["commit"])
    assert record["versions"]["jax"] == jax.__version__ and record["devices"] == 8
    assert record["tokens_per_step"] == 96 and record["peak_memory_bytes"] > 2**27
    parts = record["start_seconds"]
    assert next(iter(parts)) == "import"
    assert {"trace and lower", "compile", "load a batch"} <= parts.keys()
    assert all(seconds >= 0 for seconds in parts.values())

    shown = {line[:32].strip(): line[33:] for line in table}
    with jax.set_mesh(mesh(4, 2)):
        state = train.init_state(small_config("model.vocab=128"))
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
    assert shown["parameters"] == f"{weights:,}" and record["parameters"] == weights
    rate = float(shown["tokens/s"].replace(",", ""))
    assert rate == pytest.approx(96 / np.median(steps), rel=0.01)
    for name, flops in {
        "MFU, projections only": record["projection_flops"],
        "MFU, causal attention included": record["projection_flops"] + record["attention_flops"],
    }.items():
        share = flops / (8 * 1e9) / (96 / rate)
        assert float(shown[name].rstrip("%")) / 100 == pytest.approx(share, rel=0.01, abs=1e-3)
    total = float(shown["time to first step"].split()[0])
    assert total == pytest.approx(sum(parts.values()), abs=0.06)


def test_the_steps_that_are_timed(monkeypatch):
    """Uses a fake clock: each step ends 1.25 s after the one before it."""
    monkeypatch.setattr(benchmark, "SECONDS", 4.5)
    monkeypatch.setattr(benchmark, "MAX_STEPS", 20)
    monkeypatch.setattr(benchmark, "MIN_STEPS", 6)
    now = [0.0]

    class Metrics:
        def wait(self):
            now[0] += 1

    def batches():
        while True:
            now[0] += 0.25
            yield "batch"

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(benchmark.time, "process_time", lambda: 2 * now[0])
    times = benchmark.time_steps(
        lambda state, batch: (state, Metrics()), batches(), "state", Metrics.wait
    )
    assert times == ([1.25] * 6, [0.25] * 6, 2.5)
