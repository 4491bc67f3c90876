"""Collectives and contractions whose string says what they do, and is checked.

    y = ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", h, w_down)   # a sum is owed
    y = ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)                       # and paid

Call them inside a `typed_shard_map`. Each op checks its operands against the left side of its
string, itself against what it can do, and its result against the right side; what doesn't hold is
a ShardTypeError (or a SpecError, if the string can't be read) while tracing. Each runs under a
`jax.named_scope` that carries its string, which the jaxpr, the HLO and a profiler show. JAX has no
`vmap` of values that owe sums.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.types import (
    Dim,
    DType,
    ShardTypeError,
    Spec,
    axes_problem,
    check,
    check_tree,
    inside_shard_map,
    mesh_shape,
    parse_signature,
)


def scope_name(op: str, signature: str) -> str:
    """The name an op runs under. "/" would start a new path segment there, so it becomes "|"."""
    return f"{op}({signature})".replace("/", "|")


# Finds that name, of any op, in a longer path.
SCOPE = re.compile(r"\w+\([^()]*->[^()]*\)|\bsums?_of_squares\b")


class Call:
    """One call of an op: its parsed string, and how it complains."""

    def __init__(self, op: str, signature: str):
        self.operands, self.result = parse_signature(signature)
        self.where = f'{op}("{signature}")'

    def require(self, condition: object, problem: str) -> None:
        if not condition:
            raise ShardTypeError(f"{self.where}: {problem}")


def define_op(implementation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps `implementation(call, *operands)` into an op that takes a string and is checked."""
    name = implementation.__name__
    shown = f"{implementation.__module__.rpartition('.')[2]}.{name}"
    parameters = inspect.signature(implementation).parameters.values()
    takes = sum(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters) - 1  # 0: any number

    @functools.wraps(implementation)
    def op(signature: str, *operands: jax.Array, **options: Any) -> jax.Array:
        if not isinstance(signature, str):
            raise ShardTypeError(f"{shown} takes its string first, then its operands")
        call = Call(shown, signature)
        call.require(inside_shard_map(), "call it inside a typed_shard_map")
        count = len(call.operands)
        call.require(takes in (0, count), f"it takes {takes} operand(s), not {count}")
        call.require(
            len(operands) == count, f"the string has {count} operand(s), the call {len(operands)}"
        )
        for spec in (*call.operands, call.result):
            problem = axes_problem(spec)
            call.require(not problem, f"`{spec}`: {problem}")
            brackets = name != "index_unreduced" and any(dim.indexed for dim in spec.dims)
            call.require(not brackets, f"`{spec}`: only ops.index_unreduced takes brackets")
        for i, (spec, operand) in enumerate(zip(call.operands, operands, strict=True)):
            check(operand, spec, f"operand {i + 1} of {call.where}")
        with jax.named_scope(scope_name(name, signature)):
            result = implementation(call, *operands, **options)
        check(result, call.result, f"the result of {call.where}")
        return result

    return op


def _varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` as a value that may differ along `axes`: a cast in the type, no communication."""
    kind = jax.typeof(x).manual_axis_type
    missing = tuple(a for a in axes if a not in kind.varying and a not in kind.unreduced)
    return lax.pcast(x, missing, to="varying") if missing else x


def _owing(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` as partial sums over `axes`, whose total is the value: a cast, no communication."""
    return lax.pcast(_varying(x, axes), axes, to="unreduced") if axes else x


def _names(spec: Spec) -> list[str]:
    return [dim.name for dim in spec.dims]


def _one_to_one(call: Call, longer: Spec, shorter: Spec) -> list[tuple[int, tuple[str, ...]]]:
    """Where `longer` has more axes: the position, and the trailing axes that `shorter` lacks."""
    call.require(
        _names(longer) == _names(shorter), "the dimensions must be the same, in the same order"
    )
    beyond = []
    for i, (long, short) in enumerate(zip(longer.dims, shorter.dims, strict=True)):
        kept = len(short.axes)
        call.require(
            long.axes[:kept] == short.axes,
            f"{long} and {short}: the axes that change must be the last of {long}, "
            "as the parts lie in that order",
        )
        if long.axes[kept:]:
            beyond.append((i, long.axes[kept:]))
    return beyond


@define_op
def all_gather(call: Call, x: jax.Array) -> jax.Array:
    """Makes dimensions whole along the axes that the right side leaves out.

        ops.all_gather("M/d F/t -> M F/t", w)       over d
        ops.all_gather("M/t/d -> M", gain)          over t and d

    Forward: all-gather. Backward: reduce-scatter over the same axes.
    Raises ShardTypeError if it gathers nothing, if an axis before the last is left out
    (`M/t/d -> M/d`), or on pending sums.
    """
    (given,), wanted = call.operands, call.result
    call.require(not given.unreduced and not wanted.unreduced, "pay the sum before the gather")
    gathered = _one_to_one(call, given, wanted)
    call.require(gathered, "it gathers nothing")
    for i, axes in gathered:
        x = lax.all_gather(_varying(x, axes), axes, axis=i, tiled=True)
    return x


def _paid(call: Call) -> tuple[str, ...]:
    """The axes over which the left side owes a sum and the right side doesn't."""
    (given,), wanted = call.operands, call.result
    new = ",".join(a for a in wanted.unreduced if a not in given.unreduced)
    call.require(not new, f"it can't leave a sum over {new} owed that wasn't owed before")
    paid = tuple(a for a in given.unreduced if a not in wanted.unreduced)
    call.require(paid, "no sum is paid: the left side needs {U:axis}, the right side not")
    return paid


