"""Writes and reads zarr groups and arrays in a folder or bucket. Errors name the path or chunk."""

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr
from zarr.storage import FsspecStore, LocalStore, StorePath, WrapperStore

from shardlib.errors import UserError


class DamageError(UserError):
    """Something stored is missing, or was changed since it was written."""


class StoreError(OSError):
    """A store doesn't answer, or can't be opened. What it holds may be undamaged."""


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


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Names `what` in errors: StoreError if the store doesn't deliver it, else DamageError, because
    then it is missing or doesn't parse."""
    try:
        yield
    except Exception as error:  # of many types, as a file may hold anything
        kind = StoreError if isinstance(error, StoreError | MemoryError) else DamageError
        raise kind(f"{what} can't be read: {str(error).split('. ')[0]}") from error


def _file_system(path: str) -> tuple[Any, str]:
    """Returns a path's file system, without cached listings, and the path in it. A path
    without a protocol is local: fsspec would find other file systems in `a::b` and `data:x`."""
    if "://" not in path:
        return fsspec.filesystem("file"), os.path.abspath(path)
    files, inner = fsspec.core.url_to_fs(path)
    files.invalidate_cache()
    return files, inner


def _store(path: str, read_only: bool = False) -> Any:
    """Returns a folder or bucket as zarr takes it, which might take a folder's name for a URL."""
    make: Any = FsspecStore.from_url if "://" in path else LocalStore
    return make(path, read_only=read_only)


def group(path: str, mode: Any) -> Any:
    """Opens a zarr group in a folder or a bucket."""
    return zarr.open_group(_store(path), mode=mode)


def names(path: str) -> list[str]:
    """Returns the names of the entries of a folder or bucket prefix; none if it doesn't exist.
    Raises OSError if the store can't be reached."""
    with opening(path), contextlib.suppress(FileNotFoundError):
        files, inner = _file_system(path)
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in files.ls(inner, detail=False)]
    return []


def attributes(path: str) -> dict[str, Any]:
    """Returns the attributes of a group, unverified: none if they are missing or don't parse.
    Raises OSError if the store can't be reached."""
    text = b""
    with opening(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        files, inner = _file_system(path)
        text = files.cat_file(f"{inner}/zarr.json")
    with contextlib.suppress(Exception):  # of many types, as the file may hold anything
        return dict(json.loads(text)["attributes"])
    return {}


def checksum(attrs: dict[str, Any]) -> int:
    """Returns the CRC-32 of attributes, except for `checksum` itself and `write_completed`, which
    marked checkpoints of an earlier format."""
    rest = {key: attrs[key] for key in attrs if key not in ("checksum", "write_completed")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def write_group(path: str, attrs: dict[str, Any]) -> None:
    """Creates a group with these attributes and their checksum, and reads it back."""
    signed = attrs | {"checksum": checksum(attrs)}
    # Other hosts may have written chunks there, which open_group would refuse.
    zarr.create_group(_store(path), attributes=signed, zarr_format=3)
    if attributes(path) != signed:
        raise StoreError(f"{path} was written but can't be read back")


def read_group(path: str) -> dict[str, Any]:
    """Returns the attributes that `write_group` wrote, or raises DamageError."""
    attrs = attributes(path)
    if attrs.get("checksum") != checksum(attrs):
        raise DamageError(f"{path}/zarr.json is missing, or was changed since it was written")
    return attrs


def remove(path: str) -> None:
    """Removes a folder, if it is there."""
    files, inner = _file_system(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if "://" in path and fsspec.core.has_magic(inner):
            for file in files.find(inner):  # rm would remove other runs by the pattern `run*`
                files.rm_file(file)
        else:
            files.rm(inner, recursive=True)


class _WholeStore(WrapperStore[Any]):
    """Raises DamageError for a missing file, such as a chunk, which zarr would read as zeros, and
    StoreError for one that can't be fetched, whatever the store raises."""

    _supports_sync_io = False  # makes zarr 3.4 read with `get` only

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        value = None
        with opening("the store"), contextlib.suppress(FileNotFoundError):  # no folder
            value = await super().get(key, *args, **kwargs)
        if value is None:
            raise DamageError("it is missing")
        return value


def array(path: str, name: str, description: Any, read_only: bool = True) -> zarr.Array:
    """Returns an array in a group, given the content of its zarr.json, which isn't read."""
    place = StorePath(_WholeStore(_store(path, read_only)), name)
    # zarr would leave out chunks of zeros. Here a missing chunk always means a lost chunk.
    return zarr.Array.from_dict(place, description).with_config({"write_empty_chunks": True})


def write(array: zarr.Array, index: Any, values: np.ndarray) -> None:
    """Writes a part of an array that consists of whole chunks."""
    with opening(array.path, "written"):
        array[index] = values.view(array.dtype)


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
    slices = (*np.index_exp[index], *[slice(None)] * array.ndim)
    grid = []
    for part, length, size in zip(slices, array.shape, array.chunks, strict=False):
        covered = range(length)[part]
        grid.append(range(covered.start // size, -(-covered.stop // size)))
    for place in itertools.product(*grid):
        with reading(f"{array.path}: chunk {'.'.join(map(str, place)) or 0}"):
            array.get_block_selection(place)
