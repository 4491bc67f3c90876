"""Pretrains a Llama-style decoder, sharded over a mesh of up to four axes. This file holds the
entire training step of a dense model with AdamW: weights, model, loss, optimizer and step, and the
loop around it. variants/ adds other families of models, experts and Muon.

    python -m train --config-name=local_test_synthetic paths.model_name=synthetic_000

Mesh axes, outermost first, that is, over the slowest links first:
    r  replicas. Once a step, weights are gathered and gradients reduced over r.
    s  shards of a replica: each layer gathers its weights over s where it uses them (FSDP).
    c  context: splits the sequence. Attention gathers keys and values over c.
    t  tensor parallelism: splits the heads, the feed-forward and the vocabulary.
d isn't an axis of its own but stands for r and s together, all data parallelism: B/d is B/s/r. A
config sets d and t, and r and c where they aren't 1; s is d / r. All large weights are stored split
over all axes.

Dimensions, whose config keys are in configs/sizes.py:
    B  batch                  Q  query heads per key-value head     F  feed-forward
    L  sequence               K  key-value heads                    V  vocabulary
    M  model (residual)       D  size of a head                     l  a chunk of L

Types: f32["V/t M/c/d"] is a float32 array, vocabulary by model, V split over mesh axis t, and M
into c parts, each of these into d. It is the stored embedding; a step gathers it over r once, and
computes with compute["V/t M/c/s"]. "{U:t}" is unreduced over t: each device along t holds a partial
sum. "[V/t]" is the dimension that ops.index_unreduced indexes. "" is a scalar. compute[...] is an
array of the config's dtype, bfloat16 or float32. Stacked["layers", Layer] is a Layer whose arrays
have a first dimension `layers`; Mapped[function, Layer] one whose arrays have the types that
`function` returns; in a Subset[Layer] some arrays are missing.

`training_step` is a shard_map with the annotations as its specs: every device runs this code on its
own part of each array. Types name global dimensions: with d=4 and c=2, "B/d L/c" has shape
[B/4, L/2] here. jnp functions see only this part; only ops communicate. jax.grad derives the
backward pass, whose collectives follow from the forward ones:

                                     forward          backward
    all_gather                       all-gather       reduce-scatter
    psum_scatter                     reduce-scatter   all-gather
    psum                             all-reduce       nothing
    reduce_max                       all-reduce       it has no gradient
    sum(s)_of_squares                all-reduces      it is used outside of jax.grad
    broadcast                        nothing          all-reduce
    einsum_unreduced, reduce_sum,
    index_unreduced, attention       nothing          nothing

The gradient of a gathered value is a partial sum on each device, until the gather's reduce-scatter
adds them up. (The gradient of an einsum's replicated operand would take an all-reduce.)
Several axes of one dimension, as in "M/t/c/s -> M", take one collective. Over an axis of size 1
nothing is sent. Over n devices, each receives (n - 1)/n of the larger array, input or result, in a
gather or a reduce-scatter, and 2 (n - 1)/n of the array in an all-reduce.

`python -m tools.audit` lists all collectives, with the bytes that a device receives, by phase:
    forward
    recomputed   the backward pass recomputes each layer, and so repeats its gathers
    backward
    update       outside of jax.grad: the norm of the gradient, the number of targets
It counts the FLOPs of all matmuls, recomputed ones and masked scores included.

The batch's fields are "B/d L/c": inputs and targets, loss_mask (false for padding), position (in
the row) and start (the position at which the target's document starts). See TokenBatch in
data/loader.py.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from checks import preflight
from checks.finite import explanation
from configs.schema import Config, ModelConfig
from configs.sizes import DIMENSIONS, dimensions, step_flops
from data.loader import Batches, TokenBatch
from data.sources import check_same_rows, open_batches
from kernels.attention import attention, note_of_kernel
from runtime.checkpoint import Checkpoints
from runtime.initial import declared, embedding, gain, initial_weights, into_residual, matrix
from runtime.program import program
from runtime.run import Run, as_begun, complete, due, make_mesh, reserved, say, trained_with
from runtime.schedule import Hyper, hyper_at, note_of_schedule
from shardlib import ops
from shardlib.activations import (
    explicit_activation_checkpointing,
    save_for_backward,
    sum_over_chunks,
)
from shardlib.mesh import platform
from shardlib.types import (
    ArrayType,
    Dim,
    Mapped,
    Spec,
    Stacked,
    Subset,
    array_type,
    bool_,
    choose,
    compute,
    computing_in,
    f32,
    make_shapes,
    make_shardings,
    pytree_dataclass,
    type_tree,
    typechecked,
    typed_shard_map,
    u32,
)
from variants import experts, families, muon
from variants.experts import Experts, Routing

# --- Model ----------------------------------------------------------------------------------------

# Each weight declares its layout and its initial values: see runtime/initial.py.


@pytree_dataclass
class MLP:
    w_gate: compute["M/c/s F/t", matrix("M")]
    w_up: compute["M/c/s F/t", matrix("M")]
    w_down: compute["M/c/s F/t", into_residual("F")]


@pytree_dataclass
class Layer:
    attention_norm: compute["M/t/c/s", gain]
    w_q: compute["M/c/s Q K/t D", matrix("M")]
    w_k: compute["M/c/s K/t D", matrix("M")]
    w_v: compute["M/c/s K/t D", matrix("M")]
    qkv: families.QKV | None  # for families other than Llama
    w_o: compute["M/c/s Q K/t D", into_residual("Q K D")]
    mlp_norm: compute["M/t/c/s", gain]
    mlp: MLP | None
    experts: Experts | None


@pytree_dataclass
class Weights:
    """The weights that a replica computes with, made from the Stored ones once a step by `cast` and
    `gather_replica`."""

    embed: compute["V/t M/c/s", embedding]
    layers: Stacked["layers", Layer]
    final_norm: compute["M/t/c/s", gain]
    unembed: compute["V/t M/c/s", matrix("M")] | None  # None: tied to the embedding


def over_replicas(kind: ArrayType) -> ArrayType:
    """The weight's type, with r added to the dimension that s splits. Types that s doesn't split,
    such as a bias's, don't change."""
    dims = (Dim(x.name, (*x.over, "r") if "s" in x.over else x.over) for x in kind.spec.dims)
    return kind.laid_out(Spec(tuple(dims)))


def as_stored(kind: ArrayType) -> ArrayType:
    return array_type(f32, over_replicas(kind).spec, kind.initial)


# The types of f32 master weights, their gradients and the optimizer's moments. Matrices, and the
# gains of the residual stream's norms, are split over all mesh axes.
Stored = Mapped[as_stored, Weights]


def weights_type(config: ModelConfig) -> Any:
    """The types of a model's Weights: resolves each `X | None` by the config."""
    qkv = families.qkv_type(config.qkv_bias, config.qk_norm)
    each = config.experts and choose(Experts, b_router=config.experts.bias)
    layer = choose(Layer, qkv=qkv, mlp=config.d_ff > 0, experts=each)
    return declared(choose(Weights, layers=layer, unembed=not config.tied_embeddings))


