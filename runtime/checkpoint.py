"""Saves a tree of sharded arrays as a zarr group, and restores it on any mesh.

docs/checkpoints.md is the specification. In short: each host copies the parts that its devices
hold. While training continues, a thread writes them, then the host's record. A checkpoint is
complete once the records of all hosts are there; no host waits for another's. At the next save the
hosts tell each other whether they succeeded; if all did, the first one marks the checkpoint.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import PurePosixPath
from typing import Any, TypeVar

import jax
import numpy as np
import zarr
from omegaconf import OmegaConf

from runtime import storage
from runtime.config import Section, as_text, flat, load, plain
from runtime.storage import DamageError
from runtime.supervise import of_all_hosts
from runtime.values import NonNegativeInt, Path
from shardlib.errors import UserError
from shardlib.types import make_shapes, make_shardings, named, type_tree

C = TypeVar("C", bound=Section)
FORMAT = 3
MISSING = "missing"
# A checkpoint's name: the steps done, and when its run started, in milliseconds.
NAME = r"\d{8,10}\.\d{1,16}"
# The entries that all arrays' zarr.json have in common.
ARRAY = {"zarr_format": 3, "node_type": "array", "chunk_key_encoding": {"name": "default"},
         "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
         "fill_value": 0}  # fmt: skip
CHUNK_BYTES = 2**26  # at most, if possible: a chunk is always read and checksummed as a whole
REMOVED = "was removed during the read; checkpoints.keep_last removes old ones: take a newer one"
OTHER_FORMAT = (
    "{} has format {}; this code reads {}: use the commit that wrote it, named in "
    "starts.jsonl in the run's folder, or import it again"
)


class CheckpointError(UserError):
    """A checkpoint can't be written, or doesn't fit the model that is to be restored."""


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointsConfig(Section, key="checkpoints"):
    root: Path
    keep_last: NonNegativeInt
    keep_every: NonNegativeInt
    stop_on_error: bool


KEEP_ALL = CheckpointsConfig(root="", keep_last=0, keep_every=0, stop_on_error=True)


def chunk_shape(part: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the chunk shape for a device's part of an array: the part, halved along the first
    dimension that is still even, until it has CHUNK_BYTES or less or no dimension is even."""
    chunk = list(part)
    while itemsize * math.prod(chunk) > CHUNK_BYTES and any(n % 2 == 0 for n in chunk):
        even = next(i for i, n in enumerate(chunk) if n % 2 == 0)
        chunk[even] //= 2
    return tuple(chunk)


