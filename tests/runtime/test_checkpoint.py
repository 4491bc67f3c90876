"""Checkpoints: saving and restoring on any mesh, the format on disk, damage, other models."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import time
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import runtime.checkpoint
from runtime import storage
from runtime.checkpoint import CHUNK_BYTES, CheckpointError, Checkpoints, chunk_shape
from runtime.config import Section
from runtime.storage import DamageError
from shardlib.errors import UserError
from shardlib.types import Stacked, bf16, f32, make_shardings, pytree_dataclass, u32
from tests import golden
from tests.helpers import MESHES, mesh

SIZES = {"V": 16, "M": 24, "F": 8, "layers": 3}


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    half: bf16["F/t M/d"]


@pytree_dataclass
class Tree:
    step: u32[""]
    embed: f32["V/t M/d"]
    layers: Stacked["layers", Layer]
    gain: f32["M/t/d"]
    whole: f32["F"]


def values(seed=0):
    """Returns a tree of random bits: NaNs with payloads, infinities, denormals, signed zeros."""
    rng = np.random.default_rng(seed)

    def bits(*shape, dtype=np.float32):
        word = np.dtype(f"u{np.dtype(dtype).itemsize}")
        drawn = rng.integers(0, 2 ** (8 * word.itemsize), shape, word, endpoint=False)
        return drawn.view(dtype)

    zeros = np.zeros((16, 24), np.float32)
    zeros[3, 5] = -0.0
    layers = Layer(bits(3, 24, 8), bits(3, 8, 24, dtype=ml_dtypes.bfloat16))
    return Tree(np.uint32(7), zeros, layers, bits(24), bits(8))


def on_mesh(tree):
    return jax.tree.map(jax.device_put, tree, make_shardings(type(tree)))


def assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


CONFIG = "model: {size: small, rope: 100}\n"


def opened(path, hint=Tree, sizes=SIZES, **options):
    return Checkpoints(str(path), hint, sizes, CONFIG, 4, **options)


def save(path, step=7, tree=None, hint=Tree, sizes=SIZES):
    return written(opened(path, hint, sizes), step, tree or on_mesh(values()))


def written(checkpoints, step, tree):
    checkpoints.save(step, tree)
    checkpoints.wait()
    return pathlib.Path(f"{checkpoints.path}/{step:08d}.{checkpoints.start}")


def restore(path, hint=Tree, sizes=SIZES):
    return opened(path, hint, sizes).restore()


def test_what_one_mesh_writes_another_mesh_reads_bit_for_bit(tmp_path):
    """Each mesh reads what the one before it has written."""
    with jax.set_mesh(mesh(*MESHES[-1])):
        save(tmp_path, 1, on_mesh(values(1)))
    for step, sizes in enumerate(MESHES, 1):
        with jax.set_mesh(mesh(*sizes)):
            tree = restore(tmp_path)
            assert_same_bits(tree, values(step))
            layouts = jax.tree.map(lambda leaf: leaf.sharding, tree)
            assert layouts == make_shardings(Tree)
            save(tmp_path, step + 1, on_mesh(values(step + 1)))


def attributes(path):
    """The attributes of a group, whose checksum is right, without it."""
    found = json.loads((path / "zarr.json").read_text())["attributes"]
    checksum = found.pop("checksum")
    assert checksum == zlib.crc32(json.dumps(found, sort_keys=True).encode())
    return found


def test_on_disk_is_what_the_page_says(tmp_path):
    """Checks a saved checkpoint with only zarr, json and file names."""
    with jax.set_mesh(mesh(4, 2)):
        path = save(tmp_path / "checkpoints")
    assert path.parent == tmp_path / "checkpoints" and re.fullmatch(r"00000007\.\d{13}", path.name)
    assert abs(int(path.name.split(".")[1]) / 1000 - time.time()) < 60
    group = zarr.open_group(path, mode="r")
    listed = dict(group.members(max_depth=None))  # warns of what is in no group
    tree = values()
    layers = {"layers/w": tree.layers.w, "layers/half": tree.layers.half.view(np.uint16)}
    arrays = {"step": tree.step, "embed": tree.embed} | layers
    arrays |= {"gain": tree.gain, "whole": tree.whole}
    names = {"zarr.json", "records", "step", "embed", "layers", "gain", "whole"}
    assert {p.name for p in path.iterdir()} == names
    about = attributes(path)
    assert (about["format"], about["step"], about["config"]) == (3, 7, CONFIG)
    assert list(about["arrays"]) == list(arrays)
    assert {n for n, member in listed.items() if isinstance(member, zarr.Array)} == {*arrays}
    assert attributes(path / "records/0") == {"hosts": 1, "position": None}
    for name, wanted in arrays.items():
        assert_same_bits(group[name][()], wanted)
        description = json.loads((path / name / "zarr.json").read_text())
        for key in "shape", "data_type", "dimension_names", "chunk_grid", "attributes":
            assert description[key] == about["arrays"][name][key]
        assert description["codecs"][-1] == {"name": "crc32c"}
        # The only chunk of a scalar is the file c.
        files = [p for p in (path / name).rglob("*") if p.is_file() and p.name != "zarr.json"]
        assert len(files) == group[name].nchunks and group[name].shape == wanted.shape
        stored = sum(file.stat().st_size - 4 for file in files)
        assert stored == wanted.nbytes, "every chunk is stored once, with its checksum"
    assert group["layers/w"].chunks == (3, 6, 4)
    assert group["layers/half"].attrs["type"] == "bfloat16[layers=3, F=8, M=24]"
    assert group["layers/half"].metadata.dimension_names == ("layers", "F", "M")


def flip(file):
    first, *rest = file.read_bytes()
    file.write_bytes(bytes([first ^ 1, *rest]))


DAMAGE = {
    "a flipped bit": ("embed/c/1/2", flip),
    "a chunk cut short": ("gain/c/0", lambda file: os.truncate(file, 5)),
    "an empty chunk": ("layers/half/c/0/1/3", lambda file: os.truncate(file, 0)),
    "a missing chunk": ("step/c", os.unlink),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_named(case, here):
    chunk, damage = DAMAGE[case]
    with jax.set_mesh(mesh(4, 2)):
        save("checkpoints", 5)
        path = save("checkpoints")
        damage(path / chunk)
        with golden.raises("checkpoints.txt", case, DamageError):
            restore("checkpoints")
        shutil.rmtree(path)  # the cure that the message names
        assert_same_bits(restore("checkpoints"), values())


RECORD = "records/1/zarr.json"
LOST = {  # what happens to a checkpoint of two hosts, marked or not, and whether it is damage
    "nothing": (lambda path: None, True, ""),
    "no mark, as the run was killed before the next save": (lambda path: None, False, ""),
    "a record not written": (lambda path: os.unlink(path / RECORD), False, "unfinished"),
    "no record written": (lambda path: shutil.rmtree(path / "records"), False, "unfinished"),
    "a record cut short": (lambda path: os.truncate(path / RECORD, 9), False, "unfinished"),
    "a chunk alone": (
        lambda path: [shutil.rmtree(path), (path / "gain/c").mkdir(parents=True)],
        False, "unfinished",
    ),
    "a record lost later": (lambda path: os.unlink(path / RECORD), True, "damage"),
    "all records lost later": (lambda path: shutil.rmtree(path / "records"), True, "damage"),
    "a record changed later": (lambda path: flip(path / RECORD), True, "damage"),
    "the description lost": (lambda path: os.unlink(path / "zarr.json"), False, "damage"),
    "the description changed": (lambda path: flip(path / "zarr.json"), False, "damage"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_it_is_complete_with_the_records_of_all_hosts_and_damaged_if_one_is_lost_later(case, here):
    change, marked, outcome = LOST[case]
    with jax.set_mesh(mesh(4, 2)):
        save("checkpoints", 5)
        one = runtime.checkpoint.Checkpoint(str(save("checkpoints")))
        shutil.rmtree(f"{one.path}/records")
        for host in 1, 0:
            one.record(host, hosts=2)
        if marked:
            one.mark()
        change(pathlib.Path(one.path))
        checkpoints = opened("checkpoints")
        if outcome == "damage":
            with golden.raises("checkpoints.txt", case, DamageError):
                checkpoints.starting_point("", False)
        else:
            source, first = checkpoints.starting_point("", False)
            assert first == source.newest.step == (5 if outcome else 7)
        written(checkpoints, 9, on_mesh(values()))  # which removes what is unfinished
        assert os.path.exists(one.path) == (outcome != "unfinished")


@pytest.mark.parametrize("left", ["no mark and no records", "no chunks either", "nothing"])
def test_one_that_is_removed_while_it_is_read_is_not_damaged(left, here):
    """Stages of a removal, after another process has chosen the checkpoint."""
    with jax.set_mesh(mesh(4, 2)):
        path, reader = save("checkpoints"), opened("checkpoints")
        if left != "no mark and no records":
            assert reader.newest.arrays  # reading has begun
        for name in "complete", "records", "embed" if "chunks" in left else "gain":
            shutil.rmtree(path / name, ignore_errors=True)
        if left == "nothing":
            shutil.rmtree(path)
        with golden.raises("checkpoints.txt", "removed while it is read", DamageError):
            reader.restore()


def other(kind):
    @pytree_dataclass
    class Other:
        step: u32[""]
        embed: kind

    return Other


OTHER_MODELS = {
    "another size": (other(f32["V/t M/d"]), {"V": 16, "M": 32}),
    "another dtype": (other(bf16["V/t M/d"]), {"V": 16, "M": 24}),
    "other dimensions of the same sizes": (other(f32["M/t V/d"]), {"V": 24, "M": 16}),
    "arrays that the model lacks": (other(f32["V/t M/d"]), {"V": 16, "M": 24}),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_another_model_is_refused(case, here):
    with jax.set_mesh(mesh(1, 1)):
        save("checkpoints")
        with golden.raises("checkpoints.txt", case, CheckpointError):
            restore("checkpoints", *OTHER_MODELS[case])


@pytree_dataclass
class OtherLayers:
    layers: other(f32["V/t M/d"])


def test_a_part_of_a_tree_needs_no_more_than_itself(tmp_path):
    with jax.set_mesh(mesh(4, 2)):
        path = save(tmp_path)
        (path / "embed/c/1/2").unlink()
        layers = opened(tmp_path).restore("layers")
        assert_same_bits(layers, values().layers)
        assert jax.tree.map(lambda leaf: leaf.sharding, layers) == make_shardings(Tree).layers
        problem = "layers/step is missing in the checkpoint but uint32"
        with pytest.raises(CheckpointError, match=problem):
            opened(tmp_path, OtherLayers).restore("layers")
        (path / "layers/w/c/0/1/1").unlink()
        problem = r"layers/w: chunk 0\.1\.1 can't be read: it is missing"
        with pytest.raises(DamageError, match=problem):
            opened(tmp_path).restore("layers")


def test_each_start_writes_apart_and_the_newest_complete_checkpoint_counts(tmp_path, monkeypatch):
    with jax.set_mesh(mesh(1, 1)):
        assert opened(tmp_path / "none").newest.step == 0
        tree = on_mesh(values())
        first = opened(tmp_path)
        written(first, 5, tree)
        ten = written(first, 10, tree)
        with pytest.raises(CheckpointError, match=re.escape(ten.name)):
            written(first, 10, tree)
        assert_same_bits(restore(ten), values())
        # Left by writers that were killed early and late; entries that aren't checkpoints.
        (tmp_path / "00000015.1").mkdir()
        shutil.copytree(ten, tmp_path / "00000020.1")
        for name in "complete", "records/0":
            shutil.rmtree(tmp_path / "00000020.1" / name)
        zarr.open_group(tmp_path / "notes").create_group("x")
        (tmp_path / "00000022.1").write_text("")
        second = opened(tmp_path)
        while time.time_ns() // 10**6 == second.start:  # names have a resolution of a millisecond
            pass
        third = opened(tmp_path)
        assert pathlib.Path(second.newest.path) == ten and second.newest.step == 10
        # Two starts write to different groups, the one of the later start is the newest, and the
        # earlier one, which may still run on another machine, ends at its next save.
        assert len({first.start, second.start, third.start}) == 3
        later = written(third, 10, tree)
        (begun := tmp_path / f"00000012.{third.start}").mkdir()  # the later one is writing it
        with pytest.raises(CheckpointError, match=f"has written {later}: end this one"):
            written(second, 15, tree)
        with pytest.raises(CheckpointError, match="the last checkpoint is missing"):
            second.close()
        assert begun.exists()
        monkeypatch.setattr(time, "time_ns", lambda: 0)  # on a machine whose clock is wrong
        fourth = opened(tmp_path)
        assert fourth.newest.path == str(later) and fourth.start > third.start


def test_one_is_named_by_its_path_wherever_it_is_copied_to(tmp_path, monkeypatch):
    with jax.set_mesh(mesh(1, 1)):
        tree = on_mesh(values())
        first, _ = save(tmp_path / "a", 5, tree), save(tmp_path / "b", 6, tree)
        shutil.copytree(first, tmp_path / "b" / first.name)
        monkeypatch.chdir(tmp_path / "b")
        first = pathlib.Path(first.name).resolve()
        for path in str(first), f"{first}/", first.name, f"./{first.name}":
            checkpoints = opened(path)
            newest = checkpoints.newest
            assert newest.step == 5 and pathlib.Path(newest.path).resolve() == first
            assert runtime.checkpoint.newest(path).order == newest.order
        assert_same_bits(opened(first.name).restore(), values())
        shutil.copytree(".", "run/checkpoints")
        # As `cp -r` does if the target is there.
        shutil.copytree(first, f"checkpoints/{first.name}")
        shutil.copytree("run", "runs/20261129.1430")
        for folder in ".", "run", "runs/20261129.1430":
            assert [one.step for one in runtime.checkpoint.list_checkpoints(folder)] == [5, 6]


@dataclasses.dataclass
class Model(Section, key="model"):
    size: int
    rope: int


@dataclasses.dataclass
class Whole(Section):
    model: Model


CONFIGS = {
    "model: {size: 3, rope: 2, gate: 1}": "unknown key model.gate",
    "model: {size: small}": "model.size=small: Input should be a valid integer, ",
    "other: 1": "model.size is missing",
}


def test_a_config_of_another_schema_is_refused(tmp_path):
    """A key that is no more is left out, at the top alone."""
    with jax.set_mesh(mesh(1, 1)):
        for step, text in enumerate(["model: {size: 3}\ncompiled_step: x", *CONFIGS]):
            written(Checkpoints(str(tmp_path), Tree, SIZES, text, 4), step, on_mesh(values()))
    one, *others = runtime.checkpoint.list_checkpoints(str(tmp_path))
    assert one.config(Model, {"rope": 2}) == Model(3, 2)
    assert one.config(Whole, defaults={"model": {"rope": 2}}) == Whole(Model(3, 2))
    with pytest.raises(CheckpointError, match=r"unknown key model\.gate"):
        others[0].config(Whole)
    for other, problem in zip(others, CONFIGS.values(), strict=True):
        with pytest.raises(CheckpointError, match=f"^{re.escape(other.path)} has .*: {problem}"):
            other.config(Model, {"rope": 2})


OTHERS = {
    "an earlier format": {"format": 2, "write_completed": True},
    "another key in the model's config": {"config": "model: {size: small}\n"},
    "a key that is unknown here": {"config": "model: {size: small, rope: 100, cap: 50, none: 0}\n"},
    "a config that reads the environment": {"config": 'model: {size: "\x24{oc.env:HOME}"}\n'},
    "a config with an alias": {"config": "a: &a [1, 1]\nmodel: {size: *a}\n"},
    "a config with a tag": {"config": "model: !!python/object/apply:os.getcwd []\n"},
    "a config that is a list": {"config": "- 1\n"},
    "a model that is a list": {"config": "model: [1]\n"},
    "a config that is no text": {"config": 5},
    "arrays that are none": {"arrays": ["embed"]},
    "an array without a shape": {"arrays": {"embed": {"data_type": "float32"}}},
    "another step": {"step": 6},
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_manifest_is_refused(case, here):
    with jax.set_mesh(mesh(1, 1)):
        path = save("checkpoints")
        about = attributes(path) | OTHERS[case]
        shutil.rmtree(path)
        storage.write_group(str(path), about)
        if "write_completed" not in about:
            runtime.checkpoint.Checkpoint(str(path)).record(0, 1)
        with golden.raises("checkpoints.txt", case, UserError):
            opened("checkpoints").starting_point("", False)
        assert path.exists()


@given(st.lists(st.integers(1, 2**14), max_size=4), st.sampled_from([1, 2, 4]))
def test_chunks_divide_a_shard_evenly_and_fit(shard, itemsize):
    chunk = chunk_shape(tuple(shard), itemsize)
    assert all(length % part == 0 for length, part in zip(shard, chunk, strict=True))
    size = itemsize * int(np.prod(chunk, dtype=object))
    assert size <= CHUNK_BYTES or all(n % 2 for n in chunk), "it could be halved again"
    halves = 2 * size <= CHUNK_BYTES
    assert chunk == tuple(shard) or not halves, "it is halved more than necessary"
