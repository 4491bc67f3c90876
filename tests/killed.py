"""Trains like `python -m train`, and kills itself with SIGKILL at a chosen moment:

    python -m tests.killed KIND NUMBER ARGUMENTS...

KILLED_BY=SIGSTOP stops the process instead. The moment is number NUMBER of kind KIND since the
start, counted from 1; for a `row` of the metrics, NUMBER is its step. A process that reaches its
end prints the number of moments of each kind, and of saves.
"""

import collections
import json
import os
import pathlib
import signal
import sys
import threading
from types import SimpleNamespace

import jax
import zarr.storage
from jax._src import compiler
from jax._src.array import ArrayImpl

import train
from runtime import storage
from runtime.checkpoint import Checkpoints
from runtime.run import Run

KIND, NUMBER = sys.argv[1], int(sys.argv[2])
SIGNAL = signal.Signals[os.environ.get("KILLED_BY", "SIGKILL")]
moments = collections.Counter()
lock = threading.Lock()


def die():
    os.kill(os.getpid(), SIGNAL)


def moment(kind):
    with lock:
        moments[kind] += 1
        if (kind, moments[kind]) == (KIND, NUMBER):
            die()


def before(owner, name, kind):
    """Makes each call of a function a moment."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        moment(kind)
        return function(*args, **kwargs)

    setattr(owner, name, call)


async def set_around_record(self, key, value, *args, **kwargs):
    records = self.root.parent.name == "records"
    moment("write")
    if records:
        moment("record")
    await put(self, key, value, *args, **kwargs)
    if records:
        moment("recorded")


def log_half(self, row):
    if KIND == "row" and row["step"] == NUMBER:
        if self.first_host:
            with (self.folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(f'{{"step": {NUMBER}, "lo')
        die()
    log(self, row)


def initialize_and_say(**settings):
    initialize(**settings)
    print("connected", flush=True)


if __name__ == "__main__":
    del sys.argv[1:3]
    put, log, initialize = zarr.storage.LocalStore.set, Run.write, jax.distributed.initialize
    zarr.storage.LocalStore.set, Run.write = set_around_record, log_half
    jax.distributed.initialize = initialize_and_say
    before(Checkpoints, "save", "save")
    before(ArrayImpl, "copy_to_host_async", "copy")
    before(pathlib.Path, "replace", "rename")  # zarr writes under a temporary name
    before(storage, "read", "read")
    before(os, "unlink", "removal")
    before(os, "rmdir", "removal")
    before(Run, "compile", "compile")
    # On a CPU each host's programs have different cache keys, and JAX lets only the first host
    # write to the cache. Here all hosts write, so that each start is fast.
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    train.main()
    print("moments", json.dumps(moments), flush=True)