@define_op
def psum_scatter(call: Call, x: jax.Array) -> jax.Array:
    """Adds up partial sums; each device keeps its part of the total.

        ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)

    Forward: reduce-scatter. Backward: all-gather over the same axes.
    Raises ShardTypeError unless exactly the axes whose sums are paid appear at the end of a
    dimension's axes; JAX raises ValueError for one that does not split evenly.
    """
    (given,), wanted = call.operands, call.result
    paid = _paid(call)
    scattered = _one_to_one(call, wanted, given)
    axes = tuple(a for _, split in scattered for a in split)
    call.require(
        set(axes) == set(paid),
        f"the sum over {', '.join(paid)} is paid, but the result is newly split over "
        f"{', '.join(axes) or 'nothing'}" + ("" if axes else ": ops.psum leaves it whole"),
    )
    for i, split in scattered:
        x = lax.psum_scatter(x, split, scatter_dimension=i, tiled=True)
    return x


@define_op
def psum(call: Call, x: jax.Array) -> jax.Array:
    """Adds up partial sums; each device has the whole total.

        ops.psum("B/d L {U:t} -> B/d L", x)
        ops.psum("{U:d} -> ", loss)

    Forward: all-reduce. Backward: nothing.
    Raises ShardTypeError where no sum is owed, or where a dimension's split would change.
    """
    (given,), wanted = call.operands, call.result
    paid = _paid(call)
    call.require(
        given.dims == wanted.dims,
        "a psum changes no dimension; ops.all_gather and ops.psum_scatter change splits",
    )
    return lax.psum(x, paid)


