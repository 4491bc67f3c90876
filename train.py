"""Pretrains a Llama-style decoder, sharded over a mesh of up to four axes. This file holds the
entire training step of a dense model with AdamW: config, model, loss, optimizer, step and loop.
What other families, experts and Muon add is in variants/.

    python -m train --config-name=local_test_synthetic paths.model_name=synthetic_000

Mesh axes, outermost first, that is, over the slowest links first:
    r  replicas. Each gathers the weights over r once a step, and computes it by itself.
    s  shards of a replica: each layer gathers its weights over s where it uses them (FSDP).
    c  context: splits the sequence. Attention gathers keys and values over c.
    t  tensor parallelism: splits the heads, the feed-forward and the vocabulary.
d stands for r and s together, all data parallelism: it splits the batch. Weights are stored split
over all axes. A config that names only d and t has r = c = 1.

Dimensions:
    B  batch                  Q  query heads per key-value head     F  feed-forward
    L  sequence               K  key-value heads                    V  vocabulary
    M  model (residual)       D  size of a head                     l  a chunk of L

Types: f32["V/t M/c/d"] is a float32 array, vocabulary by model, V split over mesh axis t, and M
into c parts, each of these into d. "{U:t}" is unreduced over t: each device along t holds a partial
sum. "[V/t]" is what ops.index_unreduced looks up. "" is a scalar. compute[...] is an array of the
config's dtype, bfloat16 or float32.

`training_step` is a shard_map with the annotations as its specs: every device runs this code on its
own part of each array. Types name global dimensions, so with d=4 an array of type "B/d L/c" has
shape [B/4, L] here. jnp functions see that part alone; only ops communicate. jax.grad derives the
backward pass, and its collectives follow from those written here:

                                     forward          backward
    all_gather                       all-gather       reduce-scatter
    psum_scatter                     reduce-scatter   all-gather
    psum                             all-reduce       nothing
    reduce_max                       all-reduce       it has no gradient
    sum_of_squares(s)                all-reduces      it is outside of what jax.grad sees
    broadcast                        nothing          all-reduce
    einsum_unreduced, reduce_sum,
    index_unreduced, attention       nothing          nothing

A gathered value counts as varying, so what is computed from it needs no all-reduce in the backward
pass. Over an axis of size 1 nothing is sent. What the backward pass recomputes, it gathers again.
`python -m tools.audit` lists all collectives, with their bytes. The batch's fields, all "B/d L/c",
are inputs, targets, loss_mask, position and start: see TokenBatch in data/loader.py.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from data.loader import Batches, TokenBatch, random_batch
from data.sources import DataConfig, check_same_rows, open_batches
from runtime import checks
from runtime.checkpoint import Checkpoints
from runtime.config import F32, F32OrInf, Fraction, NonNegativeInt, PositiveInt, Section, one_of
from runtime.program import program
from runtime.run import MeshConfig, Run, RunConfig, complete, due, make_mesh, reserved, say
from shardlib import kernels, ops
from shardlib.activations import (
    explicit_activation_checkpointing,
    save_for_backward,
    sum_over_chunks,
)
from shardlib.errors import UserError
from shardlib.types import (
    COMPUTE,
    ArrayType,
    Dim,
    Mapped,
    Partial,
    Spec,
    Stacked,
    array_type,
    bool_,
    choose,
    compute,
    computing_in,
    f32,
    make_shapes,
    make_shardings,
    named,
    pytree_dataclass,
    type_tree,
    typechecked,
    typed_shard_map,
    u32,
)
from variants import experts, families, muon
from variants.experts import Experts, ExpertsConfig, Routing, RoutingConfig

# --- Model ----------------------------------------------------------------------------------------


# All sections are hashable, so that a jitted function can take a config as a static argument.
@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Section, key="model"):
    d_model: PositiveInt
    n_q_per_kv: PositiveInt
    n_kv: PositiveInt
    d_head: PositiveInt
    layers: PositiveInt
    vocab: PositiveInt
    d_ff: NonNegativeInt  # with experts: of a shared expert, which all tokens take; 0: none
    rope_max_timescale: PositiveInt
    rope_scaling: families.RopeScalingConfig | None
    norm_eps: F32
    start_token: NonNegativeInt  # the input before a document's first token
    # What families of models differ in; configs/base.yaml names some that have each.
    norms_after: bool = False  # attention and MLP: their results, not what they take
    qkv_bias: bool = False
    qk_norm: families.QK_NORMS | None = None
    tied_embeddings: bool = False
    sliding_window: PositiveInt | None = None  # the last tokens that a token sees; None: all
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        self.require(self.start_token < self.vocab, "start_token", "it must be below model.vocab")
        self.require(self.d_head % 2 == 0, "d_head", "it must be even, as RoPE rotates pairs")
        self.require(self.d_ff or self.experts, "d_ff", "it must be above 0 without experts")


@pytree_dataclass
class MLP:
    w_gate: compute["M/c/s F/t"]
    w_up: compute["M/c/s F/t"]
    w_down: compute["M/c/s F/t"]


@pytree_dataclass
class Layer:
    attention_norm: compute["M/t/c/s"]
    w_q: compute["M/c/s Q K/t D"]
    w_k: compute["M/c/s K/t D"]
    w_v: compute["M/c/s K/t D"]
    qkv: families.QKV  # of other families than Llama
    w_o: compute["M/c/s Q K/t D"]
    mlp_norm: compute["M/t/c/s"]
    mlp: MLP | None
    experts: Experts | None


@pytree_dataclass
class Weights:
    """The weights of a replica: those that a step computes with."""

    embed: compute["V/t M/c/s"]
    layers: Stacked["layers", Layer]
    final_norm: compute["M/t/c/s"]
    unembed: compute["V/t M/c/s"] | None  # None: the embedding takes its place


def over_replicas(kind: ArrayType) -> ArrayType:
    """The type of a weight whose M is split over r, too. Those without M are small."""
    dims = (Dim(x.name, (*x.over, "r") if x.name == "M" else x.over) for x in kind.spec.dims)
    return array_type(kind.element, Spec(tuple(dims)))


def as_stored(kind: ArrayType) -> ArrayType:
    return array_type(f32, over_replicas(kind).spec)


# The f32 master weights, and their gradients and the optimizer's moments. Matrices, and gains of
# the residual stream's norms, are split over all mesh axes.
Stored = Mapped[as_stored, Weights]


def weights_type(config: ModelConfig) -> Any:
    """The types of a model's Weights. Here is decided which of the alternatives it has."""
    qkv = families.qkv_type(config.qkv_bias, config.qk_norm)
    each = config.experts and experts.experts_type(config.experts)
    layer = choose(Layer, qkv=qkv, mlp=config.d_ff > 0, experts=each)
    return choose(Weights, layers=layer, unembed=not config.tied_embeddings)


