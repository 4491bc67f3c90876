"""Tries wrong and right edits of the source, and reports which check refuses each.

    python -m tests.mutations

Wrong edits are every likely mistake in each op of train.py and tools/generate.py, and those listed
in tests/edits.py and tests/bugs.py, which also have right ones. An edited source is checked as
`python -m tools.check` does: its types, then, if these hold, its numbers on two meshes. Prints a
line per edit. Ends with an error if a wrong edit passes, or if a right one is refused.
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
import types
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from runtime.config import ROOT
from shardlib import numbers
from shardlib.devices import make_mesh, simulate_cpu_devices
from shardlib.types import ShardTypeError, SpecError, computing_in, parse_signature
from tests import bugs, edits

# Half of a device's rows in a microbatch, half of a row in a chunk; dimensions so small that what
# edits compare with their lengths lies between the length of a part and that of the whole.
SETTINGS = [
    *("paths.model_name=none", "training.microbatches=2", "training.loss_chunks=2"),
    *("mesh={d: 2, t: 3}", "training.tokens={batch: 16, len: 24}", "model.d_model=48"),
    *("model.n_kv=6", "model.d_head=4", "model.d_ff=48", "model.vocab=60"),
]
FILES = "train.py", "tools/generate.py"
AXIS = re.compile(r"(?<=[/:,])[a-z]\b")


class Mutation(NamedTuple):
    """An edit of an op."""

    file: str
    where: str  # the file's line and function
    what: str
    source: str


def other_strings(text: str, axes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields variants of a signature with a description: one axis replaced, all axes exchanged, and
    a dimension's axes moved to another dimension of the same array."""
    for match in AXIS.finditer(text):
        for axis in axes:
            if axis != match[0]:
                yield f"{axis} for {match[0]}", text[: match.start()] + axis + text[match.end() :]
    exchanged = dict(zip(axes, (*axes[1:], axes[0]), strict=True))
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
    if op in ("reduce_sum", "reduce_max"):
        removed = tuple(i for i, dim in enumerate(left) if dim not in right)
        return f"jnp.{op.removeprefix('reduce_')}({arguments[0]}, axis={removed})"
    if op == "einsum_unreduced":
        names = dict.fromkeys(re.findall(r"\w+", bare))
        letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
        terms = re.sub(r"\w+", lambda name: letters[name[0]], bare).replace(" ", "")
        return f"jnp.einsum({terms!r}, {', '.join(arguments[:2])})"
    if op in ("all_gather", "psum_scatter"):
        (given,), wanted = parse_signature(signature)
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


