"""The op that computes experts without dropping a choice: on TPUs by a kernel that multiplies
groups of rows, elsewhere in a loop over blocks of each expert's tokens."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from shardlib.local import alike, einsum, unreduced
from shardlib.mesh import platform
from shardlib.ops import Call, define_op
from shardlib.types import Dim, Spec

ROWS = 512  # tokens of an expert that are computed at a time


@define_op
def experts(
    call: Call, x: jax.Array, chosen: jax.Array, score: jax.Array,
    w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array,
) -> jax.Array:  # fmt: skip
    """Sums, for each token, the outputs of its k chosen experts of E, weighted by scores. An expert
    is a SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202.

        dropless.experts(
            "B/d L/c M, B/d L/c k, B/d L/c k, E/t M G, E/t M G, E/t M G -> B/d L/c M {U:t}",
            x, chosen, score, w_gate, w_up, w_down,
        )

    Experts may be split; then each device computes its own, and the result is unreduced.
    Communicates and saves nothing: the backward pass starts over. Sorts (token, expert) choices by
    expert. On TPUs a kernel, which wants a multiple of 8 choices, then multiplies each expert's
    rows by its matrices. Elsewhere it loops over blocks of up to ROWS choices of one expert. The
    number of iterations is fixed, for the most blocks that may occur: all choices may fall on one
    device's experts, and each expert's last block may not be full.
    Raises ShardTypeError unless the operands have these dimensions in this order, the weights are
    split along E alone, and `x` and the weights have the same dtype.
    """
    tokens, choices, _, weight, *_ = call.operands
    form = "B L M, B L k, B L k, E M G, E M G, E M G -> B L M"
    call.require(choices.dims and len(weight.dims) == 3, f"write it like `{form}`")
    number, model, width = weight.dims
    tokens = Spec((*tokens.dims[:-1], Dim(model.name)))
    chosen_of = Spec((*tokens.dims[:-1], Dim(choices.dims[-1].name)))
    weight = Spec((number, Dim(model.name), Dim(width.name)))
    wanted = [tokens, *[chosen_of] * 2, *[weight] * 3]
    result = Spec(tokens.dims, number.over[::-1])  # outermost first
    right = f"{', '.join(map(str, wanted))} -> {result}"
    fits = [*call.operands, call.result] == [*wanted, result]
    call.require(fits, f"for these tokens and experts the string is `{right}`")
    same = x.dtype == w_gate.dtype == w_up.dtype == w_down.dtype
    call.require(same, "tokens and weights have different dtypes")
    x, chosen, score, *weights = alike(x, chosen, score, w_gate, w_up, w_down)
    if number.axes:  # a device's own experts count from 0
        chosen = chosen - lax.axis_index(number.axes) * w_gate.shape[0]
    flat = (rearrange(x, "... last -> (...) last") for x in (x, chosen, score))
    has_kernel = platform() == "tpu" and chosen.size % 8 == 0
    y = (in_groups if has_kernel else in_blocks)(*flat, *weights).reshape(x.shape)
    return unreduced(y, number.axes)


def sorted_by_expert(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the indices of the choices [T, k] in the order by expert, with choices of other
    devices' experts last; each choice's place in this order; and each expert's number of choices.
    """
    chosen = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
    number = lax.iota(jnp.int32, chosen.size)
    _, order = lax.sort((chosen.ravel(), number), num_keys=1)
    _, place = lax.sort((order, number), num_keys=1)
    load = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return order, place.reshape(chosen.shape), load


