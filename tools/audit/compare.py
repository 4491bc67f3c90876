"""Compares two audits, before and after an edit of the source or with other overrides."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from runtime import chips
from runtime.config import ROOT
from shardlib.errors import UserError
from tools.audit.roofline import Bound, bound
from tools.audit.text import total_of
from tools.tables import grouped, show, table, texts

Result = dict[str, Any]  # of tools.audit's `audit_step`


def earlier(against: str, chip: str) -> Result:
    """Returns the audit to compare with, read from a JSON file or made from a git revision's source
    with this command's config, for `chip`. Raises UserError if there is no such audit."""
    if pathlib.Path(against).is_file():
        try:
            return dict(json.loads(pathlib.Path(against).read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"audit.against={against}: it isn't an audit's JSON: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        _check_out(against, folder)
        options = [a for a in sys.argv[1:] if not re.match(r"\+*audit[=.]", a)]
        options += [f"++audit.json={folder}/audit.json", "++audit.against="]  # a config may set it
        options += [f"++audit.chip={chip}"] * bool(chip)
        # Runs in the user's folder, to find a relative --config-dir; -P keeps that off sys.path.
        command = [sys.executable, "-P", "-m", "tools.audit", *options]
        if problem := _failure(command, PYTHONPATH=folder):
            raise UserError(f"the audit of {against} fails: {problem.removeprefix('error: ')}")
        return dict(json.loads((pathlib.Path(folder) / "audit.json").read_text()))


def _check_out(revision: str, folder: str) -> None:
    """Writes the files of a revision into a folder, over a copy of today's configs."""
    shutil.copytree(ROOT / "configs", f"{folder}/configs")
    archive = ["git", "-C", str(ROOT), "archive", f"--output={folder}/source.tar", revision, "."]
    if said := _failure(archive):
        raise UserError(f"audit.against={revision}: it is neither a file nor a revision ({said})")
    # Unlike the filter "data", this one allows links that point out of the folder.
    shutil.unpack_archive(f"{folder}/source.tar", folder, filter="tar")


def _failure(command: list[str], **env: str) -> str:
    """Runs a command with these additions to the environment. If it fails, returns the last line of
    its errors, else ""."""
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


# --- As text --------------------------------------------------------------------------------------

Labels = tuple[str, ...]


def report(before: Result, after: Result, chip: chips.Chip | None) -> str:
    """Formats tables of the differences. Raises UserError if the earlier audit lacks tables, or is
    for another chip."""
    if lacking := after.keys() - before.keys() - {"chip", "sizes"}:
        cure = "write it again with this version of tools.audit, or choose a later revision"
        raise UserError(f"the earlier audit has no {', '.join(sorted(lacking))}: {cure}")
    if (other := before.get("chip", after["chip"])) != after["chip"]:
        raise UserError(f"the earlier audit is for {other or 'no chip'}: set the same audit.chip")
    both = before, after
    bounds = [bound(result, chip) if chip else None for result in both]
    pairs = zip(*map(_amounts, both, bounds), strict=True)
    found = [_changes(head, unit, old, new) for (head, unit, old), (_, _, new) in pairs]
    if any(found) and (earlier_bound := bounds[0]) and (least := bounds[1]):
        mfu = f"{earlier_bound.mfu:.0%} before, {least.mfu:.0%} after"
        found.append(f"MFU at most: {mfu}, bound by {least.longest}")
    return "\n\n".join(filter(None, found)) or "no difference"


def _amounts(
    result: Result, least: Bound | None
) -> Iterator[tuple[Labels, str, dict[Labels, float]]]:
    """Yields each table's headings, its unit, and its amounts by label."""

    def by(kind: str, *keys: str) -> dict[Labels, float]:
        """Sums the totals of rows with equal keys. A row's line moves with edits, so the key is
        its function."""
        rows = (row | {"function": row["line"].partition(" ")[2]} for row in result[kind])
        groups = grouped(rows, lambda row: texts(row, keys))
        return {label: total_of(found) for label, found in groups.items()}

    at_peak = {"at the peak": result["peak"], "saved in the host's memory": result["host"]}
    needed = result["model_flops"] / math.prod(result["mesh"].values())
    sent = by("transfers", "function", "op", "phase", "kind", "axes")
    yield ("",), "B", {(name,): size for name, size in (result["held"] | at_peak).items()}
    yield ("saved in", "type", "memory"), "B", by("saved", "function", "type", "memory")
    yield ("received over",), "B", by("transfers", "axes")
    yield ("sent in", "op", "phase", "collective", "over"), "B", sent
    yield ("computed",), "FLOP", by("products", "phase") | {("needed by the model",): needed}
    yield ("computed in", "op", "phase"), "FLOP", by("products", "function", "op", "phase")
    if least:
        yield ("at least",), "s", {(name,): spent for name, spent in least.seconds.items()}


def _changes(head: Labels, unit: str, old: dict[Labels, float], new: dict[Labels, float]) -> str:
    """Formats a table of the amounts that differ; "" if none does. Its last line counts the changes
    of at most a thousandth of the largest."""
    change = {key: new.get(key, 0) - old.get(key, 0) for key in {**old, **new}}
    least = max(map(abs, change.values()), default=0) / 1000
    rows = []
    for key, more in change.items():
        if abs(more) > least:
            sign, amounts = "+" if more > 0 else "", (old.get(key, 0), new.get(key, 0))
            rows.append((*key, *(show(x, unit) for x in amounts), f"{sign}{show(more, unit)}"))
    if smaller := sum(0 < abs(more) <= least for more in change.values()):
        rows.append((f"and {smaller} smaller", *[""] * (len(head) + 2)))
    return table((*head, "before", "after", "change"), rows) if rows else ""
