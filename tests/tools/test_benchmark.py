import math
import re

import jax
import pytest

import train
from runtime import chips
from tests.helpers import SMALL, mesh, small_config
from tools import benchmark


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.slow
def test_the_table(tmp_path, train_here, monkeypatch):
    monkeypatch.setattr(benchmark, "MIN_STEPS", 3)
    monkeypatch.setattr(benchmark, "MAX_STEPS", 4)
    chip = chips.CHIPS["h200"]._replace(flops=1e9)
    monkeypatch.setattr(chips, "find_chip", lambda kind: chip)
    out, message = train_here("--config-name=local_test_synthetic", *SMALL,
        "training.grad_clip=inf", f"paths.root_working_dir={tmp_path}", program=benchmark.main,
    )  # fmt: skip
    assert not message and not list(tmp_path.iterdir()), "it writes nothing"
    shown = {line[:32].strip(): line[33:] for line in out.splitlines()}
    assert re.search(r", commit [0-9a-f]{40}(-dirty)?, Python ", shown["at"])
    assert f", jax {jax.__version__}, " in shown["at"] and shown["device"] == "8 x cpu, d=4, t=2"
    with jax.set_mesh(mesh(4, 2)):
        state = train.init_state(small_config("model.vocab=128"))
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
    assert shown["parameters"] == f"{weights:,}" and shown["tokens per step"] == "96"
    median, spread = shown["step"].split(" s ")
    assert spread.endswith(" percentile of 4)")
    assert numbers(shown["CPU time"])[0] > 0 and numbers(shown["peak memory"])[0] > 2**-3
    (rate,) = numbers(shown["tokens/s"])
    assert rate == pytest.approx(96 / float(median), rel=0.01)
    projections, attention = train.step_flops(small_config("model.vocab=128"))
    flops = {"projections only": projections, "causal attention included": projections + attention}
    for name in flops:
        share = flops[name] / (8 * 1e9) / (96 / rate)
        mfu = float(shown[f"MFU, {name}"].rstrip("%")) / 100
        assert mfu == pytest.approx(share, rel=0.01, abs=1e-3)
    wait, share = numbers(shown["data wait"])
    assert 0 <= wait < float(median) and 0 <= share < 100
    parts = [*shown][[*shown].index("time to first step") + 1 :]
    assert parts[0] == "import" and {"trace and lower", "compile", "load a batch"} <= {*parts}
    seconds = [numbers(shown[part])[0] for part in parts]
    assert min(seconds) >= 0
    assert numbers(shown["time to first step"])[0] == pytest.approx(sum(seconds), abs=0.1)


@pytest.mark.parametrize("dtype, shown", [("bf16", "50.0%"), ("f32", "unknown in f32 on H100")])
def test_the_mfu_is_known_in_bf16_alone(dtype, shown, capsys):
    config = small_config(f"dtype={dtype}")
    peak = chips.CHIPS["h100"].flops * math.prod(config.mesh.axes.values())
    times = benchmark.Times([2 * sum(train.step_flops(config)) / peak] * 3, [0.0] * 3, 0.0)
    benchmark.show(config, "H100", 1, (1, ""), [], times)
    out = re.sub("   +", "  ", capsys.readouterr().out)
    assert f"MFU, causal attention included  {shown}\n" in out


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
