import errno
import fcntl
import re
import subprocess
import sys

import pytest

from runtime.supervise import locked
from shardlib.errors import UserError
from tests import golden
from tests.helpers import ROOT

HELD = """
import pathlib, sys
from runtime.supervise import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def start(folder):
    """Starts a process that locks the folder until its standard input is closed."""
    command, pipe = [sys.executable, "-c", HELD, str(folder)], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "run"
    with start(folder) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError) as error, locked(folder):
            pass
    text = re.sub(rf"{process.pid} on \S+;", "PID on HOST;", str(error.value))
    golden.check("runs.txt", "another run", text.replace(str(folder), "runs/run"))
    with locked(folder):
        pass


def test_a_killed_run_leaves_the_folder_free_at_once(tmp_path):
    with start(tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        process.kill()
    with locked(tmp_path):
        pass


def test_of_two_that_start_at_once_one_is_refused(tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    assert sorted(process.stdout.readline() for process in both) == ["", "held\n"]
    for process in both:
        process.communicate()


def test_a_file_system_without_locks_gets_a_warning(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        problem = f"{tmp_path}/lock can't be locked (No locks available)"
        warning = f"warning: {problem}; don't start a second run there\n"
        assert capsys.readouterr().err == warning


HANGS = """
import sys, time, jax
from runtime.run import Run
from tests.helpers import mesh, small_config
root, ends = sys.argv[1:]
settings = ["hang_timeout_seconds=0.7", f"hang_ends={ends}", f"paths.root_working_dir={root}"]
settings.append("checkpoint_interval=3")
with jax.set_mesh(mesh(1, 1)), Run(small_config(*settings, "paths.model_name=r")) as run:
    about = dict(tokens=1, flops=1, max_skipped=0, vectors={}, origin="")
    run.begin(first=0, steps=8, **about)
    def stuck(seconds):
        time.sleep(seconds)
    for step in range(8):
        with run.step(step, 0.0):
            stuck(1.2 if step == 6 else 0.1)
        run.log(step, dict(loss=1.0, grad_norm=1.0, skipped=0))
        if run.saves_after(step):  # steps 2, 5 and 7
            run.flush()
            time.sleep(1)  # as a save might
print("over")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["true", "false"])
def test_a_step_that_hangs_leaves_the_stacks_of_all_threads(tmp_path, ends):
    """A save may take any time."""
    command = [sys.executable, "-c", HANGS, str(tmp_path), ends]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (ends == "true")
    assert done.stdout.endswith("\nover\n") == (ends == "false")
    assert re.search(r'File "<string>", line \d+ in stuck', done.stderr), "the function that hangs"
    assert done.stderr.count("Timeout (0:00:00.700000)!") == 1, done.stderr
