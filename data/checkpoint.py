"""A tree of sharded arrays <-> a zarr group, which counts once all of it is written.

docs/checkpoints.md is the specification.
"""

import importlib.metadata
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import zarr
from jax.experimental import multihost_utils
from omegaconf import OmegaConf
from zarr.codecs import Crc32cCodec

from shardlib.types import ArrayType, make_shapes, make_shardings, type_tree

FORMAT = 1
CHUNK_BYTES = 2**26  # a chunk is read, and its checksum taken, as a whole


class CheckpointError(ValueError):
    """A checkpoint that can't be written, or isn't of the tree that is asked for."""


def chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
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
    """The checkpoints of one run: zarr groups `<step>.<start>` in the folder `path`.

    A start of the run writes under names of its own. So nothing that is there is written to again,
    whoever may be writing to it still, and nothing need be deleted. All hosts make this object, and
    call its methods, at the same steps.
    """

    def __init__(self, path: str, io_threads: int):
        self.path, self.threads = path, ThreadPoolExecutor(io_threads)
        # The first host looks for all: a shared file system may be late to another.
        complete = self._complete() if jax.process_index() == 0 else ()
        seen = np.array([*max(complete, default=(0, 0)), time.time_ns() // 10**6])
        # As bytes, for JAX would cut 64 bits to 32.
        told = np.asarray(multihost_utils.broadcast_one_to_all(seen.view(np.uint8)))
        self.newest_step, newest_start, self.start = told.view(seen.dtype).tolist()  # step 0: none
        self.newest = self._path(self.newest_step, newest_start)

    def _path(self, step: int, start: int) -> str:
        return f"{self.path}/{step:08d}.{start}"

    def _complete(self) -> Iterator[tuple[int, int]]:
        """Step and start of each complete checkpoint."""
        for name in os.listdir(self.path) if os.path.isdir(self.path) else ():
            if not re.fullmatch(r"\d{8,}\.\d+", name):
                continue
            step, start = map(int, name.split("."))
            try:
                attributes = zarr.open_group(f"{self.path}/{name}", mode="r").attrs
            except (OSError, ValueError):  # its writer was killed while it made the group
                continue
            if attributes.get("write_completed") is True and attributes.get("step") == step:
                yield step, start

    def save(self, step: int, tree: Any, hint: Any, config: str, position: Any = None) -> str:
        """Writes a tree of arrays typed by `hint`, each host its devices' parts, and returns the
        checkpoint's path once all hosts are done. The config, YAML text, goes into the manifest,
        and each host's `position` in its stream, JSON, into its report.

        Hosts learn of each other from the store alone, so this may run in a thread. Raises
        CheckpointError, on every host that is still there, if any part could not be written.
        """
        path, host = self._path(step, self.start), jax.process_index()
        leaves, kinds = _named(tree), _named(type_tree(hint))
        try:
            if host == 0:
                self._create(path, kinds, leaves, {"step": step, "config": config})
            group = self._wait(path, "arrays")
            writes = [
                (name, self.threads.submit(self._write, group, name, shard))
                for name, leaf in leaves.items()
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            ]
            results = [(name, write.exception()) for name, write in writes]
            problems = [f"{name}: {error!r}" for name, error in results if error]
            problem = problems[0] if problems else None
            report = {"shards": len(writes), "problem": problem, "position": position}
            group.create_group(f"writers/{host}", attributes=report)
            if host == 0:
                hosts = range(jax.process_count())
                reports = [self._wait(f"{path}/writers/{i}", "shards").attrs for i in hosts]
                failed = [str(report["problem"]) for report in reports if report["problem"]]
                group.attrs.update(
                    {"write_failed": failed[0]} if failed else {"write_completed": True}
                )
            outcome = self._wait(path, "write_completed", "write_failed").attrs.asdict()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be written: {error}") from error
        if "write_failed" in outcome:
            raise CheckpointError(f"{path} can't be written: {outcome['write_failed']}")
        return path

    @staticmethod
    def _create(
        path: str, kinds: dict[str, ArrayType], leaves: dict[str, jax.Array], about: dict[str, Any]
    ) -> None:
        group = zarr.open_group(path, mode="w-")
        manifest: Any = {}
        for name, leaf in leaves.items():
            entry = _entry(kinds[name], leaf.shape)
            shard = leaf.sharding.shard_shape(leaf.shape)
            chunks = chunk_shape(shard, leaf.dtype.itemsize)
            array = group.create_array(
                name,
                shape=leaf.shape,
                dtype=_stored_dtype(leaf.dtype),
                chunks=chunks,
                compressors=[Crc32cCodec()],
                dimension_names=entry["dimensions"],
            )
            manifest[name] = {**entry, "chunk_shape": list(chunks), "chunks": array.nchunks}
        packages = {name: importlib.metadata.version(name) for name in ("jax", "numpy", "zarr")}
        versions = {"python": platform.python_version(), **packages}
        # The manifest last: it tells the other hosts that the arrays are there.
        about |= {"format": FORMAT, "versions": versions, "hosts": jax.process_count()}
        group.attrs.update({**about, "arrays": manifest})

    @staticmethod
    def _write(group: Any, name: str, shard: Any) -> None:
        # A chunk of zeros is written as any other: one that isn't there is one that was lost.
        array = group[name].with_config({"write_empty_chunks": True})
        values = np.asarray(shard.data)
        array[shard.index] = values.view(_stored_dtype(values.dtype))

    @staticmethod
    def _wait(path: str, *keys: str) -> Any:
        """The group, once it is there and has one of the attributes."""
        pause = 0.05
        while True:
            try:
                group = zarr.open_group(path, mode="r+")
            except FileNotFoundError:
                pass
            else:
                if any(key in group.attrs for key in keys):
                    return group
            time.sleep(pause)
            pause = min(2 * pause, 2)

    def restore(self, hint: Any, sizes: dict[str, int], config: str) -> Any:
        """The newest checkpoint as a tree of type `hint` on the mesh in context; each host reads
        its devices' parts.

        Raises CheckpointError for another model's, naming the first difference between the `model`
        sections of the configs, or between the arrays; and for a damaged one, naming the array.
        """
        self.check_model(hint, sizes, config)
        group: Any = zarr.open_group(self.newest, mode="r")
        shapes, shardings = make_shapes(hint, sizes), make_shardings(hint)
        named = _named(shapes)

        def read(name: str, sharding: jax.sharding.Sharding) -> jax.Array:
            try:
                return self._read(group[name], named[name], sharding)
            except (OSError, ValueError, KeyError) as error:
                problem = str(error).split(". ")[0]
                raise CheckpointError(
                    f"{self.newest} is damaged: {name}: {problem}; move it away to go on from the "
                    "one before it"
                ) from error

        leaves = self.threads.map(read, named, jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def position(self) -> Any:
        """This host's position in its stream, as the newest checkpoint has it. Raises
        CheckpointError if other hosts than today's wrote it."""
        group: Any = zarr.open_group(self.newest, mode="r")
        if (hosts := group.attrs["hosts"]) != jax.process_count():
            raise CheckpointError(
                f"{self.newest} was written by {hosts} hosts, who share the stream; there are "
                f"{jax.process_count()} now"
            )
        return group[f"writers/{jax.process_index()}"].attrs.get("position")

    def check_model(self, hint: Any, sizes: dict[str, int], config: str) -> None:
        """Raises CheckpointError if the newest checkpoint is another model's."""
        about: Any = zarr.open_group(self.newest, mode="r").attrs.asdict()
        if about["format"] != FORMAT:
            raise CheckpointError(
                f"{self.newest} has format {about['format']}; this program reads {FORMAT}"
            )
        here, there = OmegaConf.create(config).model, OmegaConf.create(about["config"]).model
        kinds, shapes = _named(type_tree(hint)), _named(make_shapes(hint, sizes))
        entries = {name: _entry(kinds[name], shape.shape) for name, shape in shapes.items()}
        pairs = [(f"model.{key}", there.get(key), here[key]) for key in here]
        for name in dict.fromkeys([*entries, *about["arrays"]]):
            pairs.append((name, _show(about["arrays"].get(name)), _show(entries.get(name))))
        for name, found, wanted in pairs:
            if found != wanted:
                raise CheckpointError(
                    f"{self.newest} is of another model: {name} is {found} there, {wanted} here; "
                    "choose another paths.model_name, or the config it was made by"
                )

    @staticmethod
    def _read(
        array: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
    ) -> jax.Array:
        if missing := array.nchunks - array.nchunks_initialized:
            raise ValueError(f"{missing} of its {array.nchunks} chunks are missing")

        def part(index: Any) -> np.ndarray:
            return np.asarray(array[index]).view(shape.dtype)

        return jax.make_array_from_callback(shape.shape, sharding, part)