def mutations(
    axes: tuple[str, ...] = ("d", "s", "c", "t"),
    file: str = "train.py",
    parts: Collection[str] = ("attention_norm", "mlp_norm", "w_up"),
) -> Iterator[Mutation]:
    """Yields edits of ops that a model with these optional `parts` runs."""
    source = (ROOT / file).read_text()

    def needed(node: ast.AST) -> str | None:
        """The part without which a node doesn't run."""
        if isinstance(node, ast.FunctionDef):
            return "w_router" if node.name in ("mixture", "in_places") else None
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        part = re.fullmatch(r"w\.(\w+) is not None", test)
        return part and part[1]

    unused = {
        line
        for node in ast.walk(ast.parse(source))
        if (part := needed(node)) and part not in parts
        for line in range(node.lineno, (node.end_lineno or 0) + 1)  # type: ignore[attr-defined]
    }
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return (
            offsets[node.lineno - 1] + node.col_offset,
            offsets[node.end_lineno - 1] + node.end_col_offset,
        )

    def edit(node: Any, text: str) -> str:
        start, end = span(node)
        return source[:start] + text + source[end:]

    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        if call.lineno in unused:
            continue
        name = ast.unparse(call.func)
        within = [f.name for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
        where = f"{file}:{call.lineno} {' '.join(within)}"
        arguments = [source[slice(*span(a))] for a in call.args]
        whole = source[slice(*span(call))]
        if name == "save_for_backward":
            yield Mutation(file, where, f"{name} deleted", edit(call, f"({arguments[0]})"))
        # `gather` is a parameter; its default is ops.all_gather.
        module, _, op = {"gather": "ops.all_gather"}.get(name, name).partition(".")
        if module not in ("ops", "kernels") or not isinstance(call.args[0], ast.Constant):
            continue
        signature = str(call.args[0].value)
        if module == "ops":  # deleting a kernel gives another model
            yield Mutation(file, where, f"{op} deleted", edit(call, f"({arguments[1]})"))
        if len(arguments) == 2:
            again = whole.replace(arguments[1], whole, 1)
            yield Mutation(file, where, f"{op} twice", edit(call, again))
        for what, other in other_strings(signature, axes):
            yield Mutation(file, where, f"{op}: {what}", edit(call.args[0], f'"{other}"'))
        if text := by_jnp(op, signature, arguments[1:]):
            yield Mutation(file, where, f"{op} by jnp", edit(call, text))


def load(source: str, file: str = "train.py", name: str = "") -> types.ModuleType:
    """Loads the edited text of a source file as a module."""
    name = name or f"{pathlib.Path(file).stem}_edited_{len(sys.modules)}"
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look their module up
    path = str(ROOT / file).replace(".py", "_edited.py")
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    exec(compile(source, path, "exec"), vars(module))
    return module


def probe(source: str, config: Any) -> tuple[str, str]:
    """Returns the kind of check of an edited train.py's types that refuses it, and the first line
    of its message; or two empty strings."""
    try:
        load(source).probe(config)
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
    if re.search("branch in Python|on this mesh and", str(error)):
        return "structure"
    return "reductions" if re.search(r"unreduced|reduce", str(error)) else "layout"


class Verdict(NamedTuple):
    """The check that refuses an edit, and why, or the loss and gradient's norm that it gives."""

    net: str = ""
    why: str = ""
    made: tuple[float, ...] = ()


def verdict(edit: tuple[str, str]) -> Verdict:
    """Checks an edited source, (file, text). Call it in a process of its own, in which neither
    train.py nor a JAX backend is loaded."""
    simulate_cpu_devices(12)
    file, source = edit
    name = file.removesuffix(".py").replace("/", ".")
    try:
        module = load(source, file, name)
        if package := name.rpartition(".")[0]:
            setattr(importlib.import_module(package), name.rpartition(".")[2], module)
        train = importlib.import_module("train")
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            composed = compose("local_test_synthetic", overrides=SETTINGS)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(train.Config), composed))
        train.probe(config)
        return by_numbers(train.tiny(config))
    except Exception as error:  # of any class
        return Verdict(_kind(error), str(error).split("\n")[0])


def by_numbers(configs: Any) -> Verdict:
    """Compares what the configs compute, like runtime/checks.py, but in this process. The last one
    comes first, as it shows most mistakes."""
    tiny = importlib.import_module("tools.tiny")

    def computed(config: Any) -> Iterator[tuple[str, Any]]:
        mesh, results = meshes[config], tiny.results(config)
        while True:
            jax.device_count = lambda: mesh.size
            with jax.set_mesh(mesh), computing_in(config.dtype):
                if not (made := next(results, None)):
                    return
            yield made

    meshes = {config: make_mesh(config.mesh.axes) for config in configs}
    first: dict[str, Any] = {}
    pairs = zip(computed(configs[0]), computed(configs[-1]), strict=True)
    rest = ((None, made) for config in configs[1:-1] for made in computed(config))
    for one, (function, made) in itertools.chain(pairs, rest):
        if one:
            first[function] = one[1]
        if differ := numbers.differences(first[function], made):
            return Verdict("numbers", f"{function}: {', '.join(differ)}")
    if differ := numbers.differences(first["forward"], first["generation"]):
        return Verdict("generation", ", ".join(differ))
    return Verdict(made=tuple(float(first["training_step 3"][x]) for x in ("loss", "grad_norm")))


