"""Reads zarr arrays from a folder or a bucket. An error names the chunk that can't be read."""

import contextlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from shardlib.errors import UserError


class DamageError(UserError):
    """Part of an array is missing, or was changed since it was written."""


class StoreError(OSError):
    """A store doesn't answer, or can't be opened. What it holds may be undamaged."""


def _store(path: str) -> tuple[Any, str]:
    """Returns the file system of a folder or bucket, and the path there. Without a protocol a path
    is what it says: fsspec would find others in `a::b` and `data:x`."""
    if "://" in path:
        return fsspec.core.url_to_fs(path)
    return fsspec.filesystem("file"), os.path.abspath(path)


def group(path: str, mode: Any, **options: Any) -> Any:
    """Opens a zarr group, in a folder if the path has no protocol, whatever else is in it."""
    return zarr.open_group(path if "://" in path else pathlib.Path(path), mode=mode, **options)


@contextlib.contextmanager
def opening(path: str, done: str = "opened") -> Iterator[None]:
    """Converts whatever errors a store raises to a StoreError that names the path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = getattr(error, "strerror", None) or str(error) or repr(error)
        raise StoreError(f"{path} can't be {done}: {problem}") from error


def names(path: str) -> list[str]:
    """Returns the names of the entries of a folder or bucket prefix; none if it doesn't exist.
    Raises OSError if the store can't be reached."""
    with opening(path):
        store, inner = _store(path)
        store.invalidate_cache()
        try:
            paths = store.ls(inner, detail=False)
        except FileNotFoundError:
            return []
    return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]


def attributes(path: str) -> dict[str, Any] | None:
    """Returns the attributes of a zarr group: empty if there is no such group, None if they are
    damaged. Raises OSError if the store can't be reached."""
    with opening(path):
        store, inner = _store(path)
        try:
            text = store.cat_file(f"{inner}/zarr.json")
        except (FileNotFoundError, NotADirectoryError):
            return {}
    try:
        return dict(json.loads(text)["attributes"])
    except Exception:  # of many types, as the file may hold anything
        return None


def _remove(path: str) -> None:
    store, inner = _store(path)
    if "://" in path and fsspec.core.has_magic(inner):
        for file in store.find(inner):  # rm would take `run*` for a pattern, and remove other runs
            store.rm_file(file)
    else:
        store.rm(inner, recursive=True)


def empty(path: str) -> None:
    """Removes a group's arrays and groups, but not its attributes."""
    for name in names(path):
        if name != "zarr.json":
            _remove(f"{path}/{name}")


def remove(path: str) -> None:
    """Removes a group, its zarr.json last, so that an interrupted removal can be recognized."""
    empty(path)
    _remove(path)


class _WholeStore(WrapperStore[Any]):
    """Raises DamageError for what is missing, such as a chunk, which zarr would read as zeros, and
    StoreError for what can't be fetched, whatever the store raises."""

    _supports_sync_io = False  # makes zarr 3.4 read with `get` only

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        with opening("the store"):
            value = await super().get(key, *args, **kwargs)
        if value is None:
            raise DamageError("it is missing")
        return value


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Names what is read from a group of `open_group` in errors: StoreError if the store doesn't
    deliver it, else DamageError, because then it is missing or doesn't parse."""
    try:
        yield
    except Exception as error:  # of many types, as a file may hold anything
        kind = StoreError if isinstance(error, StoreError | MemoryError) else DamageError
        raise kind(f"{what} can't be read: {str(error).split('. ')[0]}") from error


def open_group(path: str) -> zarr.Group:
    """Opens a zarr 3 group for reading. Reading a missing chunk of its arrays is an error."""
    store: Any = FsspecStore.from_url if "://" in path else LocalStore
    with reading("zarr.json"):
        return zarr.open_group(_WholeStore(store(path, read_only=True)), mode="r", zarr_format=3)


def read(array: zarr.Array, index: Any = ()) -> np.ndarray:
    """Returns a part of an array, given by slices. Raises DamageError for a chunk that is missing
    or was changed, and StoreError if the store doesn't deliver one; both name the chunk."""
    try:
        return np.asarray(array[index])
    except Exception:  # zarr's error doesn't name the chunk; `check` does
        check(array, index)
    with reading(array.path):  # all chunks are readable now, so the store has recovered
        return np.asarray(array[index])


def check(array: zarr.Array, index: Any = ()) -> None:
    """Reads a part of an array chunk by chunk. Raises the same errors as `read`."""
    slices = index if isinstance(index, tuple) else (index,)
    slices += (slice(None),) * (array.ndim - len(slices))
    grid = []
    for part, length, size in zip(slices, array.shape, array.chunks, strict=True):
        covered = range(length)[part]
        grid.append(range(covered.start // size, -(-covered.stop // size)))
    for place in itertools.product(*grid):
        corners = zip(place, array.chunks, strict=True)
        with reading(f"{array.path}: chunk {'.'.join(map(str, place)) or 0}"):
            array[tuple(slice(i * size, (i + 1) * size) for i, size in corners)]
