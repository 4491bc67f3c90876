"""Attention, with a fused kernel on some devices and a plain twin: the reference implementation,
which runs everywhere else, on the probe mesh and in the audit. And experts, as a loop over blocks
of their tokens.

What computes them doesn't see the mesh. Its type strings describe one device's part: B is this
device's rows and K its heads.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.ops import Call, define_op, einsum, varying
from shardlib.types import Dim, Spec, floating, integer, typechecked

# Queries whose scores are in memory at a time, in rows of up to LONG keys; of longer rows fewer.
BLOCK, LONG = 512, 8192
ROWS = 512  # tokens of an expert that are computed at a time


def runs_kernel(path: str, kind: str) -> bool:
    """Returns whether an equation with this path of scopes is a twin's in whose place devices of a
    kind run a kernel. An empty kind stands for TPUs."""
    platform = "gpu" if kind and "TPU" not in kind else "tpu"
    return re.search(rf"kernel_of_\w*{platform}", path) is not None


def balanced(length: int, parts: int) -> np.ndarray:
    """The order of a row's positions, int[length], in which each of `parts` devices gets an early
    and a late piece of the row: in causal attention the same work for all. The length is a multiple
    of 2 * parts; for one part the order is that of the row."""
    if parts == 1:
        return np.arange(length)
    pieces = np.arange(length).reshape(2 * parts, -1)
    return np.stack([pieces[:parts], pieces[: parts - 1 : -1]], axis=1).ravel()


def in_order(x: jax.Array, parts: int) -> jax.Array:
    """Brings dimension 1, which is in the order of `balanced`, into the order of the row."""
    if parts == 1:
        return x
    early, late = rearrange(x, "B (parts two n) ... -> two B parts n ...", parts=parts, two=2)
    return rearrange([early, late[:, ::-1]], "two B parts n ... -> B (two parts n) ...")


# Where a row is computed in several steps: called with a layer's keys, values and positions, and
# returns those to attend to, with those of the steps before. See tools/generate.py.
recalling = jax.make_user_context(None)


@define_op
def attention(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array,
    start: jax.Array, position: jax.Array, key_position: jax.Array,
) -> jax.Array:  # fmt: skip
    """Causal attention within each document: a query sees the keys whose positions in the row are
    from `start`, where its document starts, to its own `position`. Q query heads share a key-value
    head. Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245.

        kernels.attention(
            "B/d L/c Q K/t D, B/d L K/t D, B/d L K/t D, B/d L/c, B/d L/c, B/d L -> B/d L/c Q K/t D",
            q, k, v, start, position, key_position,
        )

    Communicates nothing. Positions are in the order of `balanced`. The result is saved for the
    backward pass, which recomputes the scores from q, k and v: save those. In bf16, with a device's
    part of L a multiple of 128, or of 256 where L is split, D a multiple of 8 up to 128, and Q at
    most 32, runs a kernel: that of flash_attention.py on TPUs and, where L isn't split, cuDNN's on
    NVIDIA GPUs. Raises ShardTypeError unless the operands have these dimensions in this order, with
    D not split, and q, k and v the same dtype.
    """
    queries, *others = call.operands
    call.require(len(queries.dims) == 5, "queries have five dimensions")
    call.require(not queries.owed, "reduce it first")
    rows, length, _, kv_heads, size = queries.dims
    call.require(not size.over, f"{size} can't be split")
    keys, all_positions = (Spec((rows, Dim(length.name), *dims)) for dims in ((kv_heads, size), ()))
    positions = Spec((rows, length))
    wanted = [keys, keys, positions, positions, all_positions]
    right = f"{', '.join(map(str, (queries, *wanted)))} -> {queries}"
    fits = [*others, call.result] == [*wanted, queries]
    call.require(fits, f"for these queries the string is `{right}`")
    call.require(q.dtype == k.dtype == v.dtype, "queries, keys and values have different dtypes")
    axes = {axis for x in (q, k, v) for axis in jax.typeof(x).manual_axis_type.varying}
    q, k, v = (varying(x, tuple(axes)) for x in (q, k, v))  # as kernels have one type for all
    if recall := recalling.value:
        k, v, key_position = recall(k, v, key_position)
        return plain_attention(q, k, v, start, position, key_position)
    parts = k.shape[1] // q.shape[1]
    fits = q.shape[1] % (128 if parts == 1 else 256) == 0 and q.shape[-1] in range(8, 129, 8)
    fits = fits and q.shape[2] <= 32 and q.dtype == jnp.bfloat16
    with_kernel = ["tpu"] * fits + ["gpu"] * (fits and parts == 1)
    device = jax.sharding.get_abstract_mesh().abstract_device  # None where the step is only traced
    if device and device.platform in with_kernel:
        if device.platform == "tpu":
            return tpu_attention(q, k, v, start, position)
        return cudnn_attention(q, k, v, start)
    with jax.named_scope(f"kernel_of_{'_'.join(with_kernel)}"):
        return save_for_backward(plain_attention(q, k, v, start, position, key_position))


@typechecked
def plain_attention(
    q: floating["B L Q K D"],
    k: floating["B S K D"],
    v: floating["B S K D"],
    start: integer["B L"],
    position: integer["B L"],
    key_position: integer["B S"],
) -> floating["B L Q K D"]:
    """Computes attention in blocks of queries, so that scores are in memory for one at a time."""
    most = 2 ** (BLOCK * LONG // max(k.shape[1], LONG)).bit_length() // 2  # a power of two
    block = math.gcd(q.shape[1], most)
    if block < min(most, 64):
        block = q.shape[1]

    # k and v enter the loop in f32 and are cast to bf16 inside, so that their gradients are summed
    # over blocks in f32.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @explicit_activation_checkpointing
    def attend(_: tuple[()], queries: tuple[jax.Array, ...]) -> tuple[tuple[()], jax.Array]:
        q_block, start, position = queries
        k, v = (x.astype(q.dtype) for x in wide)
        scores = einsum("bqgkd,bskd->bkgqs", q_block, k, dtype=jnp.float32)
        visible = start[:, :, None] <= key_position[:, None]
        visible &= key_position[:, None] <= position[:, :, None]
        scores = jnp.where(visible[:, None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return (), einsum("bkgqs,bskd->bqgkd", probabilities, v)

    def blocks(x: jax.Array) -> jax.Array:
        return rearrange(x, "B (blocks L) ... -> blocks B L ...", L=block)

    _, mixed = lax.scan(attend, (), (blocks(q), blocks(start), blocks(position)))
    return rearrange(mixed, "blocks B L Q K D -> B (blocks L) Q K D")


def tpu_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, position: jax.Array
) -> jax.Array:
    """Computes attention with flash_attention.py, which saves the result itself."""
    from shardlib.flash_attention import flash_attention  # takes 0.3 s to import

    parts = k.shape[1] // q.shape[1]
    return flash_attention(q, in_order(k, parts), in_order(v, parts), start, position)


@typechecked
def cudnn_attention(
    q: floating["B L Q K D"],
    k: floating["B L K D"],
    v: floating["B L K D"],
    start: integer["B L"],
) -> floating["B L Q K D"]:
    """Computes attention with cuDNN, which wants query heads that share a key side by side. What
    its forward kernel returns is saved: see activations.py."""
    same = start[:, None, :, None] <= jnp.arange(q.shape[1])  # keys of the document and after it
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = jax.nn.dot_product_attention(
        heads, k, v, mask=same, is_causal=True, implementation="cudnn"
    )
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])


@define_op
def experts(
    call: Call, x: jax.Array, chosen: jax.Array, score: jax.Array,
    w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array,
) -> jax.Array:  # fmt: skip
    """The sum, weighted by scores, of what the chosen k of E experts make of each token. An expert
    is a SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202.

        kernels.experts(
            "B/d L/c M, B/d L/c k, B/d L/c k, E/t M G, E/t M G, E/t M G -> B/d L/c M {U:t}",
            x, chosen, score, w_gate, w_up, w_down,
        )

    Experts may be split; then each device does its own, and the result is unreduced. Communicates
    nothing and saves nothing: the backward pass recomputes. The choices are sorted by expert, and a
    loop runs over blocks of up to ROWS of them, of one expert each, as many blocks as there may be:
    all choices may be of one device's experts, and the last block of each expert isn't full. Raises
    ShardTypeError unless the operands have these dimensions in this order, with only E split among
    the weights', and `x` and weights the same dtype.
    """
    tokens, choices, _, weight, *_ = call.operands
    call.require(choices.dims and len(weight.dims) == 3, "the docstring has an example")
    number, model, width = weight.dims
    tokens = Spec((*tokens.dims[:-1], Dim(model.name)))
    chosen_of = Spec((*tokens.dims[:-1], Dim(choices.dims[-1].name)))
    weight = Spec((number, Dim(model.name), Dim(width.name)))
    wanted = [tokens, *[chosen_of] * 2, *[weight] * 3]
    result = Spec(tokens.dims, number.over)
    right = f"{', '.join(map(str, wanted))} -> {result}"
    fits = [*call.operands, call.result] == [*wanted, result]
    call.require(fits, f"for these tokens and experts the string is `{right}`")
    same = x.dtype == w_gate.dtype == w_up.dtype == w_down.dtype
    call.require(same, "tokens and weights have different dtypes")
    axes = {axis for x in (x, w_gate) for axis in jax.typeof(x).manual_axis_type.varying}
    x, chosen, score, *weights = (
        varying(x, tuple(axes)) for x in (x, chosen, score, w_gate, w_up, w_down)
    )
    if number.axes:  # a device's own experts count from 0
        chosen = chosen - lax.axis_index(number.axes) * w_gate.shape[0]
    flat = (rearrange(x, "... last -> (...) last") for x in (x, chosen, score))
    y = by_expert(*flat, *weights).reshape(x.shape)
    return lax.pcast(y, number.axes, to="unreduced") if number.axes else y


class Block(NamedTuple):
    """Up to ROWS choices of one expert."""

    expert: jax.Array
    first: jax.Array  # of its choices, in the order by expert
    own: jax.Array  # how many
    begins: jax.Array  # whether it is its expert's first


def sorted_by_expert(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, Block]:
    """The numbers of choices [T, k] in the order by expert, those of none of the experts last, and
    then zeros, for one block; the place in this order of each choice; and the blocks, as many as
    there may be, the empty ones last."""
    chosen = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
    most = chosen.shape[0] * min(chosen.shape[1], experts)  # as a token's choices differ
    size, number = min(ROWS, math.ceil(most / experts)), lax.iota(jnp.int32, chosen.size)
    _, order = lax.sort((chosen.ravel(), number), num_keys=1)
    _, place = lax.sort((order, number), num_keys=1)
    load = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(experts), axis=0, dtype=jnp.int32)
    blocks = -(-load // size)
    load_before, blocks_before = (jnp.cumsum(x) - x for x in (load, blocks))
    number = jnp.arange(most // size + experts)
    expert = jnp.searchsorted(blocks_before, number, side="right") - 1
    row = (number - blocks_before[expert]) * size
    # The first row of an empty block may be beyond the end, where dynamic_slice moves it back.
    own = jnp.clip(load[expert] - row, 0, size)
    each = Block(expert, load_before[expert] + row, own, row == 0)
    return jnp.pad(order, (0, size)), place.reshape(chosen.shape), each


def picked(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], for valid indices. JAX's own takes i64 for sizes like those of the probe mesh."""
    kept = tuple(range(index.ndim, index.ndim + x.ndim - 1))
    dims = lax.GatherDimensionNumbers(kept, collapsed_slice_dims=(0,), start_index_map=(0,))
    sizes = (1, *x.shape[1:])
    return lax.gather(x, index[..., None], dims, sizes, mode="promise_in_bounds")