@typechecked
def rms_norm(h: compute["B/d L/c M"], gain: compute["M"], eps: float) -> compute["B/d L/c M"]:
    """RMSNorm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467."""
    h32 = h.astype(f32.dtype)
    scale = lax.rsqrt(jnp.mean(jnp.square(h32), axis=-1, keepdims=True) + eps)
    return (h32 * scale * gain.astype(f32.dtype)).astype(h.dtype)


@typechecked
def norm_before(
    h: compute["B/d L/c M"], gain: compute["M/t/c/s"], config: ModelConfig
) -> compute["B/d L/c M"]:
    """Gathers the gain and normalizes a sublayer's input, unless the model has post-norm."""
    if config.norms_after:
        return h
    return rms_norm(h, ops.all_gather("M/t/c/s -> M", gain), config.norm_eps)


@typechecked
def norm_after(
    y: compute["B/d L/c M/t"], gain: compute["M/t/c/s"], config: ModelConfig
) -> compute["B/d L/c M/t"]:
    """Normalizes the result of a sublayer in models with post-norm, which have no pre-norm."""
    return families.norm_after(y, gain, config.norm_eps) if config.norms_after else y


@typechecked
def rotation(
    position: u32["B/d L/c"], config: ModelConfig
) -> tuple[f32["B/d L/c D"], f32["B/d L/c D"]]:
    """The sines and cosines of RoPE's angles: for pair i of D/2, position * max_timescale^(-2i/D).
    Each value appears at both i and i + D/2."""
    half = config.d_head // 2
    timescale = config.rope_max_timescale ** (jnp.arange(half, dtype=f32.dtype) / half)
    if config.rope_scaling:
        timescale = config.rope_scaling.slowed(timescale)
    angle = position.astype(f32.dtype)[:, :, None] / jnp.tile(timescale, 2)
    return jnp.sin(angle), jnp.cos(angle)


