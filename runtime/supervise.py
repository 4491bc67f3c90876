"""What may end a run from outside: a signal, or another run in its folder."""

import contextlib
import fcntl
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from shardlib.errors import UserError


class Stop:
    """Whether the run is to stop after this step, because SIGTERM or Ctrl-C came to any host while
    the `with` block ran. The second Ctrl-C ends the process at once, whatever it waits for."""

    signal = signal.SIGTERM

    def __init__(self) -> None:
        self.asked, self.alone = False, jax.process_count() == 1

    def __enter__(self) -> "Stop":
        handled = [signal.SIGINT, *([signal.SIGTERM] if self.alone else [])]  # else JAX handles it
        self.before = {number: signal.signal(number, self._hear) for number in handled}
        # Python calls _hear once the C code at work has returned, which a hung step never does. The
        # number of the signal is written to the socket even then.
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
        self.signal = signal.Signals(number)
        self.ask()

    def _listen(self) -> None:
        interrupts = 0
        with self.ours:
            while number := self.ours.recv(1):
                interrupts += number[0] == signal.SIGINT
                if interrupts == 2:
                    os._exit(128 + signal.SIGINT)

    def ask(self) -> None:
        self.asked = True
        if not self.alone:  # JAX tells the other hosts
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, step: int) -> bool:
        """Whether to stop after this step: the same on all hosts."""
        return self.asked if self.alone else multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a run's folder, which it makes, until the block or the process ends, however it ends.
    The file `lock` says who holds it. Raises UserError if another process does, or if the folder
    can't be written; warns where the file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise UserError(
            f"{folder} can't be written: {error.strerror}; choose another paths.model_name or "
            "paths.root_working_dir"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use by {file.read()}; choose another paths.model_name, or stop "
                "that run"
            ) from None
        except OSError as error:
            says = f"{file.name} can't be locked ({error.strerror}), so another run may start here"
            print(f"warning: {says}", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
