"""The imports between the rooms of the house go one way."""

import ast
import graphlib

import pytest

from tests.helpers import ROOMS, ROOT

# From the lowest floor up. A file imports from its own room and from those below.
FLOORS = [*ROOMS[:-1], "train", "tools", "benchmarks"]
NOT_OF = {"runtime": {"kernels"}}  # neighbors on one floor


def imported(file):
    """The modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in FLOORS)


def files_of(room):
    return [ROOT / "train.py"] if room == "train" else sorted((ROOT / room).rglob("*.py"))


def as_module(name):
    """The module that a dotted name is of: itself, or the module that has it."""
    path = ROOT / name.replace(".", "/")
    known = path.with_suffix(".py").exists() or path.is_dir()
    return name if known else name.rpartition(".")[0]


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_imports_from_below(room):
    below = {*FLOORS[: FLOORS.index(room) + 1]} - NOT_OF.get(room, set())
    files = files_of(room)
    assert files
    uses = [(str(file), name) for file in files for name in imported(file)]
    assert not [use for use in uses if use[1].partition(".")[0] not in below]


def test_no_circle():
    """Neither between the files of a room."""
    uses = {}
    for room in FLOORS:
        for file in files_of(room):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            uses[name.removesuffix(".__init__")] = {*map(as_module, imported(file))}
    graphlib.TopologicalSorter(uses).prepare()  # raises, and names the circle