def _owed_by_removing(call: Call, removed: list[Dim], before: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of summed-over dimensions, which the right side must declare as owed."""
    new = tuple(a for dim in removed for a in dim.axes)
    split = (*new, *call.result.axes)
    for axis in split:
        call.require(split.count(axis) == 1, f"axis {axis} splits two dimensions: gather one first")
    owed = ",".join(a for a in mesh_shape() if a in (*new, *before))
    fix = f"write {{U:{owed}}} on the right" if owed else "leave {U:} out on the right"
    over = ", ".join(str(dim) for dim in removed if dim.axes) or "no split dimension"
    problem = f"it sums over {over}, so the result owes a sum over {owed or 'no axis'}: {fix}"
    call.require(set(call.result.unreduced) == {*new, *before}, problem)
    return new


def _reduced(call: Call) -> tuple[tuple[int, ...], list[Dim]]:
    """The positions and dimensions that the right side leaves out."""
    (given,), wanted = call.operands, call.result
    out = [i for i, dim in enumerate(given.dims) if dim not in wanted.dims]
    kept = tuple(dim for dim in given.dims if dim in wanted.dims)
    call.require(
        kept == wanted.dims, "the right side must be the left side's dimensions less the reduced"
    )
    call.require(out, "it reduces nothing")
    return tuple(out), [given.dims[i] for i in out]


@define_op
def reduce_sum(call: Call, x: jax.Array) -> jax.Array:
    """Sums over the dimensions that the right side leaves out; over split ones, only this part.

        ops.reduce_sum("B/d L V/t -> B/d L {U:t}", x)

    Communicates nothing: the sum over the axes of a split dimension is left owed, and declared.
    Raises ShardTypeError where it isn't.
    """
    positions, removed = _reduced(call)
    owed = _owed_by_removing(call, removed, call.operands[0].unreduced)
    return _owing(jnp.sum(x, axis=positions), owed)


@define_op
def reduce_max(call: Call, x: jax.Array) -> jax.Array:
    """The maximum over the dimensions that the right side leaves out, split or not.

        ops.reduce_max("B/d L V/t -> B/d L", lax.stop_gradient(x))

    Forward: all-reduce (max) over the axes of the split ones. It has no gradient: stop it before.
    Not every backend's all-reduce passes on a NaN.
    """
    positions, removed = _reduced(call)
    pending = (*call.operands[0].unreduced, *call.result.unreduced)
    call.require(not pending, "pay the sum before the maximum; none is left after it")
    axes = tuple(a for dim in removed for a in dim.axes)
    x = jnp.max(x, axis=positions)
    return lax.pmax(_varying(x, axes), axes) if axes else x


@define_op
def einsum_unreduced(call: Call, *operands: jax.Array, dtype: DType | None = None) -> jax.Array:
    """The einsum of each device's parts.

        ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, w_up)
        ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", h, w_down)
        ops.einsum_unreduced("B/d L M, V/t M -> B/d L V/t", x, unembed, dtype=f32)

    Communicates nothing forward. Backward neither, unless an operand is the same all along an axis
    and another is not: the first one's gradient is then summed over that axis, by an all-reduce.
    Where a summed-over dimension is split over an axis, the sum over it is left owed, and declared.
    The result has the operands' dtype, or is left in a wider one, in which it was summed; its
    gradient is then rounded to the operands' dtype, so that products run in that one backward too.
    Raises ShardTypeError where one name has two splits, two dimensions are split over one axis,
    dtypes differ, operands owe sums, or {U:} isn't right.
    """
    wanted = call.result
    seen: dict[str, Dim] = {}
    for spec in (*call.operands, wanted):
        repeated = [name for name in _names(spec) if _names(spec).count(name) > 1]
        call.require(not repeated, f"`{spec}`: give the two {repeated[:1]} names of their own")
        for dim in spec.dims:
            first = seen.setdefault(dim.name, dim) if spec is not wanted else seen.get(dim.name)
            call.require(first, f"{dim} on the right is in no operand")
            call.require(first == dim, f"{first} and {dim}: one name has one split; gather first")
        call.require(not spec.unreduced or spec is wanted, f"`{spec}`: pay the sum first")
    dtypes = sorted({str(x.dtype) for x in operands})
    call.require(len(dtypes) == 1, f"operands of {' and '.join(dtypes)}: cast one of them")
    removed = [dim for name, dim in seen.items() if name not in _names(wanted)]
    owed = _owed_by_removing(call, removed, ())
    letters = {name: chr(ord("a") + i) for i, name in enumerate(seen)}
    terms = ["".join(letters[name] for name in _names(spec)) for spec in (*call.operands, wanted)]
    subscripts = ",".join(terms[:-1]) + "->" + terms[-1]
    if dtype is None or dtype.dtype == operands[0].dtype:
        return _owing(jnp.einsum(subscripts, *operands), owed)
    return _owing(widening_einsum(subscripts, dtype.dtype, *operands), owed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def widening_einsum(subscripts: str, dtype: Any, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=dtype)


def _widening_forward(subscripts: str, dtype: Any, *operands: jax.Array) -> tuple[Any, Any]:
    return widening_einsum(subscripts, dtype, *operands), operands


def _widening_backward(subscripts: str, _: Any, operands: Any, gradient: jax.Array) -> Any:
    _, narrow = jax.vjp(functools.partial(jnp.einsum, subscripts), *operands)
    return narrow(gradient.astype(operands[0].dtype))


widening_einsum.defvjp(_widening_forward, _widening_backward)


@define_op
def index_unreduced(call: Call, table: jax.Array, indices: jax.Array) -> jax.Array:
    """Looks `indices` up in the bracketed dimension of `table`, which may be split.

        ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", embed, ids)
        ops.index_unreduced("B/d L [V/t], B/d L -> B/d L {U:t}", logits, targets)

    Indices are global. A device gives the entries it holds, and zeros for the rest, so the sum over
    the bracketed dimension's axes is left owed, and declared; it communicates nothing. Dimensions
    that table and indices share are looked up one by one. The result is the indices' dimensions,
    then the table's remaining ones. An index outside 0 <= index < V gives zeros. Backward, the
    gradients of an entry that is looked up often are summed in f32.
    Raises ShardTypeError where the string is not of this form, or indices aren't i32 or u32.
    """
    tables, ids = call.operands
    looked_up = [dim for dim in tables.dims if dim.indexed]
    call.require(len(looked_up) == 1, "the first operand needs one dimension in brackets: [V/t]")
    call.require(indices.dtype in (jnp.int32, jnp.uint32), f"indices are {indices.dtype}")
    call.require(not tables.unreduced and not ids.unreduced, "pay the sum first")
    (dim,) = looked_up
    shared = tuple(d for d in tables.dims if d in ids.dims)
    call.require(
        tables.dims[: len(shared)] == shared == ids.dims[: len(shared)],
        "dimensions that both operands have must come first in both, in the same order",
    )
    wanted = (*ids.dims, *(d for d in tables.dims if not d.indexed and d not in shared))
    call.require(
        call.result.dims == wanted, f"the result's dimensions are `{Spec(wanted)}`, in that order"
    )
    owed = _owed_by_removing(call, [dim], ())
    position = tables.dims.index(dim)
    size = table.shape[position]
    first = lax.axis_index(dim.axes) * size if dim.axes else 0
    local = indices.astype(jnp.int32) - first
    table = jnp.moveaxis(table, position, len(shared))
    if ids.dims == shared:  # one entry of each row: as its backward pass, a scatter would copy them
        local = jnp.expand_dims(local, tuple(range(len(shared), table.ndim)))
        here = local == lax.broadcasted_iota(jnp.int32, table.shape, len(shared))
        return _owing(jnp.where(here, table, 0).sum(len(shared)), owed)
    lookup = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    local = jnp.where((local >= 0) & (local < size), local, size)
    wide = table.astype(jnp.float32)
    for _ in shared:
        lookup = jax.vmap(lookup)
    return _owing(lookup(wide, local).astype(table.dtype), owed)


@jax.named_scope("sum_of_squares")
def sum_of_squares(hint: Any, tree: Any) -> jax.Array:
    """The sum of the squares of all numbers in a typed tree, f32[""], whatever its layout.

        grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, grads))

    Forward: one all-reduce of a scalar for each set of axes that arrays are split over; an array
    that is whole along an axis counts once. For use outside differentiation.
    """
    totals: dict[tuple[str, ...], jax.Array] = {}
    for axes, square in _squares(hint, tree, "sum_of_squares"):
        totals[axes] = totals[axes] + square if axes in totals else square
    paid = [lax.psum(_owing(x, axes), axes) if axes else x for axes, x in totals.items()]
    total = sum(paid, start=jnp.float32(0))
    check(total, Spec(), "the result of ops.sum_of_squares")
    return total


@jax.named_scope("sums_of_squares")
def sums_of_squares(hint: Any, tree: Any, each: str) -> list[jax.Array]:
    """The same of each array in the tree, f32[""]; or, where its first dimension is `each`, of each
    of its parts along that, f32[each].

        w_q_norms = jnp.sqrt(ops.sums_of_squares(Layers, grads.layers, "layers")[1])

    Forward: an all-reduce for each array that is split. For use outside differentiation.
    """
    squares = _squares(hint, tree, "sums_of_squares", each)
    return [lax.psum(_owing(x, axes), axes) if axes else x for axes, x in squares]


def _squares(
    hint: Any, tree: Any, op: str, each: str = ""
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """Of each array the axes it is split over, and the sum that is owed over them."""
    if not inside_shard_map():
        raise ShardTypeError(f"ops.{op}: call it inside a typed_shard_map")
    for path, kind, x in check_tree(tree, hint, f"the operand of ops.{op}"):
        if kind.spec.unreduced:
            raise ShardTypeError(f"{path} is {kind}: pay the sum first")
        kept = kind.spec.dims[:1] == (Dim(each),)
        square = jnp.sum(jnp.square(x.astype(jnp.float32)), tuple(range(kept, x.ndim)))
        yield tuple(a for a in mesh_shape() if a in kind.spec.axes), square
