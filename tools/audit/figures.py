"""Shows the figures of an audit as rows of HTML tables; of two audits, also what changed."""

import collections
import html
from collections.abc import Iterator
from typing import Any

from runtime import chips
from tools.audit.roofline import bound, seconds
from tools.audit.text import TABLES, show_total, total_of
from tools.tables import show

PHASES = "forward", "recomputed", "backward", "update"
NAMES = {"memory": "memory bandwidth", "transfers": "received", "products": "computed"}
MOST = 5  # of the lines

Results = list[dict[str, Any]]  # of tools.audit's `audit_step`: one, or an earlier and a later one
Row = dict[str, Any]
Place = tuple[str, str, str]  # function, op or type, and line, unless lines have moved
Cells = dict[str, list[list[Row]]]  # by label; a cell shows the total of its rows


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


def held(results: Results) -> Iterator[str]:
    """Yields the terms of the peak, and their sum."""
    return _rows([_cells(x["held"] | {"at the peak": x["peak"]}) for x in results])


def phases(results: Results, name: str) -> Iterator[str]:
    """Yields what is received or computed in each phase and in all, and over which axes."""
    tables, columns = [], (*PHASES, "")
    for x in results:
        groups = {NAMES[name]: x[name]}
        for row in sorted(x[name], key=lambda row: -row["total"]):
            if "axes" in row:
                groups.setdefault(f"over {', '.join(row['axes'])}", []).append(row)
        tables.append(
            {
                label: [[row for row in rows if phase in (row["phase"], "")] for phase in columns]
                for label, rows in groups.items()
            }
        )
    return _rows(tables, TABLES[name].unit)


def times(results: Results, chip: chips.Chip, links: dict[str, str]) -> tuple[str, Iterator[str]]:
    """Returns what bounds the step, and rows with the least time that each resource needs."""
    names, mesh = dict(NAMES), results[-1]["mesh"]
    for axis in (axis for axis, size in mesh.items() if size > 1):
        link = (chip.links_of(mesh) | links)[axis]
        names[link] = f"{names[link]}, {axis}" if link in names else f"{link}, over {axis}"
    least = [bound(x, chip, chip.links_of(x["mesh"]) | links) for x in results]
    mfu = " → ".join(dict.fromkeys(f"{x.mfu:.0%}" for x in least))
    tables = [_cells({names.get(k, k): s for k, s in x.seconds.items()}) for x in least]
    longest = " → ".join(dict.fromkeys(NAMES.get(x.longest, x.longest) for x in least))
    return f"Bound by {longest}. MFU at most {mfu}", _rows(tables, "s")


def lines(results: Results, chip: chips.Chip | None, links: dict[str, str]) -> Iterator[str]:
    """Yields the lines that need most of a resource: of its time on a chip, else of all that is
    saved, received or computed. Of two audits, yields what changed most, by function and op."""
    needs, at = list[dict[tuple[Place, str], list[Row]]](), dict[Place, str]()
    for x in results:
        needs.append(collections.defaultdict(list))
        over = chip.links_of(x["mesh"]) | links if chip else {}
        at = {}
        for table, row in ((name, row) for name in TABLES for row in x[name]):
            line, _, function = row["line"].partition(" ")
            place = function, row.get("op") or row["type"], line if len(results) == 1 else ""
            at[place], amounts = line, {table: row}
            if chip:
                spent = seconds({table: [row]}, chip, over)
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
