"""Attention on TPUs as a Pallas kernel: FlashAttention-2, Dao 2023,
https://arxiv.org/abs/2307.08691, algorithms 1 and 2.

Scores are computed for a block of queries and a block of keys at a time, and stay on the chip.
Blocks of keys outside of the range that a block of queries sees are left out of its loop. Scores
are laid out as [keys, queries]: reductions over keys then combine whole registers, and values per
query lie along a register's lanes.

K counts key-value heads, G (Q in types) the query heads that share one, and H = K G.
"""

import functools
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

BLOCK = 512  # queries, and keys, whose scores are computed at a time
KEYS = 4096  # keys of a head that the forward kernel holds on the chip at a time
QUERIES = 4096  # queries, of all heads that share keys, that the backward kernel holds
HIDDEN = -1e30  # the score of a key that a query doesn't see; finite, as inf - inf is NaN


@typechecked
def flash_attention(
    q: floating["B L Q K D"],
    k: floating["B S K D"],
    v: floating["B S K D"],
    first: integer["B L"],
    last: integer["B L"],
) -> floating["B L Q K D"]:
    """Computes attention of each query to the keys from index `first` to `last`. L and S are
    multiples of 128. Keeps its result and the logarithms of the softmax's denominators for the
    backward pass."""
    seen = jnp.stack([first, last], axis=1).astype(jnp.int32)
    heads = rearrange(q, "B L G K D -> B (K G) L D")
    k, v = (rearrange(x, "B S K D -> B K S D") for x in (k, v))
    return rearrange(_attend(heads, k, v, seen), "B (K G) L D -> B L G K D", K=k.shape[1])


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """q and the result are [B, H, L, D], k and v [B, K, S, D]. `seen` [B, 2, L] has the indices of
    the first and the last key that each query sees."""
    return _forward(q, k, v, seen)[0]


