"""Measures how fast a checkpoint is saved and restored, compared with orbax and with plain files
that hold the same bytes, one file per device's shard.

    python -m benchmarks.checkpoint --megabytes 1000

The state has train.py's types and random numbers, on 8 simulated devices. Each round runs all
three methods in turn, each in a new folder: save (into the page cache), sync to disk (orbax syncs
by itself), restore from disk, restore from the page cache. All restored bits are compared. Takes
a minute, and four times as much memory as the state.
"""

import ctypes
import math
import os
import pathlib
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import train
from runtime.checkpoint import Checkpoints
from shardlib.devices import make_mesh, simulate_cpu_devices
from shardlib.types import make_shapes, make_shardings, present, u32
from tools import arguments

THREADS = 32  # as in base.yaml
TIMES = ("save", "save to disk", "restore from disk", "restore from memory")
CONFIG = "model: {}\n"
LLAMA = "attention_norm", "mlp_norm", "unembed", "w_gate", "w_up", "w_down"
WEIGHTS = present(train.Weights, LLAMA)
KINDS = train.State(u32[""], WEIGHTS, WEIGHTS, WEIGHTS)


def sizes(total: int) -> dict[str, int]:
    """The dimensions of a model whose state takes about `total` bytes."""
    layers, vocab, step = 8, 32, 8
    m = max(step, math.isqrt(total // (12 * (16 * layers + 2 * vocab))) // step * step)
    return {"M": m, "Q": 1, "K": 8, "D": m // 8, "F": 4 * m, "V": vocab * m, "layers": layers}


def make_state(size: dict[str, int]) -> train.State:
    """A state of random numbers: orbax would compress zeros."""
    rng = np.random.default_rng(0)

    def make(shape: Any, sharding: Any) -> jax.Array:
        values = rng.standard_normal(shape.shape, np.float32).astype(shape.dtype)
        return jax.device_put(values, sharding)

    return jax.tree.map(make, make_shapes(KINDS, size), make_shardings(KINDS))


def parts(state: train.State) -> list[np.ndarray]:
    shards = (s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
    return [np.asarray(shard.data) for shard in shards if shard.replica_id == 0]


class Plain:
    """Plain files, each written and read by a thread. Restores NumPy arrays."""

    def __init__(self, folder: pathlib.Path, state: train.State, size: dict[str, int]):
        self.parts, self.threads = parts(state), ThreadPoolExecutor(THREADS)
        self.files = [folder / str(i) for i in range(len(self.parts))]

    def save(self) -> None:
        list(self.threads.map(pathlib.Path.write_bytes, self.files, self.parts))

    def wait(self) -> None:
        pass

    def restore(self) -> list[np.ndarray]:
        read = zip(self.threads.map(pathlib.Path.read_bytes, self.files), self.parts, strict=True)
        return [np.frombuffer(values, part.dtype).reshape(part.shape) for values, part in read]


class Ours:
    def __init__(self, folder: pathlib.Path, state: train.State, size: dict[str, int]):
        self.settings, self.state = (str(folder), KINDS, size, CONFIG, THREADS), state
        self.checkpoints = Checkpoints(*self.settings, say=lambda _: None)

    def save(self) -> None:
        self.checkpoints.save(1, self.state)

    def wait(self) -> None:
        self.checkpoints.wait()

    def restore(self) -> train.State:
        return Checkpoints(*self.settings).restore()


class Orbax:
    def __init__(self, folder: pathlib.Path, state: train.State, size: dict[str, int]):
        import orbax.checkpoint

        self.path, self.state = folder / "orbax", state
        self.shapes = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, state)
        self.checkpointer = orbax.checkpoint.StandardCheckpointer()

    def save(self) -> None:
        self.checkpointer.save(self.path, self.state)

    def wait(self) -> None:
        self.checkpointer.wait_until_finished()

    def restore(self) -> train.State:
        return self.checkpointer.restore(self.path, self.shapes)


def sync(file: pathlib.Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def forget(file: pathlib.Path) -> None:
    """Drops a file from the page cache, so that the next read comes from disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    kind: Any, folder: pathlib.Path, state: train.State, size: dict[str, int]
) -> list[float]:
    """Returns the seconds that a save blocks its caller, and those that TIMES names."""
    folder.mkdir()
    method, threads = kind(folder, state, size), ThreadPoolExecutor(THREADS)
    start = time.perf_counter()
    method.save()
    blocked = time.perf_counter() - start
    method.wait()
    saved = time.perf_counter() - start
    files = [file for file in folder.rglob("*") if file.is_file()]
    list(threads.map(sync, files))
    seconds = [blocked, saved, time.perf_counter() - start]
    list(threads.map(forget, files))
    for _ in range(2):
        start = time.perf_counter()
        restored = jax.block_until_ready(method.restore())
        seconds.append(time.perf_counter() - start)
        check(restored if kind is Plain else parts(restored), parts(state))
        del restored
    shutil.rmtree(folder)
    return seconds


def check(restored: list[np.ndarray], saved: list[np.ndarray]) -> None:
    for a, b in zip(restored, saved, strict=True):
        same = np.array_equal(a.view(np.uint32), b.view(np.uint32))
        assert same, "the restored state differs from the saved one"


def memory_of_save(folder: pathlib.Path, state: train.State, size: dict[str, int]) -> int:
    """Returns how many more bytes are in use at the peak of a save that runs during steps which
    update the state in place. Consumes the state."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    checkpoints = Checkpoints(str(folder), KINDS, size, CONFIG, THREADS, say=lambda _: None)
    ctypes.CDLL(None).malloc_trim(0)  # so that memory freed earlier doesn't count
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    checkpoints.save(1, state)
    for _ in range(2):
        state = jax.block_until_ready(step(state))
    checkpoints.wait()
    shutil.rmtree(folder)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Returns a value in bytes from this process's /proc/self/status."""
    match = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def spread(values: Sequence[float], show: str) -> str:
    """Formats the median, the minimum and the maximum."""
    low, middle, high = (f(values) for f in (min, statistics.median, max))
    return f"{middle:{show}} ({low:{show}} to {high:{show}})"


def benchmark(folder: pathlib.Path, total: int, rounds: int) -> None:
    size = sizes(total)
    kinds = [Plain, Ours, Orbax]
    seconds: dict[Any, list[list[float]]] = {kind: [] for kind in kinds}
    with jax.set_mesh(make_mesh({"r": 1, "s": 4, "c": 1, "t": 2})):
        memory = memory_of_save(folder / "memory", make_state(size), size)
        state = make_state(size)
        for i in range(rounds + 1):
            for kind in kinds[i % 3 :] + kinds[: i % 3]:
                seconds[kind].append(measure(kind, folder / f"{kind.__name__}.{i}", state, size))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{nbytes:,} bytes in {len(parts(state))} parts; median (min to max) of {rounds} rounds")
    print(f"{'':20} {'plain files, s':22} {'orbax, s':22} {'ours, s':22} ", end="")
    print(f"{'speed / plain':20} speed / orbax")
    # The first round is a warm-up.
    times = {kind: list(zip(*seconds[kind][1:], strict=True))[1:] for kind in kinds}
    for name, plain, ours, orbax in zip(TIMES, *times.values(), strict=True):
        row = [f"{name:20}", *(f"{spread(each, '.3f'):22}" for each in (plain, orbax, ours))]
        for peer in (plain, orbax):
            ratios = [theirs / own for theirs, own in zip(peer, ours, strict=True)]
            row.append(f"{spread(ratios, '.0%'):20}")
        print(*row)
    for kind in (Orbax, Ours):
        blocked = spread([times[0] for times in seconds[kind][1:]], ".3f")
        print(f"a save blocks its caller: {kind.__name__} {blocked} s")
    print(f"extra memory of a save during steps: {memory / nbytes:.2f} of the state")


def main() -> None:
    parser = arguments.parser("benchmarks.checkpoint", __doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="to measure")
    args = parser.parse_args()
    simulate_cpu_devices(8)
    with tempfile.TemporaryDirectory() as name:
        benchmark(pathlib.Path(name), args.megabytes * 10**6, args.rounds)


if __name__ == "__main__":
    main()
