"""Signals that stop a run, the lock that keeps a second run out of its folder, and what hosts tell
each other."""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, reached_preemption_sync_point

from runtime.errors import tell
from shardlib.errors import UserError

# Ctrl-C; what Slurm and Kubernetes send; a terminal that closes; Slurm's --signal=USR1.
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Handles signals during the block. Leaves SIGHUP and SIGUSR1 alone if they have a handler or
    are ignored, as SIGHUP is under nohup."""
    ours = signal.SIGINT, signal.SIGTERM
    numbers = [x for x in numbers if x in ours or signal.getsignal(x) == signal.SIG_DFL]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Stop(contextlib.ExitStack):
    """Tracks whether one of STOPS has reached any host during the `with` block, so that the run
    stops after the current step. A second Ctrl-C ends the process at once."""

    received = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__()
        self.requested = self.agreed = False
        self.asked, self.one_host = 0, jax.process_count() == 1

    def __enter__(self) -> Self:
        numbers = [each for each in STOPS if self.one_host or each != signal.SIGTERM]
        self.enter_context(handled(numbers, self._handle))
        # Python calls _handle only after running C code returns, which a hung step never does. The
        # number of the signal is written to the wakeup socket even then.
        self.receiver, sender = socket.socketpair()
        self.enter_context(sender).setblocking(False)
        self.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sender.fileno()))
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.ask()

    def _listen(self) -> None:
        interrupts = 0
        with self.receiver:
            while number := self.receiver.recv(1):
                interrupts += number[0] == signal.SIGINT
                if interrupts == 2:
                    os._exit(128 + signal.SIGINT)
                if number[0] in STOPS:
                    name = signal.Signals(number[0]).name
                    plan = "stopping; a step in progress is finished and saved"
                    tell(f"{name}: {plan}; Ctrl-C again ends at once", sys.stderr)

    def ask(self) -> None:
        """Requests a stop after the current step, on all hosts."""
        self.requested = True
        if not self.one_host:  # JAX handles SIGTERM then, and tells the other hosts
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self) -> bool:
        """Returns whether to stop now, the same on all hosts. All must call it equally often."""
        if self.one_host:
            return self.requested
        self.asked += 1
        self.agreed = self.agreed or reached_preemption_sync_point(self.asked)
        return self.agreed


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Creates a run's folder and locks it until the block or the process ends, however it ends. The
    file `lock` names the process that holds it. Raises UserError if another process holds it, or
    if the folder isn't writable; warns if the file system has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        cure = "choose another paths.model_name or paths.root_working_dir"
        raise UserError(f"{folder} is not writable: {error.strerror}; {cure}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            cure = "stop that process, or choose another paths.model_name"
            raise UserError(f"{folder} is in use by {file.read()}; {cure}") from None
        except OSError as error:
            problem = f"{file.name} can't be locked ({error.strerror})"
            tell(f"warning: {problem}; don't start a second run there", sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def of_all_hosts(own: str) -> list[str]:
    """Sends a text to all hosts. Returns the texts of all, by host."""
    if jax.process_count() == 1:
        return [own]
    text = np.array([*own.encode()], np.uint8)
    lengths = process_allgather(np.array(len(text)))
    texts = process_allgather(np.pad(text, (0, lengths.max() - len(text))))
    return [bytes(row[:n]).decode() for row, n in zip(texts, lengths, strict=True)]


def check_hosts_agree(own: dict[str, Any], cure: str) -> None:
    """Raises UserError on all hosts, with the cure, if one of these values, JSON by name, differs
    between them."""
    hosts = [*map(json.loads, of_all_hosts(json.dumps(own)))]
    for name in sorted(set().union(*hosts)):
        each = [str(host.get(name)) for host in hosts]
        if other := next((i for i, value in enumerate(each) if value != each[0]), 0):
            both = f"{each[0]} on host 0, {each[other]} on host {other}"
            raise UserError(f"hosts differ in {name}: {both}. {cure}")
