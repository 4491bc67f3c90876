"""Formats an audit as text."""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime import chips
from shardlib.mesh import show_axes
from tools.tables import grouped, show, table, texts

LEAST = 1e-3  # share of a table's total; smaller rows become one line
Row = dict[str, Any]


class Table(NamedTuple):
    """The layout of one kind of rows."""

    columns: dict[str, str]  # heading -> key of a row; followed by each, count and total
    unit: str = "B"

    def text(self, rows: list[Row], share: float = LEAST) -> str:
        least, cells = total_of(rows) * share, []
        for row in (row for row in rows if row["total"] > least):
            count = f"{row.get('bound', '')} {row['times']}".strip()
            each, total = row["total"] / row["times"], show(row["total"], self.unit)
            cells.append((*texts(row, self.columns.values()), show(each, self.unit), count, total))
        if small := [row for row in rows if 0 < row["total"] <= least]:
            blank = [""] * (len(self.columns) + 1)
            cells.append((f"and {len(small)} smaller", *blank, show_total(small, self.unit)))
        return table((*self.columns, "each", "count", "total"), cells)


TABLES = {
    "saved": Table({"saved at": "line", "type": "type", "memory": "memory"}),
    "transfers": Table(
        {"sent at": "line", "op": "op", "phase": "phase", "collective": "kind", "over": "axes"}
    ),
    "products": Table({"at": "line", "op": "op", "phase": "phase"}, "FLOP"),
}


def total_of(rows: list[Row]) -> float:
    return sum(row["total"] for row in rows)


def show_total(rows: list[Row], unit: str) -> str:
    """Formats the total of rows: `1.07 GB`, or `at most 1.07 GB` if some counts are upper bounds,
    `at least` if some are lower bounds, `about` if both occur."""
    bounds = {row.get("bound", "") for row in rows} - {""}
    bound = "about" if len(bounds) > 1 else "".join(bounds)
    return f"{bound} {show(total_of(rows), unit)}".strip()


def sums(rows: list[Row], name: Callable[[Row], str], unit: str = "B") -> str:
    """Formats the totals of rows by name: `backward 2 GB, forward 1 GB`."""
    by_name = ((key, total_of(found)) for key, found in grouped(rows, name).items())
    return ", ".join(f"{key} {show(amount, unit)}" for key, amount in by_name if amount)


def summary(result: dict[str, Any], chip: chips.Chip | None) -> str:
    """Describes each device's memory in sentences."""
    room, host = "", result["host"]
    if chip:
        left = chip.usable - result["peak"]
        whole = "has" if "TPU" in chip.kind else "lets JAX take"
        room = f": {show(abs(left))} {'less' if left > 0 else 'more'} than {chip.kind} {whole}"
    more = f" {show(host)} more are saved in the host's memory." if host else ""
    return f"At its peak a step holds {show(result['peak'])}{room}.{more}"


def terms_table(result: dict[str, Any]) -> str:
    """Formats the terms of tools/audit/memory.py, which add up to the peak."""
    rows = [(name, show(size)) for name, size in result["held"].items()]
    return table(("held at the peak", "a device"), rows)


def report(result: dict[str, Any], chip: chips.Chip | None = None, least: float = LEAST) -> str:
    """Formats the result of `audit_step`."""
    axes, sent, products = result["mesh"], result["transfers"], result["products"]
    largest_first = sorted(sent, key=lambda row: -row["total"])
    by_axes = sums(largest_first, lambda row: f"over {','.join(row['axes'])}")
    by_phase = sums(largest_first, operator.itemgetter("phase"))
    flops_by_phase = sums(products, operator.itemgetter("phase"), "FLOP")
    how = f" in {sum(row['times'] for row in sent):,.0f} collectives by ring algorithms"
    count = math.prod(axes.values())
    needed = result["model_flops"] / count
    seen = "counting the scores that causality and a window leave"
    of_model = f"The model needs {show(needed, 'FLOP')} of that, {seen}."
    if needed > total_of(products):
        more = f"step_flops in configs/sizes.py says {show(needed, 'FLOP')}, which is more"
        of_model = f"{more}: edit it like the model, or each MFU is wrong."
    sizes = ", ".join(f"{name}={size}" for name, size in result["sizes"].items())
    paragraphs = [
        f"{count} devices: {show_axes(axes)}\n{sizes}\n\n{summary(result, chip)}\n",
        f"{terms_table(result)}\n",
        "The peak is predicted: usually within 10% of what compilers for TPUs and GPUs report. "
        "tools.compile asks them.\n",
        TABLES["saved"].text(result["saved"], least),
        f"\nA device receives {show_total(sent, 'B')} a step"
        + (f"{how}: {by_axes}; {by_phase}.\n" if by_phase else ".\n"),
        TABLES["transfers"].text(sent, least),
        f"\nA device computes {show_total(products, 'FLOP')} a step: {flops_by_phase}.",
        of_model,
    ]
    return "\n".join(paragraphs)
