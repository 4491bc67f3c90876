"""How much of what a TPU's program sends is on its way while something is computed."""

import collections
import math
import re
import statistics
from typing import Any, NamedTuple

from runtime import hlo
from tools.audit import show

CYCLES = 1000  # a microsecond, or somewhat less


class Sent(NamedTuple):
    """A collective of a scheduled program."""

    elements: int  # of the array, whole along the axes
    bytes: int  # of that; twice for an all-reduce
    in_loop: bool
    hidden: bool  # a microsecond or more of compute lies between its start and its end


def sent(text: str) -> list[Sent]:
    """What a TPU's program sends, by the order in which its compiler has scheduled it and the
    cycles that the compiler takes each instruction to need."""
    calls: dict[str, list[re.Match[str]]] = collections.defaultdict(list)
    computation = ""
    for line in text.splitlines():
        if match := hlo.COMPUTATION.match(line):
            computation = "" if line.startswith("ENTRY") else match[1]
        elif match := hlo.INSTRUCTION.match(line):
            calls[computation].append(match)

    def array(call: re.Match[str]) -> tuple[int, int] | None:
        """Elements and bytes of the collective that an instruction is, or that it calls."""
        _, shape, op, rest = call.groups()
        if op not in ("all-gather", "reduce-scatter", "all-reduce"):
            called = re.findall(r"(?:calls|to_apply)=%([\w.-]+)", rest)
            return next(filter(None, (array(c) for name in called for c in calls[name])), None)
        n, elements, size = _group_size(rest) if op == "reduce-scatter" else 1, 0, 0
        for bits, dims in re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", shape):
            elements += (part := n * math.prod(int(d) for d in dims.split(",") if d))
            size += part * int(bits) // 8
        return (
            (elements, size * (2 if op == "all-reduce" else 1)) if _group_size(rest) > 1 else None
        )

    found = []
    for body in ["", *re.findall(r"body=%([\w.-]+)", text)]:
        now, started = 0, dict[str, tuple[tuple[int, int], int]]()
        for call in calls[body]:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', call[4])
            # On v5e %async-collective-start.7, fusions that carry it on, %async-collective-done.7;
            # on a SparseCore %x.call-start, %x.call-update where operands come late, %x.call-done.
            step = re.fullmatch(r"(.*?)[.-](?:call-|collective-)?(start|update|done)(.*)", call[1])
            key = step[1] + step[3] if step else call[1]
            if step and step[2] == "done" and key in started:
                what, start = started.pop(key)
                found.append(Sent(*what, bool(body), now - start > CYCLES))
            elif step and step[2] == "update" and key in started:
                started[key] = started[key][0], now
            elif cycles:
                now += int(cycles[1])
            elif sends := array(call):
                if step:
                    started[key] = sends, now
                else:
                    found.append(Sent(*sends, bool(body), False))
    return found


def _group_size(rest: str) -> int:
    """Of `mesh['d'=64,'t'=4] {'t'}`, or, by jax 0.10, of `{{0,1},{2,3}}`."""
    if named := re.search(r"groups=mesh\[([^]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    listed = re.search(r"groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def share_hidden(text: str, transfers: list[dict[str, Any]]) -> str:
    """How much a TPU's program sends a step, and how much of it beside compute. How often a loop
    runs is not in its text, but in the ledger."""
    times = {(row["elements"], row["times"] > 1): row["times"] for row in transfers}
    often = statistics.mode(row["times"] for row in transfers if row["times"] > 1)
    total = hidden = 0
    for row in sent(text):
        size = row.bytes * times.get((row.elements, row.in_loop), often if row.in_loop else 1)
        total, hidden = total + size, hidden + size * row.hidden
    share = f", {hidden / total:.0%} of it beside compute" if total else ""
    return f"A step sends {show(total)}{share}, by the order of instructions."
