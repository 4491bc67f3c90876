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

import numpy as np
from omegaconf import OmegaConf

from runtime.errors import user_errors
from runtime.run import flat
from shardlib.errors import UserError

TOKENS = [(10**9, "billion tokens"), (10**6, "million tokens"), (1, "tokens")]
TIMES = [(2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (0, 60, "minutes")]


def read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A run's config by keys with dots, and its metrics by name, float64[rows]; NaN where there is
    none. Raises UserError if it has none at all."""
    try:
        config = flat(OmegaConf.load(folder / "config.yaml"))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} isn't there: {folder} is no run's folder") from None
    except ValueError as error:
        raise UserError(f"{folder}/metrics.jsonl can't be read: {error}") from None
    if not rows:
        raise UserError(f"{folder}/metrics.jsonl has no step yet")
    names = dict.fromkeys(name for row in rows for name in row)
    return config, {
        name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in names
    }


def labels(folders: Sequence[pathlib.Path], configs: Sequence[dict[str, Any]]) -> list[str]:
    """Each run's name, and what it has else than the others; of its paths, the name is enough."""
    keys = dict.fromkeys(key for config in configs for key in config)
    differ = [
        key
        for key in keys
        if not key.startswith("paths.") and len({str(c.get(key)) for c in configs}) > 1
    ]
    shown = [[f"{key.rpartition('.')[2]}={c.get(key)}" for key in differ] for c in configs]
    return [", ".join([folder.name, *more]) for folder, more in zip(folders, shown, strict=True)]


def smooth(values: np.ndarray, steps: float) -> np.ndarray:
    """Of each value and those before it the mean, by weights that fall to 1/e in so many steps.
    What isn't finite is left out."""
    decay = math.exp(-1 / steps) if steps else 0.0
    total = weight = 0.0
    means = np.full_like(values, math.nan)
    for i, value in enumerate(values):
        total, weight = decay * total, decay * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1
            means[i] = total / weight
    return means


def draw(folders: Sequence[pathlib.Path], output: pathlib.Path, smoothing: float | None) -> None:
    """Raises UserError for what is no run, and for a picture of no known kind."""
    import matplotlib

    matplotlib.use("agg")  # it needs no screen
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    runs = [read(folder) for folder in folders]
    longest = max(len(metrics["step"]) for _, metrics in runs)
    steps = max(1, longest // 100) if smoothing is None else smoothing
    batches = [
        config["training.tokens.batch"] * config["training.tokens.len"] for config, _ in runs
    ]
    tokens = [(run["step"] + 1) * batch for (_, run), batch in zip(runs, batches, strict=True)]
    seconds = [
        np.cumsum(n / run["tokens_per_second"]) for (_, run), n in zip(runs, batches, strict=True)
    ]
    scale, unit = next(u for u in TOKENS if max(map(np.max, tokens)) >= u[0])
    _, second, times = next(u for u in TIMES if max(map(np.max, seconds)) >= u[0])
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    (by_tokens, by_time), (validation, speed) = axes
    names = labels(folders, [config for config, _ in runs])
    for i, (_, metrics) in enumerate(runs):
        loss, seen = metrics["loss"], tokens[i] / scale
        for panel, x in (by_tokens, seen), (by_time, seconds[i] / second):
            panel.plot(x, loss, color=f"C{i}", alpha=0.25, linewidth=0.7)
            panel.plot(x, smooth(loss, steps), color=f"C{i}", label=names[i] * (panel is by_tokens))
        if "validation_loss" in metrics:
            there = np.isfinite(metrics["validation_loss"])
            validation.plot(seen[there], metrics["validation_loss"][there], f"C{i}.-")
        speed.plot(seen, smooth(metrics["tokens_per_second"], steps), color=f"C{i}")
    mean = f", averaged over {steps:g} steps" if steps else ""
    by_tokens.set(title=f"loss{mean}", xlabel=unit, ylabel="nats per token")
    by_time.set(title=f"loss{mean}", xlabel=f"{times} of steps", ylabel="nats per token")
    validation.set(title="validation loss", xlabel=unit, ylabel="nats per token")
    speed.set(title=f"throughput{mean}", xlabel=unit, ylabel="tokens per second")
    speed.set_ylim(bottom=0)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=min(len(runs), 2))
    try:
        figure.savefig(output, dpi=150)
    except ValueError as error:  # of a format that isn't known
        raise UserError(str(error)) from None
    pyplot.close(figure)


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