@typechecked
def rms_norm(h: compute["B/d L/c M"], gain: compute["M"], eps: float) -> compute["B/d L/c M"]:
    """Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467."""
    h32 = h.astype(f32.dtype)
    scale = lax.rsqrt(jnp.mean(jnp.square(h32), axis=-1, keepdims=True) + eps)
    return (h32 * scale * gain.astype(f32.dtype)).astype(h.dtype)


@typechecked
def enter(
    x: compute["B/d L/c M/t"], gain: compute["M/t/c/s"], config: ModelConfig
) -> compute["B/d L/c M"]:
    """Takes the input of a sublayer, attention or feed-forward, from the residual stream."""
    h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
    if config.norms_after:
        return h
    return rms_norm(h, ops.all_gather("M/t/c/s -> M", gain), config.norm_eps)


@typechecked
def leave(
    x: compute["B/d L/c M/t"],
    y: compute["B/d L/c M {U:t}"],
    gain: compute["M/t/c/s"],
    config: ModelConfig,
) -> compute["B/d L/c M/t"]:
    """Adds the result of a sublayer to the residual stream, which is split over t, to save memory:
    the reduce-scatter here and the all-gather in `enter` send as many bytes as one all-reduce. It
    is split along M, so that L stays whole; Megatron's sequence parallelism splits L."""
    y = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
    if config.norms_after:
        y = families.norm_after(y, gain, config.norm_eps)
    return x + y