def swiglu(
    x: jax.Array, score: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    gate, up = (einsum("tm,mg->tg", x, w).astype(jnp.float32) for w in (w_gate, w_up))
    hidden = (jax.nn.silu(gate) * up * score[:, None]).astype(x.dtype)
    return einsum("tg,mg->tm", hidden, w_down)


def over_blocks(
    inputs: tuple[jax.Array, ...], add: Callable[..., Any], start: Callable[[int], Any]
) -> tuple[Any, jax.Array]:
    """The totals after `add(totals, block, token, own, operands)` for each block, with `swiglu`'s
    operands, of which some rows may not be the block's own; and each choice's place in the order by
    expert. Totals begin as `start(rows)`."""
    x, chosen, score, *weights = inputs
    choices, place, blocks = sorted_by_expert(chosen, len(weights[0]))
    size = choices.size - chosen.size

    def step(totals: Any, block: Block) -> tuple[Any, tuple[()]]:
        choice = lax.dynamic_slice_in_dim(choices, block.first, size)
        token, own = choice // chosen.shape[1], jnp.arange(size)[:, None] < block.own
        operands = (
            picked(x, token),
            picked(score.ravel(), choice),
            *(w[block.expert] for w in weights),
        )
        return add(totals, block, token, own, operands), ()

    return lax.scan(step, start(choices.size), blocks)[0], place


@jax.custom_vjp
def by_expert(*inputs: jax.Array) -> jax.Array:
    """Computes `experts` for x [T, M], chosen and score [T, k] and weights [E, M, G]."""

    def start(rows: int) -> jax.Array:
        return jnp.zeros_like(inputs[0], shape=(rows, inputs[0].shape[1]))

    def add(ys: jax.Array, block: Block, _: Any, own: jax.Array, operands: Any) -> jax.Array:
        y = jnp.where(own, swiglu(*operands), 0)
        return lax.dynamic_update_slice_in_dim(ys, y, block.first, axis=0)

    ys, place = over_blocks(inputs, add, start)
    return picked(ys, place).sum(1, dtype=jnp.float32).astype(ys.dtype)


def _save(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return by_expert(*inputs), inputs


def _gradients(inputs: tuple[jax.Array, ...], grad: jax.Array) -> tuple[Any, ...]:
    x, _, score, *weights = inputs

    def start(rows: int) -> Any:
        of_rows = jnp.zeros_like(x, shape=(rows, x.shape[1])), jnp.zeros_like(score, shape=rows)
        sums = [jnp.zeros_like(w, jnp.float32, shape=w.shape[1:]) for w in weights]
        return *of_rows, sums, [jnp.zeros_like(w) for w in weights]

    def add(totals: Any, block: Block, token: jax.Array, own: jax.Array, operands: Any) -> Any:
        xs, scores, sums, by_weights = totals
        _, pull = jax.vjp(swiglu, *operands)
        by_x, by_score, *of_block = pull(jnp.where(own, picked(grad, token), 0))
        xs = lax.dynamic_update_slice_in_dim(xs, by_x, block.first, axis=0)
        scores = lax.dynamic_update_slice_in_dim(scores, by_score, block.first, axis=0)
        # An expert's blocks follow each other, so the sum of the one at hand is enough in f32.
        sums = [
            jnp.where(block.begins, 0, so_far) + new
            for so_far, new in zip(sums, of_block, strict=True)
        ]
        by_weights = [
            lax.dynamic_update_index_in_dim(w, so_far.astype(w.dtype), block.expert, axis=0)
            for w, so_far in zip(by_weights, sums, strict=True)
        ]
        return xs, scores, sums, by_weights

    (xs, scores, _, by_weights), place = over_blocks(inputs, add, start)
    by_x = picked(xs, place).sum(1, dtype=jnp.float32).astype(x.dtype)
    return by_x, None, picked(scores, place), *by_weights


by_expert.defvjp(_save, _gradients)
