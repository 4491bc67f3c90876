"""Sinks for a run's metrics. A sink is `make(folder, saved, config) -> log(row)`: `folder` is the
run's, `saved` the step of its last checkpoint or 0, `config` YAML text, and a row maps names to
numbers."""

import contextlib
import errno
import json
import math
import os
import pathlib
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

Row = dict[str, float]


def json_lines(folder: pathlib.Path, saved: int, config: str) -> Callable[[Row], None]:
    """Appends each row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""

    def log(row: Row) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        with (folder / "metrics.jsonl").open("ab", buffering=0) as metrics:
            line, end = f"{json.dumps(finite)}\n".encode(), metrics.tell()
            if metrics.write(line) < len(line):
                metrics.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return log


def tensorboard(folder: pathlib.Path, saved: int, config: str) -> Callable[[Row], None]:
    """Writes events to tensorboard/, and discards those of earlier starts from `saved` on."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar, text

    # SummaryWriter writes in a thread. After an error there it would wait forever.
    (folder / "tensorboard").mkdir(exist_ok=True)
    # TensorBoard reads files in the order of their names, which continue with the time: the clock
    # of another machine may be behind.
    before = max((x.name[12:16] for x in folder.glob("tensorboard/events.start*")), default="0")
    writer = EventsWriter(str(folder / f"tensorboard/events.start{int(before) + 1:04d}"))

    def write(step: float, **content: Any) -> None:
        writer.write_event(Event(wall_time=time.time(), step=int(step), **content))

    write(saved, session_log=SessionLog(status=SessionLog.START))
    write(saved, summary=text("config", f"```\n{config}\n```"))

    def log(row: Row) -> None:
        for name, value in row.items():
            write(row["step"], summary=scalar(name, value))
        writer.flush()

    def close() -> None:
        with contextlib.suppress(OSError):  # `log` has raised it
            writer.close()

    weakref.finalize(log, close)
    return log


def wandb(folder: pathlib.Path, saved: int, config: str) -> Callable[[Row], None]:
    """Logs to Weights & Biases, which reads settings such as WANDB_PROJECT from the environment. A
    resumed run continues its W&B run; all curves have `step` as their x axis."""
    import wandb

    # Keeps the id only at the same place: a copied folder becomes a W&B run of its own.
    file, run_id, place = folder / "wandb.id", secrets.token_hex(8), "/".join(folder.parts[-2:])
    if saved and file.exists() and (known := file.read_text().split(maxsplit=1)):
        run_id = known[0] if known[1:] in ([], [place]) else run_id
    file.write_text(f"{run_id} {place}")
    settings: Any = OmegaConf.to_container(OmegaConf.create(config))
    run = wandb.init(id=run_id, name=folder.name, dir=str(folder), config=settings, resume="allow")
    run.define_metric("*", step_metric="step")
    return run.log


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # that a sink needs
SINKS: dict[str, Callable[[pathlib.Path, int, str], Callable[[Row], None]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}