@typechecked
def rotation(
    position: u32["B/d L/c"], config: ModelConfig
) -> tuple[f32["B/d L/c D"], f32["B/d L/c D"]]:
    """The sines and cosines of RoPE's angles: for pair i of D/2, position * max_timescale^(-2i/D).
    Each stands twice, at i and at i + D/2."""
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
    """Shazeer 2020, https://arxiv.org/abs/2002.05202."""
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
    weights: Weights, batch: TokenBatch, config: ModelConfig
) -> tuple[compute["B/d L/c M/t"], Stacked["layers", Routing | None]]:
    """The residual stream after the last layer, and each layer's Routing, if any. At position l,
    which predicts target l, it depends only on the tokens before that target in the same document
    and row."""
    embed = ops.all_gather("V/t M/c/s -> V/t M", weights.embed)
    x = ops.index_unreduced("[V/t] M, B/d L/c -> B/d L/c M {U:t}", embed, batch.inputs)
    x = ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", x)
    sin, cos = rotation(batch.position, config)
    key_position = ops.all_gather("B/d L/c -> B/d L", batch.position)
    start = batch.start
    if config.sliding_window:
        start = families.first_visible(start, batch.position, config.sliding_window)

    # The backward pass keeps of each layer x, q, k, v, attention's result (its op saves it, and the
    # softmax's denominators), x after attention, gate and up; and once for all layers what `block`
    # uses from outside, sin, cos and positions, and the ids that the embedding was looked up with.
    # From these it recomputes what else it needs: the norms, attention's scores, the product of
    # gate and up, and the gathers of x and of weights. It repeats no reduce-scatter, as what each
    # one leads to is kept.
    @explicit_activation_checkpointing
    @typechecked
    def block(x: compute["B/d L/c M/t"], w: Layer) -> tuple[compute["B/d L/c M/t"], Routing | None]:
        h = enter(x, w.attention_norm, config)
        w_q = ops.all_gather("M/c/s Q K/t D -> M Q K/t D", w.w_q)
        w_k = ops.all_gather("M/c/s K/t D -> M K/t D", w.w_k)
        w_v = ops.all_gather("M/c/s K/t D -> M K/t D", w.w_v)
        q = ops.einsum_unreduced("B/d L/c M, M Q K/t D -> B/d L/c Q K/t D", h, w_q)
        k = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_k)
        v = ops.einsum_unreduced("B/d L/c M, M K/t D -> B/d L/c K/t D", h, w_v)
        q, k, v = w.qkv.adjusted(q, k, v, config.norm_eps)
        q, k = rope(q, k, sin, cos)
        q = save_for_backward(q)
        k = save_for_backward(k)
        v = save_for_backward(v)
        k = ops.all_gather("B/d L/c K/t D -> B/d L K/t D", k)
        v = ops.all_gather("B/d L/c K/t D -> B/d L K/t D", v)
        mixed = kernels.attention(
            "B/d L/c Q K/t D, B/d L K/t D, B/d L K/t D, B/d L/c, B/d L/c, B/d L -> B/d L/c Q K/t D",
            q, k, v, start, batch.position, key_position,
        )  # fmt: skip
        w_o = ops.all_gather("M/c/s Q K/t D -> M Q K/t D", w.w_o)
        y = ops.einsum_unreduced("B/d L/c Q K/t D, M Q K/t D -> B/d L/c M {U:t}", mixed, w_o)
        x = save_for_backward(leave(x, y, w.attention_norm, config))

        h = enter(x, w.mlp_norm, config)
        output, routed = swiglu(h, w.mlp) if w.mlp else None, None
        if w.experts and config.experts:
            output, routed = experts.mixture(h, w.experts, output, config.experts)
        return leave(x, output, w.mlp_norm, config), routed

    return lax.scan(block, x, weights.layers)


@typechecked
def output_weights(weights: Weights) -> tuple[compute["M"], compute["V/t M"]]:
    """The final norm's gain and the unembedding, gathered, for `unembed`."""
    split = weights.embed if weights.unembed is None else weights.unembed
    gain = ops.all_gather("M/t/c/s -> M", weights.final_norm)
    return gain, ops.all_gather("V/t M/c/s -> V/t M", split)


@typechecked
def unembed(
    weights: tuple[compute["M"], compute["V/t M"]], x: compute["B/d L/c M/t"], config: ModelConfig
) -> f32["B/d L/c V/t"]:
    """The logits, from the `output_weights` and the residual stream after the last layer: of whole
    rows, or of one chunk of them."""
    gain, w_unembed = weights
    h = ops.all_gather("B/d L/c M/t -> B/d L/c M", x)
    h = rms_norm(h, gain, config.norm_eps)
    # Without the barrier v5p's compiler fuses the norm into the matmuls, which take a third longer.
    h = lax.optimization_barrier(h)
    return ops.einsum_unreduced("B/d L/c M, V/t M -> B/d L/c V/t", h, w_unembed, dtype=f32)


# --- Config ---------------------------------------------------------------------------------------


# What training.no_decay may name, and the word that is a part of such weights' names.
KINDS = {"gains": "norm", "biases": "b", "embeddings": "embed"}


@dataclasses.dataclass(unsafe_hash=True)
class TokensConfig(Section, key="training.tokens"):
    batch: PositiveInt  # rows
    len: PositiveInt  # tokens in a row


