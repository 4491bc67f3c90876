"""A tree of sharded arrays <-> a zarr group, which counts once all of it is written.

docs/checkpoints.md is the specification.
"""

import importlib.metadata
import math
import platform
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import zarr
from jax.experimental import multihost_utils
from zarr.codecs import Crc32cCodec

from shardlib.types import ArrayType, make_shapes, make_shardings, type_tree

CHUNK_BYTES = 2**26  # a chunk's checksum is taken, and a chunk is read, as a whole


class CheckpointError(ValueError):
    """A checkpoint that can't be written, or isn't of the tree that is asked for."""


def chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A device's part of an array, cut evenly along its first dimensions to CHUNK_BYTES or less."""
    chunk = list(shard)
    for i, length in enumerate(shard):
        rest = itemsize * math.prod(chunk[i + 1 :])
        fitting = (n for n in range(length, 1, -1) if length % n == 0 and n * rest <= CHUNK_BYTES)
        chunk[i] = next(fitting, 1)
        if chunk[i] > 1:
            break
    return tuple(chunk)


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as weights/layers/w_q."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _entry(kind: ArrayType, shape: tuple[int, ...]) -> dict[str, Any]:
    """What the manifest says of an array, whatever its chunks."""
    dims = [dim.name for dim in kind.spec.dims]
    return {"dtype": kind.dtype.name, "dimensions": dims, "shape": list(shape)}


