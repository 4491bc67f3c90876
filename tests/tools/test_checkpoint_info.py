"""The tool's output for intact and damaged checkpoints."""

import shutil
import time

import jax
import jax.numpy as jnp
import pytest

from runtime import storage
from runtime.checkpoint import Checkpoints
from shardlib.types import bf16, f32, make_shardings, pytree_dataclass, u32
from tests import golden
from tests.helpers import mesh
from tests.runtime.test_checkpoint import flip
from tools import checkpoint_info

START = 1_700_000_000_000  # of the run, in milliseconds since 1970


@pytree_dataclass
class Tree:
    step: u32[""]
    w: f32["M/d F/t"]
    half: bf16["F/t M/d"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2."""
    path = tmp_path_factory.mktemp("saved")
    with jax.set_mesh(mesh(4, 2)):
        zeros = Tree(jnp.uint32(0), jnp.zeros((8, 4)), jnp.zeros((4, 8), jnp.bfloat16))
        tree = jax.tree.map(jax.device_put, zeros, make_shardings(Tree))
        sizes, config = {"M": 8, "F": 4}, "model: {size: small}\ntraining: {steps: 2}\n"
        checkpoints = Checkpoints(str(path), Tree, sizes, config, 4, say=lambda _: None)
        checkpoints.start = START
        for step in 1, 2:
            checkpoints.save(step, tree)
        checkpoints.close()
    return path


@pytest.fixture
def folder(saved, here, monkeypatch):
    """Changes to a new folder, and copies the checkpoints to `some` in it."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shutil.copytree(saved, "some")
    yield here / "some"
    monkeypatch.undo()
    time.tzset()


FIRST, LAST, OTHER = (f"0000000{step}.{START}" for step in (1, 2, 3))


def one(how):
    """Makes a case that removes all but the last checkpoint, and applies `how` to that."""

    def change(folder):
        shutil.rmtree(folder / FIRST)
        how(folder / LAST)

    return change


def two_arrays(path):
    flip(path / "w/c/3/1")
    (path / "half/c/0/2").unlink()


def unfinished(path):
    for name in "complete", "records":
        shutil.rmtree(path / name)


# How the folder is changed, the expected exit code, and the path given to the tool.
CASES = {
    "whole": (str, 0, "some"),
    "one, by its own path": (str, 0, f"some/{LAST}/"),
    "two damaged arrays": (one(two_arrays), 1, "some"),
    "without its description": (one(lambda path: (path / "zarr.json").unlink()), 1, "some"),
    "a record lost": (lambda folder: shutil.rmtree(folder / LAST / "records/0"), 1, "some"),
    "an older one damaged": (lambda folder: flip(folder / FIRST / "w/c/0/0"), 1, "some"),
    "another step's attributes": (one(lambda path: path.rename(f"some/{OTHER}")), 1, "some"),
    "unfinished, beside a whole one": (lambda folder: unfinished(folder / LAST), 0, "some"),
    "an unfinished one alone": (one(unfinished), 1, "some"),
    "a folder that isn't there": (str, 1, "none"),
    "a folder of Hugging Face": (lambda _: open("config.json", "x").close(), 1, "."),
    "a checkpoint that isn't there": (str, 1, f"some/00000009.{START}"),
}


def test_one_that_is_removed_meanwhile_is_not_damaged(folder, ended, monkeypatch):
    """A run removes the first one while that is checked."""
    check = storage.check

    def removing(array):
        shutil.rmtree(folder / FIRST, ignore_errors=True)
        check(array)

    monkeypatch.setattr(storage, "check", removing)
    out, errors, code = ended(checkpoint_info.main, "some")
    lines = out.splitlines()
    assert lines[0].endswith("; removed meanwhile") and lines[1].endswith("; intact")
    assert not errors and code == 0


@pytest.mark.parametrize("case", CASES)
def test_what_it_says(case, folder, ended):
    prepare, wanted, path = CASES[case]
    prepare(folder)
    out, errors, code = ended(checkpoint_info.main, path)
    if isinstance(code, str):  # which the interpreter prints
        errors, code = f"{errors}{code}\n", 1
    assert code == wanted and "Traceback" not in errors
    golden.check("checkpoint_info.txt", case, f"{out}{errors}exit code {code}")
