"""Tries every likely mistake in each op of train.py, and reports which check catches it.

    python -m tests.mutations

Each edited source is probed as train.py probes itself before it compiles. An edit that passes is
run in f32 on three simulated meshes, and must give the same loss and gradients as the original.
Prints a line per edit, and ends with an error if an edit changes them and no check catches it.
"""

import argparse
import ast
import collections
import dataclasses
import itertools
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from runtime.config import ROOT
from shardlib.devices import make_mesh, simulate_cpu_devices
from shardlib.types import ShardTypeError, SpecError, make_shardings, parse_signature

SOURCE = pathlib.Path(train.__file__).read_text()
MESHES = ({"d": 2, "t": 2}, {"d": 4, "t": 2}, {"d": 1, "t": 4})
SETTINGS = (
    *("model.d_model=16", "model.n_kv=4", "model.d_head=4", "model.d_ff=24", "model.vocab=32"),
    *("training.tokens={batch: 4, len: 8}", "training.grad_clip=inf", "paths.model_name=none"),
)


AXIS = re.compile(r"(?<=[/:])[a-z]\b")


class Mutation(NamedTuple):
    line: int
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


def mutations(axes: tuple[str, ...]) -> Iterator[Mutation]:
    offsets = [0]
    for line in SOURCE.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return (
            offsets[node.lineno - 1] + node.col_offset,
            offsets[node.end_lineno - 1] + node.end_col_offset,
        )

    def edit(node: Any, text: str) -> str:
        start, end = span(node)
        return SOURCE[:start] + text + SOURCE[end:]

    calls = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        name = ast.unparse(call.func)
        arguments = [SOURCE[slice(*span(a))] for a in call.args]
        whole = SOURCE[slice(*span(call))]
        if name == "save_for_backward":
            yield Mutation(call.lineno, f"{name} deleted", edit(call, f"({arguments[0]})"))
        # `gather` is a parameter; its default is ops.all_gather.
        module, _, op = {"gather": "ops.all_gather"}.get(name, name).partition(".")
        if module not in ("ops", "kernels") or not isinstance(call.args[0], ast.Constant):
            continue
        signature = str(call.args[0].value)
        if module == "ops":  # deleting a kernel gives another model
            yield Mutation(call.lineno, f"{op} deleted", edit(call, f"({arguments[1]})"))
        if len(arguments) == 2:
            again = whole.replace(arguments[1], whole, 1)
            yield Mutation(call.lineno, f"{op} twice", edit(call, again))
        for what, other in other_strings(signature, axes):
            yield Mutation(call.lineno, f"{op}: {what}", edit(call.args[0], f'"{other}"'))
        if text := by_jnp(op, signature, arguments[1:]):
            yield Mutation(call.lineno, f"{op} by jnp", edit(call, text))


def load(source: str, file: str = "train.py") -> types.ModuleType:
    """Loads the edited text of a source file as a module."""
    module = types.ModuleType(f"{pathlib.Path(file).stem}_edited_{len(sys.modules)}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    path = str(ROOT / file).replace(".py", "_edited.py")
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    exec(compile(source, path, "exec"), vars(module))
    return module


def probe(source: str, config: Any) -> tuple[str, str]:
    """Returns the kind of check that catches the edit, and the first line of its message; or two
    empty strings."""
    try:
        load(source).probe(config)
    except (TypeError, ValueError, IndexError) as error:
        text = str(error)
        if isinstance(error, SpecError):
            net = "spec"
        elif not isinstance(error, ShardTypeError):
            net = "jax's shapes"
        elif re.search("outside of any op|depends on the mesh", text):
            net = "by hand"
        else:
            net = "reductions" if re.search(r"unreduced|reduce", text) else "layout"
        return net, text.split("\n")[0]
    return "", ""


def numbers(source: str, config: Any, meshes: Any = MESHES) -> list[Any]:
    """Returns the loss and gradients of a step in f32 on each mesh."""
    module = load(source.replace("bf16", "f32"))
    size, rng = module.dimensions(config), np.random.default_rng(0)
    shape = size["B"], size["L"]
    ids = rng.integers(1, size["V"], shape).astype(np.uint32)
    batch = module.TokenBatch.of(ids, rng.random(shape) < 0.2, config.model.start_token)
    results = []
    for axes in meshes:
        with jax.set_mesh(make_mesh(axes)):
            placed = jax.tree.map(jax.device_put, batch, make_shardings(module.TokenBatch))
            state, metrics = module.training_step(module.init_state(config), placed, config)
            results.append(jax.device_get((metrics.loss, jax.tree.leaves(state.mu))))
    return results


def same(actual: list[Any], expected: list[Any]) -> bool:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return all(np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-12 for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="try only every N-th edit")
    every = parser.parse_args().every
    simulate_cpu_devices(8)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = compose("local_test_synthetic", overrides=[*SETTINGS, "mesh={d: 2, t: 2}"])
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(train.Config), composed))
    axes = tuple(dataclasses.asdict(config.mesh))
    wanted = numbers(SOURCE, config)
    counts: collections.Counter[str] = collections.Counter()
    for i, (line, what, source) in enumerate(mutations(axes)):
        if i % every:
            continue
        net, message = probe(source, config)
        if not net:
            net = "same numbers" if same(numbers(source, config), wanted) else "SURVIVES"
        counts[net] += 1
        print(f"train.py:{line}  {net:12}  {what:40}  {message}".rstrip(), flush=True)
    print(
        f"\n{counts.total()} edits: " + ", ".join(f"{n} {net}" for net, n in counts.most_common())
    )
    if counts["SURVIVES"]:
        sys.exit(f"error: {counts['SURVIVES']} edits change the numbers and no check catches them")


if __name__ == "__main__":
    main()
