"""A tree of sharded arrays <-> a zarr group, which counts once all of it is written.

docs/checkpoints.md is the specification.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zarr
from jax.experimental import multihost_utils
from omegaconf import OmegaConf
from zarr.codecs import Crc32cCodec

from runtime import storage
from runtime.config import NonNegativeInt, Section
from runtime.storage import DamageError
from shardlib.errors import UserError
from shardlib.types import ArrayType, make_shapes, make_shardings, type_tree

FORMAT = 1
NAME = r"\d{8,}\.\d+"  # of a checkpoint: steps done, and the start of the run in milliseconds
CHUNK_BYTES = 2**26  # a chunk is read, and its checksum taken, as a whole


class CheckpointError(UserError):
    """A checkpoint that can't be written, or isn't of the tree that is asked for."""


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointsConfig(Section, key="checkpoints"):
    root: str  # a folder, or gs:// or s3://, for all runs; empty: paths.root_working_dir
    keep_last: NonNegativeInt  # so many; 0: all
    keep_every: NonNegativeInt  # steps; those of their multiples are kept too; 0: none
    stop_on_error: bool  # stop the run if one can't be written, or else only say so


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A device's part of an array, cut evenly to CHUNK_BYTES or less if small factors allow it."""
    chunk = list(shard)
    while itemsize * math.prod(chunk) > CHUNK_BYTES:
        factors = [
            (n, i) for i, length in enumerate(chunk) for n in range(2, 65) if length % n == 0
        ]
        if not factors:
            break
        factor, i = min(factors)
        chunk[i] //= factor
    return tuple(chunk)


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as weights/layers/w_q."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _entry(kind: ArrayType, shape: tuple[int, ...]) -> dict[str, Any]:
    """What the manifest says of an array, whatever its chunks."""
    dims = [dim.name for dim in kind.spec.dims]
    return {"dtype": kind.dtype.name, "dimensions": dims, "shape": list(shape)}


def entries(hint: Any, sizes: dict[str, int], prefix: str = "") -> dict[str, dict[str, Any]]:
    """What the manifest says of the arrays of a tree of type `hint`, whatever their chunks. Needs a
    mesh in context, be it without devices."""
    kinds, shapes = named(type_tree(hint)), named(make_shapes(hint, sizes))
    return {prefix + name: _entry(kinds[name], shape.shape) for name, shape in shapes.items()}


