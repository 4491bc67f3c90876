"""Reports what a training step saves, sends and computes on each device, without devices, data or
weights.

    python -m tools.audit --config-name=c4_h100x8_1b
    python -m tools.audit --config-name=c4_h100x8_1b mesh.d=4 mesh.t=2 audit.json=audit.json
    python -m tools.audit --config-name=c4_h100x8_1b audit.chip=a100 audit.html=audit.html
    python -m tools.audit --config-name=c4_h100x8_1b audit.against=main

    audit.chip=KIND              adds a roofline for a key of runtime/chips.py, such as h100 or v5p
    audit.links={AXIS: LINK}     the chip's link over which a mesh axis goes, such as {s: ib}
    audit.against=FILE|REVISION  prints what differs from an earlier audit's JSON, or from the audit
                                 of a git revision's source; configs that it lacks are today's
    audit.json=FILE              writes the ledger as JSON
    audit.html=FILE              writes the source as a page, with the amounts beside its lines
    audit.least=SHARE            lists rows above this part of a table's total: 0.001; 0: all

Traces the step that train.py runs, on the config's mesh, and prints the ledger of its jaxpr: tables
of saved activations, collectives and matmuls. Also predicts the step's peak memory. Sizes are
decimal: a GB is 10^9 bytes.
"""

import collections
import dataclasses
import html
import itertools
import json
import math
import pathlib
import string
from collections.abc import Iterable
from typing import Any, NamedTuple

import train
from runtime import checks, chips
from runtime.config import ROOT, Section
from runtime.program import program
from shardlib import audit, devices
from shardlib.errors import UserError
from shardlib.types import bf16, bool_, f32, i32, u32
from tools import compare, memory
from tools.ledger import ledger
from tools.roofline import bound, bound_head
from tools.tables import show, table, texts, totals


@dataclasses.dataclass
class AuditOptions(Section, key="audit"):
    """See the top of this file."""

    json: str = ""
    html: str = ""
    against: str = ""
    least: float = 1e-3
    chip: str = ""
    links: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(unsafe_hash=True)
class AuditConfig(train.Config):
    audit: AuditOptions = dataclasses.field(default_factory=AuditOptions, hash=False)


# --- The ledger and the memory --------------------------------------------------------------------

DTYPES = {kind.dtype.name: kind.name for kind in (f32, bf16, i32, u32, bool_)}
Shape = tuple[int, ...]


