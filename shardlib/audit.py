"""What a traced function does, read off its jaxpr; and that it does nothing its source hides."""

import collections
import math
import os
from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params

from shardlib.ops import SCOPE
from shardlib.types import Dim, ShardTypeError, own_frames

COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pmax", "pmin"),
    *("ppermute", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter"),
    *("unreduced_psum", "unreduced_reduce_scatter"),
}

# Primitives that keep an array's shape and yet don't treat the places along a dimension alike, and
# the parameter that says which dimension.
ORDERED = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
    "sort": "dimension",
    "rev": "dimensions",
    "iota": "dimension",
}


def equations(jaxpr: Any, path: str = "", line: str = "") -> Iterator[tuple[JaxprEqn, str, str]]:
    """Each equation, those of inner jaxprs too, with the names that it runs under and its line.

    What a library's jitted function holds was traced where it was first called: its line is that of
    the call at hand.
    """
    for eqn in jaxpr.eqns:
        here = f"{path}/{eqn.source_info.name_stack}"
        inner_eqns = [e for inner in jaxprs_in_params(eqn.params) for e in inner.eqns]
        frames = map(own_frames, (e.source_info.traceback for e in (eqn, *inner_eqns)))
        own = next(filter(None, frames), None)  # a loop that JAX took apart has but its body's
        at = line or (f"{os.path.basename(own[0].file_name)}:{own[0].line_num}" if own else "")
        yield eqn, here, at
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, here, at if path and eqn.primitive.name == "jit" else line)


def _lengths(eqn: JaxprEqn) -> list[int]:
    """The lengths of the dimensions that an equation reduces, cuts, joins, indexes or orders."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [params["length"]]
    taken, shapes = ([getattr(v.aval, "shape", ()) for v in vs] for vs in (eqn.invars, eqn.outvars))
    if name in ORDERED:
        positions = params[ORDERED[name]]
        return [shapes[0][i] for i in (positions if isinstance(positions, tuple) else (positions,))]
    if name.startswith("scatter"):
        return [shapes[0][i] for i in params["dimension_numbers"].scatter_dims_to_operand_dims]
    if name == "dynamic_update_slice":
        update = taken[1]
        return [n for n, part in zip(shapes[0], update, strict=True) if n != part]
    if name == "reshape" or (next(jaxprs_in_params(params), None) and name[:6] != "reduce"):
        return []
    kept = [collections.Counter(shape) for shape in shapes]
    counts = map(collections.Counter, taken)
    return [n for count in counts for n in count if all(count[n] > out[n] for out in kept)]


def _split(length: int, axes: dict[str, int], sizes: dict[str, int]) -> list[str]:
    """The dimensions that a length at probe sizes is made of, with the axes that they are split
    over; nothing if it is whole.

    Each dimension's size is a prime of its own times 2 and all axes' sizes, which are primes; a
    split over an axis takes one factor of it away.
    """
    total = 2 * math.prod(axes.values())
    dims = [name for name, size in sizes.items() if length % (size // total) == 0]
    rest = length // math.prod(sizes[name] // total for name in dims)
    split = tuple(a for a in reversed(axes) if rest % axes[a] ** len(dims))
    if not split or rest % 2 ** len(dims) or total ** len(dims) % rest:
        return []  # whole, or a length that only happens to have these factors
    return [str(Dim(name, split)) for name in dims]


def check(jaxpr: Any, axes: dict[str, int], sizes: dict[str, int]) -> None:
    """Raises ShardTypeError for what a function, traced at the sizes of `devices.probe_mesh`, does
    by hand along a split dimension, and for a collective that no op says.

    To JAX a device's part of an array looks like a whole one that differs between devices: only its
    lengths tell that a sum by jnp, say, is of a part. The backward pass does sum along split
    dimensions: those that an op has split forward, and in which the op pays the sum.
    """
    problems = []
    for eqn, path, line in equations(jaxpr):
        if SCOPE.search(path):
            continue
        name = eqn.primitive.name
        if name in COLLECTIVES:
            over = ", ".join(eqn.params.get("axis_name") or eqn.params["axes"])
            problems.append(f"{line}: {name} over {over}, which no op says")
        for length in _lengths(eqn) if "transpose(" not in path else ():
            if dims := _split(length, axes, sizes):
                problems.append(
                    f"{line}: {name} along {' '.join(dims)} by hand, where each device has a part "
                    "of it: use an op, or ops.all_gather first"
                )
    if problems:
        raise ShardTypeError("\n".join(dict.fromkeys(problems)))