def picked(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], for valid indices. At the probe mesh's sizes, JAX's own indexing would need i64."""
    kept = tuple(range(index.ndim, index.ndim + x.ndim - 1))
    dims = lax.GatherDimensionNumbers(kept, collapsed_slice_dims=(0,), start_index_map=(0,))
    sizes = (1, *x.shape[1:])
    return lax.gather(x, index[..., None], dims, sizes, mode="promise_in_bounds")


def swiglu(
    product: Callable[[jax.Array, jax.Array, int], jax.Array],
    x: jax.Array, score: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array,
) -> jax.Array:  # fmt: skip
    """SwiGLU of rows [T, M], scaled by their scores [T]. `product` sums over the last dimension of
    rows and the given dimension of matrices [M, G]."""
    gate, up = (product(x, w, 0).astype(jnp.float32) for w in (w_gate, w_up))
    hidden = (jax.nn.silu(gate) * up * score[:, None]).astype(x.dtype)
    return product(hidden, w_down, 1)


# --- In groups ------------------------------------------------------------------------------------


def grouped(inputs: tuple[jax.Array, ...], grad: jax.Array | None = None) -> Any:
    """Returns the result of `experts` for x [T, M], chosen and score [T, k] and weights [E, M, G],
    or, given the result's gradient, the inputs' gradients. On TPUs without a multiple of 8 choices,
    and on other devices, `lax.ragged_dot_general` would multiply all rows by all experts."""
    x, chosen, score, *weights = inputs
    order, place, load = sorted_by_expert(chosen, len(weights[0]))
    total, token = load.sum(), order // chosen.shape[1]
    own = (jnp.arange(order.size) < total)[:, None]  # TPUs leave the other rows undefined

    def product(rows: jax.Array, w: jax.Array, dim: int) -> jax.Array:
        dims = lax.RaggedDotDimensionNumbers((((1,), (dim + 1,)), ((), ())), [0], [0])
        return jnp.where(own, lax.ragged_dot_general(rows, w, load, dims), 0)

    def to_tokens(rows: jax.Array) -> jax.Array:
        return jnp.where(place[..., None] < total, picked(rows, place), 0).sum(1, dtype=jnp.float32)

    operands = picked(x, token), picked(score.ravel(), order), *weights
    y, pull = jax.vjp(functools.partial(swiglu, product), *operands)
    if grad is None:
        return to_tokens(y).astype(x.dtype)
    by_x, by_score, *by_weights = pull(picked(grad, token))
    by_score = jnp.where(place < total, picked(by_score, place), 0)
    return to_tokens(by_x).astype(x.dtype), None, by_score, *by_weights


@jax.custom_vjp
def in_groups(*inputs: jax.Array) -> jax.Array:
    """Computes the result of `grouped`, with gradients, on TPUs."""
    return grouped(inputs)


in_groups.defvjp(lambda *inputs: (grouped(inputs), inputs), grouped)


# --- In blocks ------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Up to ROWS choices of one expert."""

    expert: jax.Array
    first: jax.Array  # the place of its first choice in the order by expert
    own: jax.Array  # the number of its choices
    begins: jax.Array  # whether it is its expert's first block


def blocks(tokens: int, k: int, own: int) -> tuple[int, int]:
    """Returns the most blocks there can be, and a block's choices, if `tokens` tokens choose k
    experts each and a device has `own` experts."""
    most = tokens * min(k, own)  # a token's choices all differ
    size = min(ROWS, math.ceil(most / own))
    return most // size + own, size


def least_shares(kind: str, tokens: int, k: int, own: int, experts: int) -> tuple[float, float]:
    """Returns lower bounds on the shares of the loop's FLOPs and bytes that a kind of device needs
    for its `own` experts, at even loads: TPUs' kernel skips padding."""
    if "TPU" not in kind or tokens * k % 8:
        return 1, 1
    count, size = blocks(tokens, k, own)
    rows = tokens * k * own / experts / (count * size)
    return rows, min(rows, own / count)  # it may read each matrix once