@typechecked
def rope(
    q: compute["B/d L/c Q K/t D"],
    k: compute["B/d L/c K/t D"],
    sin: f32["B/d L/c D"],
    cos: f32["B/d L/c D"],
) -> tuple[compute["B/d L/c Q K/t D"], compute["B/d L/c K/t D"]]:
    """Rotates each pair (i, i + D/2) of queries and keys. Su et al. 2021,
    https://arxiv.org/abs/2104.09864, section 3.4."""

    # A matmul turns each pair by 90 degrees, exactly. TPUs would take longer to swap the halves.
    size = q.shape[-1]
    turn = (jnp.eye(size, k=size // 2) - jnp.eye(size, k=-size // 2)).astype(q.dtype)

    def rotated(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
        return (x * cos + jnp.matmul(x, turn) * sin).astype(x.dtype)

    sin, cos = sin[:, :, None], cos[:, :, None]  # a dimension for the heads
    return rotated(q, sin[:, :, None], cos[:, :, None]), rotated(k, sin, cos)


@typechecked
def swiglu(h: compute["B/d L/c M"], w: MLP) -> compute["B/d L/c M {U:t}"]:
    """SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202."""
    w_gate = ops.all_gather("M/c/s F/t -> M F/t", w.w_gate)
    w_up = ops.all_gather("M/c/s F/t -> M F/t", w.w_up)
    gate = ops.einsum_unreduced("B/d L/c M, M F/t -> B/d L/c F/t", h, w_gate)
    up = ops.einsum_unreduced("B/d L/c M, M F/t -> B/d L/c F/t", h, w_up)
    gate = save_for_backward(gate)
    up = save_for_backward(up)
    w_down = ops.all_gather("M/c/s F/t -> M F/t", w.w_down)
    hidden = jax.nn.silu(gate.astype(f32.dtype)) * up.astype(f32.dtype)
    hidden = hidden.astype(compute.dtype)
    return ops.einsum_unreduced("B/d L/c F/t, M F/t -> B/d L/c M {U:t}", hidden, w_down)


@typechecked
def forward(
    weights: Weights, batch: TokenBatch, config: ModelConfig, unroll: int = 1
) -> tuple[compute["B/d L/c M/t"], Stacked["layers", Routing | None]]:
    """Returns the residual stream after the last layer, and each layer's Routing, if any. The
    stream at position l, which predicts target l, depends only on inputs 0 to l of its
    document."""
    embed = ops.all_gather("V/t M/c/s -> V/t M", weights.embed)
    x = ops.index_unreduced("[V/t] M, B/d L/c -> B/d L/c M {U:t}", embed, batch.inputs)
    x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)
    sin, cos = rotation(batch.position, config)
    key_position = ops.all_gather("B/d L/c -> B/d L", batch.position)
    start = batch.start
    if config.sliding_window:
        start = families.first_visible(start, batch.position, config.sliding_window)

    # In an unrolled loop the compiler may put off a layer's weight gradients, and so keep their
    # inputs in memory. With FSDP (over s and c) and no tensor parallelism (over t), the gradients'
    # reduce-scatters prevent this. Otherwise `in_turn` does, which sends nothing.
    fsdp_without_tp = lax.axis_size("s") * lax.axis_size("c") > 1 and lax.axis_size("t") == 1

    # The residual stream x is split over t: this saves memory and sends no more, as a sublayer's
    # all-gather and reduce-scatter send as many bytes as one all-reduce. It is split along M, not L
    # as in Megatron's sequence parallelism, where devices along t hold different positions, so that
    # a chunk of the loss would need all these devices. The price: devices along t compute the same
    # norms.
    #
    # For the backward pass, each layer keeps x, q, k, v, attention's result, x after attention,
    # gate and up. The attention op saves its result itself and, on GPUs and TPUs, the softmax's log
    # denominators, f32["B/d L/c K/t Q"], as the audit says. Kept once, not per layer: the values
    # that `block` uses from outside (sin, cos, the keys' positions) and the embedding lookup's ids.
    # Weights and the batch are arguments of the step, in memory anyway. The backward pass
    # recomputes the rest: norms, attention's scores, the product of gate and up, and the gathers of
    # x, k, v and weights. It repeats no reduce-scatter, because x is saved after each one: after
    # attention below, after the MLP as the next layer's argument.
    @functools.partial(
        explicit_activation_checkpointing, unrolled=unroll > 1, in_turn=not fsdp_without_tp
    )
    @typechecked
    def block(x: compute["B/d L/c M/t"], w: Layer) -> tuple[compute["B/d L/c M/t"], Routing | None]:
        h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
        h = norm_before(h, w.attention_norm, config)
        w_q = ops.all_gather("M/c/s Q K/t D -> M Q K/t D", w.w_q)
        w_k = ops.all_gather("M/c/s K/t D -> M K/t D", w.w_k)
        w_v = ops.all_gather("M/c/s K/t D -> M K/t D", w.w_v)
        q = ops.einsum_unreduced("B/d L/c M, M Q K/t D -> B/d L/c Q K/t D", h, w_q)
        k = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_k)
        v = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_v)
        if w.qkv:
            q, k, v = w.qkv.adjusted(q, k, v, config.norm_eps)
        q, k = rope(q, k, sin, cos)
        q = save_for_backward(q)
        k = save_for_backward(k)
        v = save_for_backward(v)
        k = ops.all_gather("B/d L/c K/t D -> B/d L K/t D", k)
        v = ops.all_gather("B/d L/c K/t D -> B/d L K/t D", v)
        mixed = attention(
            "B/d L/c Q K/t D, B/d L K/t D, B/d L K/t D, B/d L/c, B/d L/c, B/d L -> B/d L/c Q K/t D",
            q, k, v, start, batch.position, key_position,
        )  # fmt: skip
        w_o = ops.all_gather("M/c/s Q K/t D -> M Q K/t D", w.w_o)
        y = ops.einsum_unreduced("B/d L/c Q K/t D, M Q K/t D -> B/d L/c M {U:t}", mixed, w_o)
        y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
        x = save_for_backward(x + norm_after(y, w.attention_norm, config))

        z = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
        z = norm_before(z, w.mlp_norm, config)
        output = swiglu(z, w.mlp) if w.mlp else None
        routed = None
        if w.experts and config.experts:
            output, routed = experts.mixture(z, w.experts, output, config.experts)
        output = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", output)
        return x + norm_after(output, w.mlp_norm, config), routed

    return lax.scan(block, x, weights.layers, unroll=unroll)


