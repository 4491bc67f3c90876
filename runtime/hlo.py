"""Reads the text of a compiled program, and shows the compiled step to people: as a profile whose
events have the ops' type strings, and as a table of its source's lines."""

import collections
import contextlib
import gzip
import html
import itertools
import json
import linecache
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from runtime.source import is_users, source_line
from shardlib.ops import SCOPE

# Parts of an op_name that come from JAX's machinery rather than from the source.
MACHINERY = re.compile(
    r"shard_map|(transpose\()?jvp\(\)+|while|body|cond|closed_call|eval_jaxpr|"
    r"checkpoint|rematted_computation"
)


def phase(path: str) -> str:
    """The phase of a training step, given an equation's or instruction's path of JAX's scopes."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "update"


def describe(op_name: str) -> str:
    """Shortens an op_name: `all_gather(V/t M/d -> V/t M), backward: reduce_scatter`."""
    *path, primitive = re.sub(r"^jit\(\w+\)/", "", op_name).split("/")
    scope, names = SCOPE.search(op_name), [p for p in path if not MACHINERY.fullmatch(p)]
    where = scope[0].replace("|", "/") if scope else names[-1] if names else ""
    when = phase(op_name)
    part = f", {when}" if when in ("recomputed", "backward") else ""
    return f"{where}{part}: {primitive}" if where else f"{primitive}{part}"


def op_names(hlo: str) -> dict[str, str]:
    """Maps instructions to their op_names, the paths of JAX scopes around them. Fusions that XLA
    makes of conversions have none."""
    return dict(re.findall(r'^ +(?:ROOT )?%(\S+) = .*op_name="([^"]*)"', hlo, re.MULTILINE))


def operation(lowered: jax.stages.Lowered, number: int) -> str:
    """Names the operation in a line of a lowered program's text: `dot_general at train.py:253`."""
    module: Any = lowered.compiler_ir()
    text = module.operation.get_asm(enable_debug_info=True, use_local_scope=True)
    lines = text.splitlines()[number:]
    name = re.search(r"(?<= stablehlo\.)\w+", lines[0])
    result = re.match(r" *(%\w+)", lines[0])
    # A constant may have no place of its own: take its first use's.
    uses = re.compile(rf"{result[1]}\b" if result else "$^")
    for line in [lines[0], *filter(uses.search, lines[1:])]:
        for file, n in re.findall(r'"([^"]+\.py)":(\d+)', line):
            if is_users(file):
                return f"{name[0] if name else 'a function'} at {os.path.basename(file)}:{n}"
    return "the start"


@contextlib.contextmanager
def profile(
    folder: pathlib.Path, program: jax.stages.Compiled, say: Callable[[str], None]
) -> Iterator[None]:
    """Profiles the block. Writes the events, the program's renamed by `describe`, to a file for
    Perfetto, and prints its path. Each process needs a folder of its own, as several may share a
    machine."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls are many and tell little about the devices
    # By default, a trace has no more than a million events.
    os.environ.setdefault("TF_PROFILER_TRACE_VIEWER_MAX_EVENTS", str(3 * 10**6))
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield
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
    say(f"profiled {named}")


# --- The program's text ---------------------------------------------------------------------------

COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{")
INSTRUCTION = re.compile(r" +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")


class Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes

    def find(self, pattern: str) -> str:
        """Returns the group of the pattern's first match, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    def called(self, attribute: str = "calls|to_apply") -> list[str]:
        return re.findall(rf"(?:{attribute})=%([\w.-]+)", self.rest)

    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])


Program = dict[str, dict[str, Instruction]]  # by computation ("" is the entry), then by name


def parse(text: str) -> Program:
    program: Program = collections.defaultdict(dict)
    computation = ""
    # A kernel's metadata may be on lines of its own.
    for line in re.sub(r"(kernel_metadata=\{)\n(.*)\n\}", r"\1\2}", text).splitlines():
        if match := COMPUTATION.match(line):
            computation = "" if line.startswith("ENTRY") else match[1]
        elif match := INSTRUCTION.match(line):
            program[computation][match[1]] = Instruction(*match.groups())
    return program


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


# --- A picture ------------------------------------------------------------------------------------

PHASES = ("forward", "recomputed", "backward", "update", "unknown")  # XLA drops some names
COUNTED = r"(all-|reduce-s|collective-)[\w-]+(?<!-done)|dot|convolution|custom-call"
STYLES = {  # by pattern in a row
    r"\d (all-|reduce-|coll)[\w-]+": "fill: #0b57d0",
    r"\d (dot|conv|custom)[\w-]*": "fill: #c5221f",
    r"^[^\d\n].*": "font-weight: bold",  # a title
}
START = """<svg xmlns="http://www.w3.org/2000/svg" width="{:.0f}" height="{}"
  style="background: white; font: 11.5px monospace">"""
ROW = """<rect x="4" y="{}" width="100%" height="18" fill="#f2f2f2"/>
<text x="8" y="{}" xml:space="preserve">{}</text>"""


def draw(text: str, path: pathlib.Path) -> str:
    """Draws an optimized program as a table in the order of the source. Each row below a
    function's title is a line: the number of its HLO instructions by phase, and those that compute
    or communicate. Returns a message that says where the picture is."""
    traces, files = tracebacks(text), dict[str, str]()
    nodes = collections.defaultdict[Any, Any](lambda: collections.defaultdict(collections.Counter))
    for call in itertools.chain(*(calls.values() for calls in parse(text).values())):
        op_name, frame = call.find(r'op_name="(.*?)"'), call.find(r"stack_frame_id=(\d+)") or "0"
        # JAX and XLA add instructions around the step, named shard_map or shard_map/broadcast.54.
        added = call.op == "constant" or re.search(r"/shard_map(/\w+\.\d+)?$", op_name)
        if (line := source_line(traces[frame])) and not added:
            file, number, function = re.split("[: ]", line)
            own = [f.file_name for f in traces[frame].frames if is_users(f.file_name)]
            files |= {os.path.basename(file): file for file in own}
            part = phase(op_name) if op_name else "unknown"
            nodes[file, int(number), function][part][call.op] += 1
    rows = list[str]()
    parts = [part for part in PHASES if any(part in counts for counts in nodes.values())]
    for above, node in itertools.pairwise([("", 0, ""), *sorted(nodes)]):
        if above[::2] != node[::2]:
            title = f"{node[0]}: {node[2]}".ljust(94)
            rows += ["", title + "".join(f"{part:21}" for part in parts)]
        code, more = (linecache.getline(files[node[0]], node[1] + i).strip() for i in (0, 1))
        row = f"{node[1]:<4} {code}{more if code[-1:] == '(' else ''}"[:92].ljust(94)
        for counts in (nodes[node][part] for part in parts):
            named = [f"{n} {op}" for op, n in counts.items() if re.fullmatch(COUNTED, op)]
            row += f"{counts.total() or ''}: {', '.join(named)}".strip(": ").ljust(21)
        rows.append(row)
    body = html.escape("\n".join(rows))
    for pattern, style in STYLES.items():
        body = re.sub(pattern, rf'<tspan style="{style}">\g<0></tspan>', body, flags=re.MULTILINE)
    lines = [ROW.format(18 * i - 13, 18 * i, row) for i, row in enumerate(body.splitlines()) if row]
    size = 16 + 6.95 * (94 + 21 * len(parts)), 18 * len(rows)
    path.write_text("\n".join([START.format(*size), *lines, "</svg>\n"]))
    return f"drew {path}"