REFUSALS = {
    "spec",
    "layout",
    "structure",
    "jax's shapes",
    "reductions",
    "collective",
    "numbers",
    "generation",
}
EXPECTED = {
    "unedited": {"passes"},
    "op": REFUSALS | {"same numbers"},
    "right": {"passes"},
    "right in training": {"passes", "generation"},
    "right but refused": {"structure"},
    "not promised": {"passes"},
}


def stale_rows(nets: dict[str, str]) -> list[str]:
    """Returns the rows of docs/bugs.md that name another check than the one that refuses the bug.
    With UPDATE_GOLDEN=1, corrects them."""
    page, stale = ROOT / "docs/bugs.md", []
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        name = line.removeprefix("| [").partition("](")[0]
        shown, _, net = line.removesuffix(" |").rpartition(" | ")
        actual = "nothing" if nets.get(name) == "passes" else nets.get(name)
        if name in nets and net != actual:
            stale.append(name)
            lines[i] = f"{shown} | {actual} |"
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text("\n".join(lines) + "\n")
        return []
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="of the config, in addition")
    # train.py, which knows them, isn't loaded in this process.
    default = "attention_norm mlp_norm w_up"
    parser.add_argument("--parts", default=default, help="optional arrays that the settings choose")
    parser.add_argument("--every", type=int, default=1, help="try only every N-th edit")
    parser.add_argument("--only", default="", help="try only edits whose line this regex finds")
    args = parser.parse_args()
    SETTINGS.extend(args.settings)
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        # Halves the time again; jax 0.12 doesn't know it.
        + " --xla_cpu_use_fusion_emitters=false" * (jax.__version_info__ < (0, 11))
    )
    # Each edit's kind, name, file and text.
    tried = [("unedited", "train.py", "train.py", (ROOT / "train.py").read_text())]
    lists = {"wrong": edits.WRONG | bugs.BUGS, "right": edits.RIGHT | edits.RIGHT_WITH_BROADCAST}
    lists |= {"right in training": edits.RIGHT_IN_TRAINING, "not promised": edits.NOT_PROMISED}
    lists["right but refused"] = edits.RIGHT_BUT_REFUSED
    if "w_router" in args.parts:
        lists = {"wrong": edits.WRONG_WITH_EXPERTS, "right": edits.RIGHT_WITH_EXPERTS}
    for group, listed in lists.items():
        for name, edit in listed.items():
            kind = "not promised" if name in bugs.NOT_PROMISED else group
            tried.append((kind, name, edit.file, edits.edited_source(edit)))
    for file in FILES:
        for op in mutations(file=file, parts=args.parts.split()):
            tried.append(("op", f"{op.where} {op.what}", file, op.source))
    chosen = [t for t in tried[1:] if re.search(args.only, f"{t[0]}: {t[1]}")]
    tried = [tried[0], *chosen[:: args.every]]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    bad: list[str] = []
    nets: dict[str, str] = {}
    fork = multiprocessing.get_context("fork")  # a process of its own for each, already set up
    with fork.Pool(2, maxtasksperchild=1) as pool:
        verdicts = pool.imap(verdict, ((file, source) for _, _, file, source in tried), 1)
        for (kind, name, *_), (net, why, made) in zip(tried, verdicts, strict=True):
            if kind == "unedited":
                original = np.array(made)
            result = net or "passes"
            if kind == "op" and not net:
                same = np.abs(np.array(made) - original).max() < 1e-4 * original.max()
                result = "same numbers" if same else "passes"
            counts[kind, result] += 1
            nets[name] = result
            if result not in EXPECTED.get(kind, REFUSALS):
                bad.append(name)
            mark = "BAD" if name in bad else ""
            print(f"{mark:3} {kind:8}  {result:12}  {name:50}  {why}".rstrip(), flush=True)
    for (kind, net), count in sorted(counts.items()):
        print(f"{count:5}  {kind}: {net}")
    bad += stale_rows(nets)
    if bad:
        sys.exit(f"error: wrong edits pass, right ones are refused, or rows are stale: {bad}")


if __name__ == "__main__":
    main()
