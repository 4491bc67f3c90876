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
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import train
from data.config import ROOT, program
from data.loader import Loader
from shardlib.devices import show_axes

IMPORTED = time.perf_counter()
WARMUP = 3  # steps that are run first and left out
LEAST, MOST = 10, 100  # steps that are timed: MOST, or once there are LEAST
SECONDS = 30  # as many as this takes


def time_start(config: train.Config, loader: Loader) -> tuple[train.State, dict[str, float]]:
    """The state, and the seconds that each part of the way to the first step's end takes."""
    marks = {"import": IMPORTED - START, "devices and dataset": time.perf_counter() - IMPORTED}

    def mark(name: str, result: Any) -> Any:
        jax.block_until_ready(result)
        marks[name] = time.perf_counter() - START - sum(marks.values())
        return result

    batch = mark("load a batch", loader.load(0))
    state = mark("initialize the state", train.init_state(config))
    traced = mark("trace", train.training_step.trace(state, batch, config))
    lowered = mark("lower", traced.lower())
    mark("compile", lowered.compile())
    state, _ = mark("run a step", train.training_step(state, batch, config))
    return state, marks


def time_steps(
    config: train.Config, loader: Loader, state: train.State
) -> tuple[list[float], list[float]]:
    """Seconds of each step, and those its batch was waited for, once the first ones are done.

    As in training, a step is waited for when the next one is under way; what is timed is from one
    step's end to the next one's.
    """
    ends: list[float] = []
    waits: list[float] = []
    before = None
    batches = loader.batches(1, 2**31)
    for step in itertools.count():
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        state, metrics = train.training_step(state, batch, config)
        if before is not None:
            jax.block_until_ready(before)
            ends.append(time.perf_counter())
        before = metrics
        # Several hosts have to stop at the same step, and their clocks differ.
        enough = jax.process_count() > 1 or (len(ends) > 1 and ends[-1] - ends[0] > SECONDS)
        if step - WARMUP >= (LEAST if enough else MOST):
            break
    jax.block_until_ready(state)
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


@program(train.Config, "configs", {"paths": {"model_name": "none"}})
def main(config: train.Config) -> None:
    config.training.validation_interval = 0  # no need of a validation split
    try:
        train.check_config(config)
        mesh = train.make_mesh(config)
        with jax.set_mesh(mesh):
            loader, _ = train.make_loaders(config)
    except (ValueError, OSError) as error:
        train.stop(config, str(error))
    with jax.set_mesh(mesh):
        state, start = time_start(config, loader)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        steps, waits = time_steps(config, loader, state)
    if jax.process_index():
        return

    low, median, high = (float(np.percentile(steps, share)) for share in (10, 50, 90))
    spread = f"{low:.4f} to {high:.4f}: 10th to 90th percentile of {len(steps)}"
    tokens = config.training.tokens.batch * config.training.tokens.len
    projections, attention = train.step_flops(config)
    peak, where = peak_memory()
    device, count = jax.devices()[0].device_kind, math.prod(mesh.shape.values())
    table = {
        "device": f"{count} x {device}, {show_axes(mesh.shape)}",
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,}",
        "step": f"{median:.4f} s ({spread})",
        "tokens/s": f"{tokens / median:,.0f}",
        "MFU, causal attention included": train.mfu(config, projections + attention, median),
        "MFU, projections only": train.mfu(config, projections, median),
        "data wait": f"{np.median(waits):.4f} s a step, {sum(waits) / sum(steps):.1%} of the time",
        "peak memory": f"{peak / 2**30:.2f} GiB {where}",
        "to the first step's end": f"{sum(start.values()):.1f} s",
        **{f"    {name}": f"{seconds:.2f} s" for name, seconds in start.items()},
    }
    for name, text in table.items():
        print(f"{name:32} {text}")
    # A number that JSON hasn't, as an infinite clip, becomes a text.
    settings = json.loads(json.dumps(dataclasses.asdict(config)), parse_constant=str)
    packages = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    record = {
        "config": settings,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **packages},
        "machine": platform.platform(),
        "device": device,
        "devices": count,
        "hosts": jax.process_count(),
        "parameters": parameters,
        "tokens_per_step": tokens,
        "step_seconds": [round(seconds, 6) for seconds in steps],
        "data_wait_seconds": [round(seconds, 6) for seconds in waits],
        "projection_flops": projections,
        "attention_flops": attention,
        "peak_memory_bytes": peak,
        "start_seconds": start,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
