"""Times the training step of a config, and the way to its first one.

    python -m tools.benchmark --config-name=local_test_synthetic

Prints a table, and the same as one line of JSON. Writes nothing.
"""

# ruff: noqa: E402
import time

START = time.perf_counter()  # the interpreter itself took some 20 ms before

import dataclasses
import itertools
import json
import math
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import train
from data.loader import Batches
from data.sources import open_batches
from runtime.config import ROOT
from runtime.program import program
from runtime.run import compile_step, make_mesh
from shardlib import devices

IMPORTED = time.perf_counter()
WARMUP = 3  # steps that are run first and left out
LEAST, MOST = 10, 100  # steps that are timed: MOST, or once there are LEAST
SECONDS = 30  # as many as this takes


def time_start(
    config: train.Config, loader: Batches
) -> tuple[jax.stages.Compiled, train.State, dict[str, float]]:
    """The step, the state after the first one, and the seconds that each part of the way there
    takes."""
    checked = time.perf_counter() - IMPORTED
    marks = {"import": IMPORTED - START, "devices, dataset, check of types": checked}

    def mark(name: str, result: Any) -> Any:
        jax.block_until_ready(result)
        marks[name] = time.perf_counter() - START - sum(marks.values())
        return result

    lowered = mark("trace and lower", train.lower_step(config))
    step = mark("compile", compile_step(config, lowered))
    state = mark("initialize the state", train.init_state(config))
    batch = mark("load a batch", next(loader.from_step(0, 1))[1])
    state, _ = mark("run a step", step(state, batch))
    return step, state, marks


def time_steps(
    step_once: Callable[..., Any], batches: Iterator[Any], state: Any, wait: Callable[[Any], Any]
) -> tuple[list[float], list[float]]:
    """Seconds of each step, and those its batch was waited for, once the first ones are done. A
    step takes state and batch, and gives the next state and what `wait` waits for its end by.

    As in training, a step is waited for when the next one is under way; what is timed is from one
    step's end to the next one's.
    """
    ends: list[float] = []
    waits: list[float] = []
    before = None
    for step in itertools.count():
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        state, metrics = step_once(state, batch)
        if before is not None:
            wait(before)
            ends.append(time.perf_counter())
        before = metrics
        # Several hosts have to stop at the same step, and their clocks differ.
        enough = jax.process_count() > 1 or (len(ends) > 1 and ends[-1] - ends[0] > SECONDS)
        if step - WARMUP >= (LEAST if enough else MOST):
            break
    wait(before)
    return list(np.diff(ends[WARMUP - 1 :])), waits[WARMUP : len(ends)]


def peak_memory() -> tuple[int, str]:
    """The most bytes that were in use, and where."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(each["peak_bytes_in_use"] for each in stats if each), "on a device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "by this process"


def commit() -> str:
    """The git commit of the source, with a plus if it was changed since."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return done.stdout.strip() + ("+" if changed.stdout else "") or "unknown"


def show(
    config: train.Config, kind: str, parameters: int, steps: list[float], peak: tuple[int, str],
    packages: list[str], rows: dict[str, str], record: dict[str, Any],
) -> None:  # fmt: skip
    """Prints the table, and the line of JSON, to which `rows` and `record` add."""
    low, median, high = (float(np.percentile(steps, share)) for share in (10, 50, 90))
    spread = f"{low:.4f} to {high:.4f}: 10th to 90th percentile of {len(steps)}"
    tokens = config.training.tokens.batch * config.training.tokens.len
    projections, attention = train.step_flops(config)
    axes = dataclasses.asdict(config.mesh)
    count, all_flops = math.prod(axes.values()), projections + attention
    table = {
        "device": f"{count} x {kind}, {devices.show_axes(axes)}",
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,}",
        "step": f"{median:.4f} s ({spread})",
        "tokens/s": f"{tokens / median:,.0f}",
        "MFU, causal attention included": devices.mfu(kind, count, all_flops / median),
        "MFU, projections only": devices.mfu(kind, count, projections / median),
        "peak memory": f"{peak[0] / 2**30:.2f} GiB {peak[1]}",
    }
    for name, text in (table | rows).items():
        print(f"{name:32} {text}")
    # A number that JSON hasn't, as an infinite clip, becomes a text.
    settings = json.loads(json.dumps(dataclasses.asdict(config)), parse_constant=str)
    line = {
        "config": settings,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "machine": platform.platform(),
        "device": kind,
        "devices": count,
        "hosts": jax.process_count(),
        "parameters": parameters,
        "tokens_per_step": tokens,
        "step_seconds": [round(seconds, 6) for seconds in steps],
        "projection_flops": projections,
        "attention_flops": attention,
        "peak_memory_bytes": peak[0],
    }
    print(json.dumps(line | record))


@program(train.Config, "configs", {"paths": {"model_name": "none"}})
def main(config: train.Config) -> None:
    hyper = dataclasses.replace(config.training, validation_interval=0)  # needs no such split
    config = dataclasses.replace(config, training=hyper)
    mesh = make_mesh(config, dataclasses.asdict(config.mesh))
    with jax.set_mesh(mesh):
        loader, _ = open_batches(config, train.dimensions(config))
    train.check_types(config)
    with jax.set_mesh(mesh):
        step_once, state, start = time_start(config, loader)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        batches = (batch for _, batch in loader.from_step(1, 2**31))
        steps, waits = time_steps(step_once, batches, state, jax.block_until_ready)
    if jax.process_index():
        return

    share = sum(waits) / sum(steps)
    rows = {
        "data wait": f"{np.median(waits):.4f} s a step, {share:.1%} of the time",
        "to the first step's end": f"{sum(start.values()):.1f} s",
        **{f"    {name}": f"{seconds:.2f} s" for name, seconds in start.items()},
    }
    waited = [round(seconds, 6) for seconds in waits]
    record = {"data_wait_seconds": waited, "start_seconds": start}
    kind, packages = jax.devices()[0].device_kind, ["jax", "jaxlib", "numpy"]
    show(config, kind, parameters, steps, peak_memory(), packages, rows, record)


if __name__ == "__main__":
    main()
