"""What an optimized program's text says of its collectives; shares no code with the audit."""

import collections
import math
import os
import re
from typing import NamedTuple

KINDS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
INSTRUCTION = re.compile(rf" +(?:ROOT )?%\S+ = (\(.*?\)|\S+) ({KINDS})(?:-start)?\((.*)")


class Collective(NamedTuple):
    kind: str
    axes: tuple[str, ...]
    elements: int
    phase: str
    line: str
    times: int
    merged: bool  # one of several arrays in one instruction


def _tables(text: str) -> dict[str, dict[str, str]]:
    tables, name = collections.defaultdict(dict), ""
    for line in text.split("\nENTRY")[0].splitlines():
        if re.fullmatch(r"[A-Z]\w+", line):
            name = line
        elif match := re.match(r"(\d+) (.*)", line):
            tables[name][match[1]] = match[2]
    return tables


def _source_lines(text: str, file: str) -> dict[str, str]:
    """Frame id -> the innermost line of `file` on its stack."""
    tables = _tables(text)
    files = {i: name.strip('"') for i, name in tables["FileNames"].items()}
    found = {}
    for start in tables["StackFrames"]:
        frame = start
        while frame != "0":
            place, parent = re.findall(r"=(\d+)", tables["StackFrames"][frame])[:2]
            location = tables["FileLocations"][place]
            name = files[re.search(r"file_name_id=(\d+)", location)[1]]
            if os.path.basename(name) == file:
                line = re.search(r" line=(\d+)", location)[1]
                found[start] = f"{file}:{line}"
                break
            frame = str(int(parent) - 1)
    return found


def _axes(groups: str, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ. jax 0.12 prints them, 0.10 lists ids."""
    if named := re.match(r"mesh\[[^]]*\] \{([^}]*)\}", groups):
        return tuple(sorted(named[1].replace("'", "").split(",")))
    group = [int(i) for i in re.search(r"\{([\d,]*)\}", groups)[1].split(",")]
    places = []
    for device in group:
        place, rest = {}, device
        for axis, size in reversed(mesh.items()):
            rest, place[axis] = divmod(rest, size)
        places.append(place)
    return tuple(sorted(a for a in mesh if len({place[a] for place in places}) > 1))


def _trip_counts(text: str) -> dict[str, int]:
    """How often each computation runs: the product of the trips of the loops around it."""
    inside, here = {}, ""
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            here = match[1]
        elif match := re.search(r" while\(.*body=%([\w.-]+)", line):
            inside[match[1]] = here, int(re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1])
        for called in re.findall(r"(?:calls|to_apply|condition)=%([\w.-]+)", line):
            inside.setdefault(called, (here, 1))

    def times(name):
        return inside[name][1] * times(inside[name][0]) if name in inside else 1

    return {name: times(name) for name in [*inside, here]}


def collectives(text: str, mesh: dict[str, int], file: str = "train.py") -> list[Collective]:
    lines, trips = _source_lines(text, file), _trip_counts(text)
    found, here = [], ""
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            here = match[1]
        if not (match := INSTRUCTION.match(line)):
            continue
        shape, kind, rest = match.groups()
        op_name = re.search(r'op_name="([^"]*)"', rest)[1]
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        phase = (
            "recomputed"
            if "rematted_computation" in op_name
            else "backward"
            if "transpose(" in op_name
            else "forward"
            if "jvp(" in op_name
            else "update"
        )
        axes = _axes(re.search(r"replica_groups=(.*?\}\}|mesh\S* \{[^}]*\})", rest)[1], mesh)
        size = math.prod(mesh[a] for a in axes)
        at = lines.get(frame[1], "") if frame else ""
        parts = re.findall(r"\w+\[([\d,]*)\]", shape)
        for part in parts:
            elements = math.prod(int(n) for n in part.split(",") if n)
            elements *= size if kind == "reduce-scatter" else 1
            row = kind, axes, elements, phase, at, trips.get(here, 1), len(parts) > 1
            found.append(Collective(*row))
    return found


RULES = {
    "one": "a collective over axes of size one moves nothing, and may stay in the program",
    "merged": "all-reduces over the same axes may be one instruction, at one of their lines",
    "once": "in a loop that runs once, what the backward pass would do again is done once",
}


def unexplained(transfers, program, mesh, rules=RULES):
    """The rows of a ledger, and the collectives of a program, that don't map to each other, each to
    exactly one, by kind, axes, elements, phase, line and trip count."""

    def real(axes):
        return tuple(sorted(a for a in axes if mesh[a] > 1 or "one" not in rules))

    rows = [
        Collective(r.kind, real(r.axes), r.elements, r.phase, r.line, r.times, False)
        for r in transfers
        if r.bytes or "one" not in rules
    ]
    left = []
    for found in sorted((c._replace(axes=real(c.axes)) for c in program), key=lambda c: c.merged):
        if not found.axes and "one" in rules:
            continue
        loose = found.merged and found.kind == "all-reduce" and "merged" in rules
        key = ("kind", "axes", "elements", "times", *(() if loose else ("phase", "line")))
        same = [r for r in rows if all(getattr(r, k) == getattr(found, k) for k in key)]
        if same:
            rows.remove(same[0])
        else:
            left.append(found)
    if "once" in rules:
        gathers = {c._replace(axes=real(c.axes)) for c in program if c.times == 1}
        again = [r for r in rows if r.phase == "recomputed" and r.times == 1]
        known = [r for r in again if r._replace(phase="forward") in gathers]
        rows = [r for r in rows if r not in known]
    return rows, left
