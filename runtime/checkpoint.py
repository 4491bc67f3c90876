"""A tree of sharded arrays <-> a zarr group, which counts once all of it is written.

docs/checkpoints.md is the specification.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import zarr
from jax.experimental import multihost_utils
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from zarr.codecs import Crc32cCodec

from runtime import storage
from runtime.config import NonNegativeInt, Section
from runtime.storage import DamageError
from shardlib.errors import UserError
from shardlib.types import make_shapes, make_shardings, type_tree

C = TypeVar("C")
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


NONE = "{} has no complete checkpoint; name a run's folder of checkpoints, or one of them"
KEEP_ALL = CheckpointsConfig(root="", keep_last=0, keep_every=0, stop_on_error=True)


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A device's part of an array, halved to CHUNK_BYTES or less, as far as its sizes are even."""
    chunk = list(shard)
    while itemsize * math.prod(chunk) > CHUNK_BYTES:
        even = [i for i, length in enumerate(chunk) if length % 2 == 0]
        if not even:
            break
        chunk[even[0]] //= 2
    return tuple(chunk)


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as weights/layers/w_q."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def entries(hint: Any, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What the manifest says of the arrays of a tree of type `hint`, whatever their chunks. Needs a
    mesh in context, be it without devices."""
    kinds, made = named(type_tree(hint)), {}
    for name, shape in named(make_shapes(hint, sizes)).items():
        dims = [dim.name for dim in kinds[name].spec.dims]
        made[name] = {"dtype": shape.dtype.name, "dimensions": dims, "shape": list(shape.shape)}
    return made


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
    versions = {package.__name__: package.__version__ for package in (jax, np, zarr)}
    versions = {"python": platform.python_version(), **versions}
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
    """A zarr group `<step>.<start>`, complete or not. Nothing is read before it is asked for."""

    def __init__(self, path: str):
        self.path = path
        step, start = path.rpartition("/")[2].split(".")
        self.which = self.step, self.start = int(step), int(start)

    @functools.cached_property
    def attributes(self) -> dict[str, Any] | None:
        """As they are there; empty if its writer was killed early, None if they are damaged."""
        return storage.attributes(self.path)

    @property
    def counts(self) -> bool:
        """Whether it is complete, or damaged and may have been: to read it says what is wrong."""
        about = self.attributes
        # A checksum and a mark are written at once, so one without the other is damage.
        return about is None or about.get("write_completed", "checksum" in about) is True

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """The attributes of a complete one. Raises DamageError if they aren't what was written, and
        CheckpointError if it has another format."""
        about = self.attributes or {}
        if about.get("step") != self.step or about.get("checksum") != _checksum(about):
            file = f"{self.path}/zarr.json"
            raise DamageError(f"{file} isn't what was written; without it the one before counts")
        if (found := about["format"]) != FORMAT:
            raise CheckpointError(f"{self.path} has format {found}; this program reads {FORMAT}")
        return about

    def config(self, schema: type[C], section: str = "", defaults: Any = None) -> C:
        """Its config, or a section, as `schema`, a dataclass; `defaults` has what it may not say.
        Raises CheckpointError if its sections have other keys or types."""
        said: Any = OmegaConf.select(OmegaConf.create(self.about["config"]), section, default={})
        if not section:
            # A key of an earlier version said how the run was done, not what its model is.
            known = {field.name for field in dataclasses.fields(cast(Any, schema))}
            said = OmegaConf.masked_copy(said, [key for key in said if key in known])
        try:
            made = OmegaConf.merge(OmegaConf.structured(schema), defaults or {}, said)
            return cast(C, OmegaConf.to_object(made))
        except OmegaConfBaseException as error:
            problem = f"has a config of another version: {str(error).splitlines()[0]}"
            raise CheckpointError(f"{self.path} {problem}") from None

    def check(self, model: Any, arrays: dict[str, Any], prefix: str, cure: str) -> None:
        """Compares with the keys of a config's section `model`, which may be none, and with what
        `entries` says of arrays, those under a prefix. Raises CheckpointError, which names the
        first difference and a cure."""
        there, found = OmegaConf.create(self.about["config"]).model, self.about["arrays"]
        pairs = [(f"model.{key}", there.get(key), model[key]) for key in model]
        for name in dict.fromkeys([*arrays, *found]):
            if name.startswith(prefix):
                pairs.append((name, show_entry(found.get(name)), show_entry(arrays.get(name))))
        for name, theirs, ours in pairs:
            if theirs != ours:
                difference = f"{name} is {theirs} there, {ours} here"
                raise CheckpointError(f"{self.path} is of another model: {difference}; {cure}")

    @functools.cached_property
    def group(self) -> Any:
        return storage.open_group(self.path)

    def array(self, name: str) -> zarr.Array:
        """Raises DamageError unless it is described as in the manifest, and OSError where the store
        doesn't say."""
        entry = self.about["arrays"][name]
        with storage.opening(self.path):
            try:
                array = self.group[name]
                described = list(array.shape), list(array.chunks)
            except Exception as error:  # whatever is left of the file
                store = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
                kind = OSError if store else DamageError
                raise kind(f"{name}: its description can't be read: {error!r}") from error
        if described != (entry["shape"], entry["chunk_shape"]):
            raise DamageError(f"{name}: its description isn't what was written")
        return array

    def read(self, array: zarr.Array, index: Any = ()) -> np.ndarray:
        """A part of an array, as `storage.read` has it. An OSError names the checkpoint, which may
        be whole, and readable again soon."""
        with storage.opening(self.path):
            return storage.read(array, index)


