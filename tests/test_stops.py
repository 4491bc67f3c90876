"""What a run starts from, and what makes it stop."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import train
from data.run import Run
from tests import golden
from tests.helpers import ROOT, SMALL, edited, mesh, small_config, train_here
from tests.test_resume import arrays, rows

ARGUMENTS = ["--config-name=local_test_synthetic", *SMALL, "training.steps=6", "mesh={d: 2, t: 2}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where they are, with one that was left alone, `whole`, which has a checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = [*ARGUMENTS, "checkpoint_interval=3", f"paths.root_working_dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train", *arguments, "paths.model_name=whole"])
        train.main()
    return folder


@pytest.fixture
def start(runs, capsys, monkeypatch):
    def start(name, *more, program=train.main):
        settings = f"paths.root_working_dir={runs}", f"paths.model_name={name}"
        return train_here(capsys, monkeypatch, *ARGUMENTS, *settings, *more, program=program)

    return start


def checkpoint(run, step):
    (found,) = (run / "checkpoints").glob(f"{step:08d}.*")
    return found


def assert_as_whole(runs, name):
    assert rows(runs / name) == rows(runs / "whole")
    assert arrays(checkpoint(runs / name, 6)) == arrays(checkpoint(runs / "whole", 6))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_the_run_goes_on_later(runs, start, monkeypatch, number):
    log = Run.log

    def log_and_signal(self, row):
        log(self, row)
        if row["step"] == 1:  # while step 2 is at work
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(Run, "log", log_and_signal)
    out, code = start(number.name)
    assert code == str(128 + number)
    assert out.endswith(
        f"\nstopped after step 3 by {number.name}; the same command goes on there\n"
    )
    assert signal.getsignal(number) == before
    monkeypatch.setattr(Run, "log", log)
    out, code = start(number.name)
    assert not code and "\nresumed at step 3 from " in out
    assert_as_whole(runs, number.name)


TWICE = """
import os, signal
import train
from data.run import Run

def log(self, row):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

