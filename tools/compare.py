"""Compares two audits: what an edit of the source, or other overrides, change."""

import collections
import json
import math
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

from runtime import chips
from runtime.config import ROOT
from shardlib.errors import UserError
from tools.roofline import bound
from tools.tables import show, table

Result = dict[str, Any]  # of tools.audit's `audit_step`


def earlier(against: str) -> Result:
    """The audit to compare with: a JSON file that an audit wrote, or that of a revision, made with
    this command's config. Raises UserError if there is no such audit."""
    if pathlib.Path(against).is_file():
        try:
            return dict(json.loads(pathlib.Path(against).read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"audit.against={against}: it isn't an audit's JSON: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        _check_out(against, folder)
        options = [a for a in sys.argv[1:] if not re.match(r"\+*audit(=|\.(?!chip))", a)]
        command = [sys.executable, "-m", "tools.audit", *options, "++audit.json=audit.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            problem = done.stderr.strip().splitlines()[-1].removeprefix("error: ")
            raise UserError(f"the audit of {against} fails: {problem}")
        return dict(json.loads((pathlib.Path(folder) / "audit.json").read_text()))


def _check_out(revision: str, folder: str) -> None:
    """Writes the files of a revision into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", f"--output={folder}/source.tar", revision, "."],
        capture_output=True, text=True,
    )  # fmt: skip
    if archive.returncode:
        raise UserError(
            f"audit.against={revision}: it is neither a file nor a revision "
            f"({archive.stderr.strip().splitlines()[-1]})"
        )
    with tarfile.open(f"{folder}/source.tar") as source:
        source.extractall(folder, filter="tar")  # which leaves links out of the folder as they are


# --- As text --------------------------------------------------------------------------------------

Amounts = Iterator[tuple[tuple[str, ...], float]]  # labels, amount


def report(before: Result, after: Result, chip: chips.Chip | None, links: dict[str, str]) -> str:
    """Tables of what differs. `links` overrides the chip's links by axis. Raises UserError if the
    earlier audit lacks what later ones have."""
    if lacking := after.keys() - before.keys() - {"chip"}:
        cure = "make it anew with this version of tools.audit, or choose a later revision"
        raise UserError(f"the earlier audit has no {', '.join(sorted(lacking))}: {cure}")
    if (earlier_chip := before.get("chip", after["chip"])) != after["chip"]:
        raise UserError(
            f"the earlier audit is for {earlier_chip or 'no chip'}: set audit.chip alike"
        )
    both = before, after
    tables = [
        _changes([""], "B", *map(_held, both)),
        _changes(["saved in", "type", "memory"], "B", *(_rows(r, "saved") for r in both)),
        _changes(["received over"], "B", *map(_received, both)),
        _changes(["sent in", "op", "phase", "collective", "over"], "B",
                 *(_rows(r, "transfers") for r in both)),
        _changes(["computed"], "FLOP", *map(_computed, both)),
        _changes(["computed in", "op", "phase"], "FLOP", *(_rows(r, "products") for r in both)),
    ]  # fmt: skip
    if chip:
        bounds = [bound(r, chip, chip.links_of(r["mesh"]) | links) for r in both]
        times = ([((name,), spent) for name, spent in b.seconds.items()] for b in bounds)
        tables.append(_changes(["at least"], "s", *map(iter, times)))
        mfu = [f"{b.mfu:.0%}" for b in bounds]
        tables.append(f"MFU at most: {mfu[0]} before, {mfu[1]} after, bound by {bounds[1].longest}")
    return "\n\n".join(filter(None, tables)) or "no difference"


def _held(result: Result) -> Amounts:
    """Yields what a device holds at the peak."""
    for name, size in result["held"].items():
        yield (name,), size
    yield ("at the peak",), result["peak"]
    yield ("saved in the host's memory",), result["host"]


def _received(result: Result) -> Amounts:
    for row in result["transfers"]:
        yield (",".join(row["axes"]),), row["total"]


def _computed(result: Result) -> Amounts:
    for row in result["products"]:
        yield (row["phase"],), row["total"]
    yield ("needed by the model",), result["model_flops"] / math.prod(result["mesh"].values())


LABELS = {
    "saved": ("type", "memory"),
    "transfers": ("op", "phase", "kind", "axes"),
    "products": ("op", "phase"),
}


def _rows(result: Result, kind: str) -> Amounts:
    """The rows of a kind, by function: lines move when the source is edited."""
    for row in result[kind]:
        values = (row[key] for key in LABELS[kind])
        labels = (value if isinstance(value, str) else ",".join(value) for value in values)
        yield (row["line"].partition(" ")[2], *labels), row["total"]


def _changes(head: list[str], unit: str, before: Amounts, after: Amounts) -> str:
    """A table of the amounts whose sums by label differ; empty if none does. The last line counts
    changes that are smaller than a thousandth of the largest."""
    old, new = _sums(before), _sums(after)
    change = {key: new[key] - old[key] for key in dict.fromkeys([*old, *new])}
    least = max(map(abs, change.values()), default=0) / 1000
    rows = [
        (*key, show(old[key], unit), show(new[key], unit), f"{'+' * (more > 0)}{show(more, unit)}")
        for key, more in change.items()
        if abs(more) > least
    ]
    if smaller := sum(0 < abs(more) <= least for more in change.values()):
        rows.append((f"and {smaller} smaller", *[""] * (len(head) + 2)))
    return table((*head, "before", "after", "change"), rows) if rows else ""


def _sums(amounts: Amounts) -> dict[tuple[str, ...], float]:
    sums = collections.defaultdict[tuple[str, ...], float](float)
    for labels, amount in amounts:
        sums[labels] += amount
    return sums
