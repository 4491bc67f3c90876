"""Tries wrong and right edits of the source, and reports which check refuses each.

    python -m tests.mutations [PART ...]

A part is a config with edits to try. Wrong edits are the likely mistakes in each op that the
config's steps call with a literal string, in any file, and those listed in tests/edits.py and
tests/bugs.py. The right ones are in tests/edits.py. An edited source is checked as by `python -m
tools.check`: its types, then, if these hold, its numbers on two meshes. Prints a line per edit.
Ends with an error if a wrong edit passes, if a right one is refused, or if a file's ops have fewer
edits than tests/golden/mutations.txt says.
"""

import argparse
import ast
import collections
import importlib
import itertools
import linecache
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import runtime.config
from checks import layout, numbers, preflight
from checks.jaxprs import communicating
from runtime.config import ROOT
from runtime.devices import QUICK_COMPILES, make_mesh, simulate_cpu_devices
from shardlib import activations, ops
from shardlib.types import ShardTypeError, SpecError, computing_in, parse_signature
from tests import bugs, edits

# A microbatch is half of a device's rows, a chunk half of a row. Dimensions are so small that
# numbers that edits compare with a length lie between a part's length and the whole length.
SETTINGS = (
    *("paths.model_name=none", "training.microbatches=2", "training.loss_chunks=2"),
    *("mesh={d: 2, t: 3}", "training.tokens={batch: 16, len: 24}", "model.d_model=48"),
    *("model.n_kv=6", "model.d_head=4", "model.d_ff=48", "model.vocab=60"),
    "metrics.norms_interval=1",
)
VARIANTS = (
    *("model.experts={count: 6, per_token: 2, d_ff: 20}", "training.microbatches=1"),
    "training.optimizer=muon",
    *("training.routing.balance_cost=0.5", "training.routing.z_cost=0.1"),
    *("model.qkv_bias=true", "model.qk_norm=head", "model.sliding_window=5"),
)
CONTEXT = (
    *("mesh={d: 2, c: 2, t: 3}", "model.norms_after=true"),
    *("model.qkv_bias=true", "model.qk_norm=all", "model.sliding_window=5"),
)


class Part(NamedTuple):
    """Edits that are tried with a config."""

    settings: tuple[str, ...]
    lists: dict[str, dict[str, Any]]  # listed edits, by what is expected of them
    without: str = ""  # the part whose ops aren't tried again


PARTS = {
    "dense": Part(
        (),
        {
            "wrong": edits.WRONG | bugs.BUGS,
            "right": edits.RIGHT | edits.RIGHT_WITH_BROADCAST,
            "right in training": edits.RIGHT_IN_TRAINING,
            "not promised": edits.NOT_PROMISED,
        },
    ),
    "context": Part(CONTEXT, {"wrong": edits.WRONG_AFTER}),
    "variants": Part(
        VARIANTS, {"wrong": edits.WRONG_WITH_VARIANTS, "right": edits.RIGHT_WITH_VARIANTS}, "dense"
    ),
}
AXES = "d", "s", "c", "t"
AXIS = re.compile(r"(?<=[/:,])[a-z]\b")
GOLDEN = ROOT / "tests/golden/mutations.txt"


class Called(NamedTuple):
    """A call of an op in the source, with its place there as Python's compiler notes it."""

    op: str  # "ops.psum"
    file: str
    place: tuple[int | None, ...]  # first line, last line, first column, last column


