"""Failed writes, full disks and damage at every possible place: a checkpoint that looks complete
is complete, or its damage is found."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zarr
import zarr.storage._local

from runtime import storage
from runtime.checkpoint import Checkpoint, CheckpointError, Checkpoints, CheckpointsConfig
from shardlib.types import bf16, make_shardings, pytree_dataclass, u32
from tests.helpers import mesh
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
    return jax.tree.map(jax.device_put, tiny(seed), make_shardings(Tiny))


@pytest.fixture
def one_device():
    with jax.set_mesh(mesh(1, 1)):
        yield


def keeping(keep_last=0, keep_every=0, stop_on_error=True):
    return CheckpointsConfig("", keep_last, keep_every, stop_on_error)


def opened_tiny(path, *options):
    return Checkpoints(str(path), Tiny, TINY, CONFIG, 4, *options)


def end(checkpoints):
    """Waits for the pending save, and fails if it hangs."""
    done, _ = concurrent.futures.wait([checkpoints.saving], timeout=60)
    assert done, "the save hangs"
    checkpoints.wait()


def saved(checkpoints, step, tree):
    """Saves a tree. Returns the checkpoint's path and the error, or an empty string."""
    checkpoints.save(step, tree)
    path = checkpoints._path(step, checkpoints.start)
    try:
        end(checkpoints)
    except CheckpointError as error:
        return path, str(error)
    return path, ""


