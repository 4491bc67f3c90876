"""Saves a tree of sharded arrays as a zarr group, and restores it on any mesh.

docs/checkpoints.md is the specification. The steps of a save, in order:

1. Each host copies the parts that its devices hold. Training continues; the rest is in a thread.
2. The first host creates the group and its empty arrays, then sets the group's attributes.
3. Each host waits for the attribute `arrays`, then writes its parts.
4. Each host records under `writers/<host>` how its writes ended.
5. The first host waits for the records of all hosts, then sets `write_completed`: true if every
   part was written, else false. A failed save's arrays are removed, to make room.
6. The first host removes old checkpoints, if the new one is complete.
7. Each host waits for `write_completed` and reports how the save ended.

After a crash before step 5 the group has no `write_completed`, so no reader uses it.
"""

import contextlib
import dataclasses
import functools
import json
import math
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import zarr
from jax.experimental import multihost_utils
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from zarr.codecs import BytesCodec, Crc32cCodec

from runtime import storage
from runtime.config import NonNegativeInt, Path, Section, flat, plain
from runtime.errors import tell
from runtime.storage import DamageError
from shardlib.errors import UserError
from shardlib.types import make_shapes, make_shardings, named, type_tree

C = TypeVar("C")
FORMAT = 2
# Of a checkpoint: the steps done, and when its run started, in milliseconds.
NAME = r"\d{8,10}\.\d{1,16}"
# What the attributes of a checkpoint, and the entries of its manifest, have at least.
ATTRIBUTES = {"step": int, "config": str, "hosts": int, "format": int, "versions": dict,
              "arrays": dict}  # fmt: skip
ENTRY = {"dtype": str, "dimensions": list, "shape": list, "chunk_shape": list, "chunks": int}
CODECS, BYTES = (Crc32cCodec(),), (BytesCodec(), BytesCodec(endian=None))
CHUNK_BYTES = 2**26  # at most, if possible: a chunk is always read and checksummed as a whole


class CheckpointError(UserError):
    """A checkpoint can't be written, or doesn't fit the model that is to be restored."""


@dataclasses.dataclass(unsafe_hash=True)
class CheckpointsConfig(Section, key="checkpoints"):
    root: Path  # folder or bucket for all runs; empty: paths.root_working_dir
    keep_last: NonNegativeInt  # how many of the last checkpoints to keep; 0: all
    keep_every: NonNegativeInt  # also keep those whose step is a multiple of this; 0: none
    stop_on_error: bool  # whether a checkpoint that can't be written stops the run or only warns


NO_CHECKPOINT = "{} has no complete checkpoint; name a run's checkpoints folder, or one checkpoint"
KEEP_ALL = CheckpointsConfig(root="", keep_last=0, keep_every=0, stop_on_error=True)


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the chunk shape for a device's part of an array: the part, halved along the first
    dimension that is still even, until it has CHUNK_BYTES or less or no dimension is even."""
    chunk = list(shard)
    while itemsize * math.prod(chunk) > CHUNK_BYTES:
        even = [i for i, length in enumerate(chunk) if length % 2 == 0]
        if not even:
            break
        chunk[even[0]] //= 2
    return tuple(chunk)


def entries(hint: Any, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Returns the manifest entries, without chunks, of the arrays of a tree of type `hint`. Needs a
    mesh in context, which may be abstract."""
    types, result = named(type_tree(hint)), {}
    for name, shape in named(make_shapes(hint, sizes)).items():
        dims = [dim.name for dim in types[name].spec.dims]
        result[name] = {"dtype": shape.dtype.name, "dimensions": dims, "shape": list(shape.shape)}
    return result


