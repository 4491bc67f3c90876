"""zarr arrays in a folder or in a bucket: what can't be read is named to the chunk."""

import itertools
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr


class DamageError(ValueError):
    """Part of an array is missing, or isn't what was written."""


def names(path: str) -> list[str]:
    """Of what is in a folder, or under a bucket's prefix; none if that isn't there."""
    store, inner = fsspec.core.url_to_fs(path)
    store.invalidate_cache()
    try:
        return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in store.ls(inner, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: str) -> None:
    """A group, its own description last: up to then it can be told what it was."""
    store, inner = fsspec.core.url_to_fs(path)
    for name in names(path):
        if name != "zarr.json":
            store.rm(f"{inner}/{name}", recursive=True)
    store.rm(inner, recursive=True)


def read(array: zarr.Array, index: Any = ...) -> np.ndarray:
    """A part of an array, by slices. Raises DamageError, naming the first chunk that can't be
    read."""
    try:
        return np.asarray(array[index])
    except Exception as error:  # each codec and store raises its own
        for name, chunk in _chunks(array, index):
            try:
                array[chunk]
            except Exception as cause:
                problem = str(cause).split(". ")[0]
                raise DamageError(f"{array.path}: chunk {name} can't be read: {problem}") from cause
        raise DamageError(f"{array.path} can't be read: {error}") from error


def check_chunks(array: zarr.Array, path: str) -> None:
    """Raises DamageError if an array of the group at `path` lacks a chunk: zarr makes one up."""
    if array.nchunks_initialized == array.nchunks:
        return
    store, inner = fsspec.core.url_to_fs(path)
    lost = [
        name
        for name, _ in _chunks(array, ...)
        if not store.exists("/".join([inner, array.path, "c", *name.split(".")]).rstrip("/"))
    ]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    raise DamageError(f"{array.path}: chunk {lost[0] if lost else '?'} is missing{more}")


def _chunks(array: zarr.Array, index: Any) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """The chunks that a part of an array lies in, each with its name, such as 0.3."""
    given = index if isinstance(index, tuple) else (index,)
    given = tuple(part for part in given if part is not ...)
    ranges = []
    for i, (length, size) in enumerate(zip(array.shape, array.chunks, strict=True)):
        part = given[i] if i < len(given) else slice(None)
        first, last, _ = part.indices(length)
        ranges.append(range(first // size, -(-last // size)))
    for place in itertools.product(*ranges):
        pairs = zip(place, array.chunks, strict=True)
        yield ".".join(map(str, place)), tuple(slice(i * n, (i + 1) * n) for i, n in pairs)
