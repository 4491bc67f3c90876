"""Tests the state that a run starts from, and what makes it stop."""

import dataclasses
import errno
import json
import multiprocessing.connection
import os
import re
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from checks import preflight
from checks.finite import explanation
from runtime import sinks
from runtime.checkpoint import CheckpointError, Checkpoints, named
from runtime.run import Run
from runtime.supervise import STOPS
from shardlib.types import make_shardings
from tests import golden, helpers
from tests.files import arrays, rows
from tests.helpers import ROOT, SMALL, mesh, small_config
from tests.processes import python_at_work

# All runs have the same program, which is compiled once.
ARGUMENTS = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 1, t: 1}"]
ARGUMENTS += ["training.steps=6", "training.steps_for_lr=6"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs, with an uninterrupted one, `whole`, which has a checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = [*ARGUMENTS, "checkpoint_interval=3", f"paths.root_working_dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train", *arguments, "paths.model_name=whole"])
        train.main()
    return folder


@pytest.fixture
def start(runs, train_here):
    def start(name, *more, program=train.main):
        settings = f"paths.root_working_dir={runs}", f"paths.model_name={name}"
        return train_here(*ARGUMENTS, *settings, *more, program=program)

    return start


def checkpoint(run, step):
    (path,) = (run / "checkpoints").glob(f"{step:08d}.*")
    return path


def assert_as_whole(runs, name):
    assert rows(runs / name) == rows(runs / "whole")
    assert arrays(checkpoint(runs / name, 6)) == arrays(checkpoint(runs / "whole", 6))


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_ends_the_step_saves_and_the_run_goes_on_later(runs, start, monkeypatch, number):
    log = Run.write

    def log_and_signal(self, row):
        log(self, row)
        if row["step"] == 1:  # while step 2 is running
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(Run, "write", log_and_signal)
    out, code = start(number.name)
    assert code == str(128 + number)
    line = f"stopped by {number.name} after 3 steps; the same command resumes there"
    assert out.endswith(f"\n{line}\n")
    assert signal.getsignal(number) == before
    monkeypatch.setattr(Run, "write", log)
    out, code = start(number.name)
    assert not code and "\nresumed at step 3 from " in out
    assert_as_whole(runs, number.name)


def test_a_signal_ends_the_check_of_numbers(start, monkeypatch):
    """One that all processes get, as from Slurm."""

    def after_a_signal(left, timeout):
        for each in multiprocessing.active_children():
            os.kill(each.pid, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        for each in wait(left, timeout):
            each.recv()  # raises EOFError if the signal ended its process
        return []  # even if all results came first: the run would then take a step

    wait = multiprocessing.connection.wait
    monkeypatch.setattr(multiprocessing.connection, "wait", after_a_signal)
    monkeypatch.setattr(preflight, "SECONDS_BETWEEN_LINES", -1)
    out, code = start("compared", "check=numbers", "model.norm_eps=1e-4")
    assert code == str(128 + signal.SIGTERM)
    assert re.search(r"\ncomparing the numbers: 0 of 2 results are there\n", out)
    assert out.endswith("\nstopped by SIGTERM after 0 steps; the same command resumes there\n")
    assert not multiprocessing.active_children()


def test_an_update_that_is_not_finite_is_left_out_inside_the_step():
    config = small_config()
    with jax.set_mesh(mesh(2, 2)):
        state = train.init_state(config)
        ones = np.ones((8, 12), int)
        batch = helpers.token_batch(train.TokenBatch, ones, ones == 0)
        state, metrics = helpers.take_step(train, state, batch, config)
        assert int(metrics["skipped"]) == 0 and np.isfinite(metrics["loss"])
        embed = state.weights.embed.at[1, 0].set(jnp.inf)
        weights = dataclasses.replace(state.weights, embed=embed)
        state = dataclasses.replace(state, weights=weights)
        before = jax.device_get((state.weights, state.mu, state.nu))
        state, metrics = helpers.take_step(train, state, batch, config)
        given = config, state.weights, batch, "batch 7 is of the seventh page"
        text = explanation(train.gradients, *given)
        fresh = train.init_state(config).weights
        large = {"final_norm": fresh.final_norm * 1e21, "unembed": fresh.unembed * 1e-21}
        overflowing = explanation(
            train.gradients, config, dataclasses.replace(fresh, **large), batch, ""
        )
    assert text.startswith("gradients whose norm is not finite: embed, layers/")
    cause = "is of the seventh page. Random tokens have such gradients, too: the weights diverged, "
    assert cause in text
    assert overflowing.startswith("gradients whose norm is not finite: unembed; ")
    assert int(metrics["skipped"]) == 1 and not np.isfinite(metrics["loss"])
    after = jax.device_get((state.weights, state.mu, state.nu))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.step) == 2


