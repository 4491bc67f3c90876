"""Shows an audit as a page: its figures, and the source, with the amounts beside its lines."""

import ast
import collections
import html
import itertools
import math
import pathlib
import string
import sys
from collections.abc import Iterator
from typing import Any

from runtime import chips
from runtime.config import ROOT
from shardlib.mesh import show_axes
from tools.audit.roofline import bound, seconds
from tools.audit.text import TABLES, Row, show_total, summary, total_of
from tools.tables import grouped, show

PHASES = "forward", "recomputed", "backward", "update"
NAMES = {"memory": "memory bandwidth", "transfers": "received", "products": "computed"}
MOST = 5  # of the lines
# The columns beside each line: the table whose rows at that line are added up, and their phase.
MARGIN = [("saved", ""), *itertools.product(("transfers", "products"), PHASES[:3])]

Result = dict[str, Any]  # of tools.audit's `audit_step`
Place = tuple[str, str, str]  # line, function, and op or type
Cells = dict[str, list[list[Row]]]  # by label; a cell shows the total of its rows
Amounts = dict[tuple[str, ...], list[Row]]  # by line, table and phase


def page(result: Result, chip: chips.Chip | None, text: str) -> str:
    """The first screen has the figures. Below are train.py and each file of variants/ and kernels/
    that the step calls, with what each line saves, receives and computes. Definitions without
    amounts are folded, and so is the text."""
    options = [option.lstrip("+") for option in sys.argv[1:]]
    options = [x for x in options if not x.startswith(("audit.html=", "audit.json="))]
    how = "<small>audit.chip=h100, or another chip, adds it</small>"
    bounded, needed = f"What bounds the step? {how}", iter([""])
    measure = "by share of all that is saved, received or computed"
    if chip:
        bounded, needed = times(result, chip)
        measure = "by least time, without what kernels and the optimizer read and write"
    at: Amounts = collections.defaultdict(list)
    for table, row in ((name, row) for name in TABLES for row in result[name]):
        phase = row.get("phase", "").replace("update", "forward")
        at[row["line"].partition(" ")[0], table, phase].append(row)
    files = [ROOT / "train.py", *sorted([*ROOT.glob("variants/*.py"), *ROOT.glob("kernels/*.py")])]
    parts = {
        "bar": bar(result, chip),
        "held": _rows(_cells(result["held"] | {"at the peak": result["peak"]})),
        "received": phases(result, "transfers"),
        "computed": phases(result, "products"),
        "times": needed,
        "lines": lines(result, chip),
        "source": (line for file in files for line in _source(file, at)),
    }
    count, kind = math.prod(result["mesh"].values()), f"x {chip.kind}" if chip else "devices"
    template = string.Template(pathlib.Path(__file__).with_suffix(".html").read_text())
    return template.substitute(
        {name: "\n".join(rows) for name, rows in parts.items()},
        devices=f"{count} {kind}, {show_axes(result['mesh'])}",
        options=html.escape(" ".join(options)),
        summary=summary(result, chip),
        bound=bounded,
        measure=measure,
        text=html.escape(text),
    )


# --- The figures ----------------------------------------------------------------------------------


def bar(result: Result, chip: chips.Chip | None) -> Iterator[str]:
    """Yields a bar of the peak's terms, with the chip's memory."""
    memory, usable = (chip.memory, chip.usable) if chip else (0.0, 0.0)
    length = max(memory, result["peak"])
    ends = f"--usable: {usable / length:.2%}; --memory: {memory / length:.2%}"
    yield f'<div class=bar style="{ends}">'
    for term, size in result["held"].items():
        inside = show(size) if size > length / 12 else ""  # else it has no room
        yield f'<i style="width: {size / length:.3%}" title="{term}">{inside}</i>'
    yield "</div>"
    if chip:
        limit = f"JAX may use {show(usable)} of {show(memory)}"
        yield f'<p class=limit style="width: {usable / length:.2%}">{limit}</p>'


def phases(result: Result, name: str) -> Iterator[str]:
    """Yields what is received or computed in each phase and in all, and over which axes."""
    groups, columns, cells = {NAMES[name]: result[name]}, (*PHASES, ""), Cells()
    if name == "transfers":
        largest_first = sorted(result[name], key=lambda row: -row["total"])
        groups |= grouped(largest_first, lambda row: f"over {', '.join(row['axes'])}")
    for label, rows in groups.items():
        cells[label] = [[x for x in rows if phase in (x["phase"], "")] for phase in columns]
    return _rows(cells, TABLES[name].unit)


