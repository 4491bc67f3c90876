"""Attention, with a fused kernel on some devices and a plain reference implementation, which runs
everywhere else, as on the probe mesh and in the audit.

Neither sees the mesh. Their type strings describe one device's part: B is its rows and K its
key-value heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.local import alike, einsum
from shardlib.mesh import platform
from shardlib.ops import Call, define_op
from shardlib.types import Dim, Spec, compute, floating, integer, typechecked

# Queries whose scores are in memory at a time; fewer if a row has more than LONG keys.
BLOCK, LONG = 512, 8192
KERNEL = "has_kernel"  # a scope around equations that a kernel replaces on TPUs and GPUs


def balanced(length: int, parts: int) -> np.ndarray:
    """Returns the order of a row's positions, int[length], in which each of `parts` devices gets an
    early and a late piece of the row: in causal attention all have the same work. The length is a
    multiple of 2 * parts. One part keeps the row's order."""
    if parts == 1:
        return np.arange(length)
    pieces = np.arange(length).reshape(2 * parts, -1)
    return np.stack([pieces[:parts], pieces[: parts - 1 : -1]], axis=1).ravel()


def in_order(x: jax.Array, parts: int) -> jax.Array:
    """Reorders dimension 1 from the order of `balanced` to the row's."""
    if parts == 1:
        return x
    early, late = rearrange(x, "B (parts two n) ... -> two B parts n ...", parts=parts, two=2)
    return rearrange([early, late[:, ::-1]], "two B parts n ... -> B (two parts n) ...")


# While a row is computed in several steps, a function that takes a layer's keys, values and key
# positions, and returns all so far, for the queries to attend to. See variants/cache.py.
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

        attention(
            "B/d L/c Q K/t D, B/d L K/t D, B/d L K/t D, B/d L/c, B/d L/c, B/d L -> B/d L/c Q K/t D",
            q, k, v, start, position, key_position,
        )

    Communicates nothing. Positions are in the order of `balanced`. The result is saved for the
    backward pass, which recomputes the scores from q, k and v: save these. If `misfit` finds
    nothing, it runs flash_attention.py on TPUs and cuDNN's kernel on NVIDIA GPUs. Raises
    ShardTypeError unless the operands have these dimensions in this order, with D not split, and q,
    k and v the same dtype.
    """
    queries, *others = call.operands
    call.require(len(queries.dims) == 5, "queries have five dimensions")
    call.require(not queries.unreduced, "reduce it first")
    rows, length, _, kv_heads, size = queries.dims
    call.require(not size.over, f"{size} can't be split")
    keys, all_positions = (Spec((rows, Dim(length.name), *dims)) for dims in ((kv_heads, size), ()))
    positions = Spec((rows, length))
    wanted = [keys, keys, positions, positions, all_positions]
    right = f"{', '.join(map(str, (queries, *wanted)))} -> {queries}"
    fits = [*others, call.result] == [*wanted, queries]
    call.require(fits, f"for these queries the string is `{right}`")
    call.require(q.dtype == k.dtype == v.dtype, "queries, keys and values have different dtypes")
    q, k, v = alike(q, k, v)  # kernels want one type for all three
    if recall := recalling.value:
        k, v, key_position = recall(k, v, key_position)
        return plain_attention(q, k, v, start, position, key_position)
    fits = not misfit(q.shape[1], k.shape[1], q.shape[2], q.shape[-1], q.dtype)
    if fits and (kernel := KERNELS.get(platform())):
        return kernel(q, k, v, start, position, key_position)
    with jax.named_scope(KERNEL if fits else "plain"):
        return save_for_backward(plain_attention(q, k, v, start, position, key_position))


def misfit(length: int, keys: int, queries: int, size: int, dtype: Any) -> str:
    """Returns why TPUs' and GPUs' kernels can't take a device's `length` queries and `keys` keys of
    a row, with `queries` query heads of `size` per key-value head; "" if they can."""
    multiple = 128 if length == keys else 256
    reasons = {
        f"kernels compute in bfloat16, not in {dtype}": dtype != jnp.bfloat16,
        f"a device's {length} tokens of a row aren't a multiple of {multiple}": length % multiple,
        f"the size of a head, {size}, isn't a multiple of 8 up to 128": size % 8 or size > 128,
        f"more than 32 query heads share a key-value head: {queries}": queries > 32,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@typechecked
def plain_attention(
    q: floating["B L Q K D"],
    k: floating["B S K D"],
    v: floating["B S K D"],
    start: integer["B L"],
    position: integer["B L"],
    key_position: integer["B S"],
) -> floating["B L Q K D"]:
    """Computes attention in blocks of queries, so that only one block's scores are in memory."""
    length, most = q.shape[1], max(BLOCK * LONG // max(k.shape[1], LONG), 1)
    block = max(n for n in range(1, min(most, length) + 1) if length % n == 0)
    if 2 * block < min(most, 64):  # many small blocks would take longer
        block = length

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
    q: jax.Array, k: jax.Array, v: jax.Array,
    start: jax.Array, position: jax.Array, key_position: jax.Array,
) -> jax.Array:  # fmt: skip
    """Computes attention with flash_attention.py, which saves the result itself."""
    from kernels.flash_attention import flash_attention  # takes 0.3 s to import

    parts = k.shape[1] // q.shape[1]
    return flash_attention(q, in_order(k, parts), in_order(v, parts), start, position)


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array,
    start: jax.Array, position: jax.Array, key_position: jax.Array,
) -> jax.Array:  # fmt: skip
    """Computes attention with cuDNN, which wants query heads that share a key side by side, and the
    mask of documents as an array of rows, queries and keys in the queries' dtype. activations.py
    saves the outputs of its forward kernel."""
    seen = start[:, None, :, None] <= key_position[:, None, None]
    whole = q.shape[1] == k.shape[1]  # then positions are in order, and cuDNN skips later keys
    if not whole:
        seen &= key_position[:, None, None] <= position[:, None, :, None]
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = jax.nn.dot_product_attention(
        heads, k, v, mask=seen, is_causal=whole, implementation="cudnn"
    )
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])


KERNELS = {"tpu": tpu_attention, "gpu": cudnn_attention}  # by platform


def share_computed(kind: str, seen: float, parts: int) -> float:
    """Returns a lower bound on the share of scores that a kind of device computes. `seen` is the
    share that causality and the window leave visible; documents hide more. L has `parts` parts."""
    if "TPU" in kind:
        return seen
    return 1 if parts > 1 else 0.5  # cuDNN skips only later keys, if rows are in order


def note_of_kernel(sizes: dict[str, int], parts: int) -> str:
    """Names the kernel that computes attention on the mesh in context, or says why none does, given
    the sizes of L, Q and D, and the parts that L is split into. Empty where there are no kernels.
    """
    length, kernel = sizes["L"] // parts, KERNELS.get(platform())
    problem = misfit(length, sizes["L"], sizes["Q"], sizes["D"], compute.dtype)
    if not kernel:
        return ""
    return f"attention: {f'plain, as {problem}' if problem else kernel.__name__}"
