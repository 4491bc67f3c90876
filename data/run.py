"""A run's folder: the config that made it, and its metrics, one JSON object per line and step."""

import json
import math
import os
import pathlib

import jax


class MetricsError(ValueError):
    """An earlier metrics.jsonl that can't be read."""


class Run:
    """`<root>/<name>/` with config.yaml and metrics.jsonl, written by the first host alone."""

    def __init__(self, root: str, name: str):
        self.folder = pathlib.Path(root).expanduser() / name
        self.first_host = jax.process_index() == 0

    def open(self, config: str, first_step: int) -> None:
        """Before `first_step`: writes the config, and keeps the metrics of the steps before it.

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
        (self.folder / "config.yaml").write_text(config)

    def log(self, row: dict[str, float]) -> None:
        """Appends a row to the metrics. JSON has no NaN or infinity: those become null."""
        if self.first_host:
            finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
            with (self.folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(finite) + "\n")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.first_host:
            print(text, flush=True)
