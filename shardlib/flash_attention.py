"""Attention on TPUs as a Pallas kernel: FlashAttention-2, Dao 2023,
https://arxiv.org/abs/2307.08691, algorithms 1 and 2.

Scores are computed for a block of queries and a block of keys at a time, and stay on the chip.
Pairs of blocks are skipped if causality or documents hide all these keys from all these queries.
Scores are laid out as [keys, queries]: reductions over keys then combine whole registers, and what
there is once per query lies along a register's lanes.

Here K counts key-value heads and H all query heads, those that share a key-value head side by side.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.activations import save_for_backward
from shardlib.types import floating, integer, typechecked

BLOCK = 512  # queries, and keys
HIDDEN = -1e30  # the score of a key that a query doesn't see; finite, as inf - inf is NaN
HELD = 2**20  # elements of the queries' gradient that are held on the chip in f32


@typechecked
def flash_attention(
    q: floating["B L Q K D"],
    k: floating["B L K D"],
    v: floating["B L K D"],
    document: integer["B L"],
) -> floating["B L Q K D"]:
    """Computes attention, where L is a multiple of 128 and a document's tokens stand in a row.
    Keeps its result and the logarithms of the softmax's denominators for the backward pass."""
    index = jnp.broadcast_to(jnp.arange(document.shape[1]), document.shape)
    continues = jnp.pad(document[:, 1:] == document[:, :-1], ((0, 0), (1, 0)))
    first = lax.cummax(jnp.where(continues, 0, index), axis=1)
    seen = jnp.stack([first, index], axis=1)
    heads = rearrange(q, "B L Q K D -> B (K Q) L D")
    k, v = (rearrange(x, "B L K D -> B K L D") for x in (k, v))
    mixed = _attend(heads, k, v, seen.astype(jnp.int32))
    return rearrange(mixed, "B (K Q) L D -> B L Q K D", K=k.shape[1])


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """q and the result are [B, H, L, D], k and v [B, K, L, D]. `seen` [B, 2, L] has the index of
    the first and of the last key that a query sees."""
    return _forward(q, k, v, seen)[0]


def _save(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    mixed, log_sum = map(save_for_backward, _forward(*inputs))
    return mixed, (*inputs, mixed, log_sum)


_attend.defvjp(_save, lambda saved, mixed_grad: (*_backward(*saved, mixed_grad), None))


# --- Blocks ---------------------------------------------------------------------------------------


def _blocks_in_memory(seen: jax.Array, block: int, over: str) -> jax.Array:
    """[B, blocks of queries, blocks of keys] for over="keys", and with these two swapped for
    over="queries": the number of the block in memory at each step over the last dimension. That is
    the step's own, unless the pair of blocks is skipped: then the last one, or the first one to
    come, stays there, so that nothing is fetched."""
    first, last = rearrange(seen, "B two (blocks n) -> two B blocks n", n=block)
    number = jnp.arange(first.shape[1], dtype=jnp.int32)
    start = number * block
    visible = (first.min(-1)[:, :, None] < start + block) & (last.max(-1)[:, :, None] >= start)
    if over == "queries":
        visible = visible.mT
    before = lax.cummax(jnp.where(visible, number, 0), axis=2)
    return jnp.maximum(before, jnp.argmax(visible, axis=2, keepdims=True).astype(jnp.int32))


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    numbers = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def _scores(q: Any, k: Any, seen: Any, key_block: jax.Array) -> jax.Array:
    """[keys, queries], not scaled."""
    scores = _dot(k[...], q[...], 1, 1)
    index = key_block * k.shape[0] + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where((index >= seen[:1]) & (index <= seen[1:]), scores, HIDDEN)


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result's shape. It varies over the same mesh axes as x."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _settings(
    name: str, parallel: int, dims: int, q: jax.Array, block: int, matmuls: int
) -> dict[str, Any]:
    """What a kernel tells the compiler: how many of the grid's dimensions the cores of a chip may
    share, and its cost, where each matmul takes half of the scores."""
    rows, heads, length, size = q.shape
    scores = rows * heads * length * (length + block) // 2
    kinds = (pltpu.PARALLEL,) * parallel + (pltpu.ARBITRARY,) * (dims - parallel)
    return {
        "name": name,
        "compiler_params": pltpu.CompilerParams(dimension_semantics=kinds),
        "cost_estimate": pl.CostEstimate(
            flops=2 * matmuls * scores * size,
            transcendentals=scores,
            bytes_accessed=2 * matmuls * q.size * q.dtype.itemsize,
        ),
    }


