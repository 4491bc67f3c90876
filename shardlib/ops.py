"""Collectives and contractions. Each takes a string that says what it does, and checks it.

    y = ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", h, w_down)   # partial sums
    y = ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)                       # reduced

Call the ops inside a `typed_shard_map`. While tracing, an op checks its operands against the left
side of the string, its result against the right side, and that it can do what the string asks; if
not, it raises ShardTypeError (SpecError if the string can't be parsed). Each op runs under a
`jax.named_scope` that carries its string, so it shows up in the jaxpr, the HLO and profiles. Ops
don't work under `vmap`, which JAX lacks for unreduced values. Ops named `_unreduced`, reduce_sum
and reduce_mean communicate nothing: their sums over split dimensions are unreduced.
"""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.local import einsum, gather, scatter, unreduced, varying
from shardlib.types import (
    Dim,
    DType,
    ShardTypeError,
    Spec,
    axes_problem,
    check,
    check_replicated,
    check_tree,
    inside_shard_map,
    mesh_shape,
    named,
    parse_signature,
    several,
    show_groups,
)

# Finds an op's scope name in a longer path. jvp(ab,bc->ac) is the gradient of a jnp.einsum.
SCOPE = re.compile(r"\b(?!(?:jvp|transpose|vmap)\()\w+\([^()]*->[^()]*\)|\bsums?_of_squares\b")


# Called with each operand and result of an op, its layout and description; returns the value.
# `checks.numbers.recording` sets a function that stores it.
watching = jax.make_user_context(lambda x, spec, what: x)


class Call:
    """One call of an op: its parsed string, and the start of its error messages."""

    def __init__(self, op: str, signature: str):
        *self.operands, self.result = (spec.expanded for spec in parse_signature(signature))
        self.where = f'{op}("{signature}")'

    def require(self, condition: object, problem: str) -> None:
        if not condition:
            raise ShardTypeError(f"{self.where}: {problem}")


