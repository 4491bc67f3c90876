import io
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

import runtime.supervise
from runtime.supervise import Lease, LeaseError, Watchdog
from tests import golden
from tests.helpers import ROOT

HELD = """
import pathlib, sys, time
from runtime.supervise import Lease
with Lease(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder):
    """Another process that has the folder's lease, until its input is closed."""
    command = [sys.executable, "-c", HELD, str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def leases(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_a_second_run_is_refused_and_harms_nothing(tmp_path, monkeypatch):
    with hold(tmp_path) as process:
        before = leases(tmp_path)
        with pytest.raises(LeaseError) as error, Lease(tmp_path):
            pass
        assert leases(tmp_path) == before and len(before) == 1
        process.stdin.close()
    text = re.sub(rf"{process.pid} on \S+;", "PID on HOST;", str(error.value))
    golden.check("runs.txt", "another run", text.replace(str(tmp_path), "runs/run"))
    assert leases(tmp_path) == []
    with Lease(tmp_path) as lease:
        assert len(leases(tmp_path)) == 1 and not lease.lost()
    assert leases(tmp_path) == []


def test_a_killed_run_leaves_the_folder_free_at_once(tmp_path):
    with hold(tmp_path) as process:
        process.kill()
    assert len(leases(tmp_path)) == 1
    with Lease(tmp_path) as lease:
        assert leases(tmp_path) == [lease.file.name]


ELSEWHERE = '{"pid": 1, "started": "5", "host": "far", "kernel": "another"}'


@pytest.mark.parametrize("text", [ELSEWHERE, "", '{"pid": 1, "sta'])
def test_one_of_another_machine_counts_until_it_is_old(tmp_path, monkeypatch, text):
    """By the file system's clock: the machine's own may be wrong."""
    monkeypatch.setattr(runtime.supervise, "STALE", 1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    (tmp_path / "metrics").touch()
    other = tmp_path / "lease.5.1.json"
    other.write_text(text)
    begun = time.monotonic()
    with Lease(tmp_path) as lease:
        assert time.monotonic() - begun > 1, "it may be renewed yet"
        assert leases(tmp_path) == [lease.file.name, "metrics"]
    other.write_text(text)
    os.utime(other, (time.monotonic(),) * 2)  # long ago
    with Lease(tmp_path):
        pass


def test_a_run_that_was_stopped_for_long_finds_that_it_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.supervise, "RENEWED", 1000)  # as if it were stopped
    monkeypatch.setattr(runtime.supervise, "STALE", 1)
    monkeypatch.setattr(runtime.supervise, "_dead", lambda holder: False)
    with Lease(tmp_path) as first:
        assert not first.lost()
        with Lease(tmp_path) as second:
            assert first.lost() and not second.lost()


def test_two_that_start_at_once_are_not_both_at_work(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(2)
    ]
    # One may end before the other begins: both live on, or are refused, only in turn.
    first = [process.stdout.readline() for process in both]
    for process in both:
        process.communicate()
    assert first.count("held\n") <= 1 and leases(tmp_path) == []


HANGS = """
import pathlib, sys, time
from runtime.supervise import Watchdog
with Watchdog(0.5, sys.argv[2] == "ends", pathlib.Path(sys.argv[1])) as watchdog:
    for _ in range(8):
        time.sleep(0.2)
        watchdog.beat()
    def stuck():
        time.sleep(1.5)
    stuck()
    watchdog.beat()
print("over")
"""


@pytest.mark.parametrize("how", ["ends", "waits on"])
def test_a_step_that_hangs_leaves_the_stacks_of_all_threads(tmp_path, how):
    file = tmp_path / "hang.txt"
    command = [sys.executable, "-c", HANGS, str(file), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((124, "") if how == "ends" else (0, "over\n"))
    for text in file.read_text(), done.stderr:
        assert text.startswith("no step ended for 0.5 s; the threads' stacks:\n")
        assert re.search(r'File "<string>", line \d+ in stuck', text), "the one that hangs"
        assert text.count("no step ended") == 1, "it is said once"
    assert done.stderr.endswith(f"these stacks are in {file}\n")


def test_no_hang_no_word(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Watchdog(0, True, pathlib.Path(tmp_path / "x")) as watchdog:
        watchdog.beat()
    assert not watchdog.thread.is_alive() and not leases(tmp_path)