def _show(entry: dict[str, Any] | None) -> str:
    """`float32[V=1280, M=256]`."""
    if entry is None:
        return "missing"
    sizes = zip(entry["dimensions"], entry["shape"], strict=True)
    return f"{entry['dtype']}[{', '.join(f'{name}={size}' for name, size in sizes)}]"


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """zarr has no bfloat16: its bits are stored as uint16."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


class Checkpoints:
    """The checkpoints of one run: groups `<step>.<attempt>` in the zarr group at `path`.

    An attempt is one start of the run, and writes under names of its own. So nothing that is there
    is written to again, whoever may be writing to it still, and nothing need be deleted. All hosts
    make this object, and call its methods, at the same steps.
    """

    def __init__(self, path: str, io_threads: int):
        self.path, self.threads = path, ThreadPoolExecutor(io_threads)
        complete, names = [(-1, 0)], [(-1, 0)]
        if jax.process_index() == 0:
            for name, group in self._groups():
                names.append(name)
                if group.attrs.get("write_completed") is True:
                    complete.append(name)
        # What the first host sees counts for all: a shared file system may be late to another.
        attempt = 1 + max(attempt for _, attempt in names)
        seen = multihost_utils.broadcast_one_to_all(np.array([*max(complete), attempt], np.int32))
        self.newest_step, newest_attempt, self.attempt = map(int, seen)
        self.newest = self._name(self.newest_step, newest_attempt) if self.newest_step >= 0 else ""

    @staticmethod
    def _name(step: int, attempt: int) -> str:
        return f"{step:08d}.{attempt}"

    def _groups(self) -> list[tuple[tuple[int, int], Any]]:
        try:
            folder = zarr.open_group(self.path, mode="r")
        except FileNotFoundError:
            return []
        with warnings.catch_warnings():  # of a group whose writer was killed while it made it
            warnings.simplefilter("ignore")
            groups = [(re.fullmatch(r"(\d+)\.(\d+)", name), g) for name, g in folder.groups()]
        return [((int(name[1]), int(name[2])), group) for name, group in groups if name]

    def save(self, step: int, tree: Any, hint: Any, config: str) -> str:
        """Writes a tree of arrays typed by `hint`, each host its devices' parts, and returns the
        checkpoint's path once all hosts are done. The config, as text, goes into the manifest.

        Hosts learn of each other from the store alone, so this may run in a thread. Raises
        CheckpointError, on every host that is still there, if any part could not be written.
        """
        name, host = self._name(step, self.attempt), jax.process_index()
        leaves, kinds = _named(tree), _named(type_tree(hint))
        path = f"{self.path}/{name}"
        try:
            if host == 0:
                self._create(name, kinds, leaves, {"step": step, "config": config})
            group = self._wait(path, "arrays")
            futures = {
                self.threads.submit(self._write, group, name, shard): name
                for name, leaf in leaves.items()
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            }
            problems = [f"{futures[f]}: {f.exception()!r}" for f in futures if f.exception()]
            report = {"shards": len(futures), "problem": problems[0] if problems else None}
            group.create_group(f"writers/{host}", attributes=report)
            if host == 0:
                count = range(jax.process_count())
                reports = [self._wait(f"{path}/writers/{i}", "shards").attrs for i in count]
                failed = [str(report["problem"]) for report in reports if report["problem"]]
                group.attrs.update(
                    {"write_failed": failed[0]} if failed else {"write_completed": True}
                )
            outcome = self._wait(path, "write_completed", "write_failed").attrs.asdict()
        except OSError as error:
            raise CheckpointError(f"{path} can't be written: {error}") from error
        if "write_failed" in outcome:
            raise CheckpointError(f"{path} can't be written: {outcome['write_failed']}")
        return path

    def _create(
        self,
        name: str,
        kinds: dict[str, ArrayType],
        leaves: dict[str, jax.Array],
        about: dict[str, Any],
    ) -> None:
        group = zarr.open_group(self.path, mode="a").create_group(name)
        manifest: Any = {}
        for path, leaf in leaves.items():
            entry = _entry(kinds[path], leaf.shape)
            shard = leaf.sharding.shard_shape(leaf.shape)
            chunks = chunk_shape(shard, leaf.dtype.itemsize)
            array = group.create_array(
                path,
                shape=leaf.shape,
                dtype=_stored_dtype(leaf.dtype),
                chunks=chunks,
                compressors=[Crc32cCodec()],
                dimension_names=entry["dimensions"],
            )
            manifest[path] = {**entry, "chunk_shape": list(chunks), "chunks": array.nchunks}
        packages = {name: importlib.metadata.version(name) for name in ("jax", "numpy", "zarr")}
        versions: Any = {"format": 1, "python": platform.python_version(), **packages}
        # The manifest last: it tells the other hosts that the arrays are there.
        group.attrs.update({**about, "versions": versions, "arrays": manifest})

    @staticmethod
    def _write(group: Any, name: str, shard: Any) -> None:
        # A chunk of zeros is written as any other: one that isn't there is one that was lost.
        array = group[name].with_config({"write_empty_chunks": True})
        values = np.asarray(shard.data)
        array[shard.index] = values.view(_stored_dtype(values.dtype))

    @staticmethod
    def _wait(path: str, *keys: str) -> Any:
        """The group, once it is there and has one of the attributes."""
        while True:
            try:
                group = zarr.open_group(path, mode="r+")
            except FileNotFoundError:
                pass
            else:
                if any(key in group.attrs for key in keys):
                    return group
            time.sleep(0.1)

    def restore(self, hint: Any, sizes: dict[str, int]) -> Any:
        """The newest checkpoint as a tree of type `hint` on the mesh in context; each host reads
        its devices' parts.

        Raises CheckpointError, naming the first array that differs, if the checkpoint holds another
        tree, and naming the array if one is damaged.
        """
        path = f"{self.path}/{self.newest}"
        group: Any = zarr.open_group(path, mode="r")
        kinds, shapes = _named(type_tree(hint)), _named(make_shapes(hint, sizes))
        manifest = group.attrs["arrays"]
        for name in dict.fromkeys([*shapes, *manifest]):
            wanted = _entry(kinds[name], shapes[name].shape) if name in shapes else None
            found = manifest.get(name)
            if _show(wanted) != _show(found):
                raise CheckpointError(
                    f"{path} is of another model: {name} is {_show(found)} there, and "
                    f"{_show(wanted)} here; choose another model_name, or the config it was made by"
                )

        def damaged(what: str) -> CheckpointError:
            return CheckpointError(
                f"{path} is damaged, {what}; to go on from the checkpoint before it, move it away"
            )

        def read(name: str, sharding: jax.sharding.Sharding) -> jax.Array:
            array, dtype = group[name], shapes[name].dtype
            if missing := array.nchunks - array.nchunks_initialized:
                raise damaged(f"{name}: {missing} of its {array.nchunks} chunks are missing")

            def part(index: Any) -> np.ndarray:
                try:
                    return np.asarray(array[index]).view(dtype)
                except (ValueError, OSError) as error:
                    shown = ", ".join(f"{s.start or 0}:{s.stop or ''}" for s in index)
                    raise damaged(f"{name}[{shown}]: {error}") from None

            return jax.make_array_from_callback(shapes[name].shape, sharding, part)

        shardings = make_shardings(hint)
        leaves = self.threads.map(read, shapes, jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shardings), leaves)
