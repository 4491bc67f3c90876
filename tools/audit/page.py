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

from runtime import chips
from runtime.config import ROOT
from shardlib.devices import show_axes
from tools.audit import figures
from tools.audit.text import TABLES, show_total, summary, total_of

# The columns beside each line: the table whose rows at that line are added up, and their phase.
MARGIN = [("saved", ""), *itertools.product(("transfers", "products"), figures.PHASES[:3])]

Amounts = dict[tuple[str, ...], list[figures.Row]]  # by line, table and phase


def page(
    results: figures.Results, chip: chips.Chip | None, links: dict[str, str], text: str
) -> str:
    """The first screen has the figures of an audit, or of two with what changed. Below are train.py
    and each file of variants/ and kernels/ that the step calls, with what each line saves, receives
    and computes. Definitions without amounts are folded, and so is the text. `links` overrides the
    chip's links by axis."""
    result, options = results[-1], [option.lstrip("+") for option in sys.argv[1:]]
    options = [x for x in options if not x.startswith(("audit.html=", "audit.json="))]
    how = "<small>audit.chip=h100, or another chip, adds it</small>"
    bound, times = f"What bounds the step? {how}", iter([""])
    measure = "by share of all that is saved, received or computed"
    if chip:
        bound, times = figures.times(results, chip, links)
        measure = "by least time, without what kernels and the optimizer read and write"
    at: Amounts = collections.defaultdict(list)
    for table, row in ((name, row) for name in TABLES for row in result[name]):
        phase = row.get("phase", "").replace("update", "forward")
        at[row["line"].partition(" ")[0], table, phase].append(row)
    files = [ROOT / "train.py", *sorted([*ROOT.glob("variants/*.py"), *ROOT.glob("kernels/*.py")])]
    parts = {
        "bars": figures.bars(results, chip),
        "held": figures.held(results),
        "received": figures.phases(results, "transfers"),
        "computed": figures.phases(results, "products"),
        "times": times,
        "lines": figures.lines(results, chip, links),
        "source": (line for file in files for line in _source(file, at)),
    }
    count, kind = math.prod(result["mesh"].values()), f"x {chip.kind}" if chip else "devices"
    template = string.Template(pathlib.Path(__file__).with_suffix(".html").read_text())
    return template.substitute(
        {name: "\n".join(rows) for name, rows in parts.items()},
        devices=f"{count} {kind}, {show_axes(result['mesh'])}",
        options=html.escape(" ".join(options)),
        summary=summary(result, chip),
        bound=bound,
        which="Largest changes" if len(results) > 1 else "Most expensive lines",
        measure=measure,
        text=html.escape(text),
    )


def _cell(at: Amounts, *key: str) -> str:
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
            cells = "".join(_cell(at, f"{file.name}:{i}", *column) for column in MARGIN)
            line = html.escape(code[i - 1])
            yield f'<tr id="{file.name}:{i}"><td>{i}</td><td>{line}</td>{cells}</tr>'
        yield "</tbody>"