def show_entry(entry: dict[str, Any] | None) -> str:
    """Formats a manifest entry as `float32[V=1280, M=256]`, and None as `missing`."""
    if entry is None:
        return "missing"
    sizes = zip(entry["dimensions"], entry["shape"], strict=True)
    return f"{entry['dtype']}[{', '.join(f'{name}={size}' for name, size in sizes)}]"


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype on disk. zarr has no bfloat16, so its bits are stored as uint16."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def _checksum(attrs: dict[str, Any]) -> int:
    """Returns the CRC-32 of a checkpoint's attributes, except the two that are written last."""
    rest = {k: v for k, v in attrs.items() if k not in ("checksum", "write_completed")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _has(values: Any, types: Mapping[str, type]) -> bool:
    """Returns whether values, read from JSON, are a dict with these keys and types."""
    return isinstance(values, dict) and all(type(values.get(k)) is t for k, t in types.items())


def _describes(entry: Any) -> bool:
    """Returns whether an entry of a manifest can describe an array."""
    try:
        columns = zip(entry["dimensions"], entry["shape"], entry["chunk_shape"], strict=True)
        lengths = all(type(n) is int and n > 0 for _, *sizes in columns for n in sizes)
        return _has(entry, ENTRY) and lengths and jnp.dtype(entry["dtype"]).itemsize > 0
    except (KeyError, TypeError, ValueError):
        return False


def create(path: str) -> Any:
    """Creates an empty group. Raises ContainsGroupError if there is one."""
    return storage.group(path, "w-", zarr_format=3)


def describe(group: Any, arrays: dict[str, Any], attrs: dict[str, Any]) -> None:
    """Creates a group's arrays, which are empty. `arrays` has each array's manifest entry and the
    shape of the part that one device writes, which determines the chunks. `attrs` has the
    attributes step, config and hosts."""
    manifest: Any = {}
    for name, (entry, shard) in arrays.items():
        dtype = jnp.dtype(entry["dtype"])
        chunks = chunk_shape(shard, dtype.itemsize)
        array = group.create_array(
            name,
            shape=entry["shape"],
            dtype=_stored_dtype(dtype),
            chunks=chunks,
            compressors=CODECS,
            dimension_names=entry["dimensions"],
        )
        manifest[name] = {**entry, "chunk_shape": list(chunks), "chunks": array.nchunks}
    versions = {package.__name__: package.__version__ for package in (jax, np, zarr)}
    versions = {"python": platform.python_version(), **versions}
    # Last: the other hosts wait for the attribute `arrays` before they write.
    group.update_attributes({**attrs, "format": FORMAT, "versions": versions, "arrays": manifest})


def write(group: Any, name: str, index: Any, values: np.ndarray) -> None:
    """Writes a part of an array that consists of whole chunks."""
    # zarr would leave out chunks of zeros. Here a missing chunk always means a lost chunk.
    array = group[name].with_config({"write_empty_chunks": True})
    array[index] = values.view(_stored_dtype(values.dtype))


def report(group: Any, host: int, shards: int, problem: str | None, position: Any) -> None:
    """Records how a host's writes ended: their number, the first error or None, and the host's
    position in a streamed dataset."""
    attrs = {"shards": shards, "problem": problem, "position": position}
    group.create_group(f"writers/{host}", attributes=attrs)


def complete(group: Any, positions: list[Any]) -> None:
    """Marks a group complete after all parts are written. From here on it is a checkpoint."""
    attrs = group.attrs.asdict() | {"positions": positions}
    group.update_attributes({**attrs, "checksum": _checksum(attrs), "write_completed": True})


class Checkpoint:
    """A zarr group `<step>.<start>`, complete or not. It is read lazily."""

    def __init__(self, path: str):
        self.path = path
        step, start = path.rpartition("/")[2].split(".")
        self.order = self.step, self.start = int(step), int(start)  # newer is larger

    @functools.cached_property
    def attributes(self) -> dict[str, Any] | None:
        """The attributes, unverified: empty if the writer was killed early, None if damaged."""
        return storage.attributes(self.path)

    @property
    def may_be_complete(self) -> bool:
        """True if it is complete or so damaged that it may have been. Reading it then raises an
        error that names the damage."""
        attrs = self.attributes
        # checksum and write_completed are written together, so one without the other is damage.
        return attrs is None or attrs.get("write_completed", "checksum" in attrs) is True

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The attributes of a complete checkpoint, verified. Raises DamageError if they changed
        since they were written, and CheckpointError if the format is unknown."""
        metadata = self.attributes or {}
        valid = metadata.get("step") == self.step and _has(metadata, ATTRIBUTES)
        if not (valid and metadata.get("checksum") == _checksum(metadata)):
            cure = "delete the checkpoint to use the one before it"
            raise DamageError(f"{self.path}/zarr.json was changed since it was written; {cure}")
        if (version := metadata["format"]) != FORMAT:
            cure = "use the commit that wrote it, which starts.jsonl in the run's folder names"
            problem = f"has format {version}; this code reads {FORMAT}: {cure}"
            raise CheckpointError(f"{self.path} {problem}, or import it again")
        if not all(map(_describes, metadata["arrays"].values())):
            raise DamageError(f"{self.path}/zarr.json describes an array that can't be")
        return metadata

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The config. Raises CheckpointError if it isn't plain."""
        try:
            return plain(self.metadata["config"])
        except ValueError as error:
            raise CheckpointError(f"{self.path}: its config can't be read: {error}") from None

    def config(self, schema: type[C], section: str = "", defaults: Any = None) -> C:
        """Returns the checkpoint's config, or a section of it, as the dataclass `schema`. Keys that
        it lacks are taken from `defaults`. Raises CheckpointError if a section has other keys or
        types."""
        part: Any = self.settings
        for key in filter(None, section.split(".")):
            part = part.get(key, {}) if isinstance(part, dict) else {}
        if not section:
            # Drops top-level keys of earlier versions: they don't describe the model.
            known = {field.name for field in dataclasses.fields(cast(Any, schema))}
            part = {key: value for key, value in part.items() if key in known}
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema), defaults or {}, part)
            return cast(C, OmegaConf.to_object(merged))
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            problem = f"has a config of another version: {str(error).splitlines()[0]}"
            raise CheckpointError(f"{self.path} {problem}") from None

    def check(self, model: Any, arrays: dict[str, Any], prefix: str, cure: str) -> None:
        """Checks that the checkpoint fits `model`, a config's section of that name (or {}), and
        `arrays`, as `entries` returns them; only arrays whose names start with `prefix` count.
        Raises CheckpointError with the first difference and the cure."""
        config, saved = flat(self.settings.get("model") or {}), self.metadata["arrays"]
        # An older version's config lacks what null, false or 0 switches off.
        known = [key for key in model if key in config or model[key]]
        pairs = [(f"model.{key}", config.get(key), model[key]) for key in known]
        for name in dict.fromkeys([*arrays, *saved]):
            if name.startswith(prefix):
                pairs.append((name, show_entry(saved.get(name)), show_entry(arrays.get(name))))
        for name, actual, expected in pairs:
            if actual != expected:
                difference = f"{name} is {actual} in the checkpoint but {expected} here"
                raise CheckpointError(f"{self.path} has a different model: {difference}; {cure}")

    @functools.cached_property
    def group(self) -> Any:
        return storage.open_group(self.path)

    def array(self, name: str) -> zarr.Array:
        """Returns an array of the group. Raises DamageError if its zarr.json differs from the
        manifest, and OSError if the store can't deliver it."""
        entry = self.metadata["arrays"][name]
        with storage.opening(self.path):
            group = self.group
            with storage.reading(f"{name}: its zarr.json"):
                array = group[name]
                shapes = list(array.shape), list(array.chunks)
        # A chunk of other codecs might unpack to any size.
        codecs = array.compressors == CODECS and array.serializer in BYTES and not array.filters
        if shapes != (entry["shape"], entry["chunk_shape"]) or not codecs:
            raise DamageError(f"{name}: its zarr.json was changed since it was written")
        return array

    def read(self, array: zarr.Array, index: Any = ()) -> np.ndarray:
        """Returns a part of an array, as `storage.read` does. An OSError names the checkpoint; it
        may be undamaged, and readable again later."""
        with storage.opening(self.path):
            return storage.read(array, index)