@dataclasses.dataclass(unsafe_hash=True)
class TrainingConfig(Section, key="training"):
    warmup_steps: NonNegativeInt
    steps: PositiveInt
    steps_for_lr: PositiveInt
    learning_rate: F32
    schedule: Annotated[str, one_of("cosine linear wsd constant")]  # see `learning_rate`
    cooldown_steps: NonNegativeInt  # of wsd, the last ones, in which the rate falls
    cosine_learning_rate_final_fraction: F32  # of any schedule that falls
    optimizer: Annotated[str, one_of("adamw muon")]
    muon_momentum: Fraction
    no_decay: tuple[Annotated[str, one_of(" ".join(KINDS))], ...]  # weights that don't decay
    adam_b1: Fraction
    adam_b2: Fraction
    adam_eps: F32
    adam_eps_root: F32
    weight_decay: F32
    grad_clip: F32OrInf  # largest global gradient norm; inf disables clipping
    seed: NonNegativeInt
    tokens: TokensConfig
    routing: RoutingConfig
    microbatches: PositiveInt  # splits a device's rows; gradients are summed over the parts
    loss_chunks: PositiveInt  # splits the sequence; logits exist for one part at a time
    validation_interval: NonNegativeInt  # steps; 0 disables validation
    validation_batches: PositiveInt
    validation_at_start: bool  # validate before the first step, too
    skip_steps: tuple[NonNegativeInt, ...]  # batches to leave out; later steps move up
    max_skipped_updates: NonNegativeInt  # consecutive non-finite updates before the run stops

    def __post_init__(self) -> None:
        self.require(self.grad_clip > 0, "grad_clip", "it must be above 0; inf disables clipping")
        self.require(self.adam_eps + self.adam_eps_root, "adam_eps", "AdamW would divide 0 by 0")
        fits = self.schedule != "wsd" or 0 < self.cooldown_steps <= self.steps_for_lr
        problem = f"wsd needs one, of at most training.steps_for_lr={self.steps_for_lr} steps"
        self.require(fits, "cooldown_steps", problem)


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class Config(RunConfig, DataConfig):
    model: ModelConfig
    training: TrainingConfig
    mesh: MeshConfig
    dtype: Annotated[str, one_of(" ".join(COMPUTE))]  # of compute[...]

    def __post_init__(self) -> None:
        super().__post_init__()
        hyper, mesh = self.training, self.mesh
        (rows, rest), length = divmod(hyper.tokens.batch, mesh.d), hyper.tokens.len // mesh.c
        problem = f"it must divide a device's {rows} rows (training.tokens.batch / mesh.d)"
        self.require(rest or rows % hyper.microbatches == 0, "training.microbatches", problem)
        balanced = mesh.c == 1 or hyper.tokens.len % (2 * mesh.c) == 0
        self.require(balanced, "mesh.c", f"2*c must divide training.tokens.len={hyper.tokens.len}")
        problem = f"it must divide a device's {length} tokens (training.tokens.len / mesh.c)"
        self.require(length % hyper.loss_chunks == 0, "training.loss_chunks", problem)
        experts.check(self)


# The config key with the size of each dimension in the type strings.
DIMENSIONS = {
    "B": "training.tokens.batch",
    "L": "training.tokens.len",
    "M": "model.d_model",
    "Q": "model.n_q_per_kv",
    "K": "model.n_kv",
    "D": "model.d_head",
    "F": "model.d_ff",
    "V": "model.vocab",
    "E": "model.experts.count",
    "G": "model.experts.d_ff",
    "layers": "model.layers",
}


def dimensions(config: Config) -> dict[str, int]:
    """The size of each dimension that the model has."""

    def value(key: str) -> Any:
        return functools.reduce(lambda x, name: x and getattr(x, name), key.split("."), config)

    return {name: size for name, key in DIMENSIONS.items() if (size := value(key))}


# --- Loss -----------------------------------------------------------------------------------------


@typechecked
def cast(weights: Stored) -> Mapped[over_replicas, Weights]:
    """Rounds the weights to the dtype that a step computes in, before anything is sent: all that
    gathers them sends it, and so do the reductions of their gradients. Those that are declared as
    f32 stay so.
    """
    kinds = type_tree(Weights, weights)
    return jax.tree.map(lambda kind, weight: weight.astype(kind.dtype), kinds, weights)


@typechecked
def gather_replica(weights: Mapped[over_replicas, Weights]) -> Weights:
    """Gathers all weights over r, once a step. Those without M aren't split; their gradients are
    added up here, in f32."""

    def gather(path: Any, wanted: ArrayType, weight: jax.Array) -> jax.Array:
        if path[-1].name == "b_router":  # which has no gradient
            return weight
        split = over_replicas(wanted).spec
        op = ops.broadcast if split == wanted.spec else ops.all_gather
        return op(f"{split} -> {wanted.spec}", weight)

    return jax.tree.map_with_path(gather, type_tree(Weights, weights), weights)


@typechecked
def target_count(batch: TokenBatch) -> f32[""]:
    """The number of targets in the loss, over all devices."""
    mask = batch.loss_mask.astype(f32.dtype)
    return ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d L/c -> {U:d,c}", mask))


