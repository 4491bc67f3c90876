"""zarr arrays in a folder or in a bucket: what can't be read is named to the chunk."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr
from zarr.storage import WrapperStore

from shardlib.errors import UserError


class DamageError(UserError):
    """Part of an array is missing, or isn't what was written."""


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Each store raises its own errors: all become an OSError, which names the path."""
    try:
        yield
    except DamageError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(f"{path} can't be opened: {why}") from error


def names(path: str) -> list[str]:
    """Of what is in a folder, or under a bucket's prefix; none if that isn't there. Raises OSError
    where the store can't be had."""
    with opening(path):
        store, inner = fsspec.core.url_to_fs(path)
        store.invalidate_cache()
        try:
            found = store.ls(inner, detail=False)
        except FileNotFoundError:
            return []
    return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in found]


def attributes(path: str) -> dict[str, Any] | None:
    """A zarr group's: empty if it isn't there, None if they are damaged. Raises OSError where the
    store can't be had."""
    with opening(path):
        store, inner = fsspec.core.url_to_fs(path)
        try:
            text = store.cat_file(f"{inner}/zarr.json")
        except (FileNotFoundError, NotADirectoryError):
            return {}
    try:
        return dict(json.loads(text)["attributes"])
    except (ValueError, TypeError, KeyError):
        return None


def remove(path: str) -> None:
    """A group, its own description last: up to then it can be told what it was."""
    store, inner = fsspec.core.url_to_fs(path)
    for name in names(path):
        if name != "zarr.json":
            store.rm(f"{inner}/{name}", recursive=True)
    store.rm(inner, recursive=True)


class _WholeStore(WrapperStore[Any]):
    """Fails where a chunk is missing, which zarr takes for one of zeros."""

    _supports_sync_io = False  # zarr 3.4 has ways to read that go around `get`

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        value = await super().get(key, *args, **kwargs)
        if value is None and not key.endswith("zarr.json"):
            raise DamageError("it is missing")
        return value


def open_group(path: str) -> zarr.Group:
    """A zarr 3 group, to read. Of its arrays, each chunk has to be there."""
    group = zarr.open_group(path, mode="r", zarr_format=3)
    return zarr.open_group(_WholeStore(group.store), path=group.path, mode="r", zarr_format=3)


def read(array: zarr.Array, index: Any = ()) -> np.ndarray:
    """A part of an array, by slices. Raises DamageError, naming a chunk that is missing or isn't
    what was written, and OSError where the store doesn't give it."""
    try:
        return np.asarray(array[index])
    except Exception:  # zarr doesn't say which chunk it is about
        check(array, index)
    return np.asarray(array[index])  # the store was in trouble, and is no more


def check(array: zarr.Array, index: Any = ()) -> None:
    """Reads a part of an array, chunk by chunk, and raises what `read` does."""
    given = index if isinstance(index, tuple) else (index,)
    given += (slice(None),) * (array.ndim - len(given))
    grid = []
    for part, length, size in zip(given, array.shape, array.chunks, strict=True):
        covered = range(length)[part]
        grid.append(range(covered.start // size, -(-covered.stop // size)))
    for place in itertools.product(*grid):
        corners = zip(place, array.chunks, strict=True)
        try:
            array[tuple(slice(i * size, (i + 1) * size) for i, size in corners)]
        except Exception as error:
            chunk = f"{array.path}: chunk {'.'.join(map(str, place)) or 0}"
            # Codecs raise these two; stores raise OSError, or errors of their own.
            kind = DamageError if isinstance(error, ValueError | RuntimeError) else OSError
            raise kind(f"{chunk} can't be read: {str(error).split('. ')[0]}") from error