@pytest.mark.slow
def test_so_many_updates_in_a_row_may_be_left_out(runs, start, monkeypatch):
    """The loss of steps 2 and 3 is made infinite."""
    bad = "count = jnp.where((state.step == 2) | (state.step == 3), 0, count)"
    taken = "sums, count, raw_grads = loss_and_grads(state.weights, batch, config)\n"
    module = helpers.edited("train.py", (taken, f"{taken}    {bad}\n"))
    out, message = start("two", "training.max_skipped_updates=2", program=module.main)
    assert not message and "done: 6 steps" in out
    assert [row["skipped"] for row in rows(runs / "two")] == [0, 0, 1, 1, 0, 0]
    warned = re.findall("^warning: step (.*); skipped the update, (.) in a row", out, re.M)
    assert [(text[0], count) for text, count in warned] == [("2", "1"), ("3", "2")]
    one = "training.max_skipped_updates=1", "checkpoint_interval=2"
    out, message = start("one", *one, program=module.main)
    message = message.replace(str(runs), "runs").replace(f"{ROOT}/", "")
    message = re.sub(r"norm [\d.]+", "norm NORM", message)
    message = re.sub(r"sequences [\d, ]+", "sequences NUMBERS ", message)
    golden.check("runs.txt", "a loss that is no number", message)
    (kept,) = (runs / "one/checkpoints").iterdir()
    assert kept.name.startswith("00000002."), "no checkpoint of the bad state"


def test_a_batch_that_is_left_out(runs, start):
    """Later steps get the batches after it, and the run's folder has each start's config."""
    start("skips", "training.steps=3")
    out, message = start("skips", "training.skip_steps=[3, 5]")
    assert not message and "\nresumed at step 3" in out
    note = "note: the learning rate doesn't reach its peak: training.warmup_steps=10, "
    note += "but it rises for only 6 steps"
    assert note in out.splitlines()
    assert rows(runs / "skips")[:3] == rows(runs / "whole")[:3]
    assert rows(runs / "skips")[3]["loss"] != rows(runs / "whole")[3]["loss"]

    first, second = map(json.loads, (runs / "skips/starts.jsonl").read_text().splitlines())
    assert (first["first_step"], second["first_step"]) == (0, 3)
    assert second["config"] == (runs / "skips/config.yaml").read_text()
    assert first["command"].startswith("train --config-name=local_test_synthetic ")
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"] == "8 x cpu" and first["hosts"] == 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (first["commit"] or "").removesuffix("-dirty") == head.stdout.strip()
    assert bool(first["edits"]) == (first["commit"] or "").endswith("-dirty")


@pytest.mark.slow
def test_a_clone_of_another_model_is_asked_for(runs, capsys):
    """Its arrays must fit."""

    def start(*overrides):
        path = f"paths.clone_from={runs / 'whole'}"
        scaling = "model.rope_scaling={factor: 4, low_frequency_factor: 1, "
        scaling += "high_frequency_factor: 4, original_len: 12}"
        config = small_config("model.vocab=128", scaling, path, *overrides)
        kinds, sizes = train.state_type(config), train.dimensions(config)
        with jax.set_mesh(mesh(1, 1)):
            made = Checkpoints(str(runs / "none"), kinds, sizes, config.to_yaml(), 4)
            helpers.starting_state(config, made)

    other = "paths.clone_other_model=true"
    with pytest.raises(CheckpointError, match=rf"factor is null in .*, or accept it with {other}"):
        start()
    start(other)
    assert ", a model with model.rope_scaling=null\n" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"weights/.*D=4\] in the checkpoint .* train.py$"):
        start(other, "model.d_head=2")


def test_a_clone_starts_from_anothers_whole_state(runs, start):
    """Its metrics are its own: those of an attempt under the same name are put aside."""
    third = checkpoint(runs / "whole", 3)
    (runs / "state").mkdir()
    (runs / "state/metrics.jsonl").write_text('{"step": 0}\n')
    clone = f"paths.clone_from={third}", "paths.clone_weights_only=false"
    out, message = start("state", *clone)
    assert not message and f"\nresumed at step 3 from {third}\n" in out
    assert rows(runs / "state") == rows(runs / "whole")[3:]
    assert arrays(checkpoint(runs / "state", 6)) == arrays(checkpoint(runs / "whole", 6))


