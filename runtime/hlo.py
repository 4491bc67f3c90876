"""Shows the compiled step to people: as a profile whose events have the ops' type strings, and as a
picture of its instructions by source line."""

import collections
import gzip
import html
import json
import linecache
import os
import pathlib
import re
import string
from types import SimpleNamespace
from typing import Any

import jax

from shardlib.audit import phase
from shardlib.ops import SCOPE
from shardlib.types import own_line

# Parts of an op_name that come from JAX's machinery rather than from the source.
MACHINERY = re.compile(
    r"shard_map|(transpose\()?jvp\(\)+|while|body|cond|closed_call|eval_jaxpr|"
    r"checkpoint|rematted_computation"
)


def describe(op_name: str) -> str:
    """Shortens an op_name: `all_gather(V/t M/d -> V/t M), backward: reduce_scatter`."""
    *path, primitive = re.sub(r"^jit\(\w+\)/", "", op_name).split("/")
    scope, names = SCOPE.search(op_name), [p for p in path if not MACHINERY.fullmatch(p)]
    where = scope[0].replace("|", "/") if scope else names[-1] if names else ""
    part = {"forward": "", "update": ""}.get(phase(op_name), f", {phase(op_name)}")
    return f"{where}{part}: {primitive}" if where else f"{primitive}{part}"


def op_names(hlo: str) -> dict[str, str]:
    """Instruction -> its op_name, the path of JAX scopes around it. Fusions that XLA makes of
    conversions have none."""
    return dict(re.findall(r'^ +(?:ROOT )?%(\S+) = .*op_name="([^"]*)"', hlo, re.MULTILINE))


def start_profile(folder: pathlib.Path) -> None:
    """Starts a profile. Each process needs a folder of its own, as several may share a machine."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls are many and tell little about the devices
    jax.profiler.start_trace(str(folder), profiler_options=options)


def stop_profile(folder: pathlib.Path, program: jax.stages.Compiled) -> pathlib.Path:
    """Ends the profile, and writes its events to a file for Perfetto, where `describe` names those
    of the program. Returns that file."""
    jax.profiler.stop_trace()
    hlo = str(program.as_text())
    written = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    module, names = hlo.split(None, 2)[1].rstrip(","), op_names(hlo)
    events = []
    for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]:
        # CPU threads fill the trace with events about themselves.
        if not event or event["name"].startswith(("ThreadpoolListener", "end: ", "Wait: ")):
            continue
        args = event.get("args", {})
        if args.get("hlo_module") == module and args.get("hlo_op") in names:
            args["op_name"] = names[args["hlo_op"]]
            event["name"] = describe(args["op_name"])
        events.append(event)
    events.sort(key=lambda event: event.get("ts", -1))
    named = folder / "perfetto.json.gz"
    named.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return named


# --- A picture ------------------------------------------------------------------------------------

PHASES = ("forward", "recomputed", "backward", "update")
# Opcodes that a cell counts by name -> the color of cells that have one.
COLORS = {
    re.compile("(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute).*"): "#cfe0f5",
    re.compile("dot|convolution|custom-call"): "#f6d5d2",
}
INSTRUCTION = re.compile(r" +(ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)")
Cell = tuple[str, str]  # a source line, `train.py:316 block`, and a phase


def _stacks(hlo: str) -> dict[str, Any]:
    """The traceback for each `stack_frame_id`, as `own_line` takes it, from the step's function on
    inward."""
    step = re.split("[ ,]", hlo, maxsplit=2)[1].removeprefix("jit_")
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", rows, re.MULTILINE))
        for name, rows in re.findall(r"^([A-Z]\w+)\n((?:\d+ .*\n)+)", hlo, re.MULTILINE)
    }
    stacks: dict[str, Any] = {"0": SimpleNamespace(frames=[])}
    for key, row in tables.get("StackFrames", {}).items():  # parents come first
        location, parent = re.findall(r"=(\d+)", row)
        file, function, line, *_ = re.findall(r"=(\d+)", tables["FileLocations"][location])
        names = tables["FileNames"][file].strip('"'), tables["FunctionNames"][function].strip('"')
        frame = SimpleNamespace(file_name=names[0], function_name=names[1], line_num=int(line))
        outer = stacks[str(int(parent) - 1)].frames
        inside = outer or names[1].rpartition(".")[2] == step
        stacks[key] = SimpleNamespace(frames=[frame, *outer] if inside else [])
    return stacks


class Flow:
    """An optimized program by source line and phase, and the data that flows between these cells.

    An instruction without a line, such as a copy, passes on the cells of its operands. What one
    iteration of a loop hands to the next is left out.
    """

    def __init__(self, hlo: str):
        self.opcodes: dict[Cell, list[str]] = collections.defaultdict(list)
        self.ops: dict[Cell, set[str]] = collections.defaultdict(set)  # by `describe`
        self.edges: set[tuple[Cell, Cell]] = set()
        self.paths: dict[str, str] = {}  # source file -> its path
        self.stacks = _stacks(hlo)
        self.bodies: dict[str, list[Any]] = collections.defaultdict(list)
        name = ""
        for line in hlo.splitlines():
            if match := re.match(r"(?:ENTRY )?%(\S+) \(", line):
                name = "" if line.startswith("ENTRY") else match[1]
            elif match := INSTRUCTION.match(line):
                self.bodies[name].append(match.groups())
        self.follow("", [])

    def cell_of(self, attributes: str) -> Cell | None:
        """The cell of an instruction, if it comes from the user's source."""
        names = re.search(r'op_name="(.*?)" stack_frame_id=(\d+)', attributes)
        trace = self.stacks.get(names[2]) if names else None
        line = own_line(trace)
        # JAX adds instructions around the step, which have no name but "shard_map".
        if not names or not trace or not line or describe(names[1]) == "shard_map":
            return None
        cell = line, phase(names[1])
        self.paths |= {os.path.basename(f.file_name): f.file_name for f in trace.frames}
        self.ops[cell].add(describe(names[1]))
        return cell

    def follow(self, computation: str, arguments: list[Any]) -> Any:
        """Adds the instructions of a computation. Returns its result: the set of cells that a value
        comes from, or for a tuple a list of such values."""
        values: dict[str, Any] = {}
        result: Any = set()
        for is_root, name, opcode, rest in self.bodies[computation]:
            inside, _, attributes = rest.partition(")")
            operands = [values.get(operand, set()) for operand in re.findall(r"%([\w.-]+)", inside)]
            key = "to_apply" if opcode.startswith("call") else "calls|body"
            called = re.search(rf"\b(?:{key})=%([\w.-]+)", attributes)
            value: Any = set[Cell]().union(*map(_cells, operands))
            if opcode == "parameter":
                value = arguments[int(inside)] if int(inside) < len(arguments) else set()
            elif opcode == "tuple":
                value = operands
            elif opcode == "get-tuple-element" and isinstance(operands[0], list):
                value = operands[0][int(attributes.partition("index=")[2].partition(",")[0])]
            elif called:
                value = self.follow(called[1], operands)
            elif opcode != "constant" and (cell := self.cell_of(attributes)):
                self.opcodes[cell].append(opcode.removesuffix("-start"))
                self.edges |= {(source, cell) for source in value - {cell}}
                value = {cell}
            values[name] = value
            result = value if is_root else result
        return result


