import errno
import fcntl
import os
import signal
import subprocess
import threading

import pytest

from runtime.supervise import Stop, locked
from shardlib.errors import UserError
from tests.processes import python_at_work

HELD = """
import pathlib, sys
from runtime.supervise import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def start(folder):
    """Starts a process that locks the folder until its standard input is closed."""
    return python_at_work("-c", HELD, folder, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_run_is_refused_until_the_first_has_ended(killed, tmp_path):
    folder = tmp_path / "run"
    with start(folder) as process:
        assert process.stdout.readline() == "held\n"
        busy = rf"^{folder} is in use by process {process.pid} on \S+; stop that process, or "
        with pytest.raises(UserError, match=busy), locked(folder):
            pass
        if killed:
            process.kill()
    with locked(folder):
        pass


def test_a_file_system_without_locks_gets_a_warning(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        problem = f"{tmp_path}/lock can't be locked (No locks available)"
        warning = f"warning: {problem}; don't start a second run there\n"
        assert capsys.readouterr().err == warning


def test_a_signal_that_nohup_or_a_handler_takes_stays_theirs():
    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR1, print)]
    try:
        with Stop() as stop:
            for number in signal.SIGHUP, signal.SIGUSR1:
                os.kill(os.getpid(), number)
            assert not stop.reached()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reached() and stop.received == signal.SIGTERM
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)


HANGS = """
import sys, time
from tests.runtime.test_run import begun, metrics
root, ends = sys.argv[1:]
settings = "hang_timeout_seconds=0.7", f"hang_ends={ends}", "checkpoint_interval=2"
def stuck():
    sys.stdin.read()
with begun(root, *settings, steps=3) as run:
    for step in range(3):
        with run.step(step, 0.0):
            if step == 2:
                stuck()
        run.log(step, metrics())
        if step == 0:
            run.pause()
            time.sleep(1)  # as compiling a validation might, and each of its batches a bit less
            for _ in range(2):
                run.interrupted()
                time.sleep(0.5)
        if run.saves_after(step, {}):  # steps 1 and 2
            time.sleep(1)  # as a save might
print("over")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["true", "false"])
def test_a_step_that_hangs_leaves_the_stacks_of_all_threads(tmp_path, ends):
    """A save and a validation may take any time."""
    with python_at_work("-c", HANGS, tmp_path, ends) as process:
        errors, timer = "", threading.Timer(60, process.kill)  # if it isn't noticed
        timer.start()
        for line in process.stderr:
            errors += line
            if line.endswith(" in stuck\n"):  # the function that hangs
                break
        if ends == "false":
            process.stdin.close()  # the step goes on
        errors += process.stderr.read()
        out = process.stdout.read()
        timer.cancel()
    assert process.returncode == (ends == "true"), errors
    assert out.endswith("\nover\n") == (ends == "false")
    assert errors.count("Timeout (0:00:00.700000)!") == 1 and " in stuck\n" in errors, errors
