"""A run that is killed and started again ends as if it had not been."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import zarr

from data.run import MetricsError, Run
from tests import golden
from tests.helpers import ROOT, SMALL, train_here

ARGUMENTS = [
    "--config-name=local_test_synthetic",
    *SMALL,
    "training.steps=10",
    "mesh={d: 2, t: 2}",
    "checkpoint_interval=3",
]

# Runs train, and kills itself at the given write to a checkpoint, or in the middle of a row.
KILLED = """
import os, signal, sys
import zarr.storage
import train
from data.run import Run

what, number = sys.argv.pop(1), int(sys.argv.pop(1))
put, log, count = zarr.storage.LocalStore.set, Run.log, 0

async def set_or_die(self, key, value, *args, **kwargs):
    global count
    count += 1
    if what == "write" and count == number:
        os.kill(os.getpid(), signal.SIGKILL)
    await put(self, key, value, *args, **kwargs)

def log_or_die(self, row):
    if what == "row" and row["step"] == number:
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": %d, "lo' % number)
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, row)

zarr.storage.LocalStore.set, Run.log = set_or_die, log_or_die
train.main()
"""


def killed(root, what, number):
    command = [sys.executable, "-c", KILLED, what, str(number), *ARGUMENTS]
    settings = [f"paths.root_working_dir={root}", "paths.model_name=killed"]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{root}/compiled"}  # the test's time
    done = subprocess.run([*command, *settings], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def rows(path):
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    timed = {"tokens_per_second", "data_wait_seconds"}
    return [{k: v for k, v in row.items() if k not in timed} for row in found]


def arrays(path):
    group = zarr.open_group(path, mode="r")
    return {name: np.asarray(group[name][()]).tobytes() for name in group.attrs["arrays"]}


def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path, capsys, monkeypatch):
    settings = f"paths.root_working_dir={tmp_path}"
    out, message = train_here(capsys, monkeypatch, *ARGUMENTS, settings, "paths.model_name=whole")
    assert not message and out.count("\nsaved ") == 4
    whole = tmp_path / "whole"
    assert [row["step"] for row in rows(whole)] == list(range(10))
    assert rows(whole)[-1]["loss"] < rows(whole)[0]["loss"] - 0.1

    run = tmp_path / "killed"
    writes = sum(len(files) for _, _, files in os.walk(whole / "checkpoints")) // 4
    out = killed(tmp_path, "write", 20)  # among the arrays' descriptions, of the first save
    assert "resumed" not in out
    out = killed(tmp_path, "write", 2 * writes - 20)  # among the chunks of the second
    assert "resumed" not in out and "\nsaved " in out
    steps = [row["step"] for row in rows(run)]
    assert steps == list(range(len(steps))) and len(steps) >= 6, "it went on while it saved"
    out = killed(tmp_path, "row", 5)
    assert f"\nresumed at step 3 from {run}/checkpoints/00000003." in out
    assert (run / "metrics.jsonl").read_text().endswith('\n{"step": 5, "lo')
    out = killed(tmp_path, "write", 2 * writes + 7)  # a third save, after two of this attempt
    assert "\nresumed at step 3 from " in out

    out, message = train_here(capsys, monkeypatch, *ARGUMENTS, settings, "paths.model_name=killed")
    assert not message and "\nresumed at step 9 from " in out and "\ndone: 1 steps" in out
    assert rows(run) == rows(whole)
    ends = [max((path / "checkpoints").glob("00000010.*")) for path in (run, whole)]
    assert arrays(ends[0]) == arrays(ends[1])


def test_a_finished_run_says_so_and_a_longer_one_goes_on(tmp_path, capsys, monkeypatch):
    run = [*ARGUMENTS, f"paths.root_working_dir={tmp_path}", "paths.model_name=run"]
    short = [*run, "training.steps_for_lr=10", "training.steps=2"]
    train_here(capsys, monkeypatch, *short)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    out, message = train_here(capsys, monkeypatch, *short)
    assert (out, message) == (
        f"{tmp_path}/run is complete: 2 steps are done. To go on, set training.steps above that; "
        "to start anew, choose another paths.model_name\n",
        "",
    )
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}

    out, message = train_here(capsys, monkeypatch, *run, "model.d_ff=80")
    assert "is of another model: model.d_ff is 40 there, 80 here" in message
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}

    out, message = train_here(capsys, monkeypatch, *run, "mesh={d: 1, t: 4}", "training.steps=4")
    assert not message and "\nresumed at step 2 from " in out
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


METRICS = {
    "rows": ('{"step": 0}\n{"step": 1}\n{"step": 2}\n', 2),
    "a row cut short": ('{"step": 0}\n{"step": 1}\n{"st', 2),
    "rows of an earlier start twice": ('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 2}\n', 2),
    "a damaged row": ('{"step": 0}\n{"st"\n{"step": 2}\n', None),
    "an empty row": ('\n{"step": 0}\n', None),
    "no row": ('{"step": 0}\n5\n', None),
    "nothing": ("", 0),
}


@pytest.mark.parametrize("case", METRICS)
def test_what_is_kept_of_the_metrics(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, kept = METRICS[case]
    run = Run("runs", "run")
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text(text)
    if kept is None:
        with pytest.raises(MetricsError) as error:
            run.open("", 2)
        golden.check("wrong_inputs.txt", f"metrics with {case}", str(error.value))
        assert (run.folder / "metrics.jsonl").read_text() == text
    else:
        run.open("", 2)
        assert [row["step"] for row in rows(run.folder)] == list(range(kept))
        run.log({"step": 2, "loss": 1.5})
        assert rows(run.folder)[-1] == {"step": 2, "loss": 1.5}


def test_a_start_killed_while_it_writes_the_config_harms_no_later_one(tmp_path, monkeypatch):
    def killed(path, text):
        path.write_bytes(text[:24].encode())
        raise KeyboardInterrupt

    config = "model:\n  d_model: 32\n  n_q_per_kv: 2\n"
    Run(str(tmp_path), "run").open(config, 0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pathlib.Path, "write_text", killed)
        Run(str(tmp_path), "run").open(config, 2)
    Run(str(tmp_path), "run").open(config, 2)
    assert (tmp_path / "run/config.yaml").read_text() == config