# --- Loss -----------------------------------------------------------------------------------------


@typechecked
def target_count(batch: TokenBatch) -> f32[""]:
    """The number of targets in the loss, over all devices."""
    mask = batch.loss_mask.astype(f32.dtype)
    return ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", mask))


@typechecked
def output_weights(weights: Weights) -> tuple[compute["M"], compute["V/t M"]]:
    """The final norm's gain and the unembedding, gathered, for `unembed`."""
    weight = weights.embed if weights.unembed is None else weights.unembed
    gain = ops.all_gather("M/t/c/s -> M", weights.final_norm)
    return gain, ops.all_gather("V/t M/c/s -> V/t M", weight)


@typechecked
def unembed(
    weights: tuple[compute["M"], compute["V/t M"]], x: compute["B/d L/c M/t"], config: ModelConfig
) -> f32["B/d L/c V/t"]:
    """Returns the logits of whole rows or one chunk of each, from the `output_weights` and the
    residual stream after the last layer."""
    gain, w_unembed = weights
    h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
    h = rms_norm(h, gain, config.norm_eps)
    # Without the barrier v5p's compiler fuses the norm into the matmuls, which take a third longer.
    h = lax.optimization_barrier(h)
    return ops.einsum_unreduced("B/d L/c M, V/t M -> B/d L/c V/t", h, w_unembed, dtype=f32)