def describe(hint: Any, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Returns the content of each array's zarr.json, except its chunks, for a tree of type `hint`.
    The attribute `type` is like `bfloat16[V=1280, M=256]`. Needs a mesh in context, which may be
    abstract."""
    types, result = named(type_tree(hint)), {}
    for name, shape in named(make_shapes(hint, sizes)).items():
        dims, dtype = [dim.name for dim in types[name].spec.dims], shape.dtype
        lengths = [f"{dim}={size}" for dim, size in zip(dims, shape.shape, strict=True)]
        result[name] = ARRAY | {
            "shape": list(shape.shape),
            "dimension_names": dims,
            # zarr has no bfloat16, so its bits are stored as uint16.
            "data_type": f"uint{8 * dtype.itemsize}" if dtype.kind == "V" else dtype.name,
            "attributes": {"type": f"{dtype.name}[{', '.join(lengths)}]"},
        }
    return result


def in_chunks(description: dict[str, Any], part: Sequence[int]) -> dict[str, Any]:
    """Adds chunks to an array's description, given the shape of a device's part."""
    chunks = chunk_shape(part, np.dtype(description["data_type"]).itemsize)
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}
    return description | {"chunk_grid": grid}


class Checkpoint:
    """A zarr group `<step>.<start>`, complete or not. It is read lazily."""

    def __init__(self, path: str):
        self.path = path
        step, start = path.rpartition("/")[2].split(".")
        self.order = self.step, self.start = int(step), int(start)  # newer is larger

    def create(self, arrays: dict[str, Any], config: str, skipped: int = 0) -> None:
        """Writes the description of the checkpoint, on the first host."""
        about = {"format": FORMAT, "step": self.step, "config": config, "arrays": arrays}
        about |= {"skipped": skipped} if skipped else {}  # updates in a row
        storage.write_group(self.path, about)
        # A zarr library lists a folder's entries only if the folder is a group.
        folders = {str(folder) for name in arrays for folder in PurePosixPath(name).parents}
        for folder in sorted(folders - {"."} | {"records"}):
            storage.write_group(f"{self.path}/{folder}", {})
        for array in self.writable(arrays).values():
            array.update_attributes({})  # writes its zarr.json, for other programs

    def writable(self, arrays: dict[str, Any]) -> dict[str, zarr.Array]:
        """Returns the arrays to write parts to, given their descriptions."""
        return {n: storage.array(self.path, n, arrays[n], read_only=False) for n in arrays}

    def record(self, host: int, hosts: int, position: Any = None) -> None:
        """Writes the record of a host that has written all its parts."""
        storage.write_group(f"{self.path}/records/{host}", {"hosts": hosts, "position": position})

    def mark(self) -> None:
        """Marks a checkpoint that all hosts have written: a record that is lost later is damage."""
        storage.write_group(f"{self.path}/complete", {})

    def remove(self) -> None:
        """Removes the checkpoint, or a link to one. An interrupted removal leaves an incomplete
        one, not a damaged one."""
        for part in [""] if os.path.islink(self.path) else ["complete", "records", ""]:
            storage.remove(f"{self.path}/{part}")

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of all hosts. Raises DamageError if one is missing or was changed."""
        first = storage.read_group(f"{self.path}/records/0")
        others = range(1, first["hosts"])
        return [first, *(storage.read_group(f"{self.path}/records/{host}") for host in others)]

    @property
    def may_be_complete(self) -> bool:
        """True if all hosts' records are there, or if it is marked, even if damaged; the mark of an
        earlier format is `write_completed`. Reading a damaged one raises an error that says why."""
        mark = storage.attributes(f"{self.path}/complete")
        if mark or storage.attributes(self.path).get("write_completed"):
            return True
        with contextlib.suppress(DamageError):
            return bool(self.records())
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Names the checkpoint in errors, and the cure of damage. Only checkpoints that may be
        complete are read: if this one no longer may be, it was removed meanwhile."""
        with storage.opening(self.path):
            try:
                yield
            except DamageError as error:
                cure = "delete it to use the one before, or name another"
                problem = f"is damaged: {str(error).removeprefix(f'{self.path}/')}; {cure}"
                if not self.may_be_complete:
                    problem = REMOVED
                raise DamageError(f"{self.path} {problem}") from None

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The attributes, and the `positions` of all hosts, verified. Raises DamageError if they
        are missing or changed, and CheckpointError if the format is unknown."""
        with self._reading():
            metadata = storage.read_group(self.path)
            if (version := metadata.get("format")) != FORMAT:
                raise CheckpointError(OTHER_FORMAT.format(self.path, version, FORMAT))
            if metadata["step"] != self.step:
                raise DamageError(f"it is of step {metadata['step']}")
            return metadata | {"positions": [record["position"] for record in self.records()]}

    @functools.cached_property
    def arrays(self) -> dict[str, zarr.Array]:
        """The arrays, for `read`. Raises DamageError if one can't be opened."""
        arrays = self.metadata["arrays"]
        with self._reading(), storage.reading("zarr.json"):
            return {name: storage.array(self.path, name, arrays[name]) for name in arrays}

    def read(self, name: str, index: Any = ()) -> np.ndarray:
        """Returns a part of an array, as `storage.read` does, with errors that name the
        checkpoint."""
        with self._reading():
            return storage.read(self.arrays[name], index)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The config, as plain values. Raises DamageError if it isn't plain."""
        config = self.metadata["config"]
        with self._reading(), storage.reading("its config"):
            return plain(config)

    def config(self, schema: type[C], defaults: Any = None) -> C:
        """Returns the checkpoint's config, or the section of it that is a `schema`. Keys that it
        lacks come from `defaults`; unknown keys at the top level are ignored. Raises
        CheckpointError for any other difference."""
        values: Any = self.settings
        for name in filter(None, schema.prefix.split(".")):
            values = values.get(name, {}) if isinstance(values, dict) else {}
        if not schema.prefix:
            known = typing.get_type_hints(schema)
            values = {key: values[key] for key in values if key in known}
        try:
            merged: Any = OmegaConf.create(defaults or {})
            OmegaConf.set_struct(merged, False)  # else a config from Hydra refuses other keys
            merged.merge_with(values)
            return load(schema, OmegaConf.to_container(merged, resolve=True))
        except ValueError as error:
            problem = f"has a config of another version: {error}"
            raise CheckpointError(f"{self.path} {problem}") from None

    def check(
        self, model: Any, arrays: dict[str, Any], prefix: str, cure: str, of_model: str = ""
    ) -> None:
        """Checks that the checkpoint fits `model`, a config's section of that name (or {}), and
        `arrays`, as `describe` returns them; only arrays whose names start with `prefix` count.
        Raises CheckpointError with the first difference and `cure`, plus `of_model` if the arrays
        fit."""
        here = flat({"model": model})
        known = self.settings.get("model") if model else None
        there = dict.fromkeys(here) | flat({"model": known or {}})
        here |= {name: array["attributes"]["type"] for name, array in arrays.items()}
        there |= {name: array.attrs["type"] for name, array in self.arrays.items()}
        # An older version's config lacks keys for features that null, false or 0 switch off.
        differ = [x for x in {**here, **there} if (here.get(x) or None) != (there.get(x) or None)]
        differ = [name for name in differ if name.startswith(("model.", prefix))]
        for name in differ[:1]:
            saved, wanted = (as_text(x.get(name, MISSING)) for x in (there, here))
            what = "model"
            # AdamW has these moments of each weight, Muon of some.
            if name.startswith("nu/") and MISSING in (saved, wanted):
                what, optimizer = "optimizer", self.settings["training"]["optimizer"]
                cure = f"set training.optimizer={optimizer}, or clone its weights into a new run"
            elif all(x.startswith("model.") for x in differ):  # the arrays fit
                cure += of_model
            difference = f"{name} is {saved} in the checkpoint but {wanted} here"
            raise CheckpointError(f"{self.path} has a different {what}: {difference}; {cure}")


def list_checkpoints(path: str) -> list[Checkpoint]:
    """Returns the checkpoints, complete or not, in a folder or bucket, sorted by step and start; if
    it has none, those in its folder `checkpoints`, as in a run's folder. If the path itself names a
    checkpoint, returns that one, even if it doesn't exist. Raises OSError if the store can't be
    reached."""
    path = path.rstrip("/")
    found = storage.names(path)
    if re.fullmatch(NAME, path.rpartition("/")[2]) and "checkpoints" not in found:
        return [Checkpoint(path)]
    names = [name for name in found if re.fullmatch(NAME, name)]
    if not names and "checkpoints" in found:
        return list_checkpoints(f"{path}/checkpoints")
    return sorted((Checkpoint(f"{path}/{name}") for name in names), key=lambda one: one.order)


def no_checkpoint(path: str, key: str = "") -> CheckpointError:
    """Returns the error for a path without a complete checkpoint. It begins with `key`."""
    problem = "has no complete checkpoint; name a run's folder, its checkpoints, or one of them"
    if "://" not in path and not os.path.exists(path):
        problem = "doesn't exist"
    elif (elsewhere := recorded_path(path)) not in ("", f"{path}/checkpoints"):
        problem = f"has no complete checkpoint: by its config.yaml they are in {elsewhere}"
    elif os.path.exists(f"{path}/config.json"):
        problem = "is a Hugging Face folder: import it with tools.huggingface_weights"
    return CheckpointError(f"{key}{path} {problem}")


def path_of(root: str, name: str, folder: str) -> str:
    """Returns where the checkpoints of a run of this name and folder are."""
    return f"{root}/{PurePosixPath(name)}/checkpoints" if root else f"{folder}/checkpoints"


def recorded_path(folder: str) -> str:
    """Returns where the config.yaml in a run's folder says that its checkpoints are, or ""."""
    with contextlib.suppress(Exception):  # it may not be there, and may hold anything
        with open(f"{folder}/config.yaml") as file:
            settings = flat(plain(file.read()))
        return path_of(settings["checkpoints.root"], settings["paths.model_name"], folder)
    return ""


def newest(path: str) -> Checkpoint:
    """Returns the newest checkpoint that may be complete. Raises CheckpointError if there is
    none."""
    for checkpoint in reversed(list_checkpoints(path)):
        if checkpoint.may_be_complete:
            return checkpoint
    raise no_checkpoint(path)


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one run: zarr groups `<step>.<start>` in a folder or a bucket. `path` may
    also name one checkpoint, to read only that one.

    The names that it writes contain `start`, the time at which this object was made, so it never
    writes into a group of an earlier start of the run, which a leftover process may still be
    writing to. All hosts make this object and call its methods at the same steps.
    """

    path: str
    hint: Any  # the type of a checkpoint's tree of arrays
    sizes: dict[str, int]  # the lengths of its dimensions
    config: str  # YAML text; a checkpoint whose section `model` differs is refused
    io_threads: int
    policy: CheckpointsConfig = KEEP_ALL
    say: Callable[[str], None] = print
    key: str = "paths.model_name"  # the setting that error messages suggest to change
    other_model: bool = False  # a checkpoint whose section `model` differs isn't refused

    def __post_init__(self) -> None:
        self.path = self.path.rstrip("/")
        self.threads, self.background = ThreadPoolExecutor(self.io_threads), ThreadPoolExecutor(1)
        self.saving: tuple[Checkpoint, Future[None]] | None = None
        self.unmarked: Checkpoint | None = None  # written by all hosts
        self.skipped = 0  # updates in a row before the last save
        self.problem = ""  # why the last save failed
        # `newest` is the newest one now; saves don't change it. The first host decides which one
        # it is, because a shared file system may show files to other hosts later.
        name, now = f"{self.path}/{0:08d}.0", time.time_ns() // 10**6  # step 0: there is none
        if jax.process_index() == 0:
            found = list_checkpoints(self.path)
            # After the starts before, whatever their clocks said.
            now = max([now, *(one.start + 1 for one in found)])
            name = next((one.path for one in reversed(found) if one.may_be_complete), name)
        name, now = json.loads(of_all_hosts(json.dumps([name, now]))[0])
        self.newest, self.start = Checkpoint(name), now

    def starting_point(
        self, clone_from: str, weights_only: bool, other_model: bool = False
    ) -> tuple["Checkpoints", int]:
        """Returns the checkpoints to start from, and the step to start at. The checkpoints are
        this run's if it has any or `clone_from` is empty, else those at the path `clone_from`.
        Raises CheckpointError if `clone_from` has none, if the newest has a different model, or if
        the run's folder is an import, and OSError if this run can't save its own."""
        source, prefix = self, ""
        if clone_from and not self.newest.step:
            changes: Any = {"key": "paths.clone_from", "other_model": other_model}
            source = dataclasses.replace(self, path=clone_from, **changes)
            prefix = "weights/" if weights_only else ""
            if not source.newest.step:
                raise no_checkpoint(clone_from, "paths.clone_from=")
        if source.newest.step:
            source.check_model(prefix)
        if self.newest.step:
            self.skipped = self.newest.metadata.get("skipped", 0)
        folder = os.path.dirname(self.path)
        if imported := [name for name in storage.names(folder) if re.fullmatch(NAME, name)]:
            which = f"an imported model, {imported[0]}, that tools take for this run's"
            cure = f"move it, or choose another {self.key}"
            raise CheckpointError(f"{folder} has {which}: {cure}")
        self._try_store()
        return source, 0 if prefix else source.newest.step

    def _try_store(self) -> None:
        """Writes, reads, lists and removes a group: saves do this with two libraries. Waits until
        the groups of all hosts are there."""
        host, others = jax.process_index(), range(jax.process_count())
        own = f"try.{host}"

        def missing() -> list[int]:
            tried = {i: storage.attributes(f"{self.path}/try.{i}").get("start") for i in others}
            return [i for i, start in tried.items() if start != self.start]

        with storage.opening(self.path, "used for checkpoints"):
            storage.remove(f"{self.path}/{own}")
            storage.write_group(f"{self.path}/{own}", {"start": self.start})
            of_all_hosts("")  # each has written
            deadline = time.monotonic() + 30  # a shared file system may show it later
            while (absent := missing()) and time.monotonic() < deadline:
                time.sleep(1)
            unseen = f"host {host} doesn't see what host {absent[0]} writes" if absent else ""
            if unseen := next(filter(None, of_all_hosts(unseen)), ""):
                raise OSError(f"{unseen}: all hosts need one folder, or a bucket")
            listed = own in storage.names(self.path)
            storage.remove(f"{self.path}/{own}")
            if not listed or own in storage.names(self.path):
                raise OSError("what is written there can't be listed or removed")

    def save(self, step: int, tree: Any, position: Any = None, skipped: int = 0) -> None:
        """Copies the parts of a tree that this host's devices hold, then writes them in a thread.
        `position` is JSON, the host's `Batches.position`. After `skipped` skipped updates, the
        weights may have diverged, so all earlier checkpoints are kept.

        First waits for the previous save, and raises CheckpointError if that failed, like `wait`.
        """
        self.wait()
        self.skipped = skipped
        leaves, arrays, parts = named(tree), describe(self.hint, self.sizes), []
        for name, leaf in leaves.items():
            arrays[name] = in_chunks(arrays[name], leaf.sharding.shard_shape(leaf.shape))
            # On a CPU these are views of device memory. As long as they exist, XLA doesn't reuse
            # the memory of donated arrays (AcquireDonation, in its PjRt client). Copies leaf by
            # leaf: GPUs copy through pinned memory, of which a process has 64 GB by default.
            shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            parts += jax.device_get([(name, shard.index, shard.data) for shard in shards])
        target = Checkpoint(f"{self.path}/{step:08d}.{self.start}")
        self.saving = target, self.background.submit(self._write, target, arrays, parts, position)

    def _write(self, target: Checkpoint, arrays: Any, parts: Any, position: Any) -> None:
        """Writes this host's part of a checkpoint. Raises the first error, of any type."""
        host, hosts = jax.process_index(), jax.process_count()
        if host == 0:
            self._tidy(target)
            target.create(arrays, self.config, self.skipped)
        opened, submit = target.writable(arrays), self.threads.submit
        writes = [submit(storage.write, opened[name], *part) for name, *part in parts]
        wait(writes)  # for all of them, even if one failed: the next save removes them
        for write in writes:
            write.result()
        target.record(host, hosts, position)

    def wait(self) -> None:
        """Blocks until the pending save has ended on all hosts. If one of them couldn't write its
        part, and `stop_on_error` is set, raises CheckpointError on all hosts."""
        if not self.saving:
            return
        (target, written), self.saving = self.saving, None
        error = written.exception()
        own = (str(error) or repr(error)) if error else ""
        problem = next(filter(None, of_all_hosts(own)), "")
        self.problem = problem and f"{target.path} can't be written: {problem}"
        if not problem:
            self.unmarked = target
            self.say(f"saved {target.path}")
            return
        if self.policy.stop_on_error:
            raise CheckpointError(self.problem)
        self.say(f"warning: {self.problem}; the run continues")

    def close(self) -> None:
        """Blocks until the pending save is done. Raises CheckpointError if the last save failed."""
        self.wait()
        if jax.process_index() == 0:
            self._tidy()
        of_all_hosts("")  # JAX would end a host that has long waited for another to exit
        if self.problem:
            raise CheckpointError(f"the last checkpoint is missing: {self.problem}")

    def _tidy(self, current: Checkpoint | None = None) -> None:
        """Marks the last checkpoint. Removes those that the policy doesn't keep, and incomplete
        ones other than `current`, left by failed saves, killed starts and interrupted removals.
        Before `current` is written, raises CheckpointError if a later start of the run has begun:
        each would remove what the other is writing."""
        last, every = self.policy.keep_last, self.policy.keep_every
        try:
            if self.unmarked:
                self.unmarked.mark()
                self.unmarked = None
            complete = []
            for one in list_checkpoints(self.path):
                if current and one.start > self.start:
                    problem = f"a later start of this run has written {one.path}: end this one"
                    raise CheckpointError(f"{problem}, or give each its own {self.key}")
                if one.may_be_complete:
                    complete.append(one)
                elif one.start <= self.start and (not current or one.order != current.order):
                    one.remove()
            first = {one.step // every: one.step for one in reversed(complete)} if every else {}
            for one in complete[:-last] if last and not self.skipped else []:
                if one.step < every or one.step not in first.values():
                    one.remove()
        except CheckpointError:
            raise
        except Exception as error:  # stores raise errors of many types
            problem = "can't mark the last checkpoint, or remove old ones"
            self.say(f"warning: {problem}, in {self.path}: {error!r}")

    def restore(self, part: str = "") -> Any:
        """Returns the newest checkpoint as a tree of arrays on the mesh in context, of type `hint`.
        Each host reads its devices' parts. If `part` names a field of the tree, such as weights,
        reads and returns only that field.

        Raises DamageError if a part is damaged, and CheckpointError if it has a different model:
        the message names the first difference in the config's section `model` or in the arrays.
        """
        prefix = f"{part}/" if part else ""
        self.check_model(prefix)
        shapes, shardings = make_shapes(self.hint, self.sizes), make_shardings(self.hint)
        if part:
            shapes, shardings = getattr(shapes, part), getattr(shardings, part)

        def read(name: str, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            def values(index: Any) -> np.ndarray:
                return self.newest.read(prefix + name, index).view(shape.dtype)

            return jax.make_array_from_callback(shape.shape, sharding, values)

        leaves = named(shapes)
        arrays = self.threads.map(read, leaves, leaves.values(), jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def position(self) -> Any:
        """Returns this host's position in a streamed dataset from the newest checkpoint, or None if
        it has none. Raises CheckpointError if another number of hosts wrote positions."""
        positions, hosts = self.newest.metadata["positions"], jax.process_count()
        if len(positions) != hosts and any(positions):
            problem = f"was written by {len(positions)} hosts that share a stream"
            raise CheckpointError(f"{self.newest.path} {problem}; resume with as many, not {hosts}")
        return positions[jax.process_index()] if any(positions) else None

    def check_model(self, prefix: str = "") -> None:
        """Raises CheckpointError if the newest checkpoint, or the part of it whose names start with
        `prefix`, has a different model, and DamageError if its attributes are damaged."""
        if not prefix and all(n.startswith("weights/") for n in self.newest.metadata["arrays"]):
            cure = "with paths.clone_from and paths.clone_weights_only=true"
            problem = f"holds only weights; start a new run from them {cure}"
            raise CheckpointError(f"{self.newest.path} {problem}")
        model = {} if self.other_model else plain(self.config)["model"]
        arrays = describe(self.hint, self.sizes)
        cure = f"choose another {self.key}, or use the checkpoint's config and train.py"
        clones = self.key == "paths.clone_from"
        of_model = ", or accept it with paths.clone_other_model=true" if clones else ""
        self.newest.check(model, arrays, prefix, cure, of_model)