# Sums over all targets or tokens on all devices. Scalars are logged under these names, as means.
Sums = dict[str, f32[""] | f32["layers E"]]


@typechecked
def total_loss(
    weights: Weights, batch: TokenBatch, count: f32[""], config: Config
) -> tuple[f32[""], Sums]:
    """The objective: cross-entropy in nats, summed over all targets on all devices, and costs. The
    vocabulary stays split: only the logits' maximum, the sum of their exponentials and the target's
    logit are reduced. The caller divides by the batch's count of targets."""
    unembedding = output_weights(weights)

    # Runs on one chunk of the sequence at a time, because logits are by far the largest array.
    @typechecked
    def loss(
        unembedding: tuple[compute["M"], compute["V/t M"]],
        x: compute["B/d l/c M/t"],
        targets: u32["B/d l/c"],
        loss_mask: bool_["B/d l/c"],
    ) -> tuple[f32[""], Sums]:
        logits = unembed(unembedding, x, config.model)
        peak = ops.reduce_max("B/d l/c V/t -> B/d l/c", lax.stop_gradient(logits))
        logits = logits - peak[:, :, None]
        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))
        sum_exp = ops.psum("B/d l/c {U:t} -> B/d l/c", sum_exp)
        logit = ops.index_unreduced("B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets)
        logit = ops.psum("B/d l/c {U:t} -> B/d l/c", logit)
        nats = (jnp.log(sum_exp) - logit) * loss_mask
        total = ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))
        return total, {"loss": total}

    x, routed = forward(weights, batch, config.model)
    # Computes each chunk's gradient right after its loss, so that its logits need not be kept, but
    # only the gradients: that of x, and those of the gain and the unembedding, summed in f32. The
    # audit counts the collectives of these gradients as backward ones.
    chunks = config.training.loss_chunks
    objective, sums = sum_over_chunks(loss, chunks, unembedding, x, batch.targets, batch.loss_mask)
    if routed:
        cost, more = experts.costs(routed, count, config.training)
        return objective + cost, sums | more
    return objective, sums


@typechecked
def loss_and_grads(
    weights: Stored, batch: TokenBatch, config: Config
) -> tuple[Sums, f32[""], Stored]:
    """The sums over all targets, their number, and the gradient of the objective's mean. Gradients
    come out of jax.grad added up over the devices of a replica and split like the weights, because
    the backward pass of a weight's all_gather is a reduce-scatter, in bf16 like the gather. Each
    microbatch gathers the weights anew and reduce-scatters its gradients. These are added up in
    f32. What is sent over r is sent once for all microbatches. The sum is divided by the number of
    targets in the batch."""
    replica, scatter = jax.vjp(lambda stored: gather_replica(cast(stored)), weights)
    microbatches = config.training.microbatches
    count = target_count(batch)
    value_and_grads = jax.value_and_grad(total_loss, has_aux=True)
    value_and_grads = functools.partial(value_and_grads, replica, count=count, config=config)
    if microbatches == 1:
        total = value_and_grads(batch)
    else:

        def add(total: Any, rows: Any) -> tuple[Any, tuple[()]]:
            # Without the barrier libtpu 0.0.50's compiler crashes.
            part = jax.tree.map(lax.optimization_barrier, value_and_grads(rows))
            return jax.tree.map(jnp.add, total, part), ()

        # Splits each device's own rows.
        parts = jax.tree.map(lambda x: rearrange(x, "(n B) L -> n B L", n=microbatches), batch)
        sums, _ = jax.eval_shape(value_and_grads, jax.tree.map(lambda x: x[0], parts))
        wide = functools.partial(jnp.zeros_like, dtype=f32.dtype)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), sums), jax.tree.map(wide, replica)
        total, () = lax.scan(add, zeros, parts)
    (_, sums), grads = total
    # A reduce-scatter over r. In f32 it would send twice as much, and learn no better.
    (grads,) = scatter(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, replica))
    return sums, count, jax.tree.map(lambda g: g / count, grads)


# --- Optimizer ------------------------------------------------------------------------------------


@pytree_dataclass
class State:
    step: u32[""]  # completed steps
    weights: Stored
    mu: Stored  # averages of gradients
    nu: Partial[Stored]  # averages of their squares; of all that AdamW updates


def state_type(config: Config) -> Any:
    """The types of a state's arrays."""
    weights = type_tree(Stored, weights_type(config.model))
    nu = muon.divided(weights, weights)[0] if config.training.optimizer == "muon" else weights
    return State(u32[""], weights, weights, nu)


