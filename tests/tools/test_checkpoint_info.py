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
def folder(saved, tmp_path, monkeypatch):
    """Changes to a new folder, and copies the checkpoints to `some` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shutil.copytree(saved, "some")
    yield tmp_path / "some"
    monkeypatch.undo()
    time.tzset()


LAST = f"00000002.{START}"


def one(how):
    """Makes a case that removes all but the last checkpoint, and applies `how` to that."""

    def change(folder):
        shutil.rmtree(folder / f"00000001.{START}")
        how(folder / LAST)

    return change


def two_arrays(path):
    flip(path / "w/c/3/1")
    (path / "half/c/0/2").unlink()


def unfinished(path):
    for name in "complete", "records":
        shutil.rmtree(path / name)


# How the folder is changed, the path given to the tool, and the expected exit code.
CASES = {
    "whole": (lambda folder: None, "some", 0),
    "one, by its own path": (lambda folder: None, f"some/{LAST}/", 0),
    "two damaged arrays": (one(two_arrays), "some", 1),
    "without its description": (one(lambda path: (path / "zarr.json").unlink()), "some", 1),
    "a record lost": (lambda folder: shutil.rmtree(folder / LAST / "records/0"), "some", 1),
    "an older one damaged": (
        lambda folder: flip(folder / f"00000001.{START}" / "w/c/0/0"), "some", 1,
    ),
    "another step's attributes": (
        one(lambda path: path.rename(path.with_name(f"00000003.{START}"))), "some", 1,
    ),
    "unfinished, beside a whole one": (
        lambda folder: unfinished(folder / LAST), "some", 0,
    ),
    "an unfinished one alone": (one(unfinished), "some", 1),
    "a folder that isn't there": (lambda folder: None, "none", 1),
    "a checkpoint that isn't there": (lambda folder: None, f"some/00000009.{START}", 1),
}  # fmt: skip


def test_one_that_is_removed_meanwhile_is_not_damaged(folder, ended, monkeypatch):
    """A run removes the first one while that is checked."""
    check = storage.check

    def removing(array):
        shutil.rmtree(folder / f"00000001.{START}", ignore_errors=True)
        check(array)

    monkeypatch.setattr(storage, "check", removing)
    out, errors, code = ended(checkpoint_info.main, "some")
    lines = out.splitlines()
    assert lines[0].endswith("; removed meanwhile") and lines[1].endswith("; intact")
    assert not errors and code == 0


@pytest.mark.parametrize("case", CASES)
def test_what_it_says(case, folder, ended):
    prepare, path, wanted = CASES[case]
    prepare(folder)
    out, errors, code = ended(checkpoint_info.main, path)
    if isinstance(code, str):  # which the interpreter prints
        errors, code = f"{errors}{code}\n", 1
    assert code == wanted and "Traceback" not in errors
    golden.check("checkpoint_info.txt", case, f"{out}{errors}exit code {code}")