def _save(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    mixed, log_sum = map(save_for_backward, _forward(*inputs))
    return mixed, (*inputs, mixed, log_sum)


_attend.defvjp(_save, lambda saved, grad: (*_backward(grad, *saved), None))  # none for `seen`


# --- Blocks ---------------------------------------------------------------------------------------


def _ranges(seen: jax.Array, block: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns, for each block of queries, the first block of keys that it sees and the one after
    the last, [B, 2, blocks]; and likewise the range of query blocks that see each block of keys."""
    first, last = rearrange(seen, "B two (blocks n) -> two B blocks n", n=block)
    of_queries = jnp.stack([first.min(-1) // block, last.max(-1) // block + 1], axis=1)
    number, key_block = jnp.arange(first.shape[1]), jnp.arange(keys // block)
    start, stop = of_queries[:, 0, :, None], of_queries[:, 1, :, None]
    visible = (start <= key_block) & (key_block < stop)
    from_query = jnp.where(visible, number[:, None], len(number)).min(axis=1)
    to_query = jnp.where(visible, number[:, None] + 1, 0).max(axis=1)
    return of_queries, jnp.stack([from_query, to_query], axis=1)


def _part(length: int, block: int, most: int) -> int:
    """The largest multiple of the block that divides the length, up to max(most, block)."""
    return block * next((n for n in range(most // block, 1, -1) if length // block % n == 0), 1)


def _rows(number: jax.Array, block: int) -> Any:
    return pl.ds(pl.multiple_of(number * block, block), block)


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    numbers = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array, first_key: jax.Array) -> jax.Array:
    """Returns unscaled scores, [keys, queries]."""
    scores = _dot(k, q, 1, 1)
    index = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where((index >= seen[:1]) & (index <= seen[1:]), scores, HIDDEN)


def _run(
    name: str, kernel: Any, matmuls: int, ranges: jax.Array, grid: tuple[int, ...],
    inputs: list[Any], outputs: list[Any], scratch: list[tuple[int, ...]],
) -> Any:  # fmt: skip
    """Calls a kernel. Inputs, first q, are pairs of an array and its blocks; outputs are triples of
    a shape, a dtype and blocks. The grid's last dimension runs in order; the cores of a chip may
    share the others. The cost estimate assumes that half of the scores are seen."""
    q: jax.Array = inputs[0][0]
    rows, heads, length, size = q.shape
    scores = rows * heads * length * inputs[1][0].shape[2] // 2
    varying = jax.typeof(q).manual_axis_type
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[blocks for _, blocks in inputs],
            out_specs=[blocks for *_, blocks in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(*out[:2], manual_axis_type=varying) for out in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*[pltpu.PARALLEL] * 3, pltpu.ARBITRARY)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * matmuls * scores * size,
            transcendentals=scores,
            bytes_accessed=2 * matmuls * q.nbytes,
        ),
        name=name,
    )
    return call(ranges, *(array for array, _ in inputs))


# --- Forward --------------------------------------------------------------------------------------


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the result and, per query, the base-2 logarithm of the sum of the scores'
    exponentials, [B, H, 1, L]."""
    rows, heads, length, size = q.shape
    block, group, all_keys = math.gcd(length, BLOCK), heads // k.shape[1], k.shape[2]
    part = _part(all_keys, block, KEYS)
    # The grid: rows, heads, blocks of queries, parts of the keys.
    queries = pl.BlockSpec((None, None, block, size), lambda b, h, i, p, _: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, part, size), lambda b, h, i, p, _: (b, h // group, p, 0))
    ends = pl.BlockSpec((None, 2, block), lambda b, h, i, p, _: (b, 0, i))
    sums = pl.BlockSpec((None, None, 1, block), lambda b, h, i, p, _: (b, h, 0, i))
    return _run(
        "attention_forward", _forward_kernel, 2, _ranges(seen, block, all_keys)[0],
        grid=(rows, heads, length // block, all_keys // part),
        inputs=[(q, queries), (k, keys), (v, keys), (seen, ends)],
        outputs=[(q.shape, q.dtype, queries), ((rows, heads, 1, length), jnp.float32, sums)],
        scratch=[(1, block), (1, block), (size, block)],
    )  # fmt: skip


def _forward_kernel(
    ranges: Any, q: Any, k: Any, v: Any, seen: Any,
    mixed: Any, log_sum: Any, peak: Any, total: Any, weighted: Any,
) -> None:  # fmt: skip
    """Adds a part of the keys to the totals of a block of queries: the scores' maximum, the sum of
    their exponentials, and the sum of the values weighted by these, [D, queries]."""
    row, _, query_block, part = map(pl.program_id, range(4))
    block, blocks = q.shape[0], k.shape[0] // q.shape[0]
    scale = math.log2(math.e) / math.sqrt(q.shape[1])

    @pl.when(part == 0)
    def begin() -> None:
        peak[...] = jnp.full_like(peak, HIDDEN)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    start, stop = (jnp.clip(ranges[row, i, query_block] - part * blocks, 0, blocks) for i in (0, 1))

    @pl.loop(start, stop)
    def add(key_block: jax.Array) -> None:
        here = _rows(key_block, block)
        scores = _scores(q[...], k[here], seen, (part * blocks + key_block) * block)
        new_peak = jnp.maximum(peak[...], scores.max(axis=0, keepdims=True))
        shrink = jnp.exp2((peak[...] - new_peak) * scale)
        exponentials = jnp.exp2((scores - new_peak) * scale)
        total[...] = total[...] * shrink + exponentials.sum(axis=0, keepdims=True)
        weighted[...] = weighted[...] * shrink + _dot(v[here], exponentials.astype(v.dtype), 0, 0)
        peak[...] = new_peak

    @pl.when(part == pl.num_programs(3) - 1)
    def end() -> None:
        mixed[...] = (weighted[...] / total[...]).T.astype(mixed.dtype)
        log_sum[...] = peak[...] * scale + jnp.log2(total[...])


# --- Backward -------------------------------------------------------------------------------------


def _backward(
    grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array,
    mixed: jax.Array, log_sum: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns the gradients of q, k and v, given the result's. Gradients of a part of the queries
    stay on the chip over all keys; gradients of keys and values are then summed over parts."""
    rows, heads, length, size = q.shape
    group = heads // k.shape[1]
    most = QUERIES // group  # of each head
    block = math.gcd(length, min(BLOCK, 1 << (most.bit_length() - 1)))
    part = _part(length, block, most)
    # The derivative of softmax needs, per query, the product of the result and its gradient.
    product = jnp.einsum("bhld,bhld->bhl", mixed, grad, preferred_element_type=jnp.float32)
    stats = jnp.concatenate([log_sum, product[:, :, None]], axis=2)

    # The grid: rows, key-value heads, parts of the queries, blocks of keys.
    queries = pl.BlockSpec((None, group, part, size), lambda b, h, p, j, _: (b, h, p, 0))
    keys = pl.BlockSpec((None, None, block, size), lambda b, h, p, j, _: (b, h, j, 0))
    ends = pl.BlockSpec((None, 2, part), lambda b, h, p, j, _: (b, 0, p))
    sums = pl.BlockSpec((None, group, 2, part), lambda b, h, p, j, _: (b, h, 0, p))
    of_part = pl.BlockSpec((None, None, None, block, size), lambda b, h, p, j, _: (p, b, h, j, 0))
    parts = length // part
    q_grad, *others = _run(
        "attention_backward", _backward_kernel, 5, _ranges(seen, block, k.shape[2])[1],
        grid=(rows, k.shape[1], parts, k.shape[2] // block),
        inputs=[(q, queries), (k, keys), (v, keys), (seen, ends), (grad, queries), (stats, sums)],
        outputs=[(q.shape, q.dtype, queries), *[((parts, *k.shape), k.dtype, of_part)] * 2],
        scratch=[(group, part, size), (block, size), (block, size)],
    )  # fmt: skip
    return q_grad, *(each.sum(axis=0) for each in others)


def _backward_kernel(
    ranges: Any, q: Any, k: Any, v: Any, seen: Any, mixed_grad: Any, stats: Any,
    q_grad: Any, k_grad: Any, v_grad: Any, q_sum: Any, k_sum: Any, v_sum: Any,
) -> None:  # fmt: skip
    """Adds what a part of the queries and a block of keys contribute to each other's gradients."""
    row, _, part, key_block = map(pl.program_id, range(4))
    group, block, blocks = q.shape[0], k.shape[0], q.shape[1] // k.shape[0]
    scale = 1 / math.sqrt(q.shape[2])
    k_sum[...] = jnp.zeros_like(k_sum)
    v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(key_block == 0)
    def begin() -> None:
        q_sum[...] = jnp.zeros_like(q_sum)

    def add(head: jax.Array, query_block: jax.Array) -> None:
        here = _rows(query_block, block)
        query, grad = q[head, here], mixed_grad[head, here]
        log_sum, product = stats[head, :1, here], stats[head, 1:, here]
        scores = _scores(query, k[...], seen[:, here], key_block * block)
        probabilities = jnp.exp2(scores * (math.log2(math.e) * scale) - log_sum)
        v_sum[...] += _dot(probabilities.astype(v.dtype), grad, 1, 0)
        by_probability = _dot(v[...], grad, 1, 1)
        by_score = (probabilities * (by_probability - product)).astype(q.dtype)
        k_sum[...] += _dot(by_score, query, 1, 0)
        q_sum[head, here] += _dot(by_score, k[...], 0, 0)

    start, stop = (jnp.clip(ranges[row, i, key_block] - part * blocks, 0, blocks) for i in (0, 1))

    @pl.loop(0, group)
    def per_head(head: jax.Array) -> None:
        pl.loop(start, stop)(functools.partial(add, head))

    k_grad[...] = (k_sum[...] * scale).astype(k_grad.dtype)
    v_grad[...] = v_sum[...].astype(v_grad.dtype)

    @pl.when(key_block == pl.num_programs(3) - 1)
    def end() -> None:
        q_grad[...] = (q_sum[...] * scale).astype(q_grad.dtype)