@typechecked
def init_weights(config: Config) -> Stored:
    """Norm gains (names ending in norm) are one, biases (b_) zero. Matrices (w_, e_ and embeddings)
    are normal with standard deviation 1/sqrt(fan-in). Projections into the residual stream are
    divided by the square root of the number of additions to it (GPT-2, section 2.3). The embedding
    uses the unembedding's deviation; a larger one learned slower. A weight's numbers depend on the
    seed, its name and its shape alone, so that another one added beside it changes none of them.
    Raises UserError for another name."""
    size = dimensions(config)
    residual_scale = (2 * size["layers"]) ** -0.5
    deviation = {
        "w_o": residual_scale * (size["Q"] * size["K"] * size["D"]) ** -0.5,
        "w_down": residual_scale * size.get("F", 1) ** -0.5,
        "e_down": residual_scale * size.get("G", 1) ** -0.5,
    }
    kinds = type_tree(Stored, weights_type(config.model))
    seed = jax.random.key(config.training.seed)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].name
        if name.endswith("norm"):
            return jnp.ones_like(shape)
        if name.startswith("b_"):
            return jnp.zeros_like(shape)
        if not (name.startswith(("w_", "e_")) or name.endswith("embed")):
            raise UserError(
                f"the weight {name}: its name says how it starts and if it decays: a gain, at 1, "
                "ends in _norm, a bias, at 0, begins with b_, a matrix, normal, with w_; or add a "
                "rule to init_weights and a kind to KINDS"
            )
        key = jax.random.fold_in(seed, np.uint32(zlib.crc32(name.encode())))
        normal = jax.random.normal(key, shape.shape, shape.dtype)
        return normal * deviation.get(name, size["M"] ** -0.5)

    return jax.tree.map_with_path(leaf, make_shapes(kinds, size))


@typechecked
def fresh_state(weights: Stored, config: Config) -> State:
    """Step 0 with these weights and zero moments."""
    kinds = state_type(config)
    shapes = make_shapes((kinds.mu, kinds.nu), dimensions(config))
    return State(jnp.uint32(0), weights, *jax.tree.map(jnp.zeros_like, shapes))


@typechecked
def init_state(config: Config) -> State:
    """A fresh state, sharded over the mesh in context. Its values are the same on any mesh."""
    shardings = make_shardings(state_type(config))
    return jax.jit(lambda: fresh_state(init_weights(config), config), out_shardings=shardings)()


@pytree_dataclass
class Average:
    """An exponential moving average at a step: the weights of the last average and of what is new,
    and one over the sum of all weights so far."""

    old: f32[""]
    new: f32[""]
    unbias: f32[""]

    def next(self, average: jax.Array, x: jax.Array) -> jax.Array:
        return self.old * average + self.new * x


@pytree_dataclass
class Hyper:
    """The numbers of an update that the config determines. They are an argument of the training
    step, so that runs that differ in them share a program."""

    learning_rate: f32[""]
    weight_decay: f32[""]
    grad_clip: f32[""]
    adam_eps: f32[""]
    adam_eps_root: f32[""]
    mu: Average  # of AdamW
    nu: Average
    momentum: Average  # of Muon
    nesterov: Average  # of the momentum and the gradient
    bias_rate: f32[""]  # of experts


