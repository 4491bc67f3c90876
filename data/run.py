"""A run's folder: the config that made it, and its metrics, one JSON object per line and step."""

import json
import pathlib
from typing import Any


class Run:
    """`<root>/<name>/`: metrics.jsonl and config.yaml. Only the first host should make one."""

    def __init__(self, root: str, name: str, config: str):
        self.folder = pathlib.Path(root).expanduser() / name
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(config)
        self.metrics = (self.folder / "metrics.jsonl").open("w", buffering=1)

    def log(self, row: dict[str, Any]) -> None:
        """Appends a row to the metrics; whole once this returns."""
        self.metrics.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self.metrics.close()
