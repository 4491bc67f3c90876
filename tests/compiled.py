"""Reads the collectives out of an optimized program's text; shares no code with the audit."""

import collections
import math
import operator
import os
import re
from typing import NamedTuple

from runtime.config import ROOT

KINDS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
# What the name of an op has in a phase, the first of these that it has.
PHASES = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
OFTEN = 2  # for loops of a TPU's program, whose text lacks their trip counts
DONE = re.compile(r"= (\(.*?\)|\S+) [\w-]+-done\([^%]*%([\w.-]+)\)")
INSTRUCTION = re.compile(rf" +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ({KINDS})(?:-start)?\((.*)")


class Collective(NamedTuple):
    kind: str
    axes: tuple[str, ...]
    elements: int
    phase: str
    line: str
    times: int
    merged: bool  # one of several arrays in one instruction
    chain: str = ""  # of an asynchronous one
    padded: bool = False
    itemsize: int = 0  # bytes of an element


def _tables(text: str) -> dict[str, dict[str, str]]:
    tables, name = collections.defaultdict(dict), ""
    for line in text.split("\nENTRY")[0].splitlines():
        if re.fullmatch(r"[A-Z]\w+", line):
            name = line
        elif match := re.match(r"(\d+) (.*)", line):
            tables[name][match[1]] = match[2]
    return tables


def _source_lines(text: str, own: tuple[str, ...]) -> dict[str, str]:
    """Frame id -> the innermost line of its own files on its stack, with the function's name."""
    tables = _tables(text)
    files = {i: name.strip('"') for i, name in tables["FileNames"].items()}
    lines = {}
    for start in tables["StackFrames"]:
        frame = start
        while frame != "0":
            place, parent = re.findall(r"=(\d+)", tables["StackFrames"][frame])[:2]
            location = tables["FileLocations"][place]
            name = files[re.search(r"file_name_id=(\d+)", location)[1]]
            if (file := os.path.basename(name)) in own:
                line = re.search(r" line=(\d+)", location)[1]
                function = re.search(r"function_name_id=(\d+)", location)[1]
                qualified = tables["FunctionNames"][function].strip('"')
                *_, function = re.findall(r"(?:^|\.)(\w+)", qualified)
                lines[start] = f"{file}:{line} {function}"
                break
            frame = str(int(parent) - 1)
    return lines


