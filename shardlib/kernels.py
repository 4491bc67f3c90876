"""Ops with a fused kernel on some devices, each with a plain twin: the reference implementation,
which runs everywhere else, on the probe mesh and in the audit.

Kernels and twins don't see the mesh. Their type strings describe one device's part: B is this
device's rows and K its heads.
"""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.ops import Call, define_op, widening_einsum
from shardlib.types import Spec, floating, integer, typechecked

KERNEL = "kernel"  # the scope of a twin in whose place GPUs and TPUs run a kernel
BLOCK = 512  # queries whose scores are in memory at a time


@define_op
def attention(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array
) -> jax.Array:
    """Causal attention within each document. Q query heads share a key-value head. Vaswani et al.
    2017, https://arxiv.org/abs/1706.03762; Ainslie et al. 2023, https://arxiv.org/abs/2305.13245.

        kernels.attention(
            "B/d L Q K/t D, B/d L K/t D, B/d L K/t D, B/d L -> B/d L Q K/t D", q, k, v, document
        )

    Communicates nothing. A document's tokens stand in a row. The result is saved for the backward
    pass, which recomputes the scores from q, k and v: save those. If q is bf16, L a multiple of
    128, and D a multiple of 8 up to 128, runs a kernel: cuDNN's on NVIDIA GPUs, and that of
    flash_attention.py on TPUs. Raises ShardTypeError unless the operands have these dimensions in
    this order, with L and D not split.
    """
    queries, *others = call.operands
    call.require(len(queries.dims) == 5, "queries have five dimensions")
    call.require(not queries.unreduced, "reduce it first")
    rows, length, _, kv_heads, size = queries.dims
    call.require(not length.axes and not size.axes, f"{length} and {size} can't be split")
    keys, documents = Spec((rows, length, kv_heads, size)), Spec((rows, length))
    right = f"{queries}, {keys}, {keys}, {documents} -> {queries}"
    fits = [*others, call.result] == [keys, keys, documents, queries]
    call.require(fits, f"for these queries the string is `{right}`")
    device = jax.sharding.get_abstract_mesh().abstract_device  # None where the step is only traced
    platform = device.platform if device else ""
    fits = q.shape[1] % 128 == 0 and q.shape[-1] in range(8, 129, 8)
    has_kernel = fits and q.dtype == jnp.bfloat16
    if platform == "tpu" and has_kernel:
        from shardlib.flash_attention import flash_attention  # takes 0.3 s to import

        return flash_attention(q, k, v, document)
    if platform == "gpu" and has_kernel:
        return save_for_backward(cudnn_attention(q, k, v, document))
    with jax.named_scope(KERNEL if has_kernel else "plain"):
        return save_for_backward(plain_attention(q, k, v, document))


@typechecked
def plain_attention(
    q: floating["B L Q K D"],
    k: floating["B L K D"],
    v: floating["B L K D"],
    document: integer["B L"],
) -> floating["B L Q K D"]:
    """Computes attention in blocks of queries, so that scores are in memory for one at a time."""
    length = q.shape[1]
    block = math.gcd(length, BLOCK)
    if block < 64:
        block = length

    # k and v enter the loop in f32 and are cast to bf16 inside, so that their gradients are summed
    # over blocks in f32.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @explicit_activation_checkpointing
    def attend(_: tuple[()], queries: tuple[jax.Array, ...]) -> tuple[tuple[()], jax.Array]:
        q_block, q_document, q_position = queries
        k, v = (x.astype(q.dtype) for x in wide)
        scores = widening_einsum("bqgkd,bskd->bkgqs", jnp.float32, q_block, k)
        visible = q_document[:, :, None] == document[:, None, :]
        visible &= q_position[:, None] >= jnp.arange(length)
        scores = jnp.where(visible[:, None, None], scores / math.sqrt(q.shape[-1]), -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return (), jnp.einsum("bkgqs,bskd->bqgkd", probabilities, v)

    def blocks(x: jax.Array) -> jax.Array:
        return rearrange(x, "B (blocks L) ... -> blocks B L ...", L=block)

    position = rearrange(jnp.arange(length), "(blocks L) -> blocks L", L=block)
    _, mixed = lax.scan(attend, (), (blocks(q), blocks(document), position))
    return rearrange(mixed, "blocks B L Q K D -> B (blocks L) Q K D")


@typechecked
def cudnn_attention(
    q: floating["B L Q K D"],
    k: floating["B L K D"],
    v: floating["B L K D"],
    document: integer["B L"],
) -> floating["B L Q K D"]:
    """Computes attention with cuDNN, which wants query heads that share a key side by side. Its
    forward kernel runs again in the backward pass, for the softmax statistics."""
    same = document[:, None, :, None] == document[:, None, None, :]
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = jax.nn.dot_product_attention(
        heads, k, v, mask=same, is_causal=True, implementation="cudnn"
    )
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])
