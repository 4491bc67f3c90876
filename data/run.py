"""A run's folder: the config that made it, and its metrics, one JSON object per line and step."""

import json
import math
import pathlib

import jax


class Run:
    """`<root>/<name>/` with config.yaml and metrics.jsonl, written by the first host alone."""

    def __init__(self, root: str, name: str, config: str):
        self.folder = pathlib.Path(root).expanduser() / name
        self.first_host = jax.process_index() == 0
        if self.first_host:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.yaml").write_text(config)
            metrics = self.folder / "metrics.jsonl"
            if metrics.exists():  # an earlier run's: kept, under the time of its last row
                metrics.rename(self.folder / f"metrics.{metrics.stat().st_mtime_ns}.jsonl")
            self.metrics = metrics.open("w", buffering=1)

    def log(self, row: dict[str, float]) -> None:
        """Appends a row to the metrics. JSON has no NaN or infinity: those become null."""
        if self.first_host:
            finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
            self.metrics.write(json.dumps(finite) + "\n")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.first_host:
            print(text, flush=True)

    def close(self) -> None:
        if self.first_host:
            self.metrics.close()