def calls_in(run: Callable[[], Any]) -> tuple[set[Called], Any]:
    """Returns the calls of ops and of save_for_backward that this repository's source makes while
    `run` runs, and the result of `run`."""
    found = set()
    watched = ops.psum.__code__, activations.save_for_backward.__code__

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in watched and frame.f_back:
            caller, at = frame.f_back.f_code, frame.f_back.f_lasti
            file = pathlib.Path(caller.co_filename)
            if file.is_relative_to(ROOT):
                name = frame.f_locals.get("full_name", "save_for_backward")
                place = next(itertools.islice(caller.co_positions(), at // 2, None))
                found.add(Called(name, str(file.relative_to(ROOT)), place))

    sys.setprofile(note)
    try:
        return found, run()
    finally:
        sys.setprofile(None)


class Tried(NamedTuple):
    """An edit to try. `kind` says what is expected of it, `source` is the edited file."""

    kind: str
    name: str
    file: str
    source: str


def other_strings(text: str) -> Iterator[tuple[str, str]]:
    """Yields variants of a signature with a description: one axis replaced, all axes exchanged, and
    a dimension's axes moved to another dimension of the same array."""
    for match in AXIS.finditer(text):
        for axis in AXES:
            if axis != match[0]:
                yield f"{axis} for {match[0]}", text[: match.start()] + axis + text[match.end() :]
    exchanged = dict(zip(AXES, (*AXES[1:], AXES[0]), strict=True))
    yield "all axes exchanged", AXIS.sub(lambda match: exchanged[match[0]], text)
    parts = re.split(r"(->|,|\{.*?\})", text)
    for i, array in enumerate(parts[::2]):
        dims = array.split()
        for one, other in itertools.permutations(range(len(dims)), 2):
            _, slash, split = dims[one].strip("[]").partition("/")
            if slash:
                moved = list(dims)
                moved[one] = dims[one].replace(slash + split, "")
                moved[other] = re.sub(r"(\]?)$", rf"{slash}{split}\1", dims[other], count=1)
                changed = "".join([*parts[: 2 * i], f" {' '.join(moved)} ", *parts[2 * i + 1 :]])
                yield f"/{split} at {dims[other]}", changed.strip()


def by_jnp(op: str, signature: str, arguments: list[str]) -> str | None:
    """The jnp expression that one might write in place of the op, or None."""
    bare = re.sub(r"\{U:[^}]*\}|/[a-z]|[][]", "", signature)
    left, right = (part.split() for part in bare.split("->"))
    if op in ("reduce_sum", "reduce_max", "reduce_mean"):
        removed = tuple(i for i, dim in enumerate(left) if dim not in right)
        return f"jnp.{op.removeprefix('reduce_')}({arguments[0]}, axis={removed})"
    if op == "einsum_unreduced":
        names = dict.fromkeys(re.findall(r"\w+", bare))
        letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
        terms = re.sub(r"\w+", lambda name: letters[name[0]], bare).replace(" ", "")
        return f"jnp.einsum({terms!r}, {', '.join(arguments[:2])})"
    if op in ("all_gather", "psum_scatter"):
        given, wanted = parse_signature(signature)
        pairs = enumerate(zip(given.dims, wanted.dims, strict=True))
        i, axes = next((i, {*a.axes} ^ {*b.axes}) for i, (a, b) in pairs if a != b)
        parts = " * ".join(f"jax.sharding.get_abstract_mesh().shape[{axis!r}]" for axis in axes)
        if op == "all_gather":
            return f"jnp.concatenate([{arguments[0]}] * ({parts}), axis={i})"
        return (
            f"lax.slice_in_dim({arguments[0]}, 0, {arguments[0]}.shape[{i}] // ({parts}), axis={i})"
        )
    if op == "psum":
        return f"({arguments[0]} * 2)"
    if op == "index_unreduced" and signature.startswith("["):
        return f"jnp.take({', '.join(arguments)}, axis=0)"
    if op == "index_unreduced":
        return f"jnp.take_along_axis({arguments[0]}, {arguments[1]}[..., None], axis=-1)[..., 0]"
    return None


def mutations(calls: Collection[Called]) -> Iterator[Tried]:
    """Yields edits of these calls, named by line, function and kind of edit."""
    for file in sorted({call.file for call in calls}):
        names = {call.place: call.op for call in calls if call.file == file}
        yield from _of_file(file, names)


def _of_file(file: str, names: dict[tuple[int | None, ...], str]) -> Iterator[Tried]:
    source = (ROOT / file).read_text()
    encoded, span = source.encode(), edits.spans(source.encode())

    def text_of(node: Any) -> str:
        return encoded[slice(*span(node))].decode()

    def edit(what: str, node: Any, text: str) -> Tried:
        start, end = span(node)
        name = f"{file}:{call.lineno} {within} {what}"
        edited = encoded[:start] + text.encode() + encoded[end:]
        return Tried("op", name, file, edited.decode())

    def place(node: ast.Call) -> tuple[int | None, ...]:
        return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset

    nodes = [*ast.walk(ast.parse(source))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and place(node) in names]
    for call in sorted(calls, key=place):
        around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
        within = max(around, key=lambda f: f.lineno).name if around else ""
        arguments, whole = [*map(text_of, call.args)], text_of(call)
        module, _, op = names[place(call)].rpartition(".")
        if not module:
            yield edit(f"{op} deleted", call, f"({arguments[0]})")
        if not isinstance(call.args[0], ast.Constant):  # a computed string
            continue
        signature = str(call.args[0].value)
        if module == "ops":  # deleting a kernel gives another model
            yield edit(f"{op} deleted", call, f"({arguments[1]})")
        if len(arguments) == 2:
            again = whole.replace(arguments[1], whole, 1)
            yield edit(f"{op} twice", call, again)
        for what, other in other_strings(signature):
            yield edit(f"{op}: {what}", call.args[0], f'"{other}"')
        if text := by_jnp(op, signature, arguments[1:]):
            yield edit(f"{op} by jnp", call, text)


def load(source: str, file: str = "train.py", name: str = "") -> types.ModuleType:
    """Loads the edited text of a source file as a module."""
    name = name or f"{pathlib.Path(file).stem}_edited_{len(sys.modules)}"
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look their module up
    path = str(ROOT / file).replace(".py", "_edited.py")
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    module.__file__ = path
    exec(compile(source, path, "exec"), vars(module))
    return module


def probe(source: str, config: Any) -> tuple[str, str]:
    """Checks an edited train.py's types. Returns the kind of check that refuses it and the first
    line of its message, or two empty strings."""
    try:
        preflight.probe(module := load(source), runtime.config.load(module.Config, config.values()))
    except Exception as error:  # of any class
        return _kind(error), str(error).split("\n")[0]
    return "", ""


def _kind(error: Exception) -> str:
    if isinstance(error, SpecError):
        return "spec"
    if not isinstance(error, ShardTypeError):
        return "jax's shapes"
    if "outside of any op" in str(error):
        return "collective"
    if re.search("branch in Python", str(error)):
        return "structure"
    if "each device has only a part" in str(error):
        return "part"
    return "reductions" if re.search(r"unreduced|reduce", str(error)) else "layout"


class Verdict(NamedTuple):
    """The check that refuses an edit, and why, or the edit's loss and gradient norm."""

    net: str = ""
    why: str = ""
    made: tuple[float, ...] = ()


def composed(schema: Any, folder: str | pathlib.Path, name: str, *overrides: str) -> Any:
    """A config in a folder, with overrides, as an object of the class `schema`."""
    with initialize_config_dir(str(ROOT / folder), version_base="1.3"):
        given = compose(name, overrides=list(overrides))
    return runtime.config.load(schema, OmegaConf.to_container(given, resolve=True))


def config_of(train: types.ModuleType, settings: Collection[str]) -> Any:
    """A config with these settings, of the class that this copy of train.py defines."""
    return composed(train.Config, "configs", "local_test_synthetic", *SETTINGS, *settings)


def verdict(file: str, source: str, settings: Collection[str]) -> Verdict:
    """Checks an edited source. Call it in a process of its own, in which neither train.py nor a JAX
    backend is loaded."""
    simulate_cpu_devices(12)
    name = file.removesuffix(".py").replace("/", ".")
    try:
        before = vars(sys.modules.get(name, object))
        module = load(source, file, name)
        for other in [*sys.modules.values()]:  # which may have imported names of it
            for key, value in [*vars(other).items()]:
                if key in before and value is before[key]:
                    setattr(other, key, vars(module).get(key, value))
        if package := name.rpartition(".")[0]:
            setattr(importlib.import_module(package), name.rpartition(".")[2], module)
        train = importlib.import_module("train")
        config = config_of(train, settings)
        probed, pairs = preflight.probe(train, config)
        found = by_numbers(train, preflight.tiny(train, config))
        if not found.net and (axes := communicating(probed, "permute")):
            found = by_numbers(train, preflight.tiny(train, config, axes))
        if not found.net and (untried := preflight.untried(train, config, pairs)):
            return Verdict("structure", untried)
        return found
    except (MemoryError, OSError, jax.errors.JaxRuntimeError):  # this says nothing about the edit
        raise
    except Exception as error:  # of any class
        return Verdict(_kind(error), str(error).split("\n")[0])


def unedited(settings: Collection[str]) -> tuple[set[Called], Verdict]:
    """The calls that a config's steps make, and the verdict on the unedited source. Needs a process
    of its own, like `verdict`."""
    text = (ROOT / "train.py").read_text()
    found, result = calls_in(lambda: verdict("train.py", text, settings))
    calls = {call._replace(file=call.file.replace("_edited.py", ".py")) for call in found}
    return calls, result


def tried(train: types.ModuleType, config: Any) -> list[Any]:
    """Lists what a run's start computes, and a step of generation, as its ops are edited, too."""
    found = preflight.tried(train, config)
    for name, _, arrays, *_ in found:
        if name == "generation":
            from tools.generate import steps  # which imports train.py

            (_, _, inputs), size = arrays, train.dimensions(config)["V"]
            draws = np.random.default_rng(0).random(len(inputs)).astype(np.float32)
            start = np.zeros(len(inputs), np.int32)
            # Only the likeliest id, as a draw near the bound between two ids may give either.
            how = steps.Sampling(0.8, top_k=1, top_p=0.9, ids=range(size))
            given = *arrays, np.int32(0), start, draws
            return [*found, ("generate.step", steps.step, given, config, how)]
    return found


def by_numbers(train: types.ModuleType, configs: Any) -> Verdict:
    """Compares what two configs compute, as checks/preflight.py does, but in this process."""

    def computed(config: Any) -> Iterator[tuple[str, Any]]:
        mesh, results = meshes[config], None
        while True:
            with jax.set_mesh(mesh), computing_in(config.dtype), layout.on_any_machine():
                results = results or preflight.results(tried(train, config))
                if not (made := next(results, None)):
                    return
            yield made

    meshes = {config: make_mesh(config.mesh.axes) for config in configs}
    first: dict[str, Any] = {}
    # Meshes that split c don't generate, so mistakes in generation don't show there.
    all_of_them = configs[-1].mesh.c == 1
    pairs = zip(computed(configs[-1]), computed(configs[0]), strict=all_of_them)
    for (function, made), (_, one) in pairs:
        first[function] = one
        if differ := numbers.differences(one, made):
            return Verdict("numbers", f"{function}: {', '.join(differ)}")
    if all_of_them and (differ := numbers.differences(first["forward"], first["generation"])):
        return Verdict("generation", ", ".join(differ))
    return Verdict(made=tuple(float(first["training_step 3"][x]) for x in ("loss", "grad_norm")))


REFUSALS = {"layout", "part", "structure", "reductions", "collective", "numbers", "generation"}
EXPECTED = {
    "op": REFUSALS | {"spec", "jax's shapes", "same numbers"},
    "wrong": REFUSALS,  # all trace, and their strings are well-formed
    "right": {"passes"},
    "right in training": {"passes", "generation"},
    "not promised": {"passes"},
}


def stale_rows(nets: dict[str, str]) -> list[str]:
    """Returns the rows of docs/bugs.md that name another check than the one that refuses a bug."""
    stale = []
    for line in (ROOT / "docs/bugs.md").read_text().splitlines():
        name = line.removeprefix("| [").partition("](")[0]
        shown = line.removesuffix(" |").rpartition(" | ")[2]
        if name in nets and shown != ("nothing" if nets[name] == "passes" else nets[name]):
            stale.append(name)
    return stale


def _try(work: tuple[Tried, tuple[str, ...]]) -> Verdict:
    tried, settings = work
    return verdict(tried.file, tried.source, settings)


def counted(part: str, edits: list[Tried]) -> list[str]:
    """Prints the number of edits of each file's ops beside the last recorded one. Returns the files
    that have fewer. With UPDATE_GOLDEN=1, records the numbers."""
    lines = [line.split() for line in GOLDEN.read_text().splitlines()] if GOLDEN.exists() else []
    recorded = {(name, file): int(count) for name, file, count in lines}
    counts = collections.Counter(edit.file for edit in edits)
    before = {file: count for (name, file), count in recorded.items() if name == part}
    for file in sorted({*counts, *before}):
        print(f"{part}: {counts[file]} edits of ops in {file}, recorded {before.get(file, 0)}")
    if os.environ.get("UPDATE_GOLDEN"):
        recorded = {key: count for key, count in recorded.items() if key[0] != part}
        recorded |= {(part, file): count for file, count in counts.items()}
        GOLDEN.write_text("".join(f"{p} {f} {n}\n" for (p, f), n in sorted(recorded.items())))
        return []
    return [f"{file} has fewer edits" for file in before if counts[file] < before[file]]


def run_part(part: str, args: argparse.Namespace, pool: Any) -> tuple[dict[str, str], list[str]]:
    """Tries a part's edits. Returns what refuses each, and the names of those that are bad."""
    settings, lists, without = PARTS[part]
    calls, (net, why, original) = pool.apply(unedited, (settings,))
    if net:
        return {}, [f"{part}: the source as it is: {net}: {why}"]
    if without:
        calls -= pool.apply(unedited, (PARTS[without].settings,))[0]
    by_op = list(mutations(calls))
    bad = counted(part, by_op)
    tried = [
        Tried("not promised" if name in bugs.NOT_PROMISED else kind, name, edit.file, source)
        for kind, listed in lists.items()
        for name, edit in listed.items()
        if (source := edits.edited_source(edit))
    ]
    tried = [each for each in [*tried, *by_op] if re.search(args.only, f"{each.kind}: {each.name}")]
    tried = tried[:: args.every]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    nets: dict[str, str] = {}
    results = pool.imap(_try, ((each, settings) for each in tried))
    for kind, name, *_ in tried:
        net, why, made = results.next(timeout=600)  # a killed process gives no result
        result = net or "passes"
        if kind == "op" and not net:
            same = np.abs(np.array(made) - original).max() < 1e-4 * max(original)
            result = "same numbers" if same else "passes"
        counts[kind, result] += 1
        nets[name] = result
        if wrong := result not in EXPECTED.get(kind, REFUSALS):
            bad.append(name)
        mark = "BAD" if wrong else ""
        print(f"{mark:3} {kind:8}  {result:12}  {name:50}  {why}".rstrip(), flush=True)
    for (kind, net), count in sorted(counts.items()):
        print(f"{count:5}  {part}, {kind}: {net}")
    return nets, bad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="*", default=[*PARTS], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--every", type=int, default=1, help="try only every N-th edit")
    parser.add_argument("--only", default="", help="try only edits whose line this regex finds")
    args = parser.parse_args()
    if unknown := {*args.part} - {*PARTS}:
        parser.error(f"no part {unknown}")
    os.environ["XLA_FLAGS"] = QUICK_COMPILES
    # Each edit runs in a fork of this process, which has imported everything and traced the
    # unedited source without starting a backend.
    warm = load((ROOT / "train.py").read_text())
    preflight.probe(warm, config_of(warm, ()))
    bad: list[str] = []
    nets: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            for part in args.part:
                refused_by, more = run_part(part, args, pool)
                nets |= refused_by
                bad += more
    bad += stale_rows(nets)
    if bad:
        sys.exit(f"error: wrong edits pass, right ones are refused, or rows are stale: {bad}")


if __name__ == "__main__":
    main()
