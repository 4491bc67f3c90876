"""The compiled step, for people: a profile whose events say their type strings, and a graph."""

import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax

from shardlib.audit import phase
from shardlib.ops import SCOPE

# Parts of an op_name that say how JAX got there, not what the source does.
MACHINERY = re.compile(
    r"shard_map|(transpose\()?jvp\(\)+|while|body|cond|closed_call|eval_jaxpr|"
    r"checkpoint|rematted_computation"
)


def describe(op_name: str) -> str:
    """An op_name for short: `all_gather(V/t M/d -> V/t M), backward: reduce_scatter`."""
    *path, primitive = re.sub(r"^jit\(\w+\)/", "", op_name).split("/")
    scope, names = SCOPE.search(op_name), [p for p in path if not MACHINERY.fullmatch(p)]
    where = scope[0].replace("|", "/") if scope else names[-1] if names else ""
    part = {"forward": "", "update": ""}.get(phase(op_name), f", {phase(op_name)}")
    return f"{where}{part}: {primitive}" if where else f"{primitive}{part}"


def op_names(hlo: str) -> dict[str, str]:
    """Instruction -> its op_name, the path of JAX's scopes that led to it. Fusions that XLA makes
    of conversions have none."""
    return dict(re.findall(r'^ +(?:ROOT )?%(\S+) = .*op_name="([^"]*)"', hlo, re.MULTILINE))


def start_profile(folder: pathlib.Path) -> None:
    """Each process writes below a folder of its own: several may share a machine and its name."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls are many, and say little of the devices
    jax.profiler.start_trace(str(folder), profiler_options=options)


def stop_profile(folder: pathlib.Path, program: jax.stages.Compiled) -> pathlib.Path:
    """Ends the profile, and writes beside it the same events for Perfetto, in which those of the
    program are called what `describe` says. Returns that file."""
    jax.profiler.stop_trace()
    hlo = str(program.as_text())
    written = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    module, names = hlo.split(None, 2)[1].rstrip(","), op_names(hlo)
    events = []
    for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]:
        # The CPU's threads say more of themselves than of all the rest.
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


def draw(compile_step: Callable[..., jax.stages.Compiled], path: pathlib.Path) -> str:
    """Compiles the program once more, with options that make XLA write it, and the first host draws
    the optimized one: hover over an instruction for its type string and source line. Returns the
    svg's path, or, where Graphviz's `dot` is missing, the .dot file's and why."""
    import graphviz  # only a run that asks needs it

    dot, svg = path.with_suffix(".dot"), path.with_suffix(".svg")
    with tempfile.TemporaryDirectory() as folder:  # XLA writes all there is
        compile_step(xla_dump_to=folder, xla_dump_hlo_as_dot=True)
        (drawn,) = pathlib.Path(folder).glob("*after_optimizations.dot")
        if jax.process_index():  # all hosts compile, as they may have to do it together
            return ""
        dot.write_text(re.sub(r"(?<=\w)\|(?=[a-z])", "/", drawn.read_text()))  # type strings' slash
    try:
        graphviz.render("dot", "svg", dot, outfile=svg)
    except graphviz.ExecutableNotFound:
        return f"{dot}; no svg, as Graphviz's `dot` is not installed"
    return str(svg)
