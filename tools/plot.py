"""Draws the curves of runs: loss by tokens and by time, validation losses, throughput.

    python -m tools.plot runs/a runs/b --output curves.svg

A table below has each run's last losses and the settings that differ between runs, except those
that change a loss only by rounding, such as the mesh; "-" marks settings that a run doesn't use.
Faint lines show each step's loss, the others its exponential moving average, whose weights fall to
1/e within the number of steps in the title, 1% of the longest run by default. Validation is in bits
per byte if tokenizers differ and all runs recorded it. Time counts training steps only, not
validation or saving. --log starts at a tenth of the shortest run, to tell close losses apart.
"""

import contextlib
import itertools
import json
import math
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from configs.schema import unused
from data.flat_tokens import tokenizer_of
from runtime.config import as_text, flat, plain, within
from runtime.errors import user_errors
from runtime.run import ROUNDING, rows_before
from shardlib.errors import UserError
from tools import arguments

matplotlib.rcParams["text.parse_math"] = False  # a run's name may have two $
SECONDS = {"days": 86400, "hours": 3600, "minutes": 60}
TITLES = {"L": "loss by tokens", "T": "loss by time", "S": "throughput", "V": "validation loss"}
# Prefixes of the table's keys, in its order: losses, and the settings that a loss depends on.
SEEN = ("loss", "validation_loss", "validation_bits", "tokenizer", "model.", "training.", "dtype",
        "flat_tokens.", "hf_dataset.", "paths.clone_")  # fmt: skip
UNKNOWN = "unknown"  # a tokenizer, of a dataset that isn't here
LOSSES = r"^(loss|validation_(loss|bits_per_byte)(/.*)?)$"  # names of these metrics


def read(folder: pathlib.Path) -> tuple[dict[str, Any], pandas.DataFrame]:
    """Returns a run's settings by dotted key, as text, and its metrics: a row per step, with the
    tokens and seconds so far. Raises UserError if they can't be read."""
    try:
        text = (folder / "config.yaml").read_text()
        config = flat(plain(text))
        paths = re.findall("filespec: ([^:\n]+)$", text, re.MULTILINE)
        names = (recorded.name for recorded in map(tokenizer_of, paths) if recorded)
        unknown = f"{UNKNOWN}, {config.get('model.vocab')} ids"
        named = config.get("hf_dataset.tokenizer"), *names
        config["tokenizer"] = next(filter(None, named), unknown)
        lines, damaged = rows_before(folder / "metrics.jsonl", math.inf)
        if damaged:
            print(f"warning: left out {damaged} damaged lines of {folder}", file=sys.stderr)
        run = pandas.DataFrame(map(json.loads, lines), dtype=float)
        if missing := {"step", "loss", "tokens_per_second"} - {*run}:
            raise ValueError(f"no row has {' or '.join(sorted(missing))}")
        steps = run["step"].astype(int)
        if first := int(steps.min()):  # of a clone
            said = f"counts the tokens before step {first} in batches of its own size"
            print(f"note: {folder} {said}", file=sys.stderr)
        starts, start = starts_of_steps(folder, config, first, steps.max() + 1)
        batches = [x["training.tokens.batch"] * x["training.tokens.len"] for x in starts]
        tokens = np.array(batches, int)[start]
        if config.get("flat_tokens.sequence_packing") is False:
            print(f"note: the tokens of {folder} include padding", file=sys.stderr)
        run["tokens"] = np.cumsum(tokens)[steps]
        run["seconds"] = (tokens[steps] / run["tokens_per_second"]).cumsum()
        for key, last in config.items():  # a resumed run may have had several values
            values = (as_text(starts[i].get(key, last)) for i in np.unique(start))
            config[key] = ", then ".join(value for value, _ in itertools.groupby(values))
    except Exception as error:  # of YAML and pandas too
        problem = " ".join(str(error).split())
        raise UserError(f"{folder} has no readable metrics: {problem}") from None
    return config, run