def times(result: Result, chip: chips.Chip) -> tuple[str, Iterator[str]]:
    """Returns what bounds the step, and rows with the least time that each resource needs."""
    names, mesh, least = dict(NAMES), result["mesh"], bound(result, chip)
    for axis in (axis for axis, size in mesh.items() if size > 1):
        link = chip.links_of(mesh)[axis]
        names[link] = f"{names[link]}, {axis}" if link in names else f"{link}, over {axis}"
    cells = _cells({names.get(k, k): s for k, s in least.seconds.items()})
    longest = NAMES.get(least.longest, least.longest)
    return f"Bound by {longest}. MFU at most {least.mfu:.0%}", _rows(cells, "s")


def lines(result: Result, chip: chips.Chip | None) -> Iterator[str]:
    """Yields the lines that need most of a resource: of its time on a chip, else of all that is
    saved, received or computed."""
    needs: dict[tuple[Place, str], list[Row]] = collections.defaultdict(list)
    for table, row in ((name, row) for name in TABLES for row in result[name]):
        line, _, function = row["line"].partition(" ")
        place, amounts = (line, function, row.get("op") or row["type"]), {table: row}
        if chip:
            spent = seconds({table: [row]}, chip, result["mesh"])
            amounts = {resource: {"total": s} for resource, s in spent.items()}
        for name, amount in amounts.items():
            needs[place, name].append(amount)
    shares: dict[Place, tuple[float, str]] = {}
    for (place, name), rows in needs.items():
        share = total_of(rows) / (1 if chip else total_of(result[name]) or 1)
        shares[place] = max(shares.get(place, (0, "")), (share, name))
    for place, (_, name) in sorted(shares.items(), key=lambda item: -item[1][0])[:MOST]:
        line, *about = *map(html.escape, place), NAMES.get(name, name)
        texts = "".join(f"<td>{text}</td>" for text in about)
        cell = _cell(needs[place, name], "s" if chip else TABLES[name].unit)
        yield f'<tr><th><a href="#{line}">{line}</a></th>{texts}{cell}</tr>'


def _cells(amounts: dict[str, float]) -> Cells:
    return {label: [[{"total": amount}]] for label, amount in amounts.items()}


def _cell(rows: list[Row], unit: str) -> str:
    return f"<td{'' if total_of(rows) else ' class=none'}>{show_total(rows, unit)}</td>"


def _rows(table: Cells, unit: str = "B") -> Iterator[str]:
    """Yields the rows of a table. Their style has the last amount as a part of the largest."""
    largest = max(total_of(cells[-1]) for cells in table.values()) or 1
    for label, cells in table.items():
        shown, part = "".join(_cell(rows, unit) for rows in cells), total_of(cells[-1]) / largest
        yield f'<tr style="--part: {part:.2%}"><th>{label}</th>{shown}</tr>'


# --- The source -----------------------------------------------------------------------------------


def _beside(at: Amounts, *key: str) -> str:
    rows = at.get(key, [])
    if not (amount := total_of(rows)):
        return "<td></td>"
    name, shown = key[1], show_total(rows, TABLES[key[1]].unit)
    largest = max(total_of(rows) for (_, table, _), rows in at.items() if table == name)
    heat = 0.6 * math.sqrt(amount / largest)  # amounts differ by orders of magnitude
    return f'<td class={name} style="--heat: {heat:.2f}">{shown}</td>'


def _source(file: pathlib.Path, at: Amounts) -> Iterator[str]:
    """Yields the lines of a file, with the amounts beside them, if it has any. Folds neighboring
    definitions without amounts."""
    costly = {line for (line, *_), rows in at.items() if total_of(rows)}
    if not any(line.startswith(f"{file.name}:") for line in costly):
        return
    yield f"<tbody><tr><th></th><th>{file.relative_to(ROOT)}</th></tr></tbody>"
    code, nodes = (source := file.read_text()).splitlines(), ast.parse(source).body
    ends = [0, *(node.end_lineno or 0 for node in nodes[:-1]), len(code)]
    pieces = [range(first + 1, end + 1) for first, end in itertools.pairwise(ends)]
    names = [getattr(node, "name", "") for node in nodes]

    def is_costly(piece: tuple[range, str]) -> bool:
        return any(f"{file.name}:{i}" in costly for i in piece[0])

    for open_, group in itertools.groupby(zip(pieces, names, strict=True), is_costly):
        ranges, defined = zip(*group, strict=True)
        numbers = range(ranges[0].start, ranges[-1].stop)
        yield f"<tbody{'' if open_ else ' class=folded'}>"
        if not open_:
            title = f"lines {numbers[0]} to {numbers[-1]}: {', '.join(filter(None, defined))}"
            label = f"<label><input type=checkbox>{title}</label>"
            yield f"<tr><td></td><td colspan=8>{label}</td></tr>"
        for i in numbers:
            cells = "".join(_beside(at, f"{file.name}:{i}", *column) for column in MARGIN)
            line = html.escape(code[i - 1])
            yield f'<tr id="{file.name}:{i}"><td>{i}</td><td>{line}</td>{cells}</tr>'
        yield "</tbody>"