def define_op(implementation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Decorator: makes `implementation(call, *operands)` an op that takes a string first and checks
    its operands and result."""
    name = implementation.__name__
    module = implementation.__module__.removesuffix(f".{name}")
    full_name = f"{module.rpartition('.')[2]}.{name}"
    parameters = inspect.signature(implementation).parameters.values()
    arity = sum(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters) - 1  # 0: any number

    @functools.wraps(implementation)
    def op(signature: str, *operands: jax.Array, **options: Any) -> jax.Array:
        if not isinstance(signature, str):
            raise ShardTypeError(f"{full_name} takes its string first, then its operands")
        call = Call(full_name, signature)
        call.require(inside_shard_map(), "call it inside a typed_shard_map")
        count = len(call.operands)
        call.require(arity in (0, count), f"it takes {arity} operand(s), not {count}")
        call.require(
            len(operands) == count, f"its string has {count} operand(s), the call {len(operands)}"
        )
        for spec in (*call.operands, call.result):
            problem = axes_problem(spec)
            call.require(not problem, f"`{spec}`: {problem}")
            brackets = name != "index_unreduced" and any(dim.indexed for dim in spec.dims)
            call.require(not brackets, f"`{spec}`: only ops.index_unreduced takes brackets")
        watched = []
        for i, (spec, operand) in enumerate(zip(call.operands, operands, strict=True)):
            check(operand, spec, what := f"operand {i + 1} of {call.where}")
            watched.append(watching.value(operand, spec, what))
        # A "/" would start a new segment of the path.
        with jax.named_scope(f"{name}({signature})".replace("/", "|")):
            result = implementation(call, *watched, **options)
            varying_along = jax.typeof(result).manual_axis_type.varying
            # Only lax.axis_index, called by hand, makes a value vary along an axis of size 1.
            if alone := tuple(a for a, n in mesh_shape().items() if n == 1 and a in varying_along):
                result = lax.psum(result, alone)
            # An op that would return its operand returns a copy, so that gradients add up in the
            # same order on all meshes. The compiled program has no such copy.
            if any(result is x for x in watched):
                result = jnp.copy(result)
        check(result, call.result, what := f"the result of {call.where}")
        return watching.value(result, call.result, what)

    return op


def _names(spec: Spec) -> list[str]:
    return [dim.name for dim in spec.dims]


def _one_to_one(call: Call, longer: Spec, shorter: Spec) -> list[tuple[int, tuple[str, ...]]]:
    """The positions of dimensions with more axes in `longer`, and the trailing axes that `shorter`
    lacks there."""
    call.require(
        _names(longer) == _names(shorter), "the dimensions must be the same, in the same order"
    )
    extra = []
    for i, (long, short) in enumerate(zip(longer.dims, shorter.dims, strict=True)):
        kept = len(short.axes)
        call.require(
            long.axes[:kept] == short.axes,
            f"{long} and {short}: only the last axes of {long} can be gathered or scattered",
        )
        if long.axes[kept:]:
            extra.append((i, long.axes[kept:]))
    return extra


@define_op
def all_gather(call: Call, x: jax.Array) -> jax.Array:
    """Gathers dimensions over the axes that the right side leaves out.

        ops.all_gather("M/d F/t -> M F/t", w)       over d
        ops.all_gather("M/t/d -> M", gain)          over t and d at once

    Forward: all-gather. Backward: reduce-scatter over the same axes.
    JAX treats the result as varying along these axes, although devices along them hold the same.
    Raises ShardTypeError if it gathers nothing, if it leaves out an axis other than the last
    (`M/t/d -> M/d`), or for an unreduced operand.
    """
    (given,), wanted = call.operands, call.result
    call.require(not given.unreduced and not wanted.unreduced, "reduce it before the gather")
    call.require(given != wanted, "it gathers nothing")
    for i, axes in _one_to_one(call, given, wanted):
        x = gather(varying(x, axes), axes, i)
    return x


@define_op
def split(call: Call, x: jax.Array) -> jax.Array:
    """Splits dimensions that each device holds whole; each keeps its own part.

        ops.split("B/d L M -> B/d L M/t", x)

    Forward: nothing. Backward: an all-reduce over the axes if `x` is replicated over them; nothing
    if `x` comes from an all_gather, whose backward pass adds up the gradients.
    Raises ShardTypeError if it splits nothing, for an unreduced operand, or if a dimension doesn't
    split evenly.
    """
    (given,), wanted = call.operands, call.result
    call.require(not given.unreduced and not wanted.unreduced, "reduce it first")
    call.require(given != wanted, "it splits nothing")
    for i, axes in _one_to_one(call, wanted, given):
        size = x.shape[i] // math.prod(mesh_shape()[axis] for axis in axes)
        first = lax.axis_index(axes) * size
        x = lax.dynamic_slice_in_dim(varying(x, axes), first, size, axis=i)
    return x


@define_op
def all_to_all(call: Call, x: jax.Array) -> jax.Array:
    """Moves axes from one dimension to another.

        ops.all_to_all("N M/d F/t -> N/t/d M F", x)     each device gets some of N matrices, whole
        ops.all_to_all("N/t/d M F -> N M/d F/t", x)     and gives them back

    Forward: an all-to-all for each run of axes that moves together. Backward: the same, the other
    way. Raises ShardTypeError if no axis moves, if an axis is new or missing on the right, if axes
    move other than from the end of one dimension to the end of another, or for an unreduced
    operand. JAX raises ValueError if a dimension doesn't split evenly.
    """
    (given,), wanted = call.operands, call.result
    call.require(not given.unreduced and not wanted.unreduced, "reduce it first")
    call.require(_names(given) == _names(wanted), "the dimensions must be the same, in order")
    call.require({*given.axes} == {*wanted.axes}, "both sides must be split over the same axes")
    call.require(given != wanted, "it moves no axis")
    now, goal = [dim.axes for dim in given.dims], [dim.axes for dim in wanted.dims]
    while now != goal:
        moves = (
            (i, j, axes)
            for i, j in itertools.permutations(range(len(now)), 2)
            for first in range(len(now[i]))
            if (after := now[j] + (axes := now[i][first:])) == goal[j][: len(after)]
        )
        i, j, axes = next(moves, (0, 0, ()))
        call.require(axes, "axes only move from the end of one dimension to the end of another")
        x = lax.all_to_all(varying(x, axes), axes, split_axis=j, concat_axis=i, tiled=True)
        now[i], now[j] = now[i][: -len(axes)], now[j] + axes
    return x


@define_op
def indices(call: Call, x: jax.Array) -> jax.Array:
    """The index of each entry along one dimension, in the whole array.

        ops.indices("B/d L V/t -> V/t", logits)     i32; jnp.arange would number each part from 0

    Communicates nothing. Raises ShardTypeError unless the right side is a dimension of the operand.
    """
    (given,), wanted = call.operands, call.result
    call.require(len(wanted.dims) == 1, "the right side is one dimension")
    call.require(wanted.dims[0] in given.dims, f"the operand has no dimension {wanted}")
    size = x.shape[given.dims.index(wanted.dims[0])]
    first = lax.axis_index(wanted.axes) * size if wanted.axes else 0
    return first + jnp.arange(size)


@define_op
def broadcast(call: Call, x: jax.Array) -> jax.Array:
    """Marks a replicated value that each device uses on its own part of the data.

        ops.broadcast("D -> D", gain)               a weight that isn't split

    Forward: nothing. Backward: all-reduce over the axes that the string doesn't name.
    Raises ShardTypeError unless both sides are the same, or for an unreduced operand.
    """
    (given,), wanted = call.operands, call.result
    call.require(given == wanted and not given.unreduced, "both sides must be the same, reduced")
    return varying(x, tuple(axis for axis in mesh_shape() if axis not in given.axes))


def _reduced_axes(call: Call) -> tuple[str, ...]:
    """The axes over which the left side is unreduced and the right side isn't."""
    (given,), wanted = call.operands, call.result
    new = show_groups(a for a in wanted.unreduced_axes if a not in given.unreduced_axes)
    call.require(not new, f"the right side has {{U:{new}}}, but the left side has not")
    axes = tuple(a for a in given.unreduced_axes if a not in wanted.unreduced_axes)
    kept = {*given.unreduced} <= {*wanted.unreduced}
    call.require(not kept, "it reduces nothing: {U:axis} must be on the left and not on the right")
    return axes


@define_op
def psum_scatter(call: Call, x: jax.Array) -> jax.Array:
    """Adds up partial sums; each device keeps its part of the total.

        ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)

    Forward: reduce-scatter. Backward: all-gather over the same axes.
    Raises ShardTypeError unless the axes that are reduced over are exactly those that the right
    side adds to its dimensions. JAX raises ValueError if a dimension doesn't split evenly.
    """
    (given,), wanted = call.operands, call.result
    reduced = _reduced_axes(call)
    scattered = _one_to_one(call, wanted, given)
    axes = tuple(a for _, split in scattered for a in split)
    call.require(
        set(axes) == set(reduced),
        f"it reduces over {', '.join(reduced)}, but newly splits the result over "
        f"{', '.join(axes) or 'nothing'}" + ("" if axes else ": for that, use ops.psum"),
    )
    for i, split in scattered:
        x = scatter(x, split, i)
    return x


@define_op
def psum(call: Call, x: jax.Array) -> jax.Array:
    """Adds up partial sums; each device gets the full total.

        ops.psum("B/d L {U:t} -> B/d L", x)
        ops.psum("{U:d} -> ", loss)

    Forward: all-reduce. Backward: nothing, because each partial sum has the total's gradient, which
    every device holds already.
    Raises ShardTypeError if the operand isn't unreduced, or a dimension's split would change.
    """
    (given,), wanted = call.operands, call.result
    axes = _reduced_axes(call)
    call.require(
        given.dims == wanted.dims,
        "it can't change how a dimension is split; ops.all_gather and ops.psum_scatter can",
    )
    return lax.psum(x, axes) if axes else x


def _summed_axes(call: Call, removed: list[Dim], already: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of summed-over dimensions. The right side must declare them as unreduced, along with
    the axes over which the operand is unreduced already."""
    new = tuple(a for dim in removed for a in dim.axes)
    split = (*new, *call.result.axes)
    for axis in split:
        call.require(split.count(axis) == 1, f"axis {axis} splits two dimensions: gather one first")
    axes = show_groups(a for a in mesh_shape() if a in (*new, *already))
    fix = f"write {{U:{axes}}} on the right" if axes else "leave out {U:} on the right"
    over = ", ".join(str(dim) for dim in removed if dim.axes) or "no split dimension"
    problem = f"it sums over {over}, so the result is unreduced over {axes or 'no axis'}: {fix}"
    call.require(set(call.result.unreduced_axes) == {*new, *already}, problem)
    return new


def _removed(call: Call) -> tuple[tuple[int, ...], list[Dim]]:
    """The positions and Dims of the dimensions that the right side leaves out."""
    (given,), wanted = call.operands, call.result
    out = [i for i, dim in enumerate(given.dims) if dim not in wanted.dims]
    kept = tuple(dim for dim in given.dims if dim in wanted.dims)
    call.require(
        kept == wanted.dims, "the right side must be the left side without some dimensions"
    )
    call.require(out, "it reduces nothing")
    return tuple(out), [given.dims[i] for i in out]


@define_op
def reduce_sum(call: Call, x: jax.Array) -> jax.Array:
    """Sums over the dimensions that the right side leaves out, each device over its part.

        ops.reduce_sum("B/d L V/t -> B/d L {U:t}", x)

    Communicates nothing. The result is unreduced over the axes of a split dimension, and the string
    must say so, or ShardTypeError is raised.
    """
    positions, removed = _removed(call)
    axes = _summed_axes(call, removed, call.operands[0].unreduced_axes)
    return unreduced(jnp.sum(x, axis=positions), axes)


@define_op
def reduce_mean(call: Call, x: jax.Array) -> jax.Array:
    """Averages over the dimensions that the right side leaves out, like `reduce_sum`.

        ops.reduce_mean("B/d L M/t -> B/d L {U:t}", x)

    The devices' partial results add up to the mean of the whole array.
    """
    positions, removed = _removed(call)
    axes = _summed_axes(call, removed, call.operands[0].unreduced_axes)
    count = math.prod(x.shape[i] for i in positions)
    count *= math.prod(mesh_shape()[axis] for dim in removed for axis in dim.axes)
    return unreduced(jnp.sum(x, axis=positions) / float(count), axes)


@define_op
def reduce_max(call: Call, x: jax.Array) -> jax.Array:
    """Takes the maximum over the dimensions that the right side leaves out, across devices if they
    are split.

        ops.reduce_max("B/d L V/t -> B/d L", lax.stop_gradient(x))

    Forward: all-reduce (max) over the axes of split dimensions. There is no gradient: apply
    lax.stop_gradient to the operand. Some backends' all-reduce drops NaNs.
    Raises ShardTypeError for an unreduced operand or result.
    """
    positions, removed = _removed(call)
    sums = (*call.operands[0].unreduced, *call.result.unreduced)
    call.require(not sums, "reduce it before the maximum; the result has no {U:}")
    axes = tuple(a for dim in removed for a in dim.axes)
    x = jnp.max(x, axis=positions)
    return lax.pmax(varying(x, axes), axes) if axes else x


@define_op
def einsum_unreduced(call: Call, *operands: jax.Array, dtype: DType | None = None) -> jax.Array:
    """Computes the einsum of each device's parts, and adds nothing up across devices.

        ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, w_up)
        ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", h, w_down)
        ops.einsum_unreduced("B/d L M, V/t M -> B/d L V/t", x, unembed, dtype=f32)

    Forward: no communication. Backward: none, unless one operand is replicated over an axis and
    another varies along it; an all-reduce then sums the first one's gradient over that axis.
    If a summed-over dimension is split over an axis, the result is unreduced over it, and the
    string must say so. The result has the operands' dtype. With dtype=f32, bf16 operands give an
    f32 result, whose gradient is rounded to bf16, so that the backward matmuls are in bf16 too.
    Raises ShardTypeError if a name has two splits, two dimensions are split over one axis, dtypes
    differ, an operand is unreduced, or {U:} is wrong.
    """
    wanted = call.result
    seen: dict[str, Dim] = {}
    for spec in (*call.operands, wanted):
        repeated = [name for name in _names(spec) if _names(spec).count(name) > 1]
        call.require(not repeated, f"`{spec}`: rename one of the two {''.join(repeated[:1])}")
        for dim in spec.dims:
            first = seen.setdefault(dim.name, dim) if spec is not wanted else seen.get(dim.name)
            call.require(first, f"{dim} on the right is in no operand")
            call.require(
                first == dim,
                f"{first} and {dim}: a name has one split. Gather one with ops.all_gather, or "
                "split the other with ops.split or where it is declared",
            )
        call.require(not spec.unreduced or spec is wanted, f"`{spec}`: reduce it first")
    each = ", ".join(f"operand {i + 1} is {x.dtype}" for i, x in enumerate(operands))
    same = len({x.dtype for x in operands}) == 1
    call.require(same, f"{each}: cast one of them, as in x.astype(compute.dtype)")
    removed = [dim for name, dim in seen.items() if name not in _names(wanted)]
    axes = _summed_axes(call, removed, ())
    letters = {name: chr(ord("a") + i) for i, name in enumerate(seen)}
    terms = ["".join(letters[name] for name in _names(spec)) for spec in (*call.operands, wanted)]
    subscripts = ",".join(terms[:-1]) + "->" + terms[-1]
    return unreduced(einsum(subscripts, *operands, dtype=dtype and dtype.dtype), axes)


@define_op
def index_unreduced(call: Call, table: jax.Array, indices: jax.Array) -> jax.Array:
    """Looks `indices` up in the bracketed dimension of `table`, which may be split.

        ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", embed, ids)
        ops.index_unreduced("B/d L [V/t], B/d L -> B/d L {U:t}", logits, targets)

    Indices are global. Each device returns the entries that it holds and zeros for the rest, so the
    result is unreduced over the bracketed dimension's axes, and the string must say so.
    Communicates nothing. Dimensions that table and indices share are batch dimensions. The result
    has the indices' dimensions, then the table's remaining ones. An index outside 0 <= index < V
    gives zeros. In the backward pass the gradients of a repeated entry are summed in f32.
    Raises ShardTypeError if the string is not of this form, or indices aren't i32 or u32.
    """
    tables, ids = call.operands
    looked_up = [dim for dim in tables.dims if dim.indexed]
    call.require(len(looked_up) == 1, "the first operand needs one dimension in brackets: [V/t]")
    call.require(
        indices.dtype in (jnp.int32, jnp.uint32), f"indices must be i32 or u32, not {indices.dtype}"
    )
    call.require(not tables.unreduced and not ids.unreduced, "reduce it first")
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
    axes = _summed_axes(call, [dim], ())
    position = tables.dims.index(dim)
    size = table.shape[position]
    first = lax.axis_index(dim.axes) * size if dim.axes else 0
    local = indices.astype(jnp.int32) - first
    table = jnp.moveaxis(table, position, len(shared))
    # One entry per row, such as a target's logit: compares with an iota, because the backward pass
    # of a lookup is a scatter, for which the compiler would copy the table.
    if ids.dims == shared:
        local = jnp.expand_dims(local, tuple(range(len(shared), table.ndim)))
        here = local == lax.broadcasted_iota(jnp.int32, table.shape, len(shared))
        return unreduced(jnp.where(here, table, 0).sum(len(shared)), axes)
    lookup = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    local = jnp.where((local >= 0) & (local < size), local, size)
    wide = table.astype(jnp.float32)  # so that the backward pass's scatter adds up in f32
    for _ in shared:
        lookup = jax.vmap(lookup)
    return unreduced(lookup(wide, local).astype(table.dtype), axes)


@jax.named_scope("sum_of_squares")
def sum_of_squares(hint: Any, tree: Any) -> jax.Array:
    """The sum of the squares of all numbers in a typed tree, f32[""], for any layout.

        grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, grads))

    Forward: one all-reduce of a scalar for each set of axes that arrays are split over. An array
    that is replicated over an axis counts once. Don't differentiate it.
    """
    totals: dict[tuple[str, ...], jax.Array] = {}
    for over, square in _squares(hint, tree, "sum_of_squares"):
        totals[over] = totals[over] + square if over in totals else square
    return sum((_total(over, x) for over, x in totals.items()), start=jnp.float32(0))


@jax.named_scope("sums_of_squares")
def sums_of_squares(hint: Any, tree: Any, each: str) -> dict[str, jax.Array]:
    """The sum of squares of each array in a typed tree, f32[""], by its path, such as layers/w_q;
    for an array whose first dimension is `each`, one sum for each index of it, f32[each].

        w_q_norms = jnp.sqrt(ops.sums_of_squares(Weights, grads, "layers")["layers/w_q"])

    Forward: an all-reduce for each array that is split. Don't differentiate it.
    """
    squares = _squares(hint, tree, "sums_of_squares", each)
    return dict(zip(named(tree), (_total(*square) for square in squares), strict=True))


def _total(over: tuple[str, ...], x: jax.Array) -> jax.Array:
    axes = tuple(axis for axis in mesh_shape() if axis in several(over))
    return lax.psum(unreduced(x, axes), axes) if axes else x


def _squares(
    hint: Any, tree: Any, op: str, each: str = ""
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """Yields for each array the names of its axes, and its partial sum of squares."""
    if not inside_shard_map():
        raise ShardTypeError(f"ops.{op}: call it inside a typed_shard_map")
    for path, kind, x in check_tree(tree, hint, f"the operand of ops.{op}"):
        cure = (
            f"call ops.{op} outside of jax.grad, on stored weights or on gradients that are summed "
            "over all devices"
        )
        check_replicated(path, kind, x, cure)
        kept = 1 if _names(kind.spec)[:1] == [each] else 0
        square = jnp.sum(jnp.square(x.astype(jnp.float32)), tuple(range(kept, x.ndim)))
        if kept and (axes := kind.spec.dims[0].axes):  # adds zeros at other devices' indices
            size, first = len(square), lax.axis_index(axes) * len(square)
            zeros = jnp.zeros(size * math.prod(mesh_shape()[axis] for axis in axes))
            square = lax.dynamic_update_slice_in_dim(varying(zeros, axes), square, first, axis=0)
        yield tuple(sorted({name for dim in kind.spec.dims for name in dim.over})), square
