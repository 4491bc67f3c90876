"""Tests that every function with a type string in its signature is checked on each call. Without a
decorator a type string would be a comment that looks like a type."""

import ast
from collections.abc import Iterator

import pytest

from shardlib import types
from tests.helpers import ROOMS, ROOT

PATHS = [ROOT / "train.py", *(path for name in ROOMS for path in ROOT.glob(f"{name}/**/*.py"))]
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PATHS}
STRINGS = {name for name, value in vars(types).items() if isinstance(value, types.DType)}
STRINGS |= {"Stacked", "Mapped"}
CHECKS = {"typechecked", "typed_shard_map"}


def name_of(node: ast.AST) -> str:
    """The last name of an expression: `f32` for f32["B/d L"], `jit` for jax.jit(step)."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return getattr(node, "attr", "") or getattr(node, "id", "")


def has_string(hint: ast.AST) -> bool:
    inside = (name_of(node) for node in ast.walk(hint) if isinstance(node, ast.Subscript))
    return not STRINGS.isdisjoint(inside)


def of_arrays() -> set[str]:
    """The names of all pytree_dataclasses, and of Stacked and Mapped versions of them."""
    names = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            if "pytree_dataclass" in map(name_of, node.decorator_list):
                names.add(node.name)
        elif isinstance(node, ast.Assign) and has_string(node.value):
            names.add(name_of(node.targets[0]))
    return names


CLASSES = of_arrays()


def needs_check(hint: ast.AST | None) -> bool:
    """Returns whether an annotation has a type string, or is a class of arrays or a tuple of them.
    No decorator could check other containers, such as an Iterator."""
    if isinstance(hint, ast.Subscript) and name_of(hint) == "tuple":
        parts = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
        return has_string(hint) or (parts != [] and all(map(needs_check, parts)))
    named = isinstance(hint, ast.Name | ast.Attribute) and name_of(hint) in CLASSES
    return hint is not None and (named or has_string(hint))


def unchecked(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            hints = [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg)]
            is_checked = not CHECKS.isdisjoint(map(name_of, node.decorator_list))
            local = [a.annotation for a in ast.walk(node) if isinstance(a, ast.AnnAssign)]
            unseen = any(map(has_string, local))  # nothing looks at a local variable's
            if unseen or (not is_checked and any(map(needs_check, [*hints, node.returns]))):
                yield node.name


@pytest.mark.parametrize("file", TREES)
def test_what_a_signature_says_of_arrays_is_checked(file):
    assert not [*unchecked(TREES[file])]