def _cells(value: Any) -> set[Cell]:
    """The cells of a value of `Flow.follow`."""
    return set[Cell]().union(*map(_cells, value)) if isinstance(value, list) else value


def draw(hlo: str, path: pathlib.Path) -> pathlib.Path:
    """Draws an optimized program as an SVG: a row for each source line, a column for each phase,
    arrows for data. Each cell counts its instructions; hover over it for their ops. Returns the
    path."""
    flow, parts, places = Flow(hlo), list[str](), dict[Cell, tuple[int, int]]()

    def write(x: int, y: int, text: object, kind: str = "") -> str:
        return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(str(text))}</text>'

    parts += [write(710 + 180 * i, 16, name, "head") for i, name in enumerate(PHASES)]
    y, group = 20, ""
    lines = {(*re.split("[: ]", line), line) for line, _ in flow.opcodes}
    for file, number, function, line in sorted(lines, key=lambda row: (row[0], int(row[1]))):
        if group != (group := f"{file} {function}"):
            y += 22
            parts.append(write(10, y, function, "head"))
        y += 18
        source = linecache.getline(flow.paths[file], int(number)).strip()
        if source.endswith("("):
            source += linecache.getline(flow.paths[file], int(number) + 1).strip()
        parts.append(write(10, y, f"{number} {source[:96]}"))
        for i, name in enumerate(PHASES):
            if opcodes := flow.opcodes.get(cell := (line, name)):
                x, _ = places[cell] = 710 + 180 * i, y - 5
                ops = html.escape("\n".join(sorted(flow.ops[cell])))
                named = {op: color for op in opcodes for k, color in COLORS.items() if k.match(op)}
                color = next(iter(named.values()), "#eee")
                label = next((f"{opcodes.count(op)} {op}" for op in named), "")
                parts += [
                    f'<g><title>{ops}</title><rect x="{x}" y="{y - 13}" width="130" height="16" '
                    f'fill="{color}"/>',
                    write(x + 4, y - 1, label),
                    write(x + 126, y - 1, len(opcodes), "count") + "</g>",
                ]
    arrows = []
    for source_cell, target in sorted(flow.edges):
        (x1, y1), (x2, y2) = places[source_cell], places[target]
        if x1 == x2:  # a bow at the left
            a = b = x1 - min(44, 8 + abs(y2 - y1) // 8)
        elif x1 < x2:
            x1, a, b = x1 + 130, x1 + 170, x2 - 40
        else:
            x2, a, b = x2 + 130, x1 - 40, x2 + 170
        arrows.append(f'<path d="M{x1} {y1}C{a} {y1} {b} {y2} {x2} {y2}"/>')
    template = string.Template(pathlib.Path(__file__).with_suffix(".svg").read_text())
    path.write_text(template.substitute(height=y + 20, parts="\n".join([*arrows, *parts])))
    return path
