"""Where a run's metrics go. Each destination is a function that makes one: of the run's folder, its
first step and its config (YAML text) it makes a function that takes a row, numbers by their names.
"""

import importlib.util
import json
import math
import pathlib
import time
import weakref
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from shardlib.errors import UserError

Row = dict[str, float]


def json_lines(folder: pathlib.Path, first_step: int, config: str) -> Callable[[Row], None]:
    """metrics.jsonl, an object a row. JSON has no NaN or infinity: those become null."""

    def log(row: Row) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(finite) + "\n")

    return log


def tensorboard(folder: pathlib.Path, first_step: int, config: str) -> Callable[[Row], None]:
    """Events in tensorboard/. Those of an earlier start from this step on no longer count."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step, flush_secs=10)
    writer.add_text("config", f"```\n{config}\n```", first_step)

    def log(row: Row) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, row["step"])

    weakref.finalize(log, writer.close)  # which writes what a thread has not written yet
    return log


def wandb(folder: pathlib.Path, first_step: int, config: str) -> Callable[[Row], None]:
    """Weights & Biases, which reads its settings, such as WANDB_PROJECT, from the environment. What
    is resumed goes on in the run that was begun; `step` is the axis of all curves."""
    import wandb

    name = folder / "wandb.id"
    if first_step == 0 or not name.exists():
        name.write_text(f"{folder.name}-{time.time_ns() // 10**6}")
    settings: Any = OmegaConf.to_container(OmegaConf.create(config))
    run = wandb.init(
        id=name.read_text(), name=folder.name, dir=str(folder), config=settings, resume="allow"
    )
    run.define_metric("*", step_metric="step")
    return run.log


DESTINATIONS: dict[str, Callable[[pathlib.Path, int, str], Callable[[Row], None]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}
# What those need that requirements-cpu.txt doesn't have.
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_destinations(names: tuple[str, ...]) -> None:
    """Raises UserError for a destination that doesn't exist, or needs what isn't installed."""
    for name in names:
        if name not in DESTINATIONS:
            raise UserError(f"metrics.to has {name}; there are {', '.join(DESTINATIONS)}")
        package = PACKAGES.get(name)
        if package and not importlib.util.find_spec(package):
            raise UserError(f"metrics.to has {name}: pip install {package}, or leave it out")
