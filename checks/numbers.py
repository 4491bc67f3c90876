"""Runs a typed function at tiny sizes to compare its results on different meshes, and finds the op
where two runs first differ.

With `types.computing_in("f32")`, two meshes differ only by rounding: measured, about 2e-6 of an
array's largest entry.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import math
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.extend import source_info_util

from checks.layout import PRIMES
from runtime.source import source_line
from shardlib import ops
from shardlib.types import ArrayType, Spec, make_shapes, make_shardings, mesh_shape, type_tree

TOLERANCE = 3e-5  # of an array's largest entry
# Differences are relative to an array's largest entry or, if that is larger, to this share of the
# largest entry in its part of the tree. Otherwise arrays of mere rounding errors, such as the
# gradient of a term that softmax cancels, would always differ.
LEAST = 0.05


# --- Inputs ---------------------------------------------------------------------------------------


def tiny_sizes(hint: Any, sizes: dict[str, int], axes: dict[str, int]) -> dict[str, int]:
    """Returns tiny sizes of dimensions for a mesh of these axes. A dimension that `hint` splits
    gets a prime factor of its own, and splits over its axes and over each axis alone. In float
    arrays it also keeps a factor of 2 or 4 of the given size. Dimensions with the most parts get
    the smallest primes, so that a longer one may have shorter parts. Other dimensions have at most
    8. On a mesh s=2, t=3, weights M/s F/t of 1024 by 4096 get M=60 and F=84: 2 * 3 parts, a factor
    of 4, and the primes 5 and 7."""
    units, groups = dict[str, int](), dict[str, int]()
    for kind in jax.tree.leaves(type_tree(hint)):
        for dim in kind.spec.dims:
            if dim.axes:
                parts = math.prod(axes[axis] for axis in dim.axes)
                units[dim.name] = math.lcm(units.get(dim.name, 1), parts, *axes.values())
                if jnp.issubdtype(kind.dtype, jnp.floating):
                    groups[dim.name] = math.gcd(sizes.get(dim.name, 1), 4)
    primes = iter(PRIMES[1:])
    split = sorted((name for name in sizes if name in units), key=lambda name: -units[name])
    small = {name: min(size, 8) for name, size in sizes.items()}
    return small | {x: math.lcm(units[x], groups.get(x, 1)) * next(primes) for x in split}


def stirred(tree: Any) -> Any:
    """Returns initial values in which no mistake hides: no float is zero, one or equal to another.
    Signs are kept."""
    random = np.random.default_rng(0)

    def leaf(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        added = random.uniform(0.01, 0.05, x.shape) * np.where(x < 0, -1, 1)
        return np.asarray(x * random.uniform(0.5, 1.5, x.shape) + added, x.dtype)

    return jax.tree.map(leaf, jax.device_get(tree))


def made(x: Any, sizes: dict[str, int]) -> Any:
    """Makes entries for an array type, floats between 0 and 1, integers 0 or 1. Returns a tree of
    arrays as it is."""
    if not isinstance(x, ArrayType):
        return x
    random, shape = np.random.default_rng(0), make_shapes(x, sizes)
    entries = random.uniform(0.1, 0.9, shape.shape)
    is_float = jnp.issubdtype(shape.dtype, jnp.floating)
    return (entries if is_float else entries + 0.5).astype(shape.dtype)


# --- Runs -----------------------------------------------------------------------------------------


def run(function: Any, arrays: tuple[Any, ...], *static: Any) -> Any:
    """Returns the result of `function(*arrays, *static)`, a jitted `typed_shard_map`. Arguments and
    results are NumPy arrays."""
    hints = list(typing.get_type_hints(inspect.unwrap(function)).values())[: len(arrays)]
    kinds = tuple(map(type_tree, hints, arrays))
    placed = jax.device_put(arrays, make_shardings(kinds))
    return jax.device_get(function(*placed, *static))


def largest(array: Any) -> float:
    """The largest finite entry of an array, by magnitude."""
    return float(np.abs(array).max(initial=1e-30, where=np.isfinite(array)))


def difference(one: Any, other: Any, least: float = 0) -> float:
    """Returns the largest difference between two arrays, relative to the largest finite entry of
    `other`, or to `least` if that is larger; inf if shapes differ, or if an entry is NaN, or
    infinite in only one of them."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        return math.inf
    apart = np.subtract(one, other, where=one != other, out=np.zeros_like(one))
    apart = np.abs(apart).max(initial=0) / max(largest(other), least)
    return float(apart) if np.isfinite(apart) else math.inf


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lists the arrays that differ by more than rounding, worst first, like `loss by 2.1e-03`. The
    parts of the tree, for LEAST, are the arrays under each top-level name, such as weights/ or nu/,
    and all top-level arrays."""
    tops = {name: name.partition("/")[0] if "/" in name else "" for name in one}
    most = {top: max(largest(one[x]) for x in one if tops[x] == top) for top in tops.values()}
    by = {x: difference(other[x], array, LEAST * most[tops[x]]) for x, array in one.items()}
    worst = sorted(by, key=lambda name: -by[name])
    return [f"{name} by {by[name]:.1e}" for name in worst if by[name] > TOLERANCE]


# --- Where two runs differ ------------------------------------------------------------------------


class Event(NamedTuple):
    """The values that an operand or result of an op takes, or its gradients."""

    what: str  # with its line
    number: int  # in the order of the program
    backward: bool
    values: np.ndarray  # global arrays, one for each time that the op runs; NaN where copies differ


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """Records the operands and results of ops, and their gradients, in functions that are traced
    and run in this context. The list is filled when it ends."""
    names: list[tuple[str, Spec]] = []
    # `store`'s arguments: the value's number, pass and axes to sum over; a device's part of it; and
    # the device's place in the mesh.
    stored: collections.deque[tuple[Any, ...]] = collections.deque()

    def store(*computed: Any) -> None:
        stored.append(computed)  # reading an array's values here would block the devices

    def emit(number: int, backward: bool, x: jax.Array) -> None:
        kind, (_, spec) = jax.typeof(x).manual_axis_type, names[number]
        for axis in kind.unreduced:
            x = lax.psum(x, axis)
        for axis in kind.reduced:  # the same on all devices, which a callback can't take
            x = lax.pcast(x, axis, to="varying")
        # The gradient of a varying value, such as a gathered weight, is still partial.
        pending = tuple(a for a in kind.varying if backward and a not in spec.axes)
        place = [lax.axis_index(axis) for axis in mesh_shape()]
        jax.debug.callback(functools.partial(store, (number, backward, pending)), x, *place)

    def watch(x: jax.Array, spec: Spec, what: str) -> jax.Array:
        number = len(names)
        names.append((f"{what} at {source_line(source_info_util.current().traceback)}", spec))

        @jax.custom_vjp
        def same(x: jax.Array) -> jax.Array:
            emit(number, False, x)
            return x

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            emit(number, True, gradient)
            return (gradient,)

        same.defvjp(lambda x: (same(x), None), backward)
        return same(x) if jnp.issubdtype(x.dtype, jnp.floating) else same.fun(x)

    events: list[Event] = []
    axes = mesh_shape()
    with ops.watching(watch):
        yield events
    jax.effects_barrier()
    # The parts of each value by number, pass and axes to sum over, then by device. Nothing copies
    # all of them, as they may take gigabytes.
    parts: Any = collections.defaultdict(lambda: collections.defaultdict(list))
    while stored:
        key, x, *place = stored.popleft()
        parts[key][tuple(map(int, place))].append(x)
    for number, backward, pending in sorted(parts):
        devices = parts.pop((number, backward, pending))
        what, spec = names[number]
        places = np.ndindex(*axes.values())
        block = np.stack([np.asarray(devices[place], np.float32) for place in places])
        values = assembled(block.reshape(*axes.values(), *block.shape[1:]), spec, axes, pending)
        events.append(Event(what, number, backward, values))


def assembled(block: np.ndarray, spec: Spec, axes: Any, pending: tuple[str, ...]) -> np.ndarray:
    """Returns the global arrays, [time, *dims], of devices' parts, [*axes, time, *part]. Sums parts
    over `pending` axes. Copies that differ become NaN."""
    left: list[str] = []
    for axis in reversed(axes):
        i = list(axes).index(axis)
        if axis in spec.axes:
            left.insert(0, axis)
        elif axis in pending:
            block = block.sum(i)
        else:
            first = block.take(0, i)
            copies = difference(block, np.broadcast_to(np.expand_dims(first, i), block.shape))
            block = first if copies <= TOLERANCE else first * np.nan
    dims = [f"x{i}" for i in range(len(spec.dims))]
    right = [f"({' '.join([*dim.axes, x])})" for dim, x in zip(spec.dims, dims, strict=True)]
    return rearrange(block, f"{' '.join([*left, 'time', *dims])} -> time {' '.join(right)}")


def first_difference(one: list[Event], other: list[Event]) -> tuple[Event | None, Event] | None:
    """Returns the last event before two runs differ, if any, and the first that differs."""
    there = {(event.number, event.backward): event for event in other}
    previous = None
    for event, time in _in_order(one):
        match = there.get((event.number, event.backward))
        if not match or match.what != event.what or match.values.shape != event.values.shape:
            continue
        if difference(event.values[time], match.values[time]) > TOLERANCE:
            return previous, event
        previous = event
    return None


def _in_order(events: list[Event]) -> Iterator[tuple[Event, int]]:
    """Yields events in the order in which they run, each with its iteration: forward, then
    backward. Adjacent events that occur more than once are a loop's body."""
    forward = [event for event in events if not event.backward]
    backward = [event for event in reversed(events) if event.backward]
    for run in forward, backward:
        for _, loop in itertools.groupby(run, lambda event: len(event.values) > 1):
            body = list(loop)
            for time in range(max(len(event.values) for event in body)):
                yield from ((event, time) for event in body if time < len(event.values))
