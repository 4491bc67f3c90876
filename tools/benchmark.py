"""Times a config's training step, and each part of the time to the first step.

    python -m tools.benchmark --config-name=local_test_synthetic

Prints a table. Writes no files.
"""

# ruff: noqa: E402
import time

START = time.perf_counter()  # the interpreter took some 20 ms before this line

import math
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np

import train
from checks import preflight
from data.sources import open_batches
from runtime import chips
from runtime.program import program
from runtime.run import commit, compile_step, make_mesh, say
from runtime.schedule import hyper_at
from shardlib.mesh import show_axes
from shardlib.types import computing_in

IMPORTED = time.perf_counter()
WARMUP = 3  # steps run first and not timed
MIN_STEPS, MAX_STEPS = 10, 100  # bounds on the number of steps timed
SECONDS = 30  # after which, and MIN_STEPS, timing ends


class Times(NamedTuple):
    """Times of the steps after the warm-up."""

    steps: list[float]  # seconds of each
    waits: list[float]  # seconds of each that were spent waiting for its batch
    cpu: float  # CPU seconds per step, of all threads of this process


def time_steps(
    step_once: Callable[..., Any], batches: Iterator[Any], state: Any, wait: Callable[[Any], Any]
) -> Times:
    """Times steps. `step_once(state, batch)` returns the next state and a value for `wait`, which
    blocks until the step is done.

    As in training, step n is waited for while step n+1 runs. A step's time is from the end of the
    step before to its own end.
    """
    ends, cpu, waits, before = list[float](), list[float](), list[float](), None
    for step in range(WARMUP + MAX_STEPS + 1):
        since = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - since)
        state, metrics = step_once(state, batch)
        if step:
            wait(before)
            ends.append(time.perf_counter())
            cpu.append(time.process_time())
        before = metrics
        # Several hosts must stop at the same step, but their clocks differ: they time MIN_STEPS.
        if step >= WARMUP + MIN_STEPS and (jax.process_count() > 1 or ends[-1] - ends[0] > SECONDS):
            break
    wait(before)
    steps = np.diff(ends[WARMUP - 1 :]).tolist()
    return Times(steps, waits[WARMUP : len(ends)], (cpu[-1] - cpu[WARMUP - 1]) / len(steps))


def peak_memory() -> tuple[int, str]:
    """Returns the peak of the bytes in use, and whose they are."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(each["peak_bytes_in_use"] for each in stats if each), "per device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "in this process"


def show(
    config: train.Config, kind: str, parameters: int, peak: tuple[int, str], packages: list[str],
    times: Times, start: dict[str, float] | None = None,
) -> None:  # fmt: skip
    """Prints the table. `start` has the seconds of each part of the time to the first step."""
    steps, waits, cpu = times
    axes = config.mesh.axes
    count = math.prod(axes.values())
    tokens = config.training.tokens.batch * config.training.tokens.len
    projections, attention = train.step_flops(config)
    low, median, high = np.percentile(steps, (10, 50, 90))
    with computing_in(config.dtype):
        rates = (projections + attention) / median, projections / median
        both, without = (chips.mfu(kind, count, rate) for rate in rates)
    unknown = f"unknown in {config.dtype} on {kind}"
    spread = f"{low:.4f} to {high:.4f}: 10th to 90th percentile of {len(steps)}"
    source = f"commit {commit() or 'unknown'}", f"Python {platform.python_version()}"
    versions = ", ".join([*source, *(f"{package} {version(package)}" for package in packages)])
    table = {
        "at": f"{datetime.now(UTC):%Y-%m-%d}, {versions}",
        "device": f"{count} x {kind}, {show_axes(axes)}",
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,}",
        "step": f"{median:.4f} s ({spread})",
        "CPU time": f"{cpu:.4f} s per step, of all threads",
        "tokens/s": f"{tokens / median:,.0f}",
        "MFU, causal attention included": both or unknown,
        "MFU, projections only": without or unknown,
        "peak memory": f"{peak[0] / 2**30:.2f} GiB {peak[1]}",
    }
    if start:
        share = sum(waits) / sum(steps)
        table["data wait"] = f"{np.median(waits):.4f} s per step, {share:.1%} of the time"
        table["time to first step"] = f"{sum(start.values()):.1f} s"
        table |= {f"    {name}": f"{part:.2f} s" for name, part in start.items()}
    for name, text in table.items():
        print(f"{name:32} {text}")


@program(train.Config, "configs", {"paths": {"model_name": "none"}})
def main(config: train.Config) -> None:
    # No step here needs the validation split.
    off = {"training.validation_interval": 0, "training.validation_at_start": False}
    config = config.changed(off)
    mesh = make_mesh(config, config.mesh.axes)
    preflight.check_types(train, config)
    start = {"import": IMPORTED - START}

    def timed(part: str, result: Any) -> Any:
        jax.block_until_ready(result)
        start[part] = time.perf_counter() - START - sum(start.values())
        return result

    with jax.set_mesh(mesh):
        opened = open_batches(config, train.dimensions(config))
        loader, _ = timed("devices, dataset, type check", opened)
        lowered = timed("trace and lower", train.lower_step(config))
        compiled = timed("compile", compile_step(config, lowered))
        state = timed("initialize the state", train.init_state(config))
        batches = (batch for _, batch in loader.from_step(0, 2**31))
        batch = timed("load a batch", next(batches))
        numbers = hyper_at(0, config.training)  # each step uses those of the first

        def step_once(state: Any, batch: Any) -> Any:
            return compiled(state, batch, numbers)

        state, _ = timed("run a step", step_once(state, batch))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        times = time_steps(step_once, batches, state, jax.block_until_ready)
        if note := batch.note_of_padding():
            say(note)
    if jax.process_index() == 0:
        kind, packages = jax.devices()[0].device_kind, ["jax", "jaxlib", "numpy"]
        show(config, kind, parameters, peak_memory(), packages, times, start)


if __name__ == "__main__":
    main()