def _axes(groups: str, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ. jax 0.12 prints the axes, 0.10 ids."""
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


CALLED = re.compile(r"(?:calls|to_apply|condition|computations)=({.*?}|%[^,) ]+)")


def _trip_counts(text: str) -> dict[str, int]:
    """Computation -> how often it runs, the product of the trip counts of the loops around it."""
    inside, here = {}, ""
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            here = match[1]
        elif match := re.search(r" while\(.*body=%([\w.-]+)", line):
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            inside[match[1]] = here, int(known[1]) if known else OFTEN
        for names in CALLED.findall(line):
            for called in re.findall(r"%([\w.-]+)", names):
                inside.setdefault(called, (here, 1))

    def times(name):
        return inside[name][1] * times(inside[name][0]) if name in inside else 1

    return {name: times(name) for name in [*inside, here]}


LARGE = 100_000  # elements; smaller arrays may be sent with others
SLICES = re.compile(r" +%\S+ = \(\w+\[([\d,]*)\].* recv\(.*_xla_megascale_transfer_type=\"(\w+)\"")


def between_slices(text: str) -> collections.Counter[str]:
    """Counts collectives of large arrays over the data-centre network, by kind."""
    sizes = [(math.prod(map(int, dims.split(","))), kind) for dims, kind in SLICES.findall(text)]
    return collections.Counter(kind.lower().replace("_", "-") for n, kind in sizes if n > LARGE)


FILES = "train.py", *(f.name for d in ("variants", "kernels") for f in ROOT.glob(f"{d}/*.py"))


def collectives(text: str, mesh: dict[str, int], *files: str) -> list[Collective]:
    """Lists the collectives of a program, each at its line of a step's source or of `files`."""
    lines, trips = _source_lines(text, (*FILES, *files)), _trip_counts(text)
    actual, here = [], ""
    # The shape of a start has the operands, too.
    done = {name: shape for shape, name in re.findall(DONE, text)}
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            here = match[1]
        if not (match := INSTRUCTION.match(line)):
            continue
        name, shape, kind, rest = match.groups()
        shape = done.get(name, shape)
        named = re.search(r'op_name="([^"]*)"', rest)
        op_name = named[1] if named else ""
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        phase = next((phase for mark, phase in PHASES.items() if mark in op_name), "update")
        groups = r"(?:replica_groups|source_target_pairs)=(.*?\}\}|mesh\S* \{[^}]*\})"
        axes = _axes(re.search(groups, rest)[1], mesh)
        size = math.prod(mesh[a] for a in axes)
        at = lines.get(frame[1], "") if frame else ""
        parts = re.findall(r"([a-z]+\d*)\w*\[([\d,]*)\]", shape)
        pieces = len(parts) if kind == "all-to-all" else 1  # one to each device, of one array
        parts = parts[:1] if kind in ("collective-permute", "all-to-all") else parts  # or buffers
        chain = re.search(r'chain_id="(\d+)"', rest)
        padded = "from-cross-replica-sharding" in rest
        for dtype, part in parts:
            elements = math.prod(int(n) for n in part.split(",") if n)
            itemsize = int(re.sub(r"\D", "", dtype) or 8) // 8
            elements *= size if kind == "reduce-scatter" else pieces
            kind = kind.removeprefix("collective-")
            row = kind, axes, elements, phase, at, trips.get(here, 1), len(parts) > 1
            actual.append(Collective(*row, chain[1] if chain else "", padded, itemsize))
    return actual


def unexplained(transfers, program):
    """The rows of a ledger and the collectives of a program that are left after pairing those that
    agree in kind, axes, elements, phase, line and number of runs. A row that a compiler may move
    out of a loop allows several numbers; one that repeats another one may be missing. All-reduces
    over the same axes may be one instruction, at one of their lines. In a loop that runs once, the
    backward pass recomputes nothing."""

    rows = [row._replace(axes=tuple(sorted(row.axes))) for row in transfers]
    rows.sort(key=lambda r: r.times - r.at_least)  # pairs exact ones first
    every, paired, left = [*rows], set(), []
    for collective in sorted(program, key=lambda c: c.merged):
        loose = collective.merged and collective.kind == "all-reduce"
        key = operator.attrgetter("kind", "axes", "elements", *([] if loose else ["phase", "line"]))
        same = [r for r in rows if key(r) == key(collective)]
        same = [r for r in same if r.at_least <= collective.times <= r.times]
        if same:
            rows.remove(same[0])
            paired.add((collective.kind, collective.axes, collective.elements, collective.phase))
        else:
            left.append(collective)
    gathers = {(c.kind, c.axes, c.elements, c.phase, c.line) for c in program if c.times == 1}
    again = [r for r in rows if r.phase == "recomputed" and r.times == 1]
    known = [r for r in again if (r.kind, r.axes, r.elements, "forward", r.line) in gathers]
    rows = [r for r in rows if r not in known]
    # Of two equal collectives, either one may be left.
    what = operator.attrgetter("kind", "axes", "elements", "phase")
    for repeat in (r for r in every if not r.at_least):
        alike = [r for r in rows if what(r) == what(repeat) and what(r) in paired]
        rows = [r for r in rows if r not in alike[:1]]
    return rows, left


def unexplained_on_tpu(transfers, program, mesh):
    """Counts the rows of a ledger and the collectives of a program that are left after pairing
    those that agree in kind, axes, elements and being in a loop. Of a program for TPUs,

    - an asynchronous collective is in several fusions, which share its chain's id;
    - an all-gather or reduce-scatter of narrow parts is an all-reduce of the full array;
    - a reduce-scatter is an all-reduce of a padded array, and a permute of its edges;
    - a scalar that a loop all-reduces in each iteration is all-reduced after the loop, for all
      iterations together.
    """

    def key(row):
        axes = tuple(sorted(a for a in row.axes if mesh[a] > 1))
        return row.kind, axes, row.elements, row.times > 1

    pieces: dict[str | int, Collective] = {}  # the first of each chain
    for i, each in enumerate(program):
        pieces.setdefault(each.chain or i, each)
    padded = [key(each) for each in pieces.values() if each.padded]
    others = [key(each) for each in pieces.values() if not each.padded]
    actual = collections.Counter(row for row in others if row[1])
    rows = collections.Counter(key(row) for row in transfers if key(row)[1])
    left, actual = rows - actual, actual - rows

    for kind, axes, elements, loop in padded:
        n = math.prod(mesh[axis] for axis in axes)
        scatter = "reduce-scatter", axes, loop
        for row in [row for row in left if (*row[:2], row[3]) == scatter]:
            # The padding is behind the last part, so the edges of the other parts move.
            size = (elements - row[2]) * (n - 1) // n
            edges = [
                k for k in +actual
                if (k[0], k[2:]) == ("permute", (size, loop)) and {*k[1]} <= {*axes}
            ]  # fmt: skip
            if edges:
                left -= collections.Counter([row])
                actual -= collections.Counter(edges[:1])
                break
        else:
            actual[kind, axes, elements, loop] += 1
    for row in [row for row in transfers if row.elements == 1 and row.times > 1]:
        for kind, axes, n, loop in [*actual]:
            # All iterations of the innermost loop, which may be inside another one.
            iterations = row.times % n == 0 and loop == (row.times > n)
            if key(row)[:2] == (kind, axes) and n > 1 and iterations and left[key(row)]:
                left -= collections.Counter([key(row)])
                actual -= collections.Counter([(kind, axes, n, loop)])
    for kind, *where in [*left]:
        count = min(left[kind, *where], actual["all-reduce", *where])
        left[kind, *where] -= count
        actual["all-reduce", *where] -= count
    return +left, +actual


def amounts(rows, mesh, *fields):
    """Counts how often each collective runs, by kind, axes, elements, bytes of an element, and
    other fields, given the rows of a ledger or the collectives of a program. Of all-reduces it
    counts the elements, as XLA stacks those of a loop and joins scalars in one array."""
    count = collections.Counter()
    for row in rows:
        if axes := tuple(sorted(axis for axis in row.axes if mesh[axis] > 1)):
            if isinstance(row, Collective):
                itemsize = row.itemsize
            else:
                n = math.prod(mesh[axis] for axis in axes)
                share = {"all-reduce": 2 * (n - 1) / n, "permute": 1}.get(row.kind, (n - 1) / n)
                itemsize = round(row.bytes / row.elements / share)
            summed = row.kind == "all-reduce"
            key = row.kind, axes, 0 if summed else row.elements, itemsize
            key += tuple(getattr(row, field) for field in fields)
            count[key] += row.times * (row.elements if summed else 1)
    return count