@typechecked
def against_largest(
    logits: f32["B/d l/c V/t"], targets: u32["B/d l/c"]
) -> tuple[f32["B/d l/c"], f32["B/d l/c"]]:
    """Returns the targets' logits and the logs of the softmax's denominators, each minus the
    largest logit. The vocabulary stays split: only the largest logit, the sum of exponentials and
    the target's logit are reduced."""
    largest = ops.reduce_max("B/d l/c V/t -> B/d l/c", lax.stop_gradient(logits))
    logits = logits - largest[:, :, None]
    sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))
    sum_exp = ops.psum("B/d l/c {U:t} -> B/d l/c", sum_exp)
    logit = ops.index_unreduced("B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets)
    logit = ops.psum("B/d l/c {U:t} -> B/d l/c", logit)
    return logit, jnp.log(sum_exp)


# Sums over all targets or tokens on all devices. Scalars are logged under these names, as means.
Sums = dict[str, f32[""] | f32["layers E"]]


@typechecked
def total_loss(
    weights: Weights, batch: TokenBatch, count: f32[""], config: Config
) -> tuple[f32[""], Sums]:
    """Returns the objective and the sums to log. The objective is the cross-entropy in nats, summed
    over all targets on all devices, plus experts' costs. The caller divides it by `count`."""
    unembedding = output_weights(weights)

    # Runs on one chunk of the sequence at a time, because logits are by far the largest array.
    @typechecked
    def loss(
        unembedding: tuple[compute["M"], compute["V/t M"]],
        x: compute["B/d l/c M/t"],
        targets: u32["B/d l/c"],
        loss_mask: bool_["B/d l/c"],
    ) -> tuple[f32[""], Sums]:
        logit, log_sum = against_largest(unembed(unembedding, x, config.model), targets)
        nats = (log_sum - logit) * loss_mask
        total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))
        return total, {"loss": total}

    unroll = config.layers_at_a_time(platform())  # 1 in the audit, which has no devices
    x, routed = forward(weights, batch, config.model, unroll)
    # Computes each chunk's gradient right after its loss, so no logits are kept: only the gradients
    # of x and of the gain and the unembedding, which are summed over chunks in f32 and then rounded
    # to the weights' dtype. The audit lists the gradients' collectives as backward.
    chunks = config.training.loss_chunks
    objective, sums = sum_over_chunks(loss, chunks, unembedding, x, batch.targets, batch.loss_mask)
    if routed:
        cost, more = experts.costs(routed, count, config.training)
        return objective + cost, sums | more
    return objective, sums


@typechecked
def cast(weights: Stored) -> Mapped[over_replicas, Weights]:
    """Rounds the weights to the dtype that a step computes in, so that gathers of weights and
    reduce-scatters of gradients send that dtype. Weights that are declared as f32 stay f32."""
    kinds = type_tree(Weights, weights)
    return jax.tree.map(lambda kind, weight: weight.astype(kind.dtype), kinds, weights)


@typechecked
def gather_replica(weights: Mapped[over_replicas, Weights]) -> Weights:
    """Gathers all weights over r, once a step; with r=1 nothing is sent. Weights that r doesn't
    split, such as biases, are there already: their backward pass is an all-reduce of their
    gradients, in f32."""

    def gather(wanted: ArrayType, weight: jax.Array) -> jax.Array:
        if not wanted.initial.learned:  # it has no gradient to add up
            return weight
        split = over_replicas(wanted).spec
        op = ops.broadcast if split == wanted.spec else ops.all_gather
        return op(f"{split} -> {wanted.spec}", weight)

    return jax.tree.map(gather, type_tree(Weights, weights), weights)


def in_microbatches(batch: Any, config: Config) -> Any:
    """Splits each device's own rows into microbatches, along a new dimension 0."""
    n = config.training.microbatches
    return jax.tree.map(lambda x: rearrange(x, "(n B) L -> n B L", n=n), batch)


