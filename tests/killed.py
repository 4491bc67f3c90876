"""Trains like `python -m train`, and kills itself with SIGKILL at a chosen moment:

    python -m tests.killed KIND SAVE NUMBER ARGUMENTS...

KILLED_BY=SIGSTOP stops the process instead. The moment is number NUMBER of kind KIND in this
start's save number SAVE, both counted from 1. For a `row` of the metrics, NUMBER is its step. For a
`read` or a `compile`, SAVE is 0. A process that reaches its end prints the largest number of
moments of each kind in any save.
"""

import collections
import functools
import json
import operator
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

KIND, SAVE, NUMBER = sys.argv[1], *map(int, sys.argv[2:4])
SIGNAL = signal.Signals[os.environ.get("KILLED_BY", "SIGKILL")]
saves = [collections.Counter()]  # moments before the first save, and in each save
lock = threading.Lock()


def die():
    os.kill(os.getpid(), SIGNAL)


def moment(kind):
    with lock:
        saves[-1][kind] += 1
        if (kind, len(saves) - 1, saves[-1][kind]) == (KIND, SAVE, NUMBER):
            die()


def before(owner, name, kind):
    """Makes each call of a function a moment."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        moment(kind)
        return function(*args, **kwargs)

    setattr(owner, name, call)


def save_after_the_one_before(self, *args):
    self.wait()
    saves.append(collections.Counter())
    save(self, *args)


async def set_around_record(self, key, value, *args, **kwargs):
    records = self.root.parent.name == "records"
    moment("write")
    if records:
        moment("record")
    await put(self, key, value, *args, **kwargs)
    if records:
        moment("recorded")


def remove_by_moments(path):
    moments = {name: getattr(os, name) for name in ("unlink", "rmdir")}
    for name in moments:
        before(os, name, "removal")
    try:
        remove(path)
    finally:
        for name, function in moments.items():
            setattr(os, name, function)


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
    del sys.argv[1:4]
    save, put, remove = Checkpoints.save, zarr.storage.LocalStore.set, storage.remove
    log, initialize = Run.write, jax.distributed.initialize
    Checkpoints.save, zarr.storage.LocalStore.set = save_after_the_one_before, set_around_record
    storage.remove, Run.write = remove_by_moments, log_half
    jax.distributed.initialize = initialize_and_say
    before(ArrayImpl, "copy_to_host_async", "copy")
    before(pathlib.Path, "replace", "rename")  # zarr writes under a temporary name
    before(storage, "read", "read")
    before(Run, "compile", "compile")
    # On a CPU each host's programs have different cache keys, and JAX lets only the first host
    # write to the cache. Here all hosts write, so that each start is fast.
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    train.main()
    most = functools.reduce(operator.or_, saves)
    print("moments", json.dumps(most), flush=True)