# --- Forward --------------------------------------------------------------------------------------


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The result and, per query, the base-2 logarithm of the sum of the scores' exponentials,
    [B, H, 1, L]."""
    rows, heads, length, size = q.shape
    block, shared_by = math.gcd(length, BLOCK), heads // k.shape[1]
    blocks = length // block
    queries = pl.BlockSpec((None, None, block, size), lambda b, h, i, j, at: (b, h, i, 0))
    keys = pl.BlockSpec(
        (None, None, block, size), lambda b, h, i, j, at: (b, h // shared_by, at[b, i, j], 0)
    )
    ends = pl.BlockSpec((None, 2, block), lambda b, h, i, j, at: (b, 0, i))
    sums = pl.BlockSpec((None, None, 1, block), lambda b, h, i, j, at: (b, h, 0, i))
    run = pl.pallas_call(
        _forward_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, heads, blocks, blocks),
            in_specs=[queries, keys, keys, ends],
            out_specs=[queries, sums],
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32) for shape in ((1, block), (1, block), (size, block))
            ],
        ),
        out_shape=[_like(q, q.shape, q.dtype), _like(q, (rows, heads, 1, length), jnp.float32)],
        **_settings("attention_forward", 2, 4, q, block, 2),
    )
    return run(_blocks_in_memory(seen, block, "keys"), q, k, v, seen)


def _forward_kernel(
    in_memory: Any, q: Any, k: Any, v: Any, seen: Any,
    mixed: Any, log_sum: Any, peak: Any, total: Any, weighted: Any,
) -> None:  # fmt: skip
    """Adds a block of keys to what a block of queries has seen: the scores' maximum, the sum of
    their exponentials, and the values weighted by these, [D, queries]."""
    row, _, query_block, key_block = map(pl.program_id, range(4))
    scale = math.log2(math.e) / math.sqrt(q.shape[1])

    @pl.when(key_block == 0)
    def _() -> None:
        peak[...] = jnp.full_like(peak, HIDDEN)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @pl.when(in_memory[row, query_block, key_block] == key_block)
    def _() -> None:
        scores = _scores(q, k, seen, key_block)
        new_peak = jnp.maximum(peak[...], scores.max(axis=0, keepdims=True))
        shrink = jnp.exp2((peak[...] - new_peak) * scale)
        exponentials = jnp.exp2((scores - new_peak) * scale)
        total[...] = total[...] * shrink + exponentials.sum(axis=0, keepdims=True)
        weighted[...] = weighted[...] * shrink + _dot(v[...], exponentials.astype(v.dtype), 0, 0)
        peak[...] = new_peak

    @pl.when(key_block == pl.num_programs(3) - 1)
    def _() -> None:
        mixed[...] = (weighted[...] / total[...]).T.astype(mixed.dtype)
        log_sum[...] = peak[...] * scale + jnp.log2(total[...])


# --- Backward -------------------------------------------------------------------------------------


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array,
    mixed: jax.Array, log_sum: jax.Array, mixed_grad: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The gradients of q, k and v. Those of keys and values are summed over queries in the inner
    loops; that of the queries stays on the chip over all keys, for a part of the queries at a time
    if it is too large."""
    rows, heads, length, size = q.shape
    block, kv_heads = math.gcd(length, BLOCK), k.shape[1]
    shared_by, blocks = heads // kv_heads, length // block
    parts = next(
        n for n in range(1, blocks + 1)
        if blocks % n == 0 and (shared_by * length // n * size <= HELD or n == blocks)
    )  # fmt: skip
    inner = blocks // parts
    # The derivative of softmax needs, per query, the product of the result and its gradient.
    product = jnp.einsum("bhld,bhld->bhl", mixed, mixed_grad, preferred_element_type=jnp.float32)
    stats = jnp.concatenate([log_sum, product[:, :, None]], axis=2)

    # The grid: rows, key-value heads, parts, blocks of keys, query heads that share these keys, and
    # blocks of queries within the part.
    queries = pl.BlockSpec(
        (None, None, block, size),
        lambda b, k, p, j, h, i, at: (b, k * shared_by + h, at[b, j, p * inner + i], 0),
    )
    per_query = pl.BlockSpec(
        (None, None, 2, block),
        lambda b, k, p, j, h, i, at: (b, k * shared_by + h, 0, at[b, j, p * inner + i]),
    )
    ends = pl.BlockSpec(
        (None, 2, block), lambda b, k, p, j, h, i, at: (b, 0, at[b, j, p * inner + i])
    )
    keys = pl.BlockSpec((None, None, block, size), lambda b, k, p, j, h, i, at: (b, k, j, 0))
    part = (shared_by, length // parts, size)
    q_part = pl.BlockSpec((None, *part), lambda b, k, p, j, h, i, at: (b, k, p, 0))
    k_part = pl.BlockSpec(
        (None, None, None, block, size), lambda b, k, p, j, h, i, at: (p, b, k, j, 0)
    )
    of_keys = _like(k, (parts, *k.shape), k.dtype)
    run = pl.pallas_call(
        _backward_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, kv_heads, parts, blocks, shared_by, inner),
            in_specs=[queries, keys, keys, ends, queries, per_query],
            out_specs=[q_part, k_part, k_part],
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32) for shape in (part, (block, size), (block, size))
            ],
        ),
        out_shape=[_like(q, q.shape, q.dtype), of_keys, of_keys],
        **_settings("attention_backward", 3, 6, q, block, 5),
    )
    in_memory = _blocks_in_memory(seen, block, "queries")
    q_grad, k_grads, v_grads = run(in_memory, q, k, v, seen, mixed_grad, stats)
    return q_grad, k_grads.sum(axis=0), v_grads.sum(axis=0)