class Probed(NamedTuple):
    """The shapes of saved arrays at probe sizes, from which their types are read."""

    axes: dict[str, int]
    sizes: dict[str, int]
    saved: list[Shape]  # in the ledger's order, without statistics

    def type_string(self, config: train.Config, dtype: str, shape: Shape, probed: Shape) -> str:
        """The type of an array of this shape, which has the shape `probed` at probe sizes:
        `bf16["B/d L F/t"]`, or `bf16["B/d/2 L F/t"]` in a loop over halves. Gives plain lengths if
        the dimensions can't be told."""
        axes, sizes = config.mesh.axes, train.dimensions(config)
        names = []
        for length, at_probe in zip(shape, probed, strict=False):
            dims = audit.dims_of(at_probe, self.axes, self.sizes)
            held = math.prod(sizes[d.name] // math.prod(axes[a] for a in d.over) for d in dims)
            parts, rest = divmod(held, length)
            if dims and not rest:
                names.append("*".join(map(str, dims)) + (f"/{parts}" if parts > 1 else ""))
            elif length == at_probe:
                names.append(str(length))
        known = len(names) == len(shape) == len(probed)
        return f'{DTYPES.get(dtype, dtype)}["{" ".join(names if known else map(str, shape))}"]'


def probe(config: train.Config) -> Probed:
    """Traces the step at probe sizes. Raises UserError if the types in train.py don't hold."""
    mesh, sizes = devices.probe_mesh(config.mesh.axes, train.dimensions(config))
    jaxpr, axes = checks.check_types(config)[0], dict(mesh.shape)
    saved = [array.shape for array in ledger(jaxpr, axes).saved if not array.statistics]
    return Probed(axes, sizes, saved)


def audit_step(
    config: train.Config, probed: Probed | None, chip: chips.Chip | None
) -> dict[str, Any]:
    """The ledger and the predicted memory, ready for JSON; without `probed`, no types of what is
    saved. Raises UserError if a dimension doesn't split evenly over the mesh."""
    axes, kind = config.mesh.axes, chip.kind if chip else ""
    jaxpr = checks.trace_step(config, devices.abstract_mesh(axes))
    costs = ledger(jaxpr, axes, kind)
    held = memory.held(config, jaxpr, costs, kind)

    at_probe, shape, saved = iter(probed.saved if probed else ()), Shape(), []
    for array in costs.saved:
        row = array._asdict() | {"total": array.bytes}
        if probed:
            shape = shape[:-1] if array.statistics else next(at_probe)
            row["type"] = probed.type_string(config, array.dtype, array.shape, shape)
        saved.append(row)
    return {
        "chip": kind,
        "mesh": axes,
        "held": held,
        "peak": sum(held.values()),
        "host": sum(a.bytes for a in costs.saved if a.memory == "host"),
        "saved": saved,
        "transfers": merged((row._asdict() for row in costs.transfers), "bytes"),
        "products": merged((row._asdict() for row in costs.products), "flops"),
        "kernel_bytes": costs.kernel_bytes,
        "model_flops": sum(train.step_flops(config)),
    }


def merged(rows: Iterable[dict[str, Any]], amount: str) -> list[dict[str, Any]]:
    """Merges rows that differ only in how often they run, and adds to each its `total`: `times`
    times its `amount`, the key "bytes" or "flops". `bound` says what `times` is: "at most" if a
    compiler may run them less often, "at least" in a while_loop, which counts as one iteration."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        alike = row | {"times": 0, "at_least": 0}
        into = found.setdefault(tuple(alike.items()), alike)
        into["times"] += row["times"]
        into["at_least"] += row["at_least"]
    for row in found.values():
        row["bound"] = "at most" if row["at_least"] < row["times"] else ""
        if row["times"] == math.inf:
            row |= {"times": max(row["at_least"], 1), "bound": "at least"}
        row["total"] = row["times"] * row[amount]
    return list(found.values())


# --- As text --------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The layout of one kind of rows."""

    columns: dict[str, str]  # heading -> key of a row; followed by each, count and total
    unit: str = "B"

    def text(self, rows: list[dict[str, Any]], share: float = AuditOptions.least) -> str:
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


def total_of(rows: Iterable[dict[str, Any]]) -> float:
    return sum(row["total"] for row in rows)


def show_total(rows: list[dict[str, Any]], unit: str) -> str:
    """The total of rows: `1.07 GB`, or `at most 1.07 GB` if some of their counts are upper bounds.
    With lower bounds as well it is `about 1.07 GB`."""
    bounds = {row.get("bound", "") for row in rows} - {""}
    bound = "about" if len(bounds) > 1 else "".join(bounds)
    return f"{bound} {show(total_of(rows), unit)}".strip()


def sums(amounts: Iterable[tuple[str, float]], unit: str = "B") -> str:
    """The sum by name: `backward 2 GB, forward 1 GB`."""
    by_name = totals(amounts).items()
    return ", ".join(f"{name} {show(amount, unit)}" for name, amount in by_name if amount)


def summary(result: dict[str, Any], chip: chips.Chip | None) -> str:
    """Sentences about the memory of each device."""
    room, host = "", result["host"]
    if chip:
        left = chip.usable - result["peak"]
        whole = "has" if "TPU" in chip.kind else "lets JAX take"
        room = f": {show(abs(left))} {'less' if left > 0 else 'more'} than {chip.kind} {whole}"
    more = f" {show(host)} more are saved in the host's memory." if host else ""
    return f"At its peak a step holds {show(result['peak'])}{room}.{more}"


def terms_table(result: dict[str, Any]) -> str:
    """The terms of tools/memory.py, which add up to the peak."""
    rows = [(name, show(size)) for name, size in result["held"].items()]
    return table(("held at the peak", "a device"), rows)


def report(
    result: dict[str, Any], chip: chips.Chip | None = None, least: float = AuditOptions.least
) -> str:
    """The result of `audit_step` as text."""
    axes, sent, products = result["mesh"], result["transfers"], result["products"]
    largest_first = sorted(sent, key=lambda row: -row["total"])
    by_axes = sums((f"over {','.join(row['axes'])}", row["total"]) for row in largest_first)
    by_phase = sums((row["phase"], row["total"]) for row in largest_first)
    flops_by_phase = sums(((row["phase"], row["total"]) for row in products), "FLOP")
    count = math.prod(axes.values())
    needed = show(result["model_flops"] / count, "FLOP")
    paragraphs = [
        f"{count} devices: {devices.show_axes(axes)}\n\n{summary(result, chip)}\n",
        f"{terms_table(result)}\n",
        "The peak is predicted: usually within 10% of what compilers for TPUs and GPUs report. "
        "tools.compile asks them.\n",
        TABLES["saved"].text(result["saved"], least),
        f"\nA device receives {show_total(sent, 'B')} a step"
        + (f", with ring algorithms: {by_axes}; {by_phase}.\n" if by_phase else ".\n"),
        TABLES["transfers"].text(sent, least),
        f"\nA device computes {show_total(products, 'FLOP')} a step: {flops_by_phase}.",
        f"The model needs {needed} of that, counting causal attention as half.",
    ]
    return "\n".join(paragraphs)


# --- As a page ------------------------------------------------------------------------------------

# The columns beside each line: the table whose rows at that line are added up, and their phase.
PHASES = "forward", "recomputed", "backward"
MARGIN = [("saved", ""), *itertools.product(("transfers", "products"), PHASES)]


def page(result: dict[str, Any], head: str, text: str) -> str:
    """train.py as HTML, and each file of variants/ that the step calls, with what each line saves,
    receives and computes beside it. The text, and what precedes the model, are folded away."""
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
    listings += [listing(f, 1) for f in sorted(ROOT.glob("variants/*.py")) if f.name in called]
    template = string.Template(pathlib.Path(__file__).with_suffix(".html").read_text())
    lines, summary, text = "\n".join(listings), html.escape(head), html.escape(text)
    return template.substitute(summary=summary, text=text, lines=lines, last=before)


# --- A roofline -----------------------------------------------------------------------------------


def check_rates(config: train.Config) -> None:
    """Raises UserError if the dtype isn't that of the chips' rates."""
    config.require(config.dtype == "bf16", "dtype", "rates of chips are known in bf16 alone")


def chip_of(config: AuditConfig) -> chips.Chip | None:
    """The chip that audit.chip names, if any. Raises UserError if chips.CHIPS lacks it, or if it
    lacks a link in audit.links."""
    name, links = config.audit.chip, config.audit.links
    if not name and not links:
        return None
    if name not in chips.CHIPS:
        raise UserError(f"audit.chip={name!r}: choose one of {', '.join(chips.CHIPS)}")
    check_rates(config)
    chip, axes = chips.CHIPS[name], config.mesh.axes
    for axis, link in links.items():
        if axis not in axes or link not in chip.links:
            choices = f"the axes are {', '.join(axes)}, the links {', '.join(chip.links)}"
            raise UserError(f"audit.links.{axis}={link}: {choices}")
    return chip


def roofline(config: AuditConfig, chip: chips.Chip) -> str:
    """A table with a row for the config's mesh, and one for each doubling of d, and of r if there
    are replicas, up to 4096 devices or until a dimension no longer splits."""
    rows, end, mesh = [], "", config.mesh
    while math.prod((axes := mesh.axes).values()) <= 4096:
        try:
            result = audit_step(dataclasses.replace(config, mesh=mesh), None, chip)
        except UserError as error:
            end = f"\n\nThe table ends here: {error}."
            break
        links = chip.links_of(axes) | config.audit.links
        over = ", ".join(f"{axis} {links[axis]}" for axis, size in axes.items() if size > 1)
        rows.append((devices.show_axes(axes), over, *bound(result, chip, links).cells()))
        mesh = dataclasses.replace(mesh, d=2 * mesh.d, r=2 * mesh.r if mesh.r > 1 else 1)
    times = table(("mesh", "links", *bound_head(chip)), rows)
    head = f"The least time that each resource needs for a step on {chip.kind}"
    return f"{head}. The longest bounds the step:\n\n{times}{end}"


NOT_USED = {
    "paths": {"model_name": "none"},
    "flat_tokens": {"filespec": "none"},
    "hf_dataset": {"path": "none"},
}


@program(AuditConfig, "configs", NOT_USED)
def main(config: AuditConfig) -> None:
    chip = chip_of(config)
    result = audit_step(config, probe(config), chip)
    if config.audit.json:
        pathlib.Path(config.audit.json).write_text(json.dumps(result, indent=1))
    text = report(result, chip, config.audit.least)
    if config.audit.html:
        pathlib.Path(config.audit.html).write_text(page(result, summary(result, chip), text))
    if config.audit.against:
        before = compare.earlier(config.audit.against)
        print(compare.report(before, result, chip, config.audit.links))
        return
    print(text)
    if chip:
        print(f"\n{roofline(config, chip)}")


if __name__ == "__main__":
    main()