def blocks_of(load: jax.Array, count: int, size: int) -> Block:
    """Returns the blocks of all choices, and empty ones after them, `count` in all."""
    load_before, blocks_before = (jnp.cumsum(x) - x for x in (load, -(-load // size)))
    number = jnp.arange(count)
    expert = jnp.searchsorted(blocks_before, number, side="right") - 1
    row = (number - blocks_before[expert]) * size
    # The first row of an empty block may be beyond the end, where dynamic_slice moves it back.
    own = jnp.clip(load[expert] - row, 0, size)
    return Block(expert, load_before[expert] + row, own, row == 0)


def one(x: jax.Array, w: jax.Array, dim: int) -> jax.Array:
    """The product of `swiglu` for one expert."""
    return einsum("tg,mg->tm" if dim else "tm,mg->tg", x, w)


def over_blocks(
    inputs: tuple[jax.Array, ...], add: Callable[..., Any], start: Callable[[int], Any]
) -> tuple[Any, jax.Array]:
    """Loops over blocks: `start(rows)` gives the totals, and `add(totals, block, token,
    own, operands)` the next ones. The operands are for `swiglu`; their rows belong to the block
    where `own` is true. Returns the totals, and each choice's place in the order by expert."""
    x, chosen, score, *weights = inputs
    order, place, load = sorted_by_expert(chosen, len(weights[0]))
    count, size = blocks(len(chosen), chosen.shape[1], len(load))
    choices = jnp.pad(order, (0, size))

    def step(totals: Any, block: Block) -> tuple[Any, tuple[()]]:
        choice = lax.dynamic_slice_in_dim(choices, block.first, size)
        token, own = choice // chosen.shape[1], jnp.arange(size)[:, None] < block.own
        given = picked(x, token), picked(score.ravel(), choice), *(w[block.expert] for w in weights)
        return add(totals, block, token, own, given), ()

    return lax.scan(step, start(choices.size), blocks_of(load, count, size))[0], place


@jax.custom_vjp
def in_blocks(*inputs: jax.Array) -> jax.Array:
    """Computes the result of `grouped`, with gradients, in a loop."""

    x, *_ = inputs

    def add(ys: jax.Array, block: Block, _: Any, own: jax.Array, operands: Any) -> jax.Array:
        y = jnp.where(own, swiglu(one, *operands), 0)
        return lax.dynamic_update_slice_in_dim(ys, y, block.first, axis=0)

    ys, place = over_blocks(inputs, add, lambda rows: jnp.zeros_like(x, shape=(rows, x.shape[1])))
    return picked(ys, place).sum(1, dtype=jnp.float32).astype(ys.dtype)


def _gradients(inputs: tuple[jax.Array, ...], grad: jax.Array) -> tuple[Any, ...]:
    x, _, score, *weights = inputs

    def start(rows: int) -> Any:
        of_rows = jnp.zeros_like(x, shape=(rows, x.shape[1])), jnp.zeros_like(score, shape=rows)
        sums = [jnp.zeros_like(w, jnp.float32, shape=w.shape[1:]) for w in weights]
        return *of_rows, sums, [jnp.zeros_like(w) for w in weights]

    def add(totals: Any, block: Block, token: jax.Array, own: jax.Array, operands: Any) -> Any:
        xs, scores, sums, by_weights = totals
        _, pull = jax.vjp(functools.partial(swiglu, one), *operands)
        by_x, by_score, *of_block = pull(jnp.where(own, picked(grad, token), 0))
        xs = lax.dynamic_update_slice_in_dim(xs, by_x, block.first, axis=0)
        scores = lax.dynamic_update_slice_in_dim(scores, by_score, block.first, axis=0)

        def put(w: jax.Array, total: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(w, total.astype(w.dtype), block.expert, axis=0)

        # An expert's blocks follow each other, so only the current expert's sum is kept in f32.
        sums = jax.tree.map(lambda x, new: jnp.where(block.begins, 0, x) + new, sums, of_block)
        return xs, scores, sums, jax.tree.map(put, by_weights, sums)

    (xs, scores, _, by_weights), place = over_blocks(inputs, add, start)
    by_x = picked(xs, place).sum(1, dtype=jnp.float32).astype(x.dtype)
    return by_x, None, picked(scores, place), *by_weights


in_blocks.defvjp(lambda *inputs: (in_blocks(*inputs), inputs), _gradients)