@typechecked
def loss_and_grads(
    weights: Stored, batch: TokenBatch, config: Config
) -> tuple[Sums, f32[""], Stored]:
    """Returns the sums of losses and metrics, the number of targets, and the gradient of the mean
    objective. jax.grad returns gradients that are added up over the devices of a replica and split
    like the weights, because the backward pass of a weight's all_gather is a reduce-scatter, in
    bf16 like the gather. Each microbatch gathers the weights again, unless the compiler moves
    gathers out of the loop, and reduce-scatters its gradients, which are added up in f32. Over r,
    weights and gradients are sent once for all microbatches."""
    replica, scatter_over_r = jax.vjp(lambda stored: gather_replica(cast(stored)), weights)
    count = target_count(batch)
    value_and_grads = jax.value_and_grad(total_loss, has_aux=True)
    value_and_grads = functools.partial(value_and_grads, replica, count=count, config=config)
    if config.training.microbatches == 1:
        total = value_and_grads(batch)
    else:

        def add(total: Any, rows: Any) -> tuple[Any, tuple[()]]:
            # Without the barrier libtpu 0.0.50's compiler crashes.
            part = jax.tree.map(lax.optimization_barrier, value_and_grads(rows))
            return jax.tree.map(jnp.add, total, part), ()

        parts = in_microbatches(batch, config)
        sums, _ = jax.eval_shape(value_and_grads, jax.tree.map(lambda x: x[0], parts))
        wide = functools.partial(jnp.zeros_like, dtype=f32.dtype)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), sums), jax.tree.map(wide, replica)
        total, () = lax.scan(add, zeros, parts)
    (_, sums), grads = total
    # A reduce-scatter over r. In f32 it would send twice as much, and losses were no lower.
    (grads,) = scatter_over_r(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, replica))
    return sums, count, jax.tree.map(lambda g: g / count, grads)


# --- Optimizer ------------------------------------------------------------------------------------


@pytree_dataclass
class State:
    step: u32[""]  # completed steps
    weights: Stored
    mu: Stored  # averages of gradients
    nu: Subset[Stored]  # averages of squared gradients, for the weights that AdamW updates


def state_type(config: Config) -> Any:
    """The types of a state's arrays."""
    weights = type_tree(Stored, weights_type(config.model))
    nu = muon.of_adamw(weights) if config.training.optimizer == "muon" else weights
    return State(u32[""], weights, weights, nu)


@typechecked
def fresh_state(weights: Stored, config: Config) -> State:
    """Step 0 with these weights and zero moments."""
    kinds = state_type(config)
    shapes = make_shapes((kinds.mu, kinds.nu), dimensions(config))
    return State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes))


@typechecked
def init_state(config: Config) -> State:
    """A fresh state, sharded over the mesh in context. Its values are the same on any mesh."""
    kinds, sizes, seed = state_type(config), dimensions(config), config.training.seed
    made = jax.jit(
        lambda: fresh_state(initial_weights(kinds.weights, sizes, seed), config),
        out_shardings=make_shardings(kinds),
    )
    return made()


@typechecked
def moved(
    kind: Any, weight: jax.Array, change: jax.Array, hyper: Hyper, config: Config
) -> jax.Array:
    """Moves a weight against `change`, and decays it. The decay is scaled by the learning rate, as
    in PyTorch."""
    decay = 0 if kind.initial.role in config.training.no_decay else hyper.weight_decay
    return weight - hyper.learning_rate * (change + decay * weight)


