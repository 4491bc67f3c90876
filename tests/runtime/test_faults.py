"""Failed writes, as on full disks, and damage at every possible place: a checkpoint that looks
complete is complete, or its damage is found."""

import concurrent.futures
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zarr
import zarr.storage._local
from fsspec.implementations.local import LocalFileSystem

from runtime import storage
from runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints, CheckpointsConfig
from runtime.storage import DamageError
from shardlib.types import bf16, pytree_dataclass, u32
from tests.runtime import test_checkpoint
from tests.runtime.test_checkpoint import CONFIG, assert_same_bits, on_mesh, opened, restore
from tools import checkpoint_info


@pytree_dataclass
class Tiny:
    step: u32[""]
    half: bf16["F/t M/d"]


TINY = {"F": 2, "M": 4}


def tiny(seed):
    words = np.random.default_rng(seed).integers(0, 2**16, (2, 4), np.uint16)
    return Tiny(np.uint32(seed), words.view(ml_dtypes.bfloat16))


def tiny_on_mesh(seed):
    return on_mesh(tiny(seed))


def save_tiny(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, tiny_on_mesh(step))


def keeping(keep_last=0, keep_every=0, stop_on_error=True):
    return CheckpointsConfig("", keep_last, keep_every, stop_on_error)


def opened_tiny(path, *options):
    return Checkpoints(str(path), Tiny, TINY, CONFIG, 4, *options)


def end(checkpoints):
    """Waits for the pending save, and fails if it hangs."""
    done, _ = concurrent.futures.wait([checkpoints.saving[1]], timeout=60)
    assert done, "the save hangs"
    checkpoints.wait()


def saved(checkpoints, step, tree):
    """Saves a tree, as a run's last. Returns the checkpoint's path and the error, or an empty
    string."""
    checkpoints.save(step, tree)
    path = checkpoints.saving[0].path
    try:
        end(checkpoints)
        checkpoints.close()
    except CheckpointError as error:
        return path, str(error)
    return path, ""


@pytest.fixture
def writes(monkeypatch):
    """Records the files that zarr writes, and calls `fault` instead of write number `failing`."""
    put, writes = zarr.storage._local._put, types.SimpleNamespace(failing=0, fault=None, files=[])

    def put_or_fault(path, value, exclusive=False):
        if not (exclusive and path.exists()):  # which writes nothing
            writes.files.append(path)
            if len(writes.files) == writes.failing:
                return writes.fault(lambda value: put(path, value, exclusive), value)
        return put(path, value, exclusive)

    monkeypatch.setattr(zarr.storage._local, "_put", put_or_fault)
    return writes


def cut(put, value):
    """Truncates a file to 4 bytes. For the chunk that starts with zeros, those are the valid
    checksum of an empty chunk."""
    put(value[:4])