def test_a_clone_starts_from_anothers_weights(runs, capsys):
    path = runs / "whole/checkpoints"
    config = small_config("model.vocab=128", f"paths.clone_from={path}")
    wanted = arrays(checkpoint(runs / "whole", 6))
    arguments = train.state_type(config), train.dimensions(config), config.to_yaml(), 4
    with jax.set_mesh(mesh(2, 2)):
        own = Checkpoints(str(runs / "new"), *arguments)
        state = helpers.starting_state(config, own)
        for name, actual in named(jax.device_get(state)).items():
            if name.startswith("weights/"):
                assert actual.tobytes() == wanted[name]
            else:
                assert not actual.any(), "moments, and the step"
        assert capsys.readouterr().out == f"weights from {checkpoint(runs / 'whole', 6)}\n"
        assert jax.tree.map(lambda x: x.sharding, state) == make_shardings(train.state_type(config))

        # Once it has a checkpoint of its own, it resumes from that.
        own.save(5, dataclasses.replace(state, step=jnp.uint32(5)))
        own.wait()
        state = helpers.starting_state(config, Checkpoints(str(runs / "new"), *arguments))
        line = capsys.readouterr().out.splitlines()[-1]
        assert int(state.step) == 5
        assert line.startswith(f"resumed at step 5 from {runs}/new/00000005.")
        other = small_config(
            "model.vocab=128", "training.warmup_steps=8", "checkpoints.keep_last=3"
        )
        helpers.starting_state(other, Checkpoints(str(runs / "new"), *arguments))
        note = "note: the steps before were trained with "
        note += "checkpoints.keep_last=0, training.warmup_steps=10"
        assert capsys.readouterr().out.splitlines()[-1] == note
        nowhere = small_config(f"paths.clone_from={runs}/nowhere")
        with golden.raises("runs.txt", "nothing to clone", CheckpointError, (str(runs), "runs")):
            helpers.starting_state(nowhere, Checkpoints(str(runs / "newer"), *arguments))


def test_weights_that_a_step_made_infinite_are_in_no_checkpoint(runs, start):
    """Loss and gradients are finite."""
    far = "training={learning_rate: 3e38, warmup_steps: 0, weight_decay: 100}"
    out, message = start("far", far, "training.steps=1")
    problem = "error: after step 0 these are NaN or infinite, and in no checkpoint: weights/"
    assert message.startswith(problem) and message.endswith(". Lower training.learning_rate")
    assert "saved" not in out and not [*(runs / "far/checkpoints").glob("*")]


@pytest.mark.slow
def test_metrics_that_can_not_be_written_end_the_run_after_a_checkpoint(runs, start, monkeypatch):
    def json_lines(*arguments):
        write, failures = sinks.json_lines(*arguments), iter([2, 3])

        def log(row):
            if row["step"] == 2 and next(failures, None):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(row)

        return log

    with monkeypatch.context() as patch:
        patch.setattr("runtime.run.json_lines", json_lines)
        out, message = start("full")
    problem = "error: step 2 can't be logged: [Errno 28] No space left on device; stopped after "
    steps = int(message.removeprefix(problem).removesuffix(" steps, which are saved"))
    assert [row["step"] for row in rows(runs / "full")] == [*range(steps)]
    out, message = start("full")
    assert not message and f"\nresumed at step {steps} from " in out
    assert_as_whole(runs, "full")


@pytest.mark.slow
def test_a_run_whose_last_save_fails_does_not_end_well(start, monkeypatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr("runtime.storage.write", fail)
    out, message = start("unsaved", "checkpoints.stop_on_error=false")
    assert re.search("^warning: .*/00000006.* can't be written: .*; the run continues$", out, re.M)
    assert re.fullmatch("error: the last checkpoint is missing: .*/00000006.*no room.*", message)
    assert "done: " not in out


PRINTS = """
import sys
from runtime.run import say
for number in range(10**5):
    say(f"line {number}")
if len(sys.argv) == 1:
    print("over", file=sys.stderr)
"""


def test_a_run_outlives_its_standard_output():
    with python_at_work("-c", PRINTS) as process:
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == "warning: standard output ends here: Broken pipe\nover\n"
    assert process.returncode == 0
    with python_at_work("-c", PRINTS, "both", stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
    assert process.returncode == 0