@typechecked
def adamw(
    kinds: Any, weights: Any, grads: Any, mu: Any, nu: Any, hyper: Hyper, config: Config
) -> tuple[Any, Any, Any]:
    """A step of AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101, algorithm 2.
    `kinds` are the types of the weights. Returns the new weights and moments."""
    mu = jax.tree.map(lambda m, g: hyper.mu.old * m + hyper.mu.new * g, mu, grads)
    nu = jax.tree.map(lambda v, g: hyper.nu.old * v + hyper.nu.new * (g * g), nu, grads)

    def update(kind: Any, w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(v * hyper.nu.unbias + hyper.adam_eps_root) + hyper.adam_eps
        return moved(kind, w, m * hyper.mu.unbias / root, hyper, config)

    return jax.tree.map(update, kinds, weights, mu, nu), mu, nu


# --- Training step --------------------------------------------------------------------------------


# A step's metrics by name, replicated on all devices. Those with dimensions, and the norms of one
# weight (grad_norm/embed), are logged every metrics.norms_interval steps.
Metrics = dict[str, f32[""] | u32[""] | f32["layers"] | f32["layers E"]]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
@typed_shard_map
def training_step(
    state: State, batch: TokenBatch, hyper: Hyper, config: Config
) -> tuple[State, Metrics]:
    """One step of the optimizer. Gradients are first clipped by their global norm. A step whose
    loss or gradient norm isn't finite leaves weights and moments as they were, and still advances
    `step`."""
    sums, count, raw_grads = loss_and_grads(state.weights, batch, config)
    # An all-reduce of a scalar for each set of axes that splits weights. Biases add a second set.
    grad_norm = jnp.sqrt(ops.sum_of_squares(Stored, raw_grads))
    clip = jnp.minimum(1, hyper.grad_clip / grad_norm)
    grads = jax.tree.map(lambda g: g * clip, raw_grads)

    optimizers: Any = {"adamw": adamw, "muon": functools.partial(muon.update, adamw, moved)}
    update, kinds = optimizers[config.training.optimizer], state_type(config).weights
    weights, mu, nu = update(kinds, state.weights, grads, state.mu, state.nu, hyper, config)
    metrics: Any = {name: x / count for name, x in sums.items() if x.ndim == 0}
    if config.model.experts:
        weights, more = experts.rebalanced(weights, state.weights, sums, hyper.bias_rate)
        metrics |= more
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
    old = dataclasses.replace(state, step=state.step + 1)
    # Elementwise, so that the new state overwrites the old one, which is donated.
    new = State(old.step, weights, mu, nu)
    new = jax.tree.map(lambda x, before: jnp.where(finite, x, before), new, old)
    metrics |= {"learning_rate": hyper.learning_rate, "grad_norm": grad_norm}
    metrics["skipped"] = 1 - finite.astype(u32.dtype)
    if config.metrics.norms_interval:
        updates = jax.tree.map(jnp.subtract, new.weights, state.weights)
        for name, tree in ("grad", raw_grads), ("weight", new.weights), ("update", updates):
            squares = ops.sums_of_squares(Stored, tree, "layers")
            metrics |= {f"{name}_norm/{path}": jnp.sqrt(x) for path, x in squares.items()}
    return new, metrics


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def validation_step(weights: Stored, batch: TokenBatch, config: Config) -> dict[str, f32[""]]:
    """The number of targets, and the sum of their losses in nats."""
    replica, targets = gather_replica(cast(weights)), target_count(batch)
    parts = in_microbatches(batch, config)
    nats = lax.map(lambda rows: total_loss(replica, rows, targets, config)[1]["loss"], parts)
    return {"targets": targets, "nats": nats.sum()}


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def gradients(weights: Stored, batch: TokenBatch, config: Config) -> Stored:
    return loss_and_grads(weights, batch, config)[2]


def step_arguments(config: Config) -> Any:
    """The types of the arrays that `training_step` takes."""
    return state_type(config), type_tree(TokenBatch), type_tree(Hyper)


def lower_step(config: Config) -> jax.stages.Lowered:
    """The training step for the mesh in context, lowered from shapes alone, ready to compile."""
    hint = step_arguments(config)
    shapes, shardings = make_shapes(hint, dimensions(config)), make_shardings(hint)
    placed = jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, shardings)
    with computing_in(config.dtype):
        return training_step.lower(*placed, config)


# --- Loop -----------------------------------------------------------------------------------------
# The step ends here. The rest runs on the host.


@typechecked
def validate(
    config: Config, weights: Stored, data: Batches, interrupted: Callable[[], bool] = lambda: False
) -> float | None:
    """The mean loss of all targets in the validation set's first batches, the same ones each
    time. None if a signal interrupts it, between two batches."""
    nats = targets = 0.0
    for number, batch in data.from_step(0, config.training.validation_batches):
        if number and interrupted():
            return None
        sums = validation_step(weights, batch, config)
        nats, targets = nats + float(sums["nats"]), targets + float(sums["targets"])
    return nats / targets if targets else math.nan