def starts_of_steps(
    folder: pathlib.Path, config: dict[str, Any], first: int, steps: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Returns the configs of a run's starts, and for each step the index of its start's. Before
    `first` a run has no metrics."""
    file, found = folder / "starts.jsonl", np.zeros(steps, int)
    starts = list[Any]()
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # a full disk has cut it off
            starts.append(json.loads(line))
    for number, start in enumerate(starts):
        begin = start["first_step"]
        found[begin if begin > first else 0 :] = number  # also the steps that a clone skips
    return [flat(plain(start["config"])) for start in starts] or [config], found


def used(config: dict[str, Any]) -> dict[str, str]:
    """Returns the settings that a loss can depend on, as text; "-" if this run doesn't use one."""
    texts, idle = {key: as_text(value) for key, value in config.items()}, dict(unused(config))
    if texts.get("training.steps_for_lr") == texts.get("training.steps"):
        idle["training.steps_for_lr"] = "as many as these"
    seen = (key for begin in SEEN for key in texts if key.startswith(begin))
    return {key: "-" if key in idle or key.startswith(ROUNDING) else texts[key] for key in seen}


def differences(names: Sequence[str], configs: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Returns the settings that differ between runs, by run; "-" where a run doesn't use one."""
    table = pandas.DataFrame(map(used, configs), index=names).fillna("-")
    sections = {key.rpartition(".")[0] for key in table}  # a section that a run lacks is null
    differ = [key for key in table if table[key].nunique() > 1 and key not in sections]
    return table[differ]


def smooth(values: pandas.Series, steps: float) -> pandas.Series:
    """Returns the exponential moving average whose weights fall to 1/e in this many steps. NaNs
    have no weight and stay NaN."""
    fall = math.exp(-1 / steps) if steps > 0 else 0.0
    return values.ewm(alpha=1 - fall).mean().where(values.notna())


def draw(
    folders: Sequence[pathlib.Path], output: pathlib.Path, smoothing: float | None, log: bool
) -> None:
    """Draws the runs into one picture. Warns of runs that can't be read. Raises UserError if none
    can, or if the picture can't be written."""
    if output.is_dir():
        raise UserError(f"--output={output} is a folder: name a file in it")
    if not output.suffix:  # matplotlib would add one
        raise UserError(f"--output={output}: end it with .svg or .png")
    found = []
    for folder in folders:
        try:
            found.append((folder, *read(folder)))
        except UserError as error:
            if folder == folders[-1] and not found:
                raise
            print(f"warning: {error}", file=sys.stderr)
    folders, configs, runs = zip(*found, strict=True)
    names = [folder.name or folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    # A name that begins with _ would get no label.
    names = ["\N{NO-BREAK SPACE}" + name if name[0] == "_" else name for name in names]
    steps = max(map(len, runs)) // 100 if smoothing is None else smoothing
    for run, config in zip(runs, configs, strict=True):
        run["each"], run["loss"] = run["loss"], smooth(run["loss"], steps)
        run["speed"] = smooth(run["tokens_per_second"], steps)
        last = run.filter(regex=LOSSES).ffill().assign(loss=run["loss"]).iloc[-1]
        config.update(last.map("{:.4f}".format))
    table = differences(names, configs)
    text = (table.T if len(table.columns) > len(runs) else table).to_string(line_width=150)
    text = text.replace(" ", "\N{NO-BREAK SPACE}")  # in SVG several spaces are one
    if log:
        start = min(run["tokens"].max() for run in runs) / 10
        runs = tuple(run[run["tokens"] >= start] for run in runs)
    tokenizers = {config["tokenizer"] for config in configs}
    nats = "nats per byte" if tokenizers == {"bytes_utf8"} else "nats per token"
    named = [x for x in tokenizers if not x.startswith(UNKNOWN)]
    differ = "differ" if len(named) > 1 else "may differ"
    nats += f"; the tokenizers {differ}" if len(tokenizers) > 1 else ""
    longest = max(run["seconds"].max() for run in runs)
    unit = next((unit for unit in SECONDS if longest >= 2 * SECONDS[unit]), "seconds")
    columns = max(1, 150 // (max(map(len, names)) + 10))
    lines = text.count("\n") / 8 + len(runs) / columns / 5
    figure = Figure(figsize=(12, 8.5 + lines), layout="constrained")
    colors = matplotlib.colormaps["tab10" if len(runs) <= 10 else "turbo"]
    # The columns to draw, by run.
    validations = [[*run.filter(regex="^validation_loss(/|$)")] for run in runs]
    in_bits = [[x.replace("loss", "bits_per_byte", 1) for x in found] for found in validations]
    known = all({*found} <= {*run} for found, run in zip(in_bits, runs, strict=True))
    if len(tokenizers) > 1 and known and any(in_bits):
        validations = in_bits
    sets = dict.fromkeys(itertools.chain(*validations))
    styles = dict(zip(sets, itertools.cycle(["-", "--", ":", "-."]), strict=False))
    panels: dict[str, Any] = figure.subplot_mosaic("LT;VS" if sets else "LT;SS")
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        color = colors(i if len(runs) <= 10 else i / (len(runs) - 1))
        tokens, dot = run["tokens"], "." if len(run) == 1 else None
        for panel, x in ("L", tokens), ("T", run["seconds"] / SECONDS.get(unit, 1)):
            panels[panel].plot(x, run["each"], color=color, alpha=0.25, linewidth=0.7)
            panels[panel].plot(x, run["loss"], color=color, marker=dot, label=name)
        for column in validations[i]:
            rows = run.dropna(subset=column)
            panels["V"].plot(rows["tokens"], rows[column], f".{styles[column]}", color=color)
        panels["S"].plot(tokens, run["speed"], color=color, marker=dot)
    average = f", averaged over {steps:g} steps" if steps > 1 else ""
    for letter, panel in panels.items():
        title = TITLES[letter] + (average if letter != "V" else "")
        panel.set(title=title, xlabel="tokens", ylabel=nats)
        panel.grid(alpha=0.3)
        if log and letter != "S":
            panel.set(xscale="log", yscale="log")
            for axis in panel.xaxis, panel.yaxis:
                axis.set(major_locator=MaxNLocator(6), major_formatter="{x:g}", minor_formatter="")
        if letter != "T":
            panel.xaxis.set_major_formatter(EngFormatter())  # 5 M
    panels["T"].set(xlabel=f"{unit} of training steps")
    if validations is in_bits:
        panels["V"].set(ylabel="bits per byte")
    if any("/" in column for column in styles):
        for column, style in styles.items():
            label = column.partition("/")[2] or "without a name"
            panels["V"].plot([], [], style, color="black", label=label)
        panels["V"].legend()
    panels["S"].set(ylabel="tokens per second", ylim=(0, None))
    panels["S"].yaxis.set_major_formatter(EngFormatter())
    legend = panels["L"].get_legend_handles_labels()
    figure.legend(*legend, loc="outside upper center", ncols=columns)
    figure.supxlabel(text if table.size else "", family="monospace", fontsize=8)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(output, dpi=150)
    except ValueError as error:  # an unknown format
        raise UserError(str(error)) from None


def main() -> None:
    parser = arguments.parser("tools.plot", __doc__)
    parser.add_argument("run", nargs="+", help="a run's folder")
    parser.add_argument("--output", default="curves.svg", help=".svg or .png")
    parser.add_argument("--smoothing", type=within(float, 0, 10**9), help="steps; 0: none")
    parser.add_argument("--log", action="store_true", help="draw losses on logarithmic axes")
    with user_errors():
        given = parser.parse_args()
        runs = [*map(pathlib.Path, given.run)]
        draw(runs, pathlib.Path(given.output), given.smoothing, given.log)
        print(f"drew {given.output}")


if __name__ == "__main__":
    main()