def cut_with_an_error(put, value):
    """Does what a full disk does."""
    put(value[: len(value) // 2])
    raise OSError(28, "No space left on device")


def lost(put, value):
    pass


NEW, OLD_AFTER_ERROR, DAMAGED = "new", "old, the save failed", "an error that names the new one"

# What is restored, over all the writes that are hit. Losing the mark alone changes nothing.
OUTCOMES = {
    cut: {NEW, OLD_AFTER_ERROR, DAMAGED},
    cut_with_an_error: {NEW, OLD_AFTER_ERROR},
    lost: {NEW, OLD_AFTER_ERROR, DAMAGED},
}


@pytree_dataclass
class Nested:
    tiny: Tiny


def starts_with_zeros(seed):
    tree = tiny(seed)
    tree.half[0] = 0
    return Nested(tree)


@pytest.mark.parametrize("fault", OUTCOMES)
def test_whichever_write_goes_wrong_nothing_else_than_a_save_is_restored(
    fault, writes, one_device, tmp_path
):
    """Either the new checkpoint is restored, or the old one after an error, or none, as the new one
    is damaged."""
    old = starts_with_zeros(0)
    saved(opened(tmp_path, Nested, TINY), 1, on_mesh(old))
    total, writes.fault = len(writes.files), fault
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert set(files) == set(writes.files), "no file is written in another way"
    outcomes = set()
    for number in range(1, total + 1):
        new = starts_with_zeros(number)
        writes.failing, writes.files[:] = number, []
        checkpoints = opened(tmp_path, Nested, TINY)
        path, error = saved(checkpoints, 2, on_mesh(new))
        assert len(writes.files) >= number
        writes.failing = 0
        try:
            tree = restore(tmp_path, Nested, TINY)
        except DamageError as damage:
            assert not error and "\n" not in str(damage)
            assert str(damage).startswith(f"{path} is damaged: ")
            outcomes.add(DAMAGED)
        else:
            assert_same_bits(tree, old if error else new)
            if error:
                assert error.startswith(f"{path} can't be written: ") and "\n" not in error
            outcomes.add(OLD_AFTER_ERROR if error else NEW)
        shutil.rmtree(path, ignore_errors=True)
    assert outcomes == OUTCOMES[fault]


def test_a_save_has_the_arrays_of_its_time_however_late_it_writes(writes, one_device, tmp_path):
    """The caller donates the arrays to a step and deletes the results while a write is delayed. On
    a CPU the save writes from a view of the arrays' memory, which JAX must not reuse."""
    step_done = threading.Event()

    def late(put, value):
        assert step_done.wait(60)
        put(value)

    def inverted(leaf):
        word = jnp.dtype(f"u{leaf.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(~jax.lax.bitcast_convert_type(leaf, word), leaf.dtype)

    def pointers(tree):
        return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}

    step = jax.jit(lambda tree: jax.tree.map(inverted, tree), donate_argnums=0)
    test_checkpoint.save(tmp_path, 1)
    total, writes.fault = len(writes.files), late
    tree = on_mesh(test_checkpoint.values(0))
    before = pointers(tree)
    assert before & pointers(step(tree)), "without a save, memory is reused"
    for number in range(1, total + 1):
        tree, wanted = on_mesh(test_checkpoint.values(number)), test_checkpoint.values(number)
        writes.failing, writes.files[:] = number, []
        step_done.clear()
        checkpoints = opened(tmp_path)
        checkpoints.save(2, tree)
        tree = jax.block_until_ready(step(tree))
        for leaf in jax.tree.leaves(tree):
            leaf.delete()
        assert not checkpoints.saving[1].done()
        step_done.set()
        end(checkpoints)
        assert_same_bits(restore(tmp_path), wanted)


@pytest.mark.parametrize("stops", [True, False])
def test_a_failed_save_stops_the_run_once_or_is_only_said(stops, writes, one_device, tmp_path):
    """The next save says it."""
    messages = []
    checkpoints = opened_tiny(tmp_path, keeping(stop_on_error=stops), messages.append)
    save_tiny(checkpoints, 1)
    end(checkpoints)
    messages.clear()
    writes.failing, writes.fault = len(writes.files) + 5, cut_with_an_error
    save_tiny(checkpoints, 2)
    if stops:
        with pytest.raises(CheckpointError, match=r"can't be written: .*No space left"):
            save_tiny(checkpoints, 3)
        assert not messages
    else:
        save_tiny(checkpoints, 3)
        (line,) = messages
        assert line.startswith(f"warning: {tmp_path}/00000002.") and "\n" not in line
        assert "No space left" in line and line.endswith("; the run continues")
        end(checkpoints)
        writes.failing = len(writes.files) + 5
        save_tiny(checkpoints, 4)
        end(checkpoints)
    checkpoints.wait()  # the error was reported once already
    with pytest.raises(CheckpointError, match="the last checkpoint is missing: "):
        checkpoints.close()  # but a run doesn't end as if all were well
    assert_same_bits(restore(tmp_path, Tiny, TINY), tiny(1 if stops else 3))
    save_tiny(checkpoints, 9)
    end(checkpoints)
    assert_same_bits(restore(tmp_path, Tiny, TINY), tiny(9))
    checkpoints.close()


def test_a_failed_save_leaves_room_for_the_next_one(writes, one_device, tmp_path):
    """The files of a failed save are gone when the next save writes its first one."""
    checkpoints = opened_tiny(tmp_path, keeping(stop_on_error=False), lambda _: None)
    writes.failing, writes.fault = 5, cut_with_an_error
    save_tiny(checkpoints, 1)
    checkpoints.wait()
    (failed,) = tmp_path.iterdir()
    there = []

    def look(put, value):
        there.append(failed.exists())
        put(value)

    writes.failing, writes.fault = len(writes.files) + 1, look
    save_tiny(checkpoints, 2)
    checkpoints.close()
    assert there == [False]
    assert_same_bits(restore(tmp_path, Tiny, TINY), tiny(2))


@pytest.mark.parametrize("name", ["a::b", "data:a", "~/a", "a*b", "a[b]c", "☃ and spaces"])
def test_a_folder_is_what_its_name_says(name, one_device, here):
    checkpoints = opened_tiny(f"{name}/x", CheckpointsConfig("", 1, 0, True))
    checkpoints.starting_point("", False)
    save_tiny(checkpoints, 1, 2)
    checkpoints.close()
    assert_same_bits(restore(f"{name}/x", Tiny, TINY), tiny(2))
    (left,) = (here / name / "x").iterdir()
    assert left.name.startswith("00000002.")


@pytest.mark.parametrize("name", ["run*", "run?", "run[12]"])
def test_removing_what_a_pattern_would_name_leaves_others_in_a_bucket(name):
    bucket = "memory://bucket"
    for folder in name, "run1":
        zarr.open_group(f"{bucket}/{folder}/x", mode="a").create_group("writers")
    storage.remove(f"{bucket}/{name}/x")
    assert not storage.names(f"{bucket}/{name}") and len(storage.names(f"{bucket}/run1/x")) == 2
    storage.remove(f"{bucket}/run1/x")


@pytest.fixture
def two_tiny_ones(one_device, tmp_path):
    for step in 1, 2:
        saved(opened_tiny(tmp_path), step, tiny_on_mesh(step))
    return tmp_path


@pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore")  # else a warning of zarr's would count as an error
def test_a_flipped_bit_of_any_byte_is_harmless_or_found(count, two_tiny_ones):
    """Flips a bit of each byte of the newest checkpoint, one byte at a time, and restores. If
    `count` is given, tries only that many bytes, drawn with a preference for small files."""
    rng, folder = np.random.default_rng(0), two_tiny_ones
    (path,) = folder.glob("00000002.*")
    files = sorted(p for p in path.rglob("*") if p.is_file())
    places = [(file, place) for file in files for place in range(file.stat().st_size)]
    weights = np.array([file.stat().st_size ** -0.5 for file, _ in places])
    chosen = rng.choice(len(places), count or len(places), False, weights / weights.sum())
    outcomes = []
    for file, place in (places[i] for i in sorted(chosen)):
        content = file.read_bytes()
        flipped = content[place] ^ 1 << rng.integers(8)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        problem = ""
        try:
            assert_same_bits(restore(folder, Tiny, TINY), tiny(2))
        except DamageError as damage:
            problem = str(damage)
            assert problem.startswith(f"{path} is damaged: "), (file, place, problem)
        line, *_ = checkpoint_info.describe(Checkpoint(str(path)))
        assert line.endswith("; intact") == (not problem), (file, place, line)
        outcomes.append((file.name, not problem))
        file.write_bytes(content)
    assert_same_bits(restore(folder, Tiny, TINY), tiny(2))
    assert count or len(outcomes) > 2000
    assert {("zarr.json", True), ("zarr.json", False), ("c", False), ("0", False)} == set(outcomes)


ALL = [5, 10, 10, 15, 20, 25, 30]
KEPT = {(0, 10): ALL, (1, 0): [30], (2, 10): [10, 10, 20, 25, 30], (1, 7): [10, 10, 15, 25, 30]}


def contents(folder):
    return {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def test_nothing_is_removed_after_a_skipped_update(one_device, tmp_path):
    """A signal asks for a checkpoint though the weights may have diverged. The next start counts
    on."""
    for steps, skipped, left in ((5,), 0, [5]), ((10,), 2, [5, 10]), ((15, 20), 0, [20]):
        checkpoints = opened_tiny(tmp_path, keeping(keep_last=1))
        checkpoints.starting_point("", True, False)
        assert checkpoints.skipped == 2 * (left == [20])
        for step in steps:
            checkpoints.save(step, tiny_on_mesh(step), skipped=skipped)
        checkpoints.close()
        assert sorted(int(p.name.split(".")[0]) for p in tmp_path.iterdir()) == left


@pytest.mark.parametrize("keep_last, keep_every", KEPT)
def test_what_is_kept_and_what_is_never_removed(keep_last, keep_every, one_device, tmp_path):
    for name in "notes", "00000002.1.copy", "2.1":
        zarr.create_group(tmp_path / name).create_array("step", shape=(), dtype="u4")[...] = 1
    foreign = contents(tmp_path)
    for steps in ALL[:2], ALL[2:]:  # two starts of the run
        checkpoints = opened_tiny(tmp_path, keeping(keep_last, keep_every))
        save_tiny(checkpoints, *steps)
        checkpoints.close()
    assert foreign.items() <= contents(tmp_path).items()
    names = {p.name for p in tmp_path.iterdir()} - {p.name for p in foreign}
    assert sorted(int(name.split(".")[0]) for name in names) == KEPT[keep_last, keep_every]
    for name in names:  # each is intact
        step = int(name.split(".")[0])
        assert_same_bits(restore(tmp_path / name, Tiny, TINY), tiny(step))


def test_a_link_to_another_runs_checkpoint_is_removed_alone(one_device, tmp_path):
    for run in "one", "two":
        checkpoints = opened_tiny(tmp_path / run, keeping(keep_last=1))
        save_tiny(checkpoints, 5)
        checkpoints.close()
        if run == "one":
            (linked,) = (tmp_path / "one").iterdir()
            (tmp_path / "two").mkdir()
            (tmp_path / "two/00000004.1").symlink_to(linked)
    assert len([*(tmp_path / "two").iterdir()]) == 1
    assert_same_bits(restore(linked, Tiny, TINY), tiny(5))


# Errors of the kinds that stores raise: some are no OSError, some have no text.
UNANSWERED = [TimeoutError(), RuntimeError("Session is closed"), KeyError("ETag")]


@pytest.mark.parametrize("name", ["zarr.json", "records/0/zarr.json", "half/c/0/0"])
@pytest.mark.parametrize("error", UNANSWERED, ids=repr)
def test_a_store_that_does_not_answer_is_not_damage(name, error, two_tiny_ones, monkeypatch):
    get, cat = zarr.storage.LocalStore.get, LocalFileSystem.cat_file
    reader = opened_tiny(two_tiny_ones)
    file = f"{reader.newest.path}/{name}"

    async def fail(store, key, *args, **kwargs):
        if key == name:
            raise error
        return await get(store, key, *args, **kwargs)

    def fail_too(files, path, *args, **kwargs):
        if path == file:
            raise error
        return cat(files, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.storage.LocalStore, "get", fail)
        patch.setattr(LocalFileSystem, "cat_file", fail_too)
        for read in reader.restore, lambda: checkpoint_info.describe(reader.newest):
            with pytest.raises(OSError, match=r" can't be (opened|read): .*\S$") as caught:
                read()
            assert "\n" not in str(caught.value) and "damage" not in str(caught.value)
    assert_same_bits(reader.restore(), tiny(2))