def same_bits(actual, expected):
    try:
        assert_same_bits(actual, expected)
    except AssertionError:
        return False
    return True


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
    put(value[: len(value) // 2])
    raise OSError(5, "Input/output error")


def lost(put, value):
    pass


NEW, OLD_AFTER_ERROR, OLD_AFTER_WARNING = "new", "old, the save failed", "old, restore warned"

# What is restored, over all the writes that are hit.
OUTCOMES = {
    cut: {NEW, OLD_AFTER_ERROR, OLD_AFTER_WARNING},
    cut_with_an_error: {OLD_AFTER_ERROR},
    lost: {NEW, OLD_AFTER_ERROR, OLD_AFTER_WARNING},
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
    fault, writes, one_device, tmp_path, capsys
):
    """Either the new checkpoint is restored, or the old one after an error or with a warning."""
    layout, old = make_shardings(Nested), starts_with_zeros(0)
    test_checkpoint.save(tmp_path, 1, jax.device_put(old, layout), Nested, TINY)
    total, writes.fault = len(writes.files), fault
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert set(files) == set(writes.files), "no file is written in another way"
    outcomes = set()
    for number in range(1, total + 1):
        new = starts_with_zeros(number)
        writes.failing, writes.files[:] = number, []
        checkpoints = opened(tmp_path, Nested, TINY)
        path, error = saved(checkpoints, 2, jax.device_put(new, layout))
        assert len(writes.files) >= number
        writes.failing, _ = 0, capsys.readouterr()
        tree, warning = restore(tmp_path, Nested, TINY), capsys.readouterr().err
        if same_bits(tree, new):
            assert (error, warning) == ("", "")
            outcomes.add(NEW)
        else:
            assert_same_bits(tree, old)
            if warning or not error:
                assert warning.startswith(f"warning: {path} is damaged: ")
                assert warning.count("\n") == 1
            if error:
                assert error.startswith(f"{path} can't be written: ") and "\n" not in error
            outcomes.add(OLD_AFTER_ERROR if error else OLD_AFTER_WARNING)
        shutil.rmtree(path)
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
        assert not checkpoints.saving.done()
        step_done.set()
        end(checkpoints)
        assert_same_bits(restore(tmp_path), wanted)


@pytest.mark.parametrize("stops", [True, False])
def test_a_failed_save_stops_the_run_once_or_is_only_said(stops, writes, one_device, tmp_path):
    messages, failed = [], []
    policy = keeping(stop_on_error=stops)
    checkpoints = opened_tiny(tmp_path, policy, messages.append, lambda: failed.append(1))
    checkpoints.save(1, tiny_on_mesh(1))
    end(checkpoints)
    messages.clear()
    writes.failing, writes.fault = len(writes.files) + 5, cut_with_an_error
    checkpoints.save(2, tiny_on_mesh(2))
    if stops:
        with pytest.raises(CheckpointError, match=r"can't be written: .*Input/output error"):
            end(checkpoints)
        assert (failed, messages) == ([1], [])
    else:
        end(checkpoints)
        (line,) = messages
        assert line.startswith(f"warning: {tmp_path}/00000002.") and "\n" not in line
        assert "Input/output error" in line and line.endswith("; the run continues")
        assert not failed
    checkpoints.wait()  # the error was reported once already
    with pytest.raises(CheckpointError, match="the last checkpoint is missing: "):
        checkpoints.close()  # but a run doesn't end as if all were well
    assert_same_bits(restore(tmp_path, Tiny, TINY), tiny(1))
    checkpoints.save(9, tiny_on_mesh(9))
    end(checkpoints)
    assert_same_bits(restore(tmp_path, Tiny, TINY), tiny(9))
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 128 * os.sysconf("SC_PAGE_SIZE")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_gets_one_message(small_disk, one_device):
    """Saves with no free page, then a few more each time, until the checkpoint fits."""
    old, number, errors = test_checkpoint.values(0), 0, []
    test_checkpoint.save(small_disk, 1, on_mesh(old))
    filler = small_disk / "filler"
    while True:
        free = os.statvfs(small_disk)
        filler.write_bytes(bytes((free.f_bavail - number) * free.f_frsize))
        new = test_checkpoint.values(number + 1)
        messages = []
        checkpoints = opened(small_disk, say=messages.append)
        path, error = saved(checkpoints, 2, on_mesh(new))
        if not error:
            break
        assert error.startswith(f"{path} can't be written: ") and "No space left" in error
        assert not messages
        errors.append(error)
        assert_same_bits(restore(small_disk), old)
        shutil.rmtree(path, ignore_errors=True)
        filler.unlink()
        number += 3
    assert len(errors) > 5
    assert_same_bits(restore(small_disk), new)


def test_a_failed_save_leaves_the_disk_as_free_as_before(small_disk, one_device):
    policy, values = keeping(stop_on_error=False), test_checkpoint.values
    test_checkpoint.save(small_disk, 1, on_mesh(values(0)))
    before, page = os.statvfs(small_disk).f_bavail, os.sysconf("SC_PAGE_SIZE")
    filler = small_disk / "filler"
    filler.write_bytes(bytes((before - 16) * page))
    checkpoints = opened(small_disk, policy=policy, say=lambda _: None)
    checkpoints.save(2, on_mesh(values(1)))
    checkpoints.wait()
    assert "No space left" in checkpoints.problem
    filler.unlink()
    assert before - os.statvfs(small_disk).f_bavail < 4, "the failed one has no arrays"
    checkpoints.save(3, on_mesh(values(2)))
    checkpoints.close()
    assert_same_bits(restore(small_disk), values(2))


def test_what_a_killed_start_left_is_removed_by_the_next_one(two_tiny_ones):
    """Keeps those before the newest complete one, and any that may have been complete."""
    old, new = sorted(two_tiny_ones.iterdir())
    added = {"00000003.1": {}, "00000003.2": {"write_completed": False}, "00000001.1": None}
    for name, attributes in added.items():
        shutil.copytree(old, two_tiny_ones / name)
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        (two_tiny_ones / name / "zarr.json").write_text(json.dumps(group))
    opened_tiny(two_tiny_ones).starting_point("", False)
    left = {path.name for path in two_tiny_ones.iterdir()}
    assert left == {old.name, new.name, "00000001.1"}


@pytest.mark.parametrize("name", ["a::b", "data:a", "~/a", "a*b", "a[b]c", "☃ and spaces"])
def test_a_folder_is_what_its_name_says(name, one_device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = opened_tiny(f"{name}/x", CheckpointsConfig("", 1, 0, True))
    checkpoints.starting_point("", False)
    for step in 1, 2:
        checkpoints.save(step, tiny_on_mesh(step))
    checkpoints.close()
    assert_same_bits(restore(f"{name}/x", Tiny, TINY), tiny(2))
    (left,) = (tmp_path / name / "x").iterdir()
    assert left.name.startswith("00000002.")


@pytest.mark.parametrize("name", ["run*", "run?", "run[12]"])
def test_removing_what_a_pattern_would_name_leaves_others_in_a_bucket(name):
    for folder in name, "run1":
        zarr.open_group(f"memory://{folder}/x", mode="a").create_group("writers")
    storage.remove(f"memory://{name}/x")
    assert not storage.names(f"memory://{name}") and len(storage.names("memory://run1/x")) == 2
    storage.remove("memory://run1/x")


@pytest.fixture
def two_tiny_ones(one_device, tmp_path):
    for step in 1, 2:
        test_checkpoint.save(tmp_path, step, tiny_on_mesh(step), Tiny, TINY)
    return tmp_path


@pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore")  # else a warning of zarr's would count as an error
def test_a_flipped_bit_of_any_byte_is_harmless_or_found(count, two_tiny_ones, capsys):
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
        capsys.readouterr()
        tree, warning = restore(folder, Tiny, TINY), capsys.readouterr().err
        line, _ = checkpoint_info.describe(Checkpoint(str(path)))
        if same_bits(tree, tiny(2)):
            assert warning == "" and line.endswith("; intact"), (file, place, warning, line)
        else:
            assert_same_bits(tree, tiny(1))
            assert warning.startswith(f"warning: {path} is damaged: "), (file, place, warning)
            assert not line.endswith("; intact"), (file, place, line)
        outcomes.append((file.name, same_bits(tree, tiny(2))))
        file.write_bytes(content)
    assert_same_bits(restore(folder, Tiny, TINY), tiny(2))
    assert count or len(outcomes) > 2000
    assert {("zarr.json", True), ("zarr.json", False), ("c", False), ("0", False)} == set(outcomes)


ALL = [5, 10, 10, 15, 20, 25, 30]
KEPT = {(0, 10): ALL, (1, 0): [30], (2, 10): [10, 10, 20, 25, 30]}


def contents(folder):
    return {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("keep_last, keep_every", KEPT)
def test_what_is_kept_and_what_is_never_removed(keep_last, keep_every, one_device, tmp_path):
    unfinished, other = tmp_path / "00000001.1", tmp_path / "notes"
    for path in unfinished, other, tmp_path / "00000002.1.copy", tmp_path / "2.1":
        zarr.create_group(path).create_array("step", shape=(), dtype="u4")[...] = 1
        zarr.open_group(path).attrs.update({"step": 1, "write_completed": path != unfinished})
    zarr.create_group(tmp_path / "00000003.1", attributes={"write_failed": "No space left"})
    (tmp_path / "00000004.1").mkdir()
    (tmp_path / "00000005.1").write_text("")
    foreign = contents(tmp_path)
    for steps in ALL[:2], ALL[2:]:  # two starts of the run
        checkpoints = opened_tiny(tmp_path, keeping(keep_last, keep_every))
        for step in steps:
            saved(checkpoints, step, tiny_on_mesh(step))
    assert foreign.items() <= contents(tmp_path).items()
    names = {p.name for p in tmp_path.iterdir()} - {p.name for p in foreign}
    assert sorted(int(name.split(".")[0]) for name in names) == KEPT[keep_last, keep_every]
    for name in names:  # each is intact
        step = int(name.split(".")[0])
        assert_same_bits(restore(tmp_path / name, Tiny, TINY), tiny(step))


def test_what_is_newer_and_damaged_is_not_one_of_those_kept(two_tiny_ones):
    checkpoints = opened_tiny(two_tiny_ones, keeping(keep_last=1))
    damaged, _ = saved(checkpoints, 5, tiny_on_mesh(5))
    os.truncate(f"{damaged}/half/c/0/0", 8)
    checkpoints = opened_tiny(two_tiny_ones, keeping(keep_last=1))
    with pytest.raises(CheckpointError):
        checkpoints.restore()
    for step in 3, 4:
        path, _ = saved(checkpoints, step, tiny_on_mesh(step))
        assert {str(p) for p in two_tiny_ones.iterdir()} == {path, damaged}
        assert_same_bits(restore(two_tiny_ones, Tiny, TINY), tiny(step))


def test_a_removal_that_ends_midway_leaves_nothing_that_looks_complete(
    two_tiny_ones, tmp_path_factory, monkeypatch, capsys
):
    """Makes all removals of files and folders fail from some call on, as if killed there."""
    count, failing, armed, failed = 0, 0, False, False

    def or_fail(call):
        def called(*args, **kwargs):
            nonlocal count
            count += armed
            if armed and count > failing:
                raise OSError(5, "Input/output error")
            return call(*args, **kwargs)

        return called

    def arm(path):
        nonlocal armed
        armed = not failed
        remove(path)

    remove = or_fail(storage.remove)
    monkeypatch.setattr(storage, "remove", arm)
    for name in "unlink", "remove", "rmdir":
        monkeypatch.setattr(os, name, or_fail(getattr(os, name)))
    while True:
        folder, messages = tmp_path_factory.mktemp("copy") / "checkpoints", []
        shutil.copytree(two_tiny_ones, folder)
        first, second = sorted(folder.iterdir())
        checkpoints = opened_tiny(folder, keeping(keep_last=2), messages.append)
        count, failed = 0, False
        path, error = saved(checkpoints, 3, tiny_on_mesh(3))
        armed, failed = False, True
        if count <= failing:
            break
        warning, last = messages
        assert warning.startswith(f"warning: can't remove old checkpoints in {folder}: ")
        assert warning.endswith(": OSError(5, 'Input/output error')")
        assert (error, last) == ("", f"saved {path}")
        capsys.readouterr()
        assert_same_bits(restore(folder, Tiny, TINY), tiny(3))
        assert capsys.readouterr().err == ""
        assert_same_bits(restore(second, Tiny, TINY), tiny(2))
        if first.exists():
            assert opened_tiny(first).newest.step == 0
        if (first / "zarr.json").exists():  # else nothing is left to recognize it by
            _, error = saved(opened_tiny(folder, keeping(keep_last=3)), 4, tiny_on_mesh(4))
            assert not error and not first.exists(), "the next save finishes the removal"
        failing += 1
    assert failing > 10
    assert not first.exists() and second.exists()


# Errors of the kinds that stores raise: some are no OSError, some have no text.
UNANSWERED = [TimeoutError(), RuntimeError("Session is closed"), KeyError("ETag")]


@pytest.mark.parametrize("name", ["zarr.json", "half/zarr.json", "half/c/0/0"])
def test_a_store_that_does_not_answer_is_not_damage(name, two_tiny_ones, monkeypatch, capsys):
    get = zarr.storage.LocalStore.get
    for error in UNANSWERED:

        async def fail(store, key, *args, error=error, **kwargs):
            if key == name:
                raise error
            return await get(store, key, *args, **kwargs)

        reader = opened_tiny(two_tiny_ones)
        monkeypatch.setattr(zarr.storage.LocalStore, "get", fail)
        with pytest.raises(
            OSError, match=r"can't be read: the store can't be opened: \S"
        ) as caught:
            reader.restore()
        assert "\n" not in str(caught.value) and reader.newest.step == 2
        with pytest.raises(OSError, match=r"the store can't be opened: \S"):
            checkpoint_info.describe(reader.newest)
    assert capsys.readouterr().err == ""
