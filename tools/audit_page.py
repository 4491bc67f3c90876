"""The audit as one page of HTML: train.py, and beside each line what it keeps, sends and does."""

import collections
import html
import math
import pathlib
from collections.abc import Callable
from typing import Any

import train

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 1rem; color: #1c1c1c; background: #fff; }
h1 { font-size: 1.4em; margin: 0; }
table { border-collapse: collapse; }
td, th { padding: 0 .6em; text-align: right; white-space: nowrap; font-weight: normal; }
thead { position: sticky; top: 0; background: #fff; box-shadow: 0 1px #999; }
tr:target td { outline: 2px solid #d08000; }
.source td:nth-child(2), .source th:nth-child(2), .rows td, .rows th { text-align: left; }
.source th[colspan] { text-align: center; }
.source { font: 12px/1.5 ui-monospace, monospace; margin-top: 1rem; }
.source td:nth-child(2) { white-space: pre; padding-right: 1em; }
.source td:first-child { color: #888; }
.rows { margin: .5rem 0 1.5rem; font-size: 13px; }
.rows td.number { text-align: right; }
summary { cursor: pointer; }
a { color: inherit; }
"""

# Title, colour, and which phases of which part of the audit a column of the margin adds up.
COLUMNS = [
    ("", "46, 125, 50", "saved", ("",)),
    ("forward", "21, 101, 192", "transfers", ("forward", "update")),
    ("again", "21, 101, 192", "transfers", ("recomputed",)),
    ("backward", "21, 101, 192", "transfers", ("backward",)),
    ("forward", "198, 40, 40", "products", ("forward", "update")),
    ("again", "198, 40, 40", "products", ("recomputed",)),
    ("backward", "198, 40, 40", "products", ("backward",)),
]
TABLES = {
    "worst": (
        "At the worst moment, beside weights, moments and batch",
        ("line", "type", "op", "times"),
    ),
    "saved": ("Kept for the backward pass", ("line", "type", "memory", "times")),
    "transfers": ("Received", ("line", "op", "phase", "kind", "axes", "times")),
    "products": ("Multiplied", ("line", "op", "phase", "times")),
}


def _amount(part: str, row: dict[str, Any]) -> float:
    """Bytes or FLOPs of all the times that a row happens."""
    if part == "saved":
        return row["bytes"]
    return row["times"] * row["flops" if part == "products" else "bytes"]


def _unit(part: str) -> str:
    return "FLOP" if part == "products" else "B"


def _margin(result: dict[str, Any], show: Callable[[float, str], str]) -> dict[str, str]:
    """The cells beside each line, by `train.py:253`."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(COLUMNS))
    for i, (_, _, part, phases) in enumerate(COLUMNS):
        for row in result[part]:
            if row.get("phase", "") in phases:
                sums[row["line"]][i] += _amount(part, row)
    largest: dict[str, float] = collections.defaultdict(float)
    for amounts in sums.values():
        for (_, _, part, _), amount in zip(COLUMNS, amounts, strict=True):
            largest[part] = max(largest[part], amount)
    cells = {}
    for line, amounts in sums.items():
        texts = []
        for (_, colour, part, _), amount in zip(COLUMNS, amounts, strict=True):
            # The root, as amounts lie far apart.
            heat = math.sqrt(amount / largest[part]) * 0.6 if amount else 0
            shade = f' style="background: rgba({colour}, {heat:.2f})"' if amount else ""
            texts.append(f"<td{shade}>{show(amount, _unit(part)) if amount else ''}</td>")
        cells[line] = "".join(texts)
    return cells


def _table(part: str, result: dict[str, Any], show: Callable[[float, str], str]) -> str:
    title, keys = TABLES[part]
    rows = sorted(result[part], key=lambda row: -_amount(part, row))
    body = []
    for row in rows:
        number = row["line"].rpartition(":")[2]
        link = f'<a href="#L{number}">{row["line"]}</a>' if number else ""
        texts = [", ".join(row[k]) if k == "axes" else html.escape(str(row[k])) for k in keys[1:]]
        cells = "".join(f"<td>{text}</td>" for text in texts)
        amount = show(_amount(part, row), _unit(part))
        body.append(f'<tr><td>{link}</td>{cells}<td class="number">{amount}</td></tr>')
    total = show(sum(_amount(part, row) for row in rows), _unit(part))
    head = "".join(f"<th>{key}</th>" for key in (*keys, "in all"))
    return (
        f"<details><summary>{title}: {total}, {len(rows)} rows</summary>"
        f'<table class="rows"><tr>{head}</tr>{"".join(body)}</table></details>'
    )


def page(result: dict[str, Any], summary: str, show: Callable[[float, str], str]) -> str:
    """`result` as tools.audit has it, a summary as text, and how it shows amounts."""
    cells = _margin(result, show)
    empty = "<td></td>" * len(COLUMNS)
    source = pathlib.Path(train.__file__).read_text().splitlines()
    lines = "".join(
        f'<tr id="L{i}"><td>{i}</td><td>{html.escape(line)}</td>'
        f"{cells.get(f'train.py:{i}', empty)}</tr>"
        for i, line in enumerate(source, 1)
    )
    head = (
        "<thead><tr><th></th><th>train.py, on each device and in a step</th><th>keeps</th>"
        '<th colspan="3">receives</th><th colspan="3">multiplies</th></tr><tr><th></th><th></th>'
        + "".join(f"<th>{title}</th>" for title, _, _, _ in COLUMNS)
        + "</tr></thead>"
    )
    tables = "".join(_table(part, result, show) for part in TABLES)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>What a training step does</title><style>{STYLE}</style>"
        f"<h1>What a training step does</h1><p>{html.escape(summary)}</p>{tables}"
        f'<table class="source">{head}<tbody>{lines}</tbody></table></html>\n'
    )
