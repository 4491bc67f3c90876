"""Shows the figures of an audit as rows of HTML tables; of two audits, also what changed."""

import collections
import html
from collections.abc import Iterator
from typing import Any

from runtime import chips
from tools.audit.roofline import Row, bound, seconds
from tools.audit.text import TABLES, show_total, total_of
from tools.tables import show

PHASES = "forward", "recomputed", "backward", "update"
NAMES = {"memory": "memory bandwidth", "transfers": "received", "products": "computed"}
LINES = 5  # the most expensive ones

Results = list[dict[str, Any]]  # of tools.audit's `audit_step`: one, or an earlier and a later one
Cells = dict[str, list[list[Row]]]  # by label; a cell shows the total of its rows


def bars(results: Results, chip: chips.Chip | None) -> Iterator[str]:
    """Yields a bar of the peak's terms for each audit, to one scale, with the chip's memory."""
    memory, usable = (chip.memory, chip.usable) if chip else (0, 0)
    length = max(memory, *(x["peak"] for x in results))
    for x in results:
        yield f'<div class=bar style="--memory: {memory / length:.2%}">'
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
    tables = []
    for x in results:
        groups = {NAMES[name]: x[name]}
        for row in sorted(x[name], key=lambda row: -row["total"]):
            if "axes" in row:
                groups.setdefault(f"over {', '.join(row['axes'])}", []).append(row)
        tables.append({label: _by_phase(rows) for label, rows in groups.items()})
    return _rows(tables, TABLES[name].unit)


def times(results: Results, chip: chips.Chip, links: dict[str, str]) -> tuple[str, Iterator[str]]:
    """What bounds the step, and rows with the least time that each resource needs."""
    least = [bound(x, chip, chip.links_of(x["mesh"]) | links) for x in results]
    mfu = " → ".join(dict.fromkeys(f"{x.mfu:.0%}" for x in least))
    tables = [_cells({NAMES.get(k, k): s for k, s in x.seconds.items()}) for x in least]
    longest = NAMES.get(least[-1].longest, least[-1].longest)
    return f"{longest}. MFU at most {mfu}", _rows(tables, "s")


def lines(results: Results, chip: chips.Chip | None, links: dict[str, str]) -> Iterator[str]:
    """Yields the lines that need most of a resource: of its time on a chip, else of all that is
    saved, received or computed. Of two audits, yields what changed most, by function and op."""
    units = dict.fromkeys(("compute", "memory", *chip.links), "s") if chip else {}
    units = units or {name: table.unit for name, table in TABLES.items()}
    whole = {name: 1 if chip else total_of(results[-1][name]) or 1 for name in units}
    found = []
    for x in results:
        rows_at: Any = collections.defaultdict(lambda: {name: [] for name in TABLES})
        at = {}
        for name, row in ((name, row) for name in TABLES for row in x[name]):
            line, _, function = row["line"].partition(" ")
            place = function, row.get("op") or row["type"], line if len(results) == 1 else ""
            rows_at[place][name].append(row)
            at[place] = line
        over = chip.links_of(x["mesh"]) | links if chip else {}
        found.append({
            place: seconds(rows["products"], rows["transfers"], chip, over) if chip
            else {name: total_of(rows[name]) for name in TABLES}
            for place, rows in rows_at.items()
        })  # fmt: skip
    new, old, none = found[-1], found[0] if len(found) > 1 else {}, dict.fromkeys(units, 0.0)
    changes = []
    for place in {**new, **old}:
        now, then = new.get(place, none), old.get(place, none)
        changes.append(max((abs(now[k] - then[k]) / whole[k], k, place) for k in units))
    for share, name, place in sorted(changes, reverse=True)[:LINES]:
        if share:
            now = _cells({"": new.get(place, none)[name]})[""]
            then = _cells({"": old.get(place, none)[name]})[""] if old else now
            link = f'<a href="#{at[place]}">{at[place]}</a>' if place in at else "removed"
            about = f"<td>{place[0]}</td><td>{html.escape(place[1])}</td>"
            cell = _cell(now[0], then[0], units[name])
            yield f"<tr><th>{link}</th>{about}<td>{NAMES.get(name, name)}</td>{cell}</tr>"


def _by_phase(rows: list[Row]) -> list[list[Row]]:
    return [*([row for row in rows if row["phase"] == phase] for phase in PHASES), rows]


def _cells(amounts: dict[str, float]) -> Cells:
    return {label: [[{"total": amount}]] for label, amount in amounts.items()}


def _cell(new: list[Row], old: list[Row], unit: str) -> str:
    """The total of rows; if it was another one, that and the difference as well."""
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
