"""The curves of runs in one picture: loss by tokens and by time, validation loss, throughput.

    python -m tools.plot runs/a runs/b --output curves.svg

A run is labelled by what differs between the runs' configs. Faint lines are each step's loss; the
others are its exponential average, whose weights fall to 1/e in so many steps as the title says.
Time is that of the steps, without what a run does between them.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from omegaconf import OmegaConf

from runtime.config import flat
from runtime.errors import user_errors
from shardlib.errors import UserError

SECONDS = {"days": 86400, "hours": 3600, "minutes": 60}


def read(folder: pathlib.Path) -> tuple[dict[str, Any], pandas.DataFrame]:
    """A run's config by keys with dots, and its metrics, a row a step, with its tokens and seconds
    so far. Raises UserError if it has none."""
    try:
        config = flat(OmegaConf.load(folder / "config.yaml"))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        run = pandas.DataFrame([json.loads(line) for line in lines], dtype=float)
        batch = config["training.tokens.batch"] * config["training.tokens.len"]
        run["tokens"] = (run["step"] + 1) * batch
        run["seconds"] = (batch / run["tokens_per_second"]).cumsum()
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(f"{folder} has no metrics that can be read: {error}") from None
    return config, run


def labels(folders: Sequence[pathlib.Path], configs: Sequence[dict[str, Any]]) -> list[str]:
    """Each run's name, and what it has else than the others; of its paths, the name is enough."""
    table = pandas.DataFrame(configs).map(str)
    differ = [key for key in table if not key.startswith("paths.") and table[key].nunique() > 1]
    shown = [[f"{key.rpartition('.')[2]}={table[key][i]}" for key in differ] for i in table.index]
    return [", ".join([folder.name, *more]) for folder, more in zip(folders, shown, strict=True)]


def smooth(values: pandas.Series, steps: float) -> pandas.Series:
    """Of each value and those before it the mean, by weights that fall to 1/e in so many steps.
    A NaN counts for nothing, and stays one."""
    fall = math.exp(-1 / steps) if steps > 0 else 0.0
    return values.ewm(alpha=1 - fall).mean().where(values.notna())


def draw(folders: Sequence[pathlib.Path], output: pathlib.Path, smoothing: float | None) -> None:
    """Raises UserError for what is no run, and for a picture of no known kind."""
    configs, runs = zip(*map(read, folders), strict=True)
    steps = max(1, max(map(len, runs)) // 100) if smoothing is None else smoothing
    longest = max(run["seconds"].max() for run in runs)
    unit = next((unit for unit in SECONDS if longest >= 2 * SECONDS[unit]), "minutes")
    figure = Figure(figsize=(12, 8), layout="constrained")
    (by_tokens, by_time), (validation, speed) = axes = figure.subplots(2, 2)
    for i, (run, label) in enumerate(zip(runs, labels(folders, configs), strict=True)):
        color, tokens, loss = f"C{i}", run["tokens"], run["loss"]
        for panel, x in (by_tokens, tokens), (by_time, run["seconds"] / SECONDS[unit]):
            panel.plot(x, loss, color=color, alpha=0.25, linewidth=0.7)
            (line,) = panel.plot(x, smooth(loss, steps), color=color)
        line.set_label(label)
        if "validation_loss" in run:
            there = run.dropna(subset="validation_loss")
            validation.plot(there["tokens"], there["validation_loss"], f"{color}.-")
        speed.plot(tokens, smooth(run["tokens_per_second"], steps), color=color)
    mean = f", averaged over {steps:g} steps" if steps else ""
    by_tokens.set(title=f"loss{mean}", xlabel="tokens", ylabel="nats per token")
    by_time.set(title=f"loss{mean}", xlabel=f"{unit} of steps", ylabel="nats per token")
    validation.set(title="validation loss", xlabel="tokens", ylabel="nats per token")
    speed.set(
        title=f"throughput{mean}", xlabel="tokens", ylabel="tokens per second", ylim=(0, None)
    )
    for axis in by_tokens.xaxis, validation.xaxis, speed.xaxis, speed.yaxis:
        axis.set_major_formatter(EngFormatter())  # 5 M
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=min(len(runs), 2))
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(output, dpi=150)
    except ValueError as error:  # of a format that isn't known
        raise UserError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="+", type=pathlib.Path, help="a run's folder")
    parser.add_argument("--output", type=pathlib.Path, default="curves.svg", help=".svg or .png")
    parser.add_argument("--smoothing", type=float, help="steps; by default a hundredth; 0: none")
    given = parser.parse_args()
    with user_errors():
        draw(given.run, given.output, given.smoothing)
    print(f"drew {given.output}")


if __name__ == "__main__":
    main()
