"""What may end a run from outside: a signal, a step that hangs, another run in its folder."""

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from shardlib.errors import UserError

RENEWED = 2  # seconds between renewals of a lease
STALE = 30  # seconds after which one that isn't renewed counts for nothing


class Stop:
    """Whether the run is to stop after this step, since SIGTERM or Ctrl-C came while the `with`
    block ran, to any host. The second Ctrl-C ends the process at once, whatever it waits for."""

    signal = signal.SIGTERM

    def __init__(self) -> None:
        self.asked, self.alone = False, jax.process_count() == 1

    def __enter__(self) -> "Stop":
        handled = [signal.SIGINT, *([signal.SIGTERM] if self.alone else [])]  # else JAX handles it
        self.before = {number: signal.signal(number, self._hear) for number in handled}
        # Python calls _hear once what is at work has returned: a step that hangs never does.
        self.ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.wakes, self.woke = theirs, signal.set_wakeup_fd(theirs.fileno())
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.woke)
        self.wakes.close()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        self.ask()

    def _listen(self) -> None:
        count = 0
        with self.ours:
            while number := self.ours.recv(1):
                count += number[0] == signal.SIGINT
                if count == 2:
                    os._exit(128 + signal.SIGINT)

    def ask(self) -> None:
        self.asked = True
        if not self.alone:  # JAX tells the other hosts
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, step: int) -> bool:
        """The same on all hosts."""
        return self.asked if self.alone else multihost_utils.reached_preemption_sync_point(step)


class Watchdog:
    """Writes the stacks of all threads to a file, and to standard error, when `timeout` seconds
    have passed without a `beat`. Then ends the process with 124, or goes on waiting. 0: never."""

    def __init__(self, timeout: float, ends: bool, file: pathlib.Path):
        self.timeout, self.ends, self.file = timeout, ends, file
        self.beaten, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.timeout:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.over = True
        self.beat()

    def beat(self) -> None:
        self.beaten.set()

    def _watch(self) -> None:
        while not self.over:
            if self.beaten.wait(self.timeout):
                self.beaten.clear()
                continue
            with self.file.open("a") as file:
                for out in file, sys.stderr:
                    print(f"no step ended for {self.timeout} s; the threads' stacks:", file=out)
                    out.flush()
                    faulthandler.dump_traceback(out)
            print(f"these stacks are in {self.file}", file=sys.stderr, flush=True)
            if self.ends:
                os._exit(124)
            self.beaten.wait()


class LeaseError(UserError):
    """Another run is at work in the folder, or it can't be written."""


class Lease:
    """Says in a folder that a run is at work there, for as long as the `with` block runs. The first
    host does so; for the others it is nothing.

    Each run has a file of its own, and renews it; the age of another's is told by the file system's
    clock alone. Raises LeaseError if there is another's that is still renewed; waits to know. A run
    that was stopped for so long that another took over finds its own file gone: see `lost`.
    """

    def __init__(self, folder: pathlib.Path, first_host: bool = True):
        self.held = first_host
        me = {"pid": os.getpid(), "started": _started(os.getpid())}
        me |= {"host": socket.gethostname(), "kernel": _kernel()}
        self.file = folder / f"lease.{time.time_ns()}.{os.getpid()}.json"
        self.text = json.dumps(me)
        self.over = threading.Event()

    def __enter__(self) -> "Lease":
        if not self.held:
            return self
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.text)
        except OSError as error:
            raise LeaseError(
                f"{self.file.parent} can't be written: {error.strerror}; choose another "
                "paths.model_name or paths.root_working_dir"
            ) from None
        try:
            for other in self.file.parent.glob("lease.*.json"):
                if other != self.file:
                    self._outlast(other)
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._renew, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it isn't empty, as a rule
            self.file.parent.rmdir()

    def lost(self) -> bool:
        return self.held and not self.file.exists()

    def _renew(self) -> None:
        while not self.over.wait(RENEWED) and not self.lost():
            with contextlib.suppress(OSError):  # the file is gone now, or its disk for a moment
                os.utime(self.file)

    def _outlast(self, other: pathlib.Path) -> None:
        """Removes it if its run is dead, or else waits until it is old, or renewed."""
        try:
            holder, first = _json(other.read_text()), other.stat().st_mtime
            while not _dead(holder):
                os.utime(self.file)
                age = self.file.stat().st_mtime - other.stat().st_mtime
                if other.stat().st_mtime != first:
                    raise LeaseError(
                        f"{other.parent} is in use by process {holder.get('pid')} on "
                        f"{holder.get('host')}; choose another paths.model_name, or stop that run"
                    )
                if age > STALE:
                    break
                time.sleep(0.5)
            other.unlink()
        except FileNotFoundError:  # its run has ended in the meantime
            return


def _started(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the machine did; None: there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _kernel() -> str | None:
    """What a process's number is of: this machine since it was booted, this container."""
    try:
        booted = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _dead(holder: dict[str, Any]) -> bool:
    """Whether it ran here, and doesn't any more."""
    here = _kernel() and holder.get("kernel") == _kernel()
    return bool(here) and _started(holder["pid"]) != holder["started"]


def _json(text: str) -> dict[str, Any]:
    """Empty if it isn't whole."""
    try:
        return json.loads(text)
    except ValueError:
        return {}