def list_checkpoints(path: str) -> list[Checkpoint]:
    """Returns the checkpoints, complete or not, in a folder or bucket, sorted by step and start. If
    the path itself names a checkpoint, returns that one, even if it doesn't exist. Raises OSError
    if the store can't be reached."""
    path = path.rstrip("/")
    if re.fullmatch(NAME, path.rpartition("/")[2]):
        return [Checkpoint(path)]
    names = [name for name in storage.names(path) if re.fullmatch(NAME, name)]
    return sorted((Checkpoint(f"{path}/{name}") for name in names), key=lambda one: one.order)


def newest(path: str, below: tuple[int, int] | None = None) -> Checkpoint:
    """Returns the newest checkpoint that may be complete; if `below` is given, the newest before
    that step and start. Raises CheckpointError if there is none."""
    for checkpoint in reversed(list_checkpoints(path)):
        if (not below or checkpoint.order < below) and checkpoint.may_be_complete:
            return checkpoint
    raise CheckpointError(NO_CHECKPOINT.format(path))


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
    failed: Callable[[], None] = lambda: None  # called, in a thread, to stop the run
    key: str = "paths.model_name"  # the setting that error messages suggest to change

    def __post_init__(self) -> None:
        self.path, self.problem = self.path.rstrip("/"), ""
        self.threads, self.background = ThreadPoolExecutor(self.io_threads), ThreadPoolExecutor(1)
        self.saving: Future[None] | None = None
        self.start = time.time_ns() // 10**6
        self._find_newest(None)

    def starting_point(self, clone_from: str, weights_only: bool) -> "Checkpoints":
        """Returns the checkpoints to start from: those of this run if it has any or `clone_from` is
        empty, else those at the path `clone_from`. Raises CheckpointError if there are none, if the
        newest has a different model, or if this run can't save its own."""
        source, prefix = self, ""
        if clone_from and not self.newest.step:
            source = dataclasses.replace(self, path=clone_from, key="paths.clone_from")
            prefix = "weights/" if weights_only else ""
            if not source.newest.step:
                raise CheckpointError(NO_CHECKPOINT.format(f"paths.clone_from={clone_from}"))
        if source.newest.step:
            with contextlib.suppress(DamageError):  # `restore` takes the one before
                source.check_model(prefix)
        self._try_store()
        return source

    def _try_store(self) -> None:
        """Writes, lists and removes a group, as saves do with different libraries. The first host
        then removes what killed starts of this run left incomplete after its newest checkpoint."""
        name = f"try.{jax.process_index()}"
        try:
            trial: Any = storage.group(f"{self.path}/{name}", "a", zarr_format=3)
            trial.update_attributes({"name": name})
            listed = name in storage.names(self.path)
            read = storage.attributes(f"{self.path}/{name}")
            storage.remove(f"{self.path}/{name}")
            if not listed or read != {"name": name} or name in storage.names(self.path):
                raise OSError("what is written there can't be listed, read or removed")
            for group in list_checkpoints(self.path) if jax.process_index() == 0 else []:
                left = group.order > self.newest.order and not group.may_be_complete
                if left and "zarr.json" in storage.names(group.path):
                    storage.remove(group.path)
        except Exception as error:  # stores raise errors of many types
            problem = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.path} can't hold checkpoints: {problem}") from None

    def _find_newest(self, below: tuple[int, int] | None) -> None:
        """Sets `newest` to the newest checkpoint, before `below` if that is given. The first host
        decides, because a shared file system may show files to other hosts later. Also sets `start`
        to the first host's."""
        order = 0, 0
        if jax.process_index() == 0:
            with contextlib.suppress(CheckpointError):
                order = newest(self.path, below).order
        # Sent as bytes, because JAX would truncate 64-bit integers to 32.
        local = np.array([*order, self.start]).view(np.uint8)
        agreed = np.asarray(multihost_utils.broadcast_one_to_all(local)).view(np.int64)
        step, start, self.start = agreed.tolist()  # step 0: there is no checkpoint
        self.newest = Checkpoint(self._path(step, start))

    def _path(self, step: int, start: int) -> str:
        folder = re.sub(rf"(^|/){NAME}$", "", self.path) or "."
        return f"{folder}/{step:08d}.{start}"

    def save(self, step: int, tree: Any, position: Any = None) -> None:
        """Copies the parts of a tree that this host's devices hold, then writes them in a thread.
        `position` is the host's position in a streamed dataset, as JSON.

        First waits for the previous save, and raises CheckpointError if that failed, like `wait`.
        """
        self.wait()
        leaves, manifest = named(tree), entries(self.hint, self.sizes)
        arrays = {
            name: (manifest[name], leaf.sharding.shard_shape(leaf.shape))
            for name, leaf in leaves.items()
        }
        # On a CPU these are views of device memory. As long as they exist, XLA doesn't reuse the
        # memory of donated arrays (AcquireDonation, in its PjRt client). Leaf by leaf, because GPUs
        # copy through pinned memory, of which a process has 64 GB by default.
        parts = []
        for name, leaf in leaves.items():
            shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            parts += jax.device_get([(name, shard.index, shard.data) for shard in shards])
        attrs = {"step": step, "config": self.config, "hosts": jax.process_count()}
        path = self._path(step, self.start)
        self.saving = self.background.submit(self._save, path, arrays, attrs, parts, position)

    def wait(self) -> None:
        """Blocks until the pending save is done. If part of it could not be written on any host and
        `stop_on_error` is set, raises CheckpointError on every host that is still running."""
        saving, self.saving = self.saving, None
        if saving:
            saving.result()

    def close(self) -> None:
        """Blocks until the pending save is done. Raises CheckpointError if it, the last, failed."""
        self.wait()
        if self.problem:
            raise CheckpointError(f"the last checkpoint is missing: {self.problem}")

    def _save(self, path: str, arrays: Any, attrs: Any, parts: Any, position: Any) -> None:
        """Performs steps 2 to 7 of a save, as numbered above in this file. The hosts communicate
        only through the store, because their devices are busy with training steps."""
        host, hosts, incomplete = jax.process_index(), range(jax.process_count()), False
        try:
            if host == 0:  # step 2
                group, incomplete = create(path), True
                describe(group, arrays, attrs)
            # Step 3.
            self._await_key(path, "arrays", writer=0)
            group = storage.group(path, "r+", zarr_format=3)
            writes = [(part[0], self.threads.submit(write, group, *part)) for part in parts]
            results = [(name, write.exception()) for name, write in writes]
            problem = next((f"{name}: {error!r}" for name, error in results if error), None)
            # Step 4.
            report(group, host, len(writes), problem, position)
            self._await_key(f"{path}/writers/{host}", "shards", writer=host)
            if host == 0:  # steps 5 and 6
                records = [
                    self._await_key(f"{path}/writers/{i}", "shards", writer=i) for i in hosts
                ]
                problem = next((record["problem"] for record in records if record["problem"]), None)
                if problem:
                    self._abandon(path, problem)
                else:
                    complete(group, [record["position"] for record in records])
                    incomplete = False
                    self._remove_old(attrs["step"])
            # Step 7.
            problem = self._await_key(path, "write_completed", writer=0).get("write_failed")
        except Exception as error:  # stores raise errors of many types
            problem = f"{error!r}"
            if incomplete:
                self._abandon(path, problem)
        self.problem = f"{path} can't be written: {problem}" if problem else ""
        if not problem:
            self.say(f"saved {path}")
        elif self.policy.stop_on_error:
            self.failed()
            raise CheckpointError(self.problem)
        else:
            self.say(f"warning: {self.problem}; the run continues")

    @staticmethod
    def _abandon(path: str, problem: str) -> None:
        """Marks a save as failed, which the other hosts wait for, and removes its arrays. On a full
        disk only their removal makes room for the mark. The next start removes the rest."""

        def mark() -> None:
            failed = {"write_completed": False, "write_failed": problem}
            storage.group(path, "a", zarr_format=3).update_attributes(failed)

        for action in mark, functools.partial(storage.empty, path), mark:
            with contextlib.suppress(Exception):
                action()

    @staticmethod
    def _await_key(path: str, key: str, writer: int) -> dict[str, Any]:
        """Waits until a group has the attribute `key`, and returns the group's attributes. Raises
        OSError once the save has failed. On the host that wrote the attribute, raises
        FileNotFoundError instead of waiting: the write was lost."""
        while key not in (attributes := storage.attributes(path) or {}):
            if problem := attributes.get("write_failed"):
                raise OSError(problem)
            if writer == jax.process_index():
                raise FileNotFoundError(f"{key} of {path} was written but can't be read back")
            time.sleep(0.2)
        return attributes

    def _remove_old(self, written: int) -> None:
        """Removes the checkpoints that the policy doesn't keep, and the rest of any whose removal
        was interrupted. Leaves checkpoints of later steps than the one just written: they must be
        damaged, as the run resumed from before them, and don't count toward `keep_last`."""
        last, every = self.policy.keep_last, self.policy.keep_every
        if not last:
            return
        try:
            groups = [(group, group.attributes or {}) for group in list_checkpoints(self.path)]
            complete = [group for group, attrs in groups if attrs.get("write_completed") is True]
            older = [group for group in complete if group.order <= (written, self.start)]
            surplus = [group for group in older[:-last] if not every or group.step % every]
            interrupted = [group for group, attrs in groups if attrs.get("removed")]
            for group in surplus + interrupted:
                # First, so that an interrupted removal leaves nothing that looks complete.
                mark = {"write_completed": False, "removed": True}
                storage.group(group.path, "r+").update_attributes(mark)
                storage.remove(group.path)
        except Exception as error:  # stores raise errors of many types
            self.say(f"warning: can't remove old checkpoints in {self.path}: {error!r}")

    def restore(self, part: str = "") -> Any:
        """Returns the newest undamaged checkpoint as a tree of arrays on the mesh in context, of
        type `hint`, and sets `newest` to it. Each host reads its devices' parts, and
        warns of damaged checkpoints. If `part` names a field of the tree, such as weights, reads
        and returns only that field.

        Raises CheckpointError if there is no undamaged checkpoint, or if it has a different model:
        the message names the first difference in the config's section `model` or in the arrays.
        """
        while self.newest.step:
            tree = None
            try:
                tree = self._restore(part)
            except DamageError as error:
                warning = f"warning: {self.newest.path} is damaged: {error}"
                tell(warning, sys.stderr)
            if multihost_utils.process_allgather(np.array(tree is not None)).all():
                return tree
            self._find_newest(self.newest.order)
        raise CheckpointError(f"{self.path} has no undamaged checkpoint; choose another {self.key}")

    def _restore(self, part: str) -> Any:
        checkpoint, prefix = self.newest, f"{part}/" if part else ""
        self.check_model(prefix)
        shapes, shardings = make_shapes(self.hint, self.sizes), make_shardings(self.hint)
        if part:
            shapes, shardings = getattr(shapes, part), getattr(shardings, part)

        def read(name: str, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            array = checkpoint.array(prefix + name)
            return jax.make_array_from_callback(
                shape.shape, sharding, lambda index: checkpoint.read(array, index).view(shape.dtype)
            )

        leaves = named(shapes)
        arrays = self.threads.map(read, leaves, leaves.values(), jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def position(self) -> Any:
        """Returns this host's position in a streamed dataset from the newest checkpoint. Raises
        CheckpointError if another number of hosts wrote it."""
        metadata, hosts = self.newest.metadata, jax.process_count()
        if metadata["hosts"] != hosts:
            raise CheckpointError(
                f"{self.newest.path} was written by {metadata['hosts']} hosts that share a stream; "
                f"resume with as many, not {hosts}"
            )
        return metadata["positions"][jax.process_index()]

    def check_model(self, prefix: str = "") -> None:
        """Raises CheckpointError if the newest checkpoint, or the part of it whose names start with
        `prefix`, has a different model, and DamageError if its attributes are damaged."""
        if not prefix and all(n.startswith("weights/") for n in self.newest.metadata["arrays"]):
            raise CheckpointError(
                f"{self.newest.path} holds only weights; start a new run from them with "
                "paths.clone_from and paths.clone_weights_only=true"
            )
        model, arrays = flat(plain(self.config)["model"]), entries(self.hint, self.sizes)
        cure = f"choose another {self.key}, or use the checkpoint's config"
        self.newest.check(model, arrays, prefix, cure)
