"""zarr arrays in a folder or in a bucket: what can't be read is named to the chunk."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr

from shardlib.errors import UserError


class DamageError(UserError):
    """Part of an array is missing, or isn't what was written."""


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Each store raises its own errors: all become an OSError, which names the path."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise OSError(f"{path} can't be opened: {error}") from error


def names(path: str) -> list[str]:
    """Of what is in a folder, or under a bucket's prefix; none if that isn't there. Raises OSError
    where the store can't be had, and for a file."""
    with opening(path):
        store, inner = fsspec.core.url_to_fs(path)
        store.invalidate_cache()
        try:
            found = store.ls(inner, detail=False)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise OSError("a file is in its way") from error
    if found == [inner]:
        raise NotADirectoryError(f"{path} is a file, not a folder")
    return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in found]


def files(path: str) -> set[str]:
    """All that are in a folder, or under a prefix, however deep, by their names from there on."""
    with opening(path):
        store, inner = fsspec.core.url_to_fs(path)
        store.invalidate_cache()
        return {name.removeprefix(f"{inner}/") for name in store.find(inner)}


def attributes(path: str) -> dict[str, Any]:
    """A zarr group's; none if it isn't there. Raises DamageError where they can't be read, and
    OSError where the store can't be had."""
    with opening(path):
        store, inner = fsspec.core.url_to_fs(path)
        try:
            text = store.cat_file(f"{inner}/zarr.json")
        except (FileNotFoundError, NotADirectoryError):
            return {}
    try:
        return dict(json.loads(text)["attributes"])
    except (ValueError, TypeError, KeyError) as error:
        raise DamageError(f"its attributes can't be read: {error!r}") from None


def remove(path: str) -> None:
    """A group, its own description last: up to then it can be told what it was."""
    store, inner = fsspec.core.url_to_fs(path)
    for name in names(path):
        if name != "zarr.json":
            store.rm(f"{inner}/{name}", recursive=True)
    store.rm(inner, recursive=True)


def read(array: zarr.Array, index: Any = ...) -> np.ndarray:
    """A part of an array, by slices. Raises DamageError, naming the first chunk that isn't what was
    written, and OSError where the store doesn't give it."""
    try:
        return np.asarray(array[index])
    except Exception as error:  # each codec and store raises its own
        for place, chunk in _chunks(array, index):
            try:
                array[chunk]
            except Exception as cause:
                problem = str(cause).split(". ")[0]
                message = f"{array.path}: {_shown(place)} can't be read: {problem}"
                # Codecs raise these; stores raise an OSError, or one of their own.
                if isinstance(cause, ValueError | RuntimeError):
                    raise DamageError(message) from cause
                raise OSError(message) from cause
        raise OSError(f"{array.path} can't be read: {error}") from error


def check_chunks(array: zarr.Array, files: set[str]) -> None:
    """Raises DamageError if an array lacks a chunk among its group's files, where zarr looks for
    it: it would make one up."""
    key = array.metadata.encode_chunk_key
    lost = [place for place, _ in _chunks(array, ...) if f"{array.path}/{key(place)}" not in files]
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise DamageError(f"{array.path}: {_shown(lost[0])} is missing{more}")


def _shown(place: tuple[int, ...]) -> str:
    """`chunk 0.3`; a scalar has but one."""
    return f"chunk {'.'.join(map(str, place))}" if place else "its chunk"


def _chunks(array: zarr.Array, index: Any) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The chunks that a part of an array lies in, each with its place in their grid."""
    given = index if isinstance(index, tuple) else (index,)
    parts = [part for part in given if part is not ...]
    ranges, rest = [], [slice(None)] * (array.ndim - len(parts))
    for length, size, part in zip(array.shape, array.chunks, parts + rest, strict=True):
        first, last, _ = part.indices(length)
        ranges.append(range(first // size, -(-last // size)))
    for place in itertools.product(*ranges):
        pairs = zip(place, array.chunks, strict=True)
        yield place, tuple(slice(i * n, (i + 1) * n) for i, n in pairs)