def show_entry(entry: dict[str, Any] | None) -> str:
    """`float32[V=1280, M=256]`."""
    if entry is None:
        return "missing"
    sizes = zip(entry["dimensions"], entry["shape"], strict=True)
    return f"{entry['dtype']}[{', '.join(f'{name}={size}' for name, size in sizes)}]"


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """zarr has no bfloat16: its bits are stored as uint16."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def _checksum(about: dict[str, Any]) -> int:
    """Of a checkpoint's attributes, less those that are written with it."""
    rest = {k: v for k, v in about.items() if k not in ("checksum", "write_completed")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def create(path: str, arrays: dict[str, Any], about: dict[str, Any]) -> Any:
    """A new group with arrays to be written; of each its entry and the part that a writer holds,
    which is cut into chunks. `about` has the attributes step, config and hosts."""
    group = zarr.open_group(path, mode="w-", zarr_format=3)
    manifest: Any = {}
    for name, (entry, shard) in arrays.items():
        dtype = jnp.dtype(entry["dtype"])
        chunks = chunk_shape(shard, dtype.itemsize)
        array = group.create_array(
            name,
            shape=entry["shape"],
            dtype=_stored_dtype(dtype),
            chunks=chunks,
            compressors=[Crc32cCodec()],
            dimension_names=entry["dimensions"],
        )
        manifest[name] = {**entry, "chunk_shape": list(chunks), "chunks": array.nchunks}
    packages = {name: importlib.metadata.version(name) for name in ("jax", "numpy", "zarr")}
    versions = {"python": platform.python_version(), **packages}
    # It tells the other hosts that the arrays are there.
    group.update_attributes({**about, "format": FORMAT, "versions": versions, "arrays": manifest})
    return group


def write(group: Any, name: str, index: Any, values: np.ndarray) -> None:
    """A part of an array, of whole chunks."""
    # A chunk of zeros is written as any other: one that isn't there is one that was lost.
    array = group[name].with_config({"write_empty_chunks": True})
    array[index] = values.view(_stored_dtype(values.dtype))


def report(group: Any, host: int, shards: int, problem: str | None, position: Any) -> None:
    """How a host's writes ended."""
    about = {"shards": shards, "problem": problem, "position": position}
    group.create_group(f"writers/{host}", attributes=about)


def complete(group: Any, positions: list[Any]) -> None:
    """Marks a group whose every part is written. From here on it is a checkpoint."""
    about = group.attrs.asdict() | {"positions": positions}
    group.update_attributes({**about, "checksum": _checksum(about), "write_completed": True})


class Checkpoint:
    """A complete one, opened for reading. Raises DamageError if it isn't what was written."""

    def __init__(self, path: str, step: int):
        self.path = path
        try:
            self.about: dict[str, Any] = storage.attributes(path) or {}
            self.group: Any = zarr.open_group(path, mode="r", zarr_format=3)
        except DamageError:
            raise
        except Exception as error:  # whatever is left of the file
            raise DamageError(f"it can't be opened: {error!r}") from None
        if self.about.get("step") != step or self.about.get("checksum") != _checksum(self.about):
            raise DamageError("its attributes aren't those that were written")

    def array(self, name: str) -> zarr.Array:
        """With all of its chunks there, as the manifest describes it."""
        entry = self.about["arrays"][name]
        try:
            array = self.group[name]
            stored = _stored_dtype(jnp.dtype(entry["dtype"]))
            described = list(array.shape), list(array.chunks), array.dtype
        except Exception as error:  # whatever is left of the file
            raise DamageError(f"{name}: its description can't be read: {error!r}") from error
        if described != (entry["shape"], entry["chunk_shape"], stored):
            raise DamageError(f"{name}: its description isn't what was written")
        storage.check_chunks(array, self.files)
        return array

    @functools.cached_property
    def files(self) -> set[str]:
        return storage.files(self.path)

    def damage(self) -> Iterator[str]:
        """Reads all of it; the first problem of each array that has one."""
        for name in self.about["arrays"]:
            try:
                array = self.array(name)
                rows = array.chunks[0] if array.shape else 1
                for first in range(0, array.shape[0] if array.shape else 1, rows):
                    storage.read(array, slice(first, first + rows) if array.shape else ...)
            except DamageError as error:
                yield str(error)


class Checkpoints:
    """The checkpoints of one run: zarr groups `<step>.<start>` in a folder or a bucket. `path` may
    also be one of them, to read that one.

    A start of the run writes under names of its own. So nothing that is there is written to again,
    whoever may be writing to it still. All hosts make this object, and call its methods, at the
    same steps.

    A save that fails calls `failed`, in its thread, and `wait` raises its error, unless the config
    says that it is only reported.
    """

    def __init__(
        self,
        path: str,
        io_threads: int,
        config: CheckpointsConfig | None = None,
        say: Callable[[str], None] = print,
        failed: Callable[[], None] = lambda: None,
    ):
        one = re.fullmatch(rf"(.+)/({NAME})/?", path)
        self.path = one[1] if one else path.rstrip("/")
        self.only = one and one[2]
        self.config = config or CheckpointsConfig("", 0, 0, True)
        self.say, self.failed, self.key = say, failed, "paths.model_name"
        self.threads, self.background = ThreadPoolExecutor(io_threads), ThreadPoolExecutor(1)
        self.saving: Future[None] | None = None
        self.start = time.time_ns() // 10**6
        self._choose(None)

    def _choose(self, below: tuple[int, int] | None) -> None:
        """The newest, or the one before it. The first host looks for all: a shared file system may
        be late to another."""
        newest = 0, 0
        for which, about in self._groups() if jax.process_index() == 0 else ():
            # One whose attributes are damaged may be complete: to open it says what is wrong.
            # So may one with a checksum and no mark, which are written at once.
            if about is None or about.get("write_completed", "checksum" in about) is True:
                newest = max(newest, which) if not below or which < below else newest
        # As bytes, for JAX would cut 64 bits to 32.
        seen = np.array([*newest, self.start]).view(np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(seen)).view(np.int64)
        self.newest_step, self.newest_start, self.start = told.tolist()  # step 0: none
        self.newest = self._path(self.newest_step, self.newest_start)

    def _path(self, step: int, start: int) -> str:
        return f"{self.path}/{step:08d}.{start}"

    def _groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any] | None]]:
        """Step and start of each, complete or not, and its attributes; None if they are damaged."""
        for name in storage.names(self.path):
            if re.fullmatch(NAME, name) and self.only in (None, name):
                step, start = map(int, name.split("."))
                try:  # none: its writer was killed early
                    yield (step, start), storage.attributes(f"{self.path}/{name}") or {}
                except DamageError:
                    yield (step, start), None

    def save(self, step: int, tree: Any, hint: Any, config: str, position: Any = None) -> None:
        """Copies the parts of a tree of arrays typed by `hint` that this host's devices hold, and
        writes them in a thread, after the save before, if that is still at work. The config, YAML
        text, goes with it, and each host's `position` in its stream, JSON.

        Raises CheckpointError as `wait` does.
        """
        self.wait()
        leaves, kinds = named(tree), named(type_tree(hint))
        shards = [
            (name, shard.index, shard.data)
            for name, leaf in leaves.items()
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        for _, _, part in shards:
            part.copy_to_host_async()
        # On a CPU these are views of the devices' memory. While there are any, XLA writes what is
        # donated to other memory (AcquireDonation, in its PjRt client).
        parts = [(name, index, np.asarray(part)) for name, index, part in shards]
        arrays = {
            name: (_entry(kinds[name], leaf.shape), leaf.sharding.shard_shape(leaf.shape))
            for name, leaf in leaves.items()
        }
        about = {"step": step, "config": config, "hosts": jax.process_count()}
        path = self._path(step, self.start)
        self.saving = self.background.submit(self._save, path, arrays, about, parts, position)

    def wait(self) -> None:
        """Until no save is at work. Raises CheckpointError, on every host that is still there, if
        any part of it could not be written."""
        saving, self.saving = self.saving, None
        if saving:
            saving.result()

    def _save(self, path: str, arrays: Any, about: Any, parts: Any, position: Any) -> None:
        """Hosts learn of each other from the store alone, as their devices are at work."""
        try:
            host = jax.process_index()
            if host == 0:
                create(path, arrays, about)
            group = self._wait(path, "arrays", writer=0)
            writes = [(part[0], self.threads.submit(write, group, *part)) for part in parts]
            results = [(name, write.exception()) for name, write in writes]
            problems = [f"{name}: {error!r}" for name, error in results if error]
            problem = problems[0] if problems else None
            report(group, host, len(writes), problem, position)
            self._wait(f"{path}/writers/{host}", "shards", writer=host)
            if host == 0:
                hosts = range(jax.process_count())
                found = [self._wait(f"{path}/writers/{i}", "shards", writer=i) for i in hosts]
                reports = [each.attrs for each in found]
                failed = [str(report["problem"]) for report in reports if report["problem"]]
                self._end(group, [report["position"] for report in reports], failed)
            outcome = self._wait(path, "write_completed", "write_failed", writer=0)
            problem = outcome.attrs.get("write_failed")
        except Exception as error:  # each store raises its own
            problem = f"{error!r}"
        if not problem:
            self.say(f"saved {path}")
            return
        message = f"{path} can't be written: {problem}"
        if self.config.stop_on_error:
            self.failed()
            raise CheckpointError(message)
        self.say(f"warning: {message}; the run goes on")

    def _end(self, group: Any, positions: list[Any], failed: list[str]) -> None:
        if failed:
            group.update_attributes({"write_failed": failed[0]})
            return
        complete(group, positions)
        if self.config.keep_last:
            self._remove_old(group.attrs["step"])

    def _remove_old(self, written: int) -> None:
        """And those whose removal was begun. Later steps than the one just written are of
        checkpoints that were damaged: they don't count, and are left."""
        try:
            groups = {which: about for which, about in sorted(self._groups()) if about}
        except OSError as error:
            self.say(f"warning: nothing is removed: {error}")
            return
        complete = [which for which in groups if groups[which].get("write_completed") is True]
        older = [which for which in complete if which <= (written, self.start)]
        every = self.config.keep_every
        old = [which for which in older[: -self.config.keep_last] if not every or which[0] % every]
        for which in old + [which for which in groups if groups[which].get("removed")]:
            path = self._path(*which)
            try:  # it is none from here on, so that all of it may go
                mark = {"write_completed": False, "removed": True}
                zarr.open_group(path, mode="r+").update_attributes(mark)
                storage.remove(path)
            except Exception as error:  # each store raises its own
                self.say(f"warning: {path} can't be removed: {error!r}")

    @staticmethod
    def _wait(path: str, *keys: str, writer: int) -> Any:
        """The group, once it is there and has one of the attributes. The host that wrote it doesn't
        wait: what isn't there by now was lost."""
        pause = 0.05
        while True:
            try:
                group = zarr.open_group(path, mode="r+", zarr_format=3)
            except FileNotFoundError:
                pass
            else:
                if any(key in group.attrs for key in keys):
                    return group
            if writer == jax.process_index():
                raise FileNotFoundError(f"{keys[0]} of {path} was written, and isn't there")
            time.sleep(pause)
            pause = min(2 * pause, 2)

    def restore(self, hint: Any, sizes: dict[str, int], config: str, prefix: str = "") -> Any:
        """The newest checkpoint that is undamaged, which becomes `newest`, as a tree of type `hint`
        on the mesh in context; each host reads its devices' parts. Says which ones are damaged.
        With the prefix `weights/`, only what is there under that name is read, and must be whole.

        Raises CheckpointError if there is none, and for another model's, naming the first
        difference between the `model` sections of the configs, or between the arrays.
        """
        damaged = []
        while self.newest_step:
            tree, problem = None, None
            try:
                tree = self._restore(hint, sizes, config, prefix)
            except DamageError as error:
                problem = f"{self.newest} is damaged: {error}"
                print(f"warning: {problem}", file=sys.stderr, flush=True)
            except OSError as error:  # it may be whole, and readable again soon
                raise OSError(f"{self.newest}: {error}") from error
            if not multihost_utils.process_allgather(np.array(problem is not None)).any():
                return tree
            damaged.append(self.newest)
            self._choose((self.newest_step, self.newest_start))
        raise CheckpointError(
            f"{self.path} has no undamaged checkpoint, of {len(damaged)}; to start anew, choose "
            f"another {self.key}"
        )

    def _restore(self, hint: Any, sizes: dict[str, int], config: str, prefix: str) -> Any:
        found = Checkpoint(self.newest, self.newest_step)
        self.check_model(hint, sizes, config, prefix)
        shapes, shardings = make_shapes(hint, sizes), make_shardings(hint)

        def read(name: str, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            array = found.array(prefix + name)

            def part(index: Any) -> np.ndarray:
                return storage.read(array, index).view(shape.dtype)

            return jax.make_array_from_callback(shape.shape, sharding, part)

        leaves = named(shapes)
        made = self.threads.map(read, leaves, leaves.values(), jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    def position(self) -> Any:
        """This host's position in its stream, as the newest checkpoint has it. Raises
        CheckpointError if other hosts than today's wrote it."""
        about = Checkpoint(self.newest, self.newest_step).about
        if (hosts := about["hosts"]) != jax.process_count():
            raise CheckpointError(
                f"{self.newest} was written by {hosts} hosts, who share the stream; there are "
                f"{jax.process_count()} now"
            )
        return about["positions"][jax.process_index()]

    def check_model(self, hint: Any, sizes: dict[str, int], config: str, prefix: str = "") -> None:
        """Raises CheckpointError if the newest checkpoint is another model's, or none any more."""
        try:
            about = Checkpoint(self.newest, self.newest_step).about
        except DamageError as error:
            problem = f"{self.newest} is damaged: {error}"
            raise CheckpointError(f"{problem}; delete it to go on from the one before") from None
        if about["format"] != FORMAT:
            raise CheckpointError(
                f"{self.newest} has format {about['format']}; this program reads {FORMAT}"
            )
        here, there = OmegaConf.create(config).model, OmegaConf.create(about["config"]).model
        wanted = entries(hint, sizes, prefix)
        arrays = {k: v for k, v in about["arrays"].items() if k.startswith(prefix)}
        if not prefix and all(name.startswith("weights/") for name in arrays):
            raise CheckpointError(
                f"{self.newest} has weights alone: a new run starts from them by paths.clone_from, "
                "with paths.clone_weights_only=true"
            )
        pairs = [(f"model.{key}", there.get(key), here[key]) for key in here]
        for name in dict.fromkeys([*wanted, *arrays]):
            pairs.append((name, show_entry(arrays.get(name)), show_entry(wanted.get(name))))
        for name, found, expected in pairs:
            if found != expected:
                raise CheckpointError(
                    f"{self.newest} is of another model: {name} is {found} there, {expected} here; "
                    f"choose another {self.key}, or the config it was made by"
                )