@typechecked
def hyper_at(step: int, config: TrainingConfig) -> Hyper:
    """The numbers of the update after `step` others, computed in f64: in f32, 1 - 0.9 isn't 0.1."""

    def average(b: float) -> Any:
        return Average(b, 1 - b, 1 / (1 - b ** (step + 1)))

    momentum, after = average(config.muon_momentum), 1 - config.muon_momentum ** (step + 2)
    hyper = Hyper(
        learning_rate=learning_rate(step + 1, config),
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
        adam_eps=config.adam_eps,
        adam_eps_root=config.adam_eps_root,
        mu=average(config.adam_b1),
        nu=average(config.adam_b2),
        momentum=momentum,
        nesterov=Average(momentum.old / after, momentum.new * momentum.unbias, 1),
        bias_rate=config.routing.bias_rate,
    )
    return jax.tree.map(np.float32, hyper)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Linear warmup to the peak at `warmup_steps`, then a decay to the final fraction at
    `steps_for_lr`: along a half cosine, linear, only in the last `cooldown_steps` and linear there
    (warmup-stable-decay: Hu et al. 2024, https://arxiv.org/abs/2404.06395, section 4), or none. The
    first step is 1."""
    warmup = step / max(config.warmup_steps, 1)
    stable = config.steps_for_lr - config.cooldown_steps
    start = stable if config.schedule == "wsd" else config.warmup_steps
    done = min(max((step - start) / max(config.steps_for_lr - start, 1), 0), 1)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1}
    final = config.cosine_learning_rate_final_fraction
    decay = final + (1 - final) * left.get(config.schedule, 1 - done)
    return config.learning_rate * min(warmup, decay)


@typechecked
def adamw(
    weights: Any, grads: Any, mu: Any, nu: Any, hyper: Hyper, config: Config
) -> tuple[Any, Any, Any]:
    """A step of AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101, algorithm 2.
    As is customary, weight decay is scaled by the learning rate. Returns the new weights and
    moments."""
    mu = jax.tree.map(hyper.mu.next, mu, grads)
    nu = jax.tree.map(lambda v, g: hyper.nu.next(v, g * g), nu, grads)
    rate, mu_scale, nu_scale = hyper.learning_rate, hyper.mu.unbias, hyper.nu.unbias

    def update(path: Any, w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(v * nu_scale + hyper.adam_eps_root) + hyper.adam_eps
        kept = {KINDS[kind] for kind in config.training.no_decay} & {*path[-1].name.split("_")}
        decay = 0 if kept else hyper.weight_decay
        return w - rate * (m * mu_scale / root + decay * w)

    return jax.tree_util.tree_map_with_path(update, weights, mu, nu), mu, nu


# --- Training step --------------------------------------------------------------------------------


# Metrics of a step by name, of which each device has the whole. Those of parts of the model have a
# slash in their names, or dimensions.
Metrics = dict[str, f32[""] | u32[""] | f32["layers"] | f32["layers E"]]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
@typed_shard_map
def training_step(
    state: State, batch: TokenBatch, hyper: Hyper, config: Config
) -> tuple[State, Metrics]:
    """One step of the optimizer. Gradients are first clipped by their global norm. A step whose
    loss or gradient isn't finite leaves weights and moments as they were, and still advances
    `step`."""
    sums, count, raw_grads = loss_and_grads(state.weights, batch, config)
    # An all-reduce of a scalar, and another one for biases, which are split over t alone.
    grad_norm = jnp.sqrt(ops.sum_of_squares(Stored, raw_grads))
    clip = jnp.minimum(1, hyper.grad_clip / grad_norm)
    grads = jax.tree.map(lambda g: g * clip, raw_grads)

    of_muon = functools.partial(muon.update, adamw, state_type(config).weights)
    update = of_muon if config.training.optimizer == "muon" else adamw
    weights, mu, nu = update(state.weights, grads, state.mu, state.nu, hyper, config)
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
    targets = target_count(batch)
    _, sums = total_loss(gather_replica(cast(weights)), batch, targets, config)
    return {"targets": targets, "nats": sums["loss"]}


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


@typechecked
def trials(
    config: Config, state: State, order: int
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], Config]]:
    """Yields what runtime/checks.py computes on two meshes: a name, a function, the arrays that it
    takes, as NumPy arrays, and the config. `order` is that of `random_batch`."""
    # Else the moments would drown the gradients.
    mu, nu = jax.tree.map(lambda x: x * np.float32(1e-4), (state.mu, state.nu))
    batch = random_batch(dimensions(config), config.model.start_token, order)
    yield "validation_step", validation_step, (state.weights, batch), config
    yield "gradients", gradients, (state.weights, batch), config
    few = batch.loss_mask * (np.arange(len(batch.loss_mask)) * 2 < len(batch.loss_mask))[:, None]
    uneven = dataclasses.replace(batch, loss_mask=few)  # some devices have no target
    # In the middle of the schedule, and before what is done now and then.
    for step, given in (3, batch), (999, uneven):
        at_step = dataclasses.replace(state, step=np.uint32(step), mu=mu, nu=nu)
        hyper = hyper_at(step, config.training)
        yield f"training_step {step}", training_step, (at_step, given, hyper), config


# --- Loop -----------------------------------------------------------------------------------------


def step_flops(config: Config) -> tuple[int, int]:
    """Matmul FLOPs of a step, forward and backward, without recomputation: (weight matmuls, causal
    attention). Per token, 6 FLOPs for each weight of a matmul, and 6 * L * Q * K * D a layer for
    attention's two products, fewer with a window. Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, appendix B."""
    size = dimensions(config)
    heads = size["Q"] * size["K"] * size["D"]
    per_layer = size["M"] * (2 * heads + 2 * size["K"] * size["D"] + 3 * size.get("F", 0))
    if each := config.model.experts:
        per_layer += size["M"] * (each.count + 3 * each.d_ff * each.per_token)
    weights = size["layers"] * per_layer + size["V"] * size["M"]
    seen = min(config.model.sliding_window or size["L"], size["L"])  # tokens, at most
    pairs = size["B"] * seen * (2 * size["L"] - seen)
    return 6 * weights * size["B"] * size["L"], 6 * size["layers"] * heads * pairs


@typechecked
def validate(
    config: Config, weights: Stored, data: Batches, interrupted: Callable[[], bool] = lambda: False
) -> float | None:
    """The mean loss of all targets in the validation split's first batches, the same ones each
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
    """The state before step `first`: of the newest checkpoint of `source`, or with its weights if
    `first` is 0, or a fresh one if there is none. Says where it comes from."""
    if not source.newest.step:
        return init_state(config)
    if not first:
        weights = source.restore("weights")
        shardings = make_shardings(state_type(config))
        make = jax.jit(fresh_state, donate_argnums=0, static_argnums=1, out_shardings=shardings)
        say(f"weights from {source.newest.path}")
        return make(weights, config)
    state = source.restore()
    check_same_rows(config, source.newest, data)
    data.resume(source.position)
    say(f"resumed at step {first} from {source.newest.path}")
    before: Any = SimpleNamespace(**vars(config.training) | source.newest.settings["training"])
    rate, last = learning_rate(first + 1, config.training), learning_rate(first, before)
    if rate > max(last, learning_rate(first + 1, before)):
        why = f"the checkpoint has training.steps_for_lr={before.steps_for_lr}"
        say(f"note: the learning rate rises from {last:.3g} to {rate:.3g}; {why}")
    return state


@typechecked
def not_finite(config: Config, weights: Stored, batch: TokenBatch, origin: str) -> str:
    """Names the gradients of a batch that aren't finite, recomputed, the batch's origin, and a
    cure: if random tokens have such gradients, too, the weights are to blame."""

    def bad(batch: Any) -> str:
        grads = named(gradients(weights, batch, config))
        return ", ".join(name for name, grad in grads.items() if not jnp.isfinite(grad).all())

    tokens = random_batch(dimensions(config), config.model.start_token, config.mesh.c)
    cure = "Skip that batch with training.skip_steps, or raise training.max_skipped_updates"
    if bad(jax.device_put(tokens, make_shardings(TokenBatch))):
        cure = "Random tokens have such ones, too: the weights diverged. Lower the learning rate"
    names = bad(batch) or "none, with the current weights"
    return f"gradients that are not finite: {names}; {origin}. {cure}"


def train(
    config: Config, data: Batches, held_out: Batches | None, wait_for_check: Callable[..., Any]
) -> int:
    """Trains until the last step, or until a signal asks the run to stop. Returns the exit code."""
    hyper, kinds, sizes = config.training, state_type(config), dimensions(config)
    checkpoints = Checkpoints(
        config.checkpoints_path, kinds, sizes, config.to_yaml(),
        config.io.max_io_threads, policy=config.checkpoints, say=say,
    )  # fmt: skip
    if checkpoints.newest.step >= hyper.steps:
        return complete(config, checkpoints)
    clone = config.paths.clone_from, config.paths.clone_weights_only
    source, first = checkpoints.starting_point(*clone)
    config.check_tokenizer(source.newest)
    tokens, flops = hyper.tokens.batch * hyper.tokens.len, sum(step_flops(config))
    parameters = sum(x.size for x in jax.tree.leaves(make_shapes(kinds.weights, sizes)))
    say(f"{parameters:,} parameters, {tokens:,} tokens per step, {config.paths.folder}")
    size, length = config.model, hyper.tokens.len
    shape = length // config.mesh.c, length, size.n_q_per_kv, size.d_head, compute.dtype
    if kernel := kernels.described(*shape):
        say(kernel)
    with Run(config, first, hyper.steps, tokens, flops, hyper.max_skipped_updates) as run:
        step_once = run.compile(lower_step(config))
        state = starting_state(config, source, first, data)
        if wait_for_check(run.interrupted) is None:
            return run.end()

        def describe_failure(step: int, batch: Any) -> str:
            checkpoints.wait()
            return not_finite(config, state.weights, batch, data.origin_of(step))

        if held_out and hyper.validation_at_start and first == 0:
            loss = validate(config, state.weights, held_out, run.interrupted)
            run.add(validation_loss_at_start=loss)

        for step, batch in data.from_step(first, hyper.steps):
            with run.step(step, data.waited):
                state, metrics = step_once(state, batch, hyper_at(step, hyper))
            run.log(step, metrics, functools.partial(describe_failure, step, batch))
            if held_out and due(hyper.validation_interval, step, hyper.steps):
                run.pause()
                loss = validate(config, state.weights, held_out, run.interrupted)
                run.add(validation_loss=loss)
                run.flush()
            if run.saves_after(step):
                run.flush(state)  # raises if NaN would get into a checkpoint
                checkpoints.save(step + 1, state, data.position)
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
    checked = checks.checked(config)  # before set_mesh, as it traces on a mesh of another size
    with reserved(config), checked as wait, jax.set_mesh(mesh), computing_in(config.dtype):
        return train(config, data, held_out, wait)


if __name__ == "__main__":
    main()