def listed(path: str) -> list[Checkpoint]:
    """Those in a folder or bucket, by step and start; or the one that the path names, be it there
    or not. Raises OSError where the store can't be had."""
    path = path.rstrip("/")
    if re.fullmatch(NAME, path.rpartition("/")[2]):
        return [Checkpoint(path)]
    names = [name for name in storage.names(path) if re.fullmatch(NAME, name)]
    return sorted((Checkpoint(f"{path}/{name}") for name in names), key=lambda one: one.which)


def newest(path: str, below: tuple[int, int] | None = None) -> Checkpoint:
    """The last one of a path that counts; if given, below a step and start. Raises CheckpointError
    if there is none."""
    for each in reversed(listed(path)):
        if (not below or each.which < below) and each.counts:
            return each
    raise CheckpointError(NONE.format(path))


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one run: zarr groups `<step>.<start>` in a folder or a bucket. `path` may
    also be one of them, to read that one.

    A start of the run writes under names of its own. So nothing that is there is written to again,
    whoever may be writing to it still. All hosts make this object, and call its methods, at the
    same steps.
    """

    path: str
    hint: Any  # the type of a checkpoint's tree of arrays
    sizes: dict[str, int]  # of its dimensions
    config: str  # YAML text, with a section `model`: that of another model isn't restored
    io_threads: int
    policy: CheckpointsConfig = KEEP_ALL
    say: Callable[[str], None] = print
    failed: Callable[[], None] = lambda: None  # called in a thread, if a save that counts fails
    key: str = "paths.model_name"  # what errors say to choose another of

    def __post_init__(self) -> None:
        self.path = self.path.rstrip("/")
        self.threads, self.background = ThreadPoolExecutor(self.io_threads), ThreadPoolExecutor(1)
        self.saving: Future[None] | None = None
        self.start = time.time_ns() // 10**6
        self._choose(None)

    def or_those_of(self, path: str) -> "Checkpoints":
        """Those of a path, if it isn't empty, as long as there are none here: a run is cloned from
        them. Raises CheckpointError if it has none."""
        if self.newest.step or not path:
            return self
        source = dataclasses.replace(self, path=path, key="paths.clone_from")
        if not source.newest.step:
            raise CheckpointError(NONE.format(f"paths.clone_from={path}"))
        return source

    def _choose(self, below: tuple[int, int] | None) -> None:
        """The newest, or the one before it. The first host looks for all: a shared file system may
        be late to another."""
        which = 0, 0
        if jax.process_index() == 0:
            with contextlib.suppress(CheckpointError):
                which = newest(self.path, below).which
        # As bytes, for JAX would cut 64 bits to 32.
        seen = np.array([*which, self.start]).view(np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(seen)).view(np.int64)
        step, start, self.start = told.tolist()  # step 0: none
        self.newest = Checkpoint(self._path(step, start))

    def _path(self, step: int, start: int) -> str:
        folder = re.sub(rf"(^|/){NAME}$", "", self.path) or "."
        return f"{folder}/{step:08d}.{start}"

    def save(self, step: int, tree: Any, position: Any = None) -> None:
        """Copies the parts of a tree that this host's devices hold, and writes them in a thread,
        with the host's `position` in its stream, JSON. First it waits for the save before, and
        raises CheckpointError as `wait` does.
        """
        self.wait()
        leaves, described = named(tree), entries(self.hint, self.sizes)
        arrays = {
            name: (described[name], leaf.sharding.shard_shape(leaf.shape))
            for name, leaf in leaves.items()
        }
        # On a CPU these are views of the devices' memory. While there are any, XLA writes what is
        # donated to other memory (AcquireDonation, in its PjRt client).
        parts = jax.device_get(
            [
                (name, shard.index, shard.data)
                for name, leaf in leaves.items()
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            ]
        )
        about = {"step": step, "config": self.config, "hosts": jax.process_count()}
        path = self._path(step, self.start)
        self.saving = self.background.submit(self._save, path, arrays, about, parts, position)

    def wait(self) -> None:
        """Blocks until the pending save is done. Raises CheckpointError, on every host still there,
        if any part of it could not be written and the policy is to stop."""
        saving, self.saving = self.saving, None
        if saving:
            saving.result()

    def _save(self, path: str, arrays: Any, about: Any, parts: Any, position: Any) -> None:
        """Hosts learn of each other from the store alone, as their devices are at work."""
        host, hosts = jax.process_index(), range(jax.process_count())
        try:
            if host == 0:
                create(path, arrays, about)
            self._wait(path, "arrays", writer=0)
            group = zarr.open_group(path, mode="r+", zarr_format=3)
            writes = [(part[0], self.threads.submit(write, group, *part)) for part in parts]
            ended = [(name, write.exception()) for name, write in writes]
            problem = next((f"{name}: {error!r}" for name, error in ended if error), None)
            report(group, host, len(writes), problem, position)
            self._wait(f"{path}/writers/{host}", "shards", writer=host)
            if host == 0:
                reports = [self._wait(f"{path}/writers/{i}", "shards", writer=i) for i in hosts]
                problem = next((each["problem"] for each in reports if each["problem"]), None)
                if problem:
                    group.update_attributes({"write_completed": False, "write_failed": problem})
                else:
                    complete(group, [each["position"] for each in reports])
                    self._remove_old(about["step"])
            problem = self._wait(path, "write_completed", writer=0).get("write_failed")
        except Exception as error:  # each store raises its own
            problem = f"{error!r}"
        if not problem:
            self.say(f"saved {path}")
        elif self.policy.stop_on_error:
            self.failed()
            raise CheckpointError(f"{path} can't be written: {problem}")
        else:
            self.say(f"warning: {path} can't be written: {problem}; the run goes on")

    @staticmethod
    def _wait(path: str, key: str, writer: int) -> dict[str, Any]:
        """A group's attributes, once it is there and has this one. The host that wrote it doesn't
        wait: what isn't there by now was lost."""
        while key not in (about := storage.attributes(path) or {}):
            if writer == jax.process_index():
                raise FileNotFoundError(f"{key} of {path} was written, and isn't there")
            time.sleep(0.2)
        return about

    def _remove_old(self, written: int) -> None:
        """Removes what isn't to be kept, and what a removal that was cut off has left. Later steps
        than the one just written are of damaged checkpoints: they don't count, and stay."""
        last, every = self.policy.keep_last, self.policy.keep_every
        if not last:
            return
        try:
            groups = [(each, each.attributes or {}) for each in listed(self.path)]
            complete = [each for each, about in groups if about.get("write_completed") is True]
            older = [each for each in complete if each.which <= (written, self.start)]
            old = [each for each in older[:-last] if not every or each.step % every]
            begun = [each for each, about in groups if about.get("removed")]
            for each in old + begun:
                # It is none from here on, so that all of it may go.
                mark = {"write_completed": False, "removed": True}
                zarr.open_group(each.path, mode="r+").update_attributes(mark)
                storage.remove(each.path)
        except Exception as error:  # each store raises its own
            self.say(f"warning: not all that is old in {self.path} can be removed: {error!r}")

    def restore(self, part: str = "") -> Any:
        """The newest checkpoint that is undamaged, which becomes `newest`, as a tree on the mesh in
        context; each host reads its devices' parts. Says which ones are damaged. Of the part
        `weights`, only the field of that name is read, and must be whole.

        Raises CheckpointError if there is none, and for another model's, naming the first
        difference between the `model` sections of the configs, or between the arrays.
        """
        while self.newest.step:
            tree = None
            try:
                tree = self._restore(part)
            except DamageError as error:
                warning = f"warning: {self.newest.path} is damaged: {error}"
                print(warning, file=sys.stderr, flush=True)
            if multihost_utils.process_allgather(np.array(tree is not None)).all():
                return tree
            self._choose(self.newest.which)
        raise CheckpointError(
            f"{self.path} has no undamaged checkpoint; to start anew, choose another {self.key}"
        )

    def _restore(self, part: str) -> Any:
        found, prefix = self.newest, f"{part}/" if part else ""
        self.check_model(prefix)
        shapes, shardings = make_shapes(self.hint, self.sizes), make_shardings(self.hint)
        if part:
            shapes, shardings = getattr(shapes, part), getattr(shardings, part)

        def read(name: str, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            array = found.array(prefix + name)
            return jax.make_array_from_callback(
                shape.shape, sharding, lambda index: found.read(array, index).view(shape.dtype)
            )

        leaves = named(shapes)
        made = self.threads.map(read, leaves, leaves.values(), jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    def position(self) -> Any:
        """This host's position in its stream, as the newest checkpoint has it. Raises
        CheckpointError if other hosts than today's wrote it."""
        about, hosts = self.newest.about, jax.process_count()
        if about["hosts"] != hosts:
            raise CheckpointError(
                f"{self.newest.path} was written by {about['hosts']} hosts, who share the stream; "
                f"there are {hosts} now"
            )
        return about["positions"][jax.process_index()]

    def check_model(self, prefix: str = "") -> None:
        """Raises CheckpointError if the newest checkpoint, or what it has under a prefix, is of
        another model, and DamageError if what tells is damaged."""
        if not prefix and all(name.startswith("weights/") for name in self.newest.about["arrays"]):
            raise CheckpointError(
                f"{self.newest.path} has weights alone: a new run starts from them by "
                "paths.clone_from, with paths.clone_weights_only=true"
            )
        model, arrays = OmegaConf.create(self.config).model, entries(self.hint, self.sizes)
        cure = f"choose another {self.key}, or the config it was made by"
        self.newest.check(model, arrays, prefix, cure)