def _backward_kernel(
    in_memory: Any, q: Any, k: Any, v: Any, seen: Any, mixed_grad: Any, stats: Any,
    q_grad: Any, k_grad: Any, v_grad: Any, q_sum: Any, k_sum: Any, v_sum: Any,
) -> None:  # fmt: skip
    """Adds what a block of queries and a block of keys contribute to each other's gradients."""
    row, _, part, key_block, head, step = map(pl.program_id, range(6))
    _, _, _, blocks, heads, steps = map(pl.num_programs, range(6))
    query_block = part * steps + step
    scale = 1 / math.sqrt(q.shape[1])
    queries = pl.ds(step * q.shape[0], q.shape[0])

    @pl.when((head == 0) & (step == 0))
    def _() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(key_block == 0)
    def _() -> None:
        q_sum[head, queries] = jnp.zeros(q.shape, jnp.float32)

    @pl.when(in_memory[row, key_block, query_block] == query_block)
    def _() -> None:
        log_sum, product = stats[:1], stats[1:]
        scores = _scores(q, k, seen, key_block)
        probabilities = jnp.exp2(scores * (math.log2(math.e) * scale) - log_sum)
        v_sum[...] += _dot(probabilities.astype(v.dtype), mixed_grad[...], 1, 0)
        by_probability = _dot(v[...], mixed_grad[...], 1, 1)
        by_score = (probabilities * (by_probability - product)).astype(q.dtype)
        k_sum[...] += _dot(by_score, q[...], 1, 0)
        q_sum[head, queries] += _dot(by_score, k[...], 0, 0)

    @pl.when(key_block == blocks - 1)
    def _() -> None:
        q_grad[head, queries] = (q_sum[head, queries] * scale).astype(q_grad.dtype)

    @pl.when((head == heads - 1) & (step == steps - 1))
    def _() -> None:
        k_grad[...] = (k_sum[...] * scale).astype(k_grad.dtype)
        v_grad[...] = v_sum[...].astype(v_grad.dtype)
