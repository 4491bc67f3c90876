"""A run's folder: what made it, and its metrics, one JSON object per line and step; and what a run
says on the way."""

import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
from omegaconf import OmegaConf

from runtime.config import ROOT
from runtime.sinks import DESTINATIONS, Row, json_lines
from shardlib.errors import UserError


class MetricsError(UserError):
    """An earlier metrics.jsonl that can't be read."""


class Run:
    """`<root>/<name>/` with config.yaml, starts.jsonl and metrics.jsonl, written by the first host
    alone. Metrics go to the destinations that `to` names, too."""

    def __init__(self, root: str, name: str, to: tuple[str, ...] = ()):
        self.folder = pathlib.Path(root).expanduser() / name
        self.first_host, self.to = jax.process_index() == 0, to
        self.on_terminal, self.shows = sys.stdout.isatty(), False

    def open(self, config: str, first_step: int) -> None:
        """Before `first_step`: writes the config and what else the run depends on, says what has
        changed in the config, and keeps the metrics of the steps before.

        Those of later steps, done after the checkpoint by an earlier start of the run, are cut off.
        A run from step 0 sets all earlier metrics aside, as `metrics.<time>.jsonl`. Raises
        MetricsError for one that it can't read.
        """
        if not self.first_host:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and first_step == 0:
            kept_as = self.folder / f"metrics.{metrics.stat().st_mtime_ns}.jsonl"
            metrics.rename(kept_as)
            self.say(f"no checkpoint to go on from; the earlier metrics are {kept_as.name}")
        metrics.touch()
        kept = 0
        for number, line in enumerate(metrics.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):  # the last row, cut short
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                where = f"{metrics}, line {number}"
                raise MetricsError(
                    f"{where} is no row of metrics; mend it, or move it away"
                ) from None
            if step >= first_step:
                break
            kept += len(line)
        os.truncate(metrics, kept)
        earlier = self.folder / "config.yaml"
        if first_step and earlier.exists():
            before, now = (flat(OmegaConf.create(c)) for c in (earlier.read_text(), config))
            for key in sorted({*before, *now}):
                if before.get(key) != now.get(key):
                    self.say(
                        f"changed since the last start: {key}={now.get(key)}, before "
                        f"{before.get(key)}"
                    )
        part = self.folder / "config.yaml.part"  # a start that is killed here leaves the one before
        part.write_text(config)
        part.rename(earlier)
        with (self.folder / "starts.jsonl").open("a") as starts:
            starts.write(json.dumps({"first_step": first_step, "config": config} | origin()) + "\n")
        made = [json_lines, *(DESTINATIONS[name] for name in self.to)]
        self.destinations = [make(self.folder, first_step, config) for make in made]

    def log(self, row: Row) -> None:
        """Appends a row to the metrics."""
        if self.first_host:
            for log in self.destinations:
                log(row)

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.first_host:
            print("\r\x1b[K" * self.shows + text, flush=True)
            self.shows = False

    def show(self, text: str, stays: bool) -> None:
        """How far the run is. On a terminal one line, each time anew; elsewhere, and for good, a
        line if it `stays`."""
        if stays:
            self.say(text)
        elif self.first_host and self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", flush=True)
            self.shows = True


def origin() -> dict[str, Any]:
    """What else than the config a run depends on."""

    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        except OSError:  # there is no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain")
    packages = ("jax", "jaxlib", "numpy", "zarr", "datasets", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    devices = jax.devices()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version(), **versions},
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "hosts": jax.process_count(),
    }


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """By keys with dots."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = hasattr(value, "items")
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found
