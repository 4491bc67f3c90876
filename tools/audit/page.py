"""Shows an audit as a page: its figures, and the source, with the amounts beside its lines. Of two
audits, also shows what changed."""

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

Results = list[dict[str, Any]]  # of tools.audit's `audit_step`: one, or an earlier and a later one
Place = tuple[str, str, str]  # function, op or type, and line, unless lines have moved
Cells = dict[str, list[list[Row]]]  # by label; a cell shows the total of its rows
Amounts = dict[tuple[str, ...], list[Row]]  # by line, table and phase


def page(results: Results, chip: chips.Chip | None, text: str) -> str:
    """The first screen has the figures of an audit, or of two with what changed. Below are train.py
    and each file of variants/ and kernels/ that the step calls, with what each line saves, receives
    and computes. Definitions without amounts are folded, and so is the text."""
    result, options = results[-1], [option.lstrip("+") for option in sys.argv[1:]]
    options = [x for x in options if not x.startswith(("audit.html=", "audit.json="))]
    how = "<small>audit.chip=h100, or another chip, adds it</small>"
    bounded, needed = f"What bounds the step? {how}", iter([""])
    measure = "by share of all that is saved, received or computed"
    if chip:
        bounded, needed = times(results, chip)
        measure = "by least time, without what kernels and the optimizer read and write"
    at: Amounts = collections.defaultdict(list)
    for table, row in ((name, row) for name in TABLES for row in result[name]):
        phase = row.get("phase", "").replace("update", "forward")
        at[row["line"].partition(" ")[0], table, phase].append(row)
    files = [ROOT / "train.py", *sorted([*ROOT.glob("variants/*.py"), *ROOT.glob("kernels/*.py")])]
    parts = {
        "bars": bars(results, chip),
        "held": _rows([_cells(x["held"] | {"at the peak": x["peak"]}) for x in results]),
        "received": phases(results, "transfers"),
        "computed": phases(results, "products"),
        "times": needed,
        "lines": lines(results, chip),
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
        which="Largest changes" if len(results) > 1 else "Most expensive lines",
        measure=measure,
        text=html.escape(text),
    )


# --- The figures ----------------------------------------------------------------------------------


def bars(results: Results, chip: chips.Chip | None) -> Iterator[str]:
    """Yields a bar of the peak's terms for each audit, to one scale, with the chip's memory."""
    memory, usable = (chip.memory, chip.usable) if chip else (0.0, 0.0)
    length = max(memory, *(x["peak"] for x in results))
    ends = f"--usable: {usable / length:.2%}; --memory: {memory / length:.2%}"
    for x in results:
        yield f'<div class=bar style="{ends}">'
        for term in {**results[-1]["held"], **results[0]["held"]}:
            size = x["held"].get(term, 0)
            inside = show(size) if size > length / 12 else ""  # else it has no room
            yield f'<i style="width: {size / length:.3%}" title="{term}">{inside}</i>'
        yield "</div>"
    if chip:
        limit = f"JAX may use {show(usable)} of {show(memory)}"
        yield f'<p class=limit style="width: {usable / length:.2%}">{limit}</p>'


def phases(results: Results, name: str) -> Iterator[str]:
    """Yields what is received or computed in each phase and in all, and over which axes."""
    tables, columns = [], (*PHASES, "")
    for x in results:
        groups = {NAMES[name]: x[name]}
        if name == "transfers":
            largest_first = sorted(x[name], key=lambda row: -row["total"])
            groups |= grouped(largest_first, lambda row: f"over {', '.join(row['axes'])}")
        tables.append(cells := Cells())
        for label, rows in groups.items():
            cells[label] = [[x for x in rows if phase in (x["phase"], "")] for phase in columns]
    return _rows(tables, TABLES[name].unit)


