"""Draws the curves of runs: loss by tokens and by time, validation loss, throughput.

    python -m tools.plot runs/a runs/b --output curves.svg

The legend has each run's name and the config values in which the runs differ, leaving out settings
that don't affect learning, such as paths, profile or the mesh. Faint lines show each step's loss,
the others its exponential moving average, whose weights fall to 1/e within the number of steps in
the title. Time counts training steps only, not validation or saving.
"""

import dataclasses
import json
import math
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from runtime.config import flat, plain, within
from runtime.errors import user_errors
from runtime.run import RunConfig, rows_before
from shardlib.errors import UserError
from tools import arguments

SECONDS = {"days": 86400, "hours": 3600, "minutes": 60}
# What changes no number but by rounding, beside all of RunConfig; sections end in a dot.
UNSEEN = ("mesh.", "training.microbatches", "training.loss_chunks", "training.validation_",
          "training.max_skipped_updates")  # fmt: skip


def read(folder: pathlib.Path) -> tuple[dict[str, Any], pandas.DataFrame]:
    """A run's config, with dotted keys, and its metrics: a row per step, with the tokens and
    seconds so far. Raises UserError if they can't be read."""
    try:
        config = flat(plain((folder / "config.yaml").read_text()))
        lines, damaged = rows_before(folder / "metrics.jsonl", math.inf)
        if damaged:
            print(f"warning: left out {damaged} damaged lines of {folder}", file=sys.stderr)
        run = pandas.DataFrame(map(json.loads, lines), dtype=float)
        if missing := {"step", "loss", "tokens_per_second"} - {*run}:
            raise ValueError(f"no row has {' or '.join(sorted(missing))}")
        steps = run["step"].astype(int)
        tokens = tokens_of_steps(folder, config, steps.max() + 1)
        run["tokens"] = np.cumsum(tokens)[steps]
        run["seconds"] = (tokens[steps] / run["tokens_per_second"]).cumsum()
    except Exception as error:  # of YAML and pandas too
        problem = " ".join(str(error).split())
        raise UserError(f"{folder} has no readable metrics: {problem}") from None
    return config, run


def tokens_of_steps(folder: pathlib.Path, config: dict[str, Any], steps: int) -> np.ndarray:
    """The tokens in the batch of each step: the run may go on with another batch at a start."""

    def tokens(config: dict[str, Any]) -> int:
        return int(config["training.tokens.batch"] * config["training.tokens.len"])

    file = folder / "starts.jsonl"
    starts = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    found = np.full(steps, tokens(config))
    for number, start in enumerate(starts):  # a clone's first start stands for the steps before it
        found[start["first_step"] if number else 0 :] = tokens(flat(plain(start["config"])))
    return found


