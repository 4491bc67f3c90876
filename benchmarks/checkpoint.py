"""How fast a checkpoint is saved and restored, beside the same bytes as plain files, one for each
device's part, and beside orbax, in one run.

    python -m benchmarks.checkpoint --megabytes 1000

The state is train.py's, of random numbers, on 8 simulated devices. Several rounds, each of all
three in turn, each in a new folder: save, which ends in memory; sync, after which it is on the disk
(orbax waits for that by itself); restore from the disk; restore from memory. All
bits that are restored are compared. Takes a minute, and four times as much memory as the state.
"""

import argparse
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

from runtime.checkpoint import Checkpoints
from shardlib.devices import make_mesh, simulate_cpu_devices
from shardlib.types import make_shapes, make_shardings
from train import State

THREADS = 32  # of base.yaml
TIMES = ("save", "save to disk", "restore from disk", "restore from memory")
CONFIG = "model: {}\n"


def sizes(total: int) -> dict[str, int]:
    """Dimensions of a model whose state takes about `total` bytes."""
    layers, vocab, step = 8, 32, 8
    m = max(step, math.isqrt(total // (12 * (16 * layers + 2 * vocab))) // step * step)
    return {"M": m, "Q": 1, "K": 8, "D": m // 8, "F": 4 * m, "V": vocab * m, "layers": layers}


def make_state(size: dict[str, int]) -> State:
    """Numbers that don't compress: orbax would compress zeros."""
    rng = np.random.default_rng(0)

    def make(shape: Any, sharding: Any) -> jax.Array:
        values = rng.standard_normal(shape.shape, np.float32).astype(shape.dtype)
        return jax.device_put(values, sharding)

    return jax.tree.map(make, make_shapes(State, size), make_shardings(State))


def parts(state: State) -> list[np.ndarray]:
    shards = (s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
    return [np.asarray(shard.data) for shard in shards if shard.replica_id == 0]


class Plain:
    """Files, each written and read by a thread; what is read stays NumPy's."""

    def __init__(self, folder: pathlib.Path, state: State, size: dict[str, int]):
        self.files = [(folder / str(i), part) for i, part in enumerate(parts(state))]
        self.threads = ThreadPoolExecutor(THREADS)

    def save(self) -> None:
        list(self.threads.map(self._write, self.files))

    def wait(self) -> None:
        pass

    def restore(self) -> list[np.ndarray]:
        return list(self.threads.map(self._read, self.files))

    @staticmethod
    def _write(pair: tuple[pathlib.Path, np.ndarray]) -> None:
        with pair[0].open("wb") as file:
            file.write(pair[1].data)

    @staticmethod
    def _read(pair: tuple[pathlib.Path, np.ndarray]) -> np.ndarray:
        values = np.empty_like(pair[1])
        with pair[0].open("rb") as file:
            file.readinto(values.data)
        return values


class Ours:
    def __init__(self, folder: pathlib.Path, state: State, size: dict[str, int]):
        self.told, self.state = (str(folder), State, size, CONFIG, THREADS), state
        self.checkpoints = Checkpoints(*self.told, say=lambda _: None)

    def save(self) -> None:
        self.checkpoints.save(1, self.state)

    def wait(self) -> None:
        self.checkpoints.wait()

    def restore(self) -> State:
        return Checkpoints(*self.told).restore()


class Orbax:
    def __init__(self, folder: pathlib.Path, state: State, size: dict[str, int]):
        import orbax.checkpoint

        self.path, self.state = folder / "orbax", state
        self.shapes = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, state)
        self.checkpointer = orbax.checkpoint.StandardCheckpointer()

    def save(self) -> None:
        self.checkpointer.save(self.path, self.state)

    def wait(self) -> None:
        self.checkpointer.wait_until_finished()

    def restore(self) -> State:
        return self.checkpointer.restore(self.path, self.shapes)


def sync(file: pathlib.Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def forget(file: pathlib.Path) -> None:
    """Drops a file from the page cache, so that it is read from the disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(kind: Any, folder: pathlib.Path, state: State, size: dict[str, int]) -> list[float]:
    """Seconds: how long a save keeps its caller, and what TIMES names."""
    folder.mkdir()
    method, threads = kind(folder, state, size), ThreadPoolExecutor(THREADS)
    start = time.perf_counter()
    method.save()
    kept = time.perf_counter() - start
    method.wait()
    saved = time.perf_counter() - start
    files = [file for file in folder.rglob("*") if file.is_file()]
    list(threads.map(sync, files))
    seconds = [kept, saved, time.perf_counter() - start]
    list(threads.map(forget, files))
    for _ in range(2):
        start = time.perf_counter()
        found = jax.block_until_ready(method.restore())
        seconds.append(time.perf_counter() - start)
        check(found if kind is Plain else parts(found), parts(state))
        del found
    shutil.rmtree(folder)
    return seconds


def check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        same = np.array_equal(a.view(np.uint32), b.view(np.uint32))
        assert same, "what was restored isn't what was saved"


def memory_of_save(folder: pathlib.Path, state: State, size: dict[str, int]) -> int:
    """Bytes more, at the peak, for a save beside steps that write to the state's own memory. The
    state is gone after."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    checkpoints = Checkpoints(str(folder), State, size, CONFIG, THREADS, say=lambda _: None)
    ctypes.CDLL(None).malloc_trim(0)  # so that what was freed before doesn't count
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    before = status("VmRSS")
    checkpoints.save(1, state)
    for _ in range(2):
        state = jax.block_until_ready(step(state))
    checkpoints.wait()
    shutil.rmtree(folder)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Bytes, of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def spread(values: Sequence[float], show: str) -> str:
    """The median, and the least and the most."""
    low, middle, high = (f(values) for f in (min, statistics.median, max))
    return f"{middle:{show}} ({low:{show}} to {high:{show}})"


def benchmark(folder: pathlib.Path, total: int, rounds: int) -> None:
    size = sizes(total)
    kinds = [Plain, Ours, Orbax]
    seconds: dict[Any, list[list[float]]] = {kind: [] for kind in kinds}
    with jax.set_mesh(make_mesh({"d": 4, "t": 2})):
        memory = memory_of_save(folder / "memory", make_state(size), size)
        state = make_state(size)
        for i in range(rounds + 1):
            for kind in kinds[i % 3 :] + kinds[: i % 3]:
                seconds[kind].append(measure(kind, folder / f"{kind.__name__}.{i}", state, size))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(
        f"{nbytes:,} bytes in {len(parts(state))} parts; median (least to most) of {rounds} rounds"
    )
    print(f"{'':20} {'plain files, s':22} {'orbax, s':22} {'ours, s':22} ", end="")
    print(f"{'of plain speed':20} of orbax speed")
    # The first round is to warm up.
    times = {kind: list(zip(*seconds[kind][1:], strict=True))[1:] for kind in kinds}
    for name, plain, ours, orbax in zip(TIMES, *times.values(), strict=True):
        row = [f"{name:20}", *(f"{spread(each, '.3f'):22}" for each in (plain, orbax, ours))]
        for others in (plain, orbax):
            ratios = [other / our for other, our in zip(others, ours, strict=True)]
            row.append(f"{spread(ratios, '.0%'):20}")
        print(*row)
    for kind in (Orbax, Ours):
        waited = spread([taken[0] for taken in seconds[kind][1:]], ".3f")
        print(f"a save keeps its caller: {kind.__name__} {waited} s")
    print(f"memory of a save beside steps: {memory / nbytes:.2f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="of the state")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    simulate_cpu_devices(8)
    with tempfile.TemporaryDirectory() as name:
        benchmark(pathlib.Path(name), given.megabytes * 10**6, given.rounds)


if __name__ == "__main__":
    main()