def times(results: Results, chip: chips.Chip) -> tuple[str, Iterator[str]]:
    """Returns what bounds the step, and rows with the least time that each resource needs."""
    names, mesh = dict(NAMES), results[-1]["mesh"]
    for axis in (axis for axis, size in mesh.items() if size > 1):
        link = chip.links_of(mesh)[axis]
        names[link] = f"{names[link]}, {axis}" if link in names else f"{link}, over {axis}"
    least = [bound(x, chip) for x in results]
    mfu = " → ".join(dict.fromkeys(f"{x.mfu:.0%}" for x in least))
    tables = [_cells({names.get(k, k): s for k, s in x.seconds.items()}) for x in least]
    longest = " → ".join(dict.fromkeys(NAMES.get(x.longest, x.longest) for x in least))
    return f"Bound by {longest}. MFU at most {mfu}", _rows(tables, "s")


def lines(results: Results, chip: chips.Chip | None) -> Iterator[str]:
    """Yields the lines that need most of a resource: of its time on a chip, else of all that is
    saved, received or computed. Of two audits, yields what changed most, by function and op."""
    needs, at = list[dict[tuple[Place, str], list[Row]]](), dict[Place, str]()
    for x in results:
        needs.append(collections.defaultdict(list))
        at = {}
        for table, row in ((name, row) for name in TABLES for row in x[name]):
            line, _, function = row["line"].partition(" ")
            place = function, row.get("op") or row["type"], line if len(results) == 1 else ""
            at[place], amounts = line, {table: row}
            if chip:
                spent = seconds({table: [row]}, chip, x["mesh"])
                amounts = {resource: {"total": s} for resource, s in spent.items()}
            for name, amount in amounts.items():
                needs[-1][place, name].append(amount)
    new, old = needs[-1], needs[0] if len(needs) > 1 else {}
    shares: dict[Place, tuple[float, str]] = {}
    for place, name in {**new, **old}:
        more = total_of(new.get((place, name), [])) - total_of(old.get((place, name), []))
        if share := abs(more) / (1 if chip else total_of(results[-1][name]) or 1):
            shares[place] = max(shares.get(place, (0, "")), (share, name))
    if not shares:
        yield "<tr><td>none</td></tr>"
    for place, (_, name) in sorted(shares.items(), key=lambda item: -item[1][0])[:MOST]:
        link = f'<a href="#{at[place]}">{at[place]}</a>' if place in at else "removed"
        texts = place[0], html.escape(place[1]), NAMES.get(name, name)
        about = "".join(f"<td>{text}</td>" for text in texts)
        now, then = ([*x.get((place, name), [])] for x in (new, old or new))
        cell = _cell(now, then, "s" if chip else TABLES[name].unit)
        yield f"<tr><th>{link}</th>{about}{cell}</tr>"


def _cells(amounts: dict[str, float]) -> Cells:
    return {label: [[{"total": amount}]] for label, amount in amounts.items()}


def _cell(new: list[Row], old: list[Row], unit: str) -> str:
    """Formats the total of rows; if it has changed, also the old total and the difference."""
    text, more = show_total(new, unit), total_of(new) - total_of(old)
    if more:
        sign = "+" if more > 0 else ""
        text = f"{show_total(old, unit)} → {text} <b>{sign}{show(more, unit)}</b>"
    return f"<td>{text}</td>" if total_of([*new, *old]) else f"<td class=none>{text}</td>"


def _rows(tables: list[Cells], unit: str = "B") -> Iterator[str]:
    """Yields the rows of a table. Their style has the last amount as a part of the largest."""
    largest = max(total_of(cells[-1]) for cells in tables[-1].values()) or 1
    for label in {**tables[-1], **tables[0]}:
        new, old = (table.get(label, [[]] * 5) for table in (tables[-1], tables[0]))
        cells = "".join(_cell(*pair, unit) for pair in zip(new, old, strict=False))
        part = total_of(new[-1]) / largest
        yield f'<tr style="--part: {part:.2%}"><th>{label}</th>{cells}</tr>'


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