Run.log = log
train.main()
"""


def test_the_second_ctrl_c_ends_it_at_once(runs):
    settings = f"paths.root_working_dir={runs}", "paths.model_name=twice"
    done = subprocess.run(
        [sys.executable, "-c", TWICE, *ARGUMENTS, *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130 and not (runs / "twice/checkpoints").exists()
    assert "Traceback" not in done.stderr


def test_an_update_that_is_not_finite_is_left_out_inside_the_step():
    config = small_config()
    with jax.set_mesh(mesh(2, 2)):
        state = train.init_state(config)
        batch = train.TokenBatch(jnp.ones((8, 12), jnp.uint32), jnp.zeros((8, 12), bool))
        state, metrics = train.training_step(state, batch, config)
        assert int(metrics.skipped) == 0 and np.isfinite(metrics.loss)
        embed = state.weights.embed.at[1, 0].set(jnp.inf)
        weights = dataclasses.replace(state.weights, embed=embed)
        state = dataclasses.replace(state, weights=weights)
        before = jax.device_get((state.weights, state.mu, state.nu))
        state, metrics = train.training_step(state, batch, config)
    assert int(metrics.skipped) == 1 and not np.isfinite(metrics.loss)
    after = jax.device_get((state.weights, state.mu, state.nu))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.step) == 2


def test_what_is_not_finite_stops_the_run_and_is_named(runs, start):
    out, message = start("bad", "training.learning_rate=1e30", "checkpoint_interval=1")
    assert out.count("saved ") == 1
    message = re.sub(r"sequences [\d, ]+", "sequences NUMBERS ", message.replace(str(runs), "runs"))
    golden.check("runs.txt", "a loss that is no number", message)
    (kept,) = (runs / "bad/checkpoints").iterdir()
    group = zarr.open_group(kept, mode="r")
    assert kept.name.startswith("00000001.")
    assert all(np.isfinite(group[name][()]).all() for name in group.attrs["arrays"])
    last = json.loads((runs / "bad/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["skipped"] == 1 and last["grad_norm"] is None


def test_so_many_updates_in_a_row_may_be_left_out(runs, start, monkeypatch):
    """Of the batches of steps 2 and 3, the loss is made infinite."""
    bad = "loss = jnp.where((state.step == 2) | (state.step == 3), jnp.inf, loss)"
    taken = "loss, grads = loss_and_grads(state.weights, batch, config)\n"
    module = edited("train.py", (taken, f"{taken}    {bad}\n"))
    out, message = start("two", "training.max_skipped_updates=2", program=module.main)
    assert not message and "done: 6 steps" in out
    assert [row["skipped"] for row in rows(runs / "two")] == [0, 0, 1, 1, 0, 0]
    warned = re.findall("^warning: step (.*); the update is left out, (.) in a row", out, re.M)
    assert [(text[0], count) for text, count in warned] == [("2", "1"), ("3", "2")]
    out, message = start("one", "training.max_skipped_updates=1", program=module.main)
    assert message.startswith("error: step 3: loss inf, gradient norm ")
    assert "finite: none, with the weights of now; batch 3 is of " in message


def test_a_batch_that_is_left_out(runs, start):
    """The steps from there on have what comes after it."""
    start("skips", "training.skip_steps=[3, 5]", "training.steps=3", "training.steps_for_lr=6")
    out, message = start("skips", "training.skip_steps=[3, 5]")
    assert not message and "\nresumed at step 3" in out
    assert rows(runs / "skips")[:3] == rows(runs / "whole")[:3]
    assert rows(runs / "skips")[3]["loss"] != rows(runs / "whole")[3]["loss"]


def test_a_clone_starts_from_anothers_weights_or_its_whole_state(runs, start):
    third = checkpoint(runs / "whole", 3)
    out, message = start("state", f"paths.clone_from={third}", "paths.clone_weights_only=false")
    assert not message and f"\nresumed at step 3 from {third}\n" in out
    assert rows(runs / "state") == rows(runs / "whole")[3:]
    assert arrays(checkpoint(runs / "state", 6)) == arrays(checkpoint(runs / "whole", 6))

    whole = runs / "whole/checkpoints"
    clone = f"paths.clone_from={whole}", "training.learning_rate=0", "training.steps=1"
    out, message = start("weights", *clone)
    assert not message and f"\nweights from {checkpoint(runs / 'whole', 6)}\n" in out
    assert [row["step"] for row in rows(runs / "weights")] == [0]
    found, wanted = (
        arrays(checkpoint(runs / name, n)) for name, n in [("weights", 1), ("whole", 6)]
    )
    for name, bits in wanted.items():
        assert (found[name] == bits) == name.startswith("weights/"), name
    out, message = start("weights", f"paths.clone_from={whole}", "training.steps=2")
    assert "\nresumed at step 1 from " in out, "it has a checkpoint of its own now"
    out, message = start("none", f"paths.clone_from={runs}/nowhere")
    golden.check("runs.txt", "nothing to clone", message.replace(str(runs), "runs"))


def test_the_folder_says_what_the_run_depends_on(runs, start):
    start("about", "training.steps=1", "training.steps_for_lr=6")
    out, _ = start("about", "training.steps=2", "training.steps_for_lr=6", "flat_tokens.seed=5")
    assert "changed since the last start: flat_tokens.seed=5, before 0\n" in out
    assert "changed since the last start: training.steps=2, before 1\n" in out
    first, second = (json.loads(line) for line in (runs / "about/starts.jsonl").open())
    assert (first["first_step"], second["first_step"]) == (0, 1)
    assert second["config"] == (runs / "about/config.yaml").read_text()
    assert first["command"].startswith("train --config-name=local_test_synthetic ")
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"] == "8 x cpu" and first["hosts"] == 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert first["commit"] == (head.stdout.strip() or None)
