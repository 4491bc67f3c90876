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
from shardlib.errors import source_line
from shardlib.ops import SCOPE

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
    "(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start)?": "#cfe0f5",
    "dot|convolution|custom-call": "#f6d5d2",
}
INSTRUCTION = re.compile(
    r" +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) (?!constant)([\w-]+)\(.*"
    r'op_name="(.*?)" stack_frame_id=(\d+)'
)


def tracebacks(hlo: str) -> dict[str, Any]:
    """The traceback for each `stack_frame_id` of a program, as `source_line` takes it, without the
    callers of the program's own function."""
    program = re.split("[ ,]", hlo, maxsplit=2)[1].removeprefix("jit_")
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", rows, re.MULTILINE))
        for name, rows in re.findall(r"^([A-Z]\w+)\n((?:\d+ .*\n)+)", hlo, re.MULTILINE)
    }
    traces: dict[str, Any] = {"0": SimpleNamespace(frames=[])}
    for key, row in tables.get("StackFrames", {}).items():  # a frame's parent comes before it
        location, parent = re.findall(r"=(\d+)", row)
        file, function, line, *_ = re.findall(r"=(\d+)", tables["FileLocations"][location])
        path, name = tables["FileNames"][file].strip('"'), tables["FunctionNames"][function]
        frame = SimpleNamespace(file_name=path, function_name=name.strip('"'), line_num=int(line))
        outer = traces[str(int(parent) - 1)].frames
        inside = outer or frame.function_name.rpartition(".")[2] == program
        traces[key] = SimpleNamespace(frames=[frame, *outer] if inside else [])
    return traces


def draw(hlo: str, path: pathlib.Path) -> pathlib.Path:
    """Draws an optimized program as an SVG with a row for each source line and a column for each
    phase. A cell counts the line's HLO instructions in that phase; hover over it for their ops.
    Returns the path."""
    traces, files = tracebacks(hlo), dict[str, str]()
    cells: dict[Any, list[tuple[str, str]]] = collections.defaultdict(list)
    for match in filter(None, map(INSTRUCTION.match, hlo.splitlines())):
        opcode, op_name, frame = match.groups()
        # JAX and XLA add instructions around the step, named shard_map or shard_map/broadcast.54.
        added = re.search(r"/shard_map(/\w+\.\d+)?$", op_name)
        if (line := source_line(traces[frame])) and not added:
            file, number, function = re.split("[: ]", line)
            files |= {os.path.basename(f.file_name): f.file_name for f in traces[frame].frames}
            cells[(file, int(number), function), phase(op_name)].append((opcode, describe(op_name)))
    parts, y, group = list[str](), 20, ("", "")

    def write(x: int, y: int, text: object, kind: str = "") -> None:
        parts.append(f'<text class="{kind}" x="{x}" y="{y}">{html.escape(str(text))}</text>')

    for i, name in enumerate(PHASES):
        write(710 + 150 * i, 16, name, "head")
    for row in sorted({row for row, _ in cells}):
        file, number, function = row
        if group != (group := (file, function)):
            y += 22
            write(10, y, function, "head")
        y += 18
        text = linecache.getline(files[file], number).strip()
        if text.endswith("("):
            text += linecache.getline(files[file], number + 1).strip()
        write(10, y, f"{number} {text[:96]}")
        for i, name in enumerate(PHASES):
            if cell := cells.get((row, name)):
                opcodes, ops = zip(*cell, strict=True)
                named = {o: c for o in opcodes for k, c in COLORS.items() if re.fullmatch(k, o)}
                label, color = next(iter(named.items()), ("", "#eee"))
                title, x = html.escape("\n".join(sorted(set(ops)))), 710 + 150 * i
                parts.append(
                    f'<g><title>{title}</title><rect x="{x}" y="{y - 13}" width="140" height="16" '
                    f'fill="{color}"/>'
                )
                write(x + 4, y - 1, f"{opcodes.count(label)} {label}" if label else "")
                write(x + 136, y - 1, len(opcodes), "count")
                parts.append("</g>")
    template = string.Template(pathlib.Path(__file__).with_suffix(".svg").read_text())
    path.write_text(template.substitute(height=y + 20, parts="\n".join(parts)))
    return path
