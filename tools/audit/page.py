"""Shows an audit as a page: the source, with the amounts beside its lines."""

import collections
import html
import itertools
import math
import pathlib
import string
from typing import Any

from runtime.config import ROOT
from tools.audit.text import TABLES, show_total, total_of

# The columns beside each line: the table whose rows at that line are added up, and their phase.
PHASES = "forward", "recomputed", "backward"
MARGIN = [("saved", ""), *itertools.product(("transfers", "products"), PHASES)]


def page(result: dict[str, Any], head: str, text: str) -> str:
    """train.py as HTML, and each file of variants/ and kernels/ that the step calls, with what each
    line saves, receives and computes beside it. The text, and what precedes the model, are folded
    away."""
    at: dict[tuple[str, str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for name, _ in MARGIN[::3]:
        for row in result[name]:
            phase = row.get("phase", "").replace("update", "forward")
            at[row["line"].partition(" ")[0], name, phase].append(row)

    def cell(line: str, name: str, phase: str) -> str:
        if not (amount := total_of(at[line, name, phase])):
            return "<td></td>"
        largest = max(total_of(rows) for (_, table, _), rows in at.items() if table == name)
        heat = 0.6 * math.sqrt(amount / largest)  # amounts differ by orders of magnitude
        shown = show_total(at[line, name, phase], TABLES[name].unit)
        return f'<td class="{name}" style="--heat: {heat:.2f}">{shown}</td>'

    def listing(file: pathlib.Path, first: int) -> str:
        lines = [f'<tr><th></th><th>{file.relative_to(ROOT)}</th><th colspan="7"></th></tr>']
        for i, line in enumerate(file.read_text().splitlines(), 1):
            cells = "".join(cell(f"{file.name}:{i}", *column) for column in MARGIN)
            row = f'id="{file.name}:{i}"{" class=before" if i < first else ""}'
            lines.append(f"<tr {row}><td>{i}</td><td>{html.escape(line)}</td>{cells}</tr>")
        return "\n".join(lines)

    called = {line.partition(":")[0] for line, *_ in at}
    before = (ROOT / "train.py").read_text().partition("# --- Model -")[0].count("\n")
    listings = [listing(ROOT / "train.py", before + 1)]
    others = sorted([*ROOT.glob("variants/*.py"), *ROOT.glob("kernels/*.py")])
    listings += [listing(file, 1) for file in others if file.name in called]
    template = string.Template(pathlib.Path(__file__).with_suffix(".html").read_text())
    lines, summary, text = "\n".join(listings), html.escape(head), html.escape(text)
    return template.substitute(summary=summary, text=text, lines=lines, last=before)