@typechecked
def starting_state(config: Config, source: Checkpoints, first: int, data: Batches) -> State:
    """Returns the state before step `first`: fresh, or `source`'s newest, at step 0 only its
    weights. Moves `data` to that step. Prints which checkpoint it used."""
    if not source.newest.step:
        return init_state(config)
    if not first:
        weights = source.restore("weights")
        shardings = make_shardings(state_type(config))
        make = jax.jit(fresh_state, donate_argnums=0, static_argnums=1, out_shardings=shardings)
        other = trained_with(config, source.newest, "model.")
        say(f"weights from {source.newest.path}" + (other and f", a model with {other}"))
        return make(weights, config)
    state = source.restore()
    if not data.made_of:  # flat tokens need no position
        data.position = source.position()
    say(f"resumed at step {first} from {source.newest.path}")
    if other := trained_with(config, source.newest):
        say(f"note: the steps before were trained with {other}")
    return state


def train(
    config: Config, data: Batches, held_out: dict[str, Batches], wait_for_check: Callable[..., Any]
) -> int:
    """Trains until the last step, or until a signal asks the run to stop. Returns the exit code."""
    training, kinds, sizes = config.training, state_type(config), dimensions(config)
    checkpoints = Checkpoints(
        config.checkpoints_path, kinds, sizes, config.to_yaml(),
        config.io.max_io_threads, policy=config.checkpoints, say=say,
    )  # fmt: skip
    if checkpoints.newest.step >= training.steps:
        return complete(config, checkpoints)
    paths = config.paths
    clone = paths.clone_from, paths.clone_weights_only, paths.clone_other_model
    source, first = checkpoints.starting_point(*clone)
    config.check_tokenizer(source.newest)
    if first:
        check_same_rows(config, source.newest, data)
    if checkpoints.newest.step:
        checkpoints.config = as_begun(config, checkpoints.newest)
    tokens, flops = training.tokens.batch * training.tokens.len, sum(step_flops(config))
    parameters = sum(x.size for x in jax.tree.leaves(make_shapes(kinds.weights, sizes)))
    facts = f"{parameters:,} parameters", f"{tokens:,} tokens per step", data.epochs(training.steps)
    say(", ".join(filter(None, (*facts, str(config.paths.folder)))))
    of_muon = muon.note(kinds.weights) if training.optimizer == "muon" else ""
    notes = note_of_kernel(sizes, config.mesh.c), note_of_schedule(training), experts.note(config)
    for note in filter(None, (of_muon, *notes, *config.notes())):
        say(note)
    saved, skips = checkpoints.newest.step, (training.max_skipped_updates, checkpoints.skipped)
    with Run(config, saved, first, training.steps, tokens, flops, *skips) as run:
        step_once = run.compile(lower_step(config))
        state = starting_state(config, source, first, data)
        if wait_for_check(run.interrupted) is None:
            return run.end()

        def describe_failure(step: int, batch: Any) -> str:
            checkpoints.wait()
            return explanation(gradients, config, state.weights, batch, data.origin_of(step))

        def add_validation(when: str = "") -> None:
            for name, each in held_out.items():
                run.pause()
                loss = validate(config, state.weights, each, run.interrupted)
                run.add_validation(loss, each.bytes_per_token, name, when)

        if training.validation_at_start and not saved:
            add_validation("_at_start")
        run.pause()

        for step, batch in data.from_step(first, training.steps):
            if step == first and (note := batch.note_of_padding()):
                say(note)
            with run.step(step, data.waited):
                state, metrics = step_once(state, batch, hyper_at(step, training))
            run.log(step, metrics, functools.partial(describe_failure, step, batch))
            if due(training.validation_interval, step, training.steps):
                add_validation()
                run.flush()
            if run.saves_after(step, state):  # raises if NaN would get into a checkpoint
                checkpoints.save(step + 1, state, data.position, run.skipped)
            if run.stopping:
                break
        checkpoints.close()
        return run.end()


@program(Config, "configs", names="paths.model_name")
def main(config: Config) -> int:
    mesh, sizes = make_mesh(config, config.mesh.axes), dimensions(config)
    with jax.set_mesh(mesh):
        # Raises if a dimension doesn't split.
        make_shapes(step_arguments(config), sizes, DIMENSIONS)
        data, held_out = open_batches(config, sizes)
    # Not under set_mesh, as the checks trace on meshes of other sizes.
    checks = preflight.begun(sys.modules[__name__], config)
    with reserved(config), checks as wait, jax.set_mesh(mesh), computing_in(config.dtype):
        return train(config, data, held_out, wait)


if __name__ == "__main__":
    main()