def labels(folders: Sequence[pathlib.Path], configs: Sequence[dict[str, Any]]) -> list[str]:
    """Each run's name and the values in which its config differs, if they affect learning. A value
    that follows another one in all runs, as steps_for_lr follows steps, isn't repeated, nor one
    that a sweep has put into the name."""
    ignored = {field.name for field in dataclasses.fields(RunConfig)}
    table = pandas.DataFrame(configs).map(str)
    differ = [k for k in table if k.split(".")[0] not in ignored and table[k].nunique() > 1]
    differ = [k for k in differ if not k.startswith(UNSEEN)]
    differ = [
        k for i, k in enumerate(differ) if not any(table[k].equals(table[j]) for j in differ[:i])
    ]
    texts = []
    for run, (_, row) in zip(folders, table.iterrows(), strict=True):
        said = run.name.split(",")  # a sweep names its runs by their values
        parts = [f"{k.rpartition('.')[2]}={row[k]}" for k in differ if f"{k}={row[k]}" not in said]
        texts.append(", ".join([run.name, *parts]))
    return [textwrap.fill(text, 140 // min(len(folders), 2)) for text in texts]


def smooth(values: pandas.Series, steps: float) -> pandas.Series:
    """The exponential moving average, whose weights fall to 1/e in this many steps. A NaN has no
    weight and stays NaN."""
    fall = math.exp(-1 / steps) if steps > 0 else 0.0
    return values.ewm(alpha=1 - fall).mean().where(values.notna())


def draw(folders: Sequence[pathlib.Path], output: pathlib.Path, smoothing: float | None) -> None:
    """Draws the runs into one picture, except those that can't be read, which it names. Raises
    UserError if none can, and for an unknown picture format."""
    if output.is_dir():
        raise UserError(f"--output={output} is a folder: name a file in it")
    found = []
    for folder in folders:
        try:
            found.append((folder, *read(folder)))
        except UserError as error:
            if folder == folders[-1] and not found:
                raise
            print(f"warning: {error}", file=sys.stderr)
    folders, configs, runs = zip(*found, strict=True)
    steps = max(map(len, runs)) // 100 if smoothing is None else smoothing
    longest = max(run["seconds"].max() for run in runs)
    unit = next((unit for unit in SECONDS if longest >= 2 * SECONDS[unit]), "minutes")
    texts, columns = labels(folders, configs), min(len(runs), 2)
    lines = sum(text.count("\n") + 1 for text in texts) / columns
    figure = Figure(figsize=(12, 8 + lines / 5), layout="constrained")
    colors = matplotlib.colormaps["tab10" if len(runs) <= 10 else "turbo"]
    validated = any("validation_loss" in run for run in runs)
    panels = figure.subplot_mosaic("LT;VS" if validated else "LT;SS")
    by_tokens, by_time, speed = (panels[letter] for letter in "LTS")
    for i, (run, label) in enumerate(zip(runs, texts, strict=True)):
        color = colors(i if len(runs) <= 10 else i / (len(runs) - 1))
        tokens, loss, dot = run["tokens"], run["loss"], "." if len(run) == 1 else None
        for panel, x in (by_tokens, tokens), (by_time, run["seconds"] / SECONDS[unit]):
            panel.plot(x, loss, color=color, alpha=0.25, linewidth=0.7)
            (line,) = panel.plot(x, smooth(loss, steps), color=color, marker=dot)
        line.set_label(label)
        if "validation_loss" in run:
            rows = run.dropna(subset="validation_loss")
            panels["V"].plot(rows["tokens"], rows["validation_loss"], ".-", color=color)
        speed.plot(tokens, smooth(run["tokens_per_second"], steps), color=color, marker=dot)
    average = f", averaged over {steps:g} steps" if steps > 1 else ""
    for name, panel in panels.items():
        panel.set(title=f"loss{average}", xlabel="tokens", ylabel="nats per token")
        panel.grid(alpha=0.3)
        if name != "T":
            panel.xaxis.set_major_formatter(EngFormatter())  # 5 M
        if name == "V":
            panel.set(title="validation loss")
    by_time.set(xlabel=f"{unit} of training steps")
    speed.set(title=f"throughput{average}", ylabel="tokens per second", ylim=(0, None))
    speed.yaxis.set_major_formatter(EngFormatter())
    figure.legend(loc="outside upper center", ncols=columns)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(output, dpi=150)
    except ValueError as error:  # an unknown format
        raise UserError(str(error)) from None


def main() -> None:
    parser = arguments.parser("tools.plot", __doc__)
    parser.add_argument("run", nargs="+", help="a run's folder")
    parser.add_argument("--output", default="curves.svg", help=".svg or .png")
    parser.add_argument(
        "--smoothing", type=within(float, 0, 10**9), help="steps; default: 1%% of the run; 0: none"
    )
    with user_errors():
        given = parser.parse_args()
        draw([*map(pathlib.Path, given.run)], pathlib.Path(given.output), given.smoothing)
        print(f"drew {given.output}")


if __name__ == "__main__":
    main()
