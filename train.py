"""Pretrains a Llama-style decoder, sharded over a mesh of two axes. This file is the whole training
step: config, model, loss, optimizer, step, loop.

    python -m train --config-name=local_test_synthetic paths.model_name=synthetic_000

Mesh axes: d, over which the batch is split and the weights are stored split (FSDP), and t, over
which the heads, the feed-forward and the vocabulary are split (tensor parallelism).

Dimensions:
    B  batch                  Q  query heads per key-value head     F  feed-forward
    L  sequence               K  key-value heads                    V  vocabulary
    M  model (the residual)   D  head
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from data.loader import Batches, TokenBatch
from data.sources import DataConfig, open_batches
from runtime import cache
from runtime.checkpoint import Checkpoints, named
from runtime.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from runtime.program import program
from runtime.run import Run, RunConfig, due, make_mesh, say
from shardlib import audit, kernels, ops
from shardlib.activations import (
    explicit_activation_checkpointing,
    save_for_backward,
    sum_over_chunks,
)
from shardlib.errors import UserError
from shardlib.types import (
    Stacked,
    bf16,
    bool_,
    explain,
    f32,
    make_shapes,
    make_shardings,
    pytree_dataclass,
    type_tree,
    typechecked,
    typed_shard_map,
    u32,
)

# --- Config ---------------------------------------------------------------------------------------
# Hashable, so that a jitted function can take one as a static argument.


@dataclasses.dataclass(unsafe_hash=True)
class RopeScalingConfig(Section, key="model.rope_scaling"):
    """Llama 3.1's, for longer rows than those of the first training."""

    factor: NonNegativeFloat
    low_frequency_factor: NonNegativeFloat
    high_frequency_factor: NonNegativeFloat
    original_len: PositiveInt  # tokens in a row of the first training


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig(Section, key="model"):
    d_model: PositiveInt
    n_q_per_kv: PositiveInt
    n_kv: PositiveInt
    d_head: PositiveInt
    layers: PositiveInt
    vocab: PositiveInt
    d_ff: PositiveInt
    rope_max_timescale: PositiveInt
    rope_scaling: RopeScalingConfig | None
    norm_eps: NonNegativeFloat
    start_token: NonNegativeInt  # stands before a document's first one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.start_token < self.vocab, "start_token", "it must be below model.vocab")
        self.require(self.d_head % 2 == 0, "d_head", "RoPE rotates pairs, so it is even")


@dataclasses.dataclass(unsafe_hash=True)
class TokensConfig(Section, key="training.tokens"):
    batch: PositiveInt  # rows
    len: PositiveInt  # tokens in a row


@dataclasses.dataclass(unsafe_hash=True)
class TrainingConfig(Section, key="training"):
    warmup_steps: NonNegativeInt
    steps: PositiveInt
    steps_for_lr: PositiveInt
    learning_rate: NonNegativeFloat
    cosine_learning_rate_final_fraction: NonNegativeFloat
    adam_b1: Fraction
    adam_b2: Fraction
    adam_eps: NonNegativeFloat
    adam_eps_root: NonNegativeFloat
    weight_decay: NonNegativeFloat
    grad_clip: float  # inf: none
    seed: NonNegativeInt
    tokens: TokensConfig
    microbatches: PositiveInt  # parts of a device's rows, one after the other
    loss_chunks: PositiveInt  # parts of a row, whose logits are there one after the other
    validation_interval: NonNegativeInt  # steps; 0: never
    validation_batches: PositiveInt
    skip_steps: tuple[NonNegativeInt, ...]  # whose batches are left out; later steps get later ones
    max_skipped_updates: NonNegativeInt  # in a row, not being finite, before the run stops

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.grad_clip > 0, "grad_clip", "it must be above 0; inf clips none")
        length = self.tokens.len
        fits = length % self.loss_chunks == 0
        self.require(fits, "loss_chunks", f"it must divide training.tokens.len={length}")


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig(Section, key="mesh"):
    """The mesh axes, outermost first. This is their one declaration."""

    d: PositiveInt
    t: PositiveInt


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class Config(RunConfig, DataConfig):
    model: ModelConfig
    training: TrainingConfig
    mesh: MeshConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.training.tokens.batch // self.mesh.d
        problem = f"it must divide training.tokens.batch/mesh.d={rows}"
        self.require(rows % self.training.microbatches == 0, "training.microbatches", problem)


# Where the config says the size of each dimension that the type strings name.
DIMENSIONS = {
    "B": "training.tokens.batch",
    "L": "training.tokens.len",
    "M": "model.d_model",
    "Q": "model.n_q_per_kv",
    "K": "model.n_kv",
    "D": "model.d_head",
    "F": "model.d_ff",
    "V": "model.vocab",
    "layers": "model.layers",
}


def dimensions(config: Config) -> dict[str, int]:
    return {name: operator.attrgetter(key)(config) for name, key in DIMENSIONS.items()}


# --- Model ----------------------------------------------------------------------------------------


@pytree_dataclass
class Layer:
    attention_norm: f32["M/t/d"]
    w_q: f32["M/d Q K/t D"]
    w_k: f32["M/d K/t D"]
    w_v: f32["M/d K/t D"]
    w_o: f32["M/d Q K/t D"]
    mlp_norm: f32["M/t/d"]
    w_gate: f32["M/d F/t"]
    w_up: f32["M/d F/t"]
    w_down: f32["M/d F/t"]


@pytree_dataclass
class Weights:
    """The master weights, as they are stored: each split over all axes."""

    embed: f32["V/t M/d"]
    layers: Stacked["layers", Layer]
    final_norm: f32["M/t/d"]
    unembed: f32["V/t M/d"]


@typechecked
def init_weights(config: Config) -> Weights:
    """Gains, whose names end in norm, are one; the rest is normal, with deviation 1/sqrt(fan-in).
    The projections that add to the residual stream are scaled down by the root of the number of
    additions (GPT-2, section 2.3). The embedding is as small as the unembedding, as a larger one
    learns slower."""
    size = dimensions(config)
    addition = (2 * size["layers"]) ** -0.5
    deviation = {
        "w_o": addition * (size["Q"] * size["K"] * size["D"]) ** -0.5,
        "w_down": addition * size["F"] ** -0.5,
    }
    shapes, tree = jax.tree.flatten_with_path(make_shapes(Weights, size))
    keys = jax.random.split(jax.random.key(config.training.seed), len(shapes))

    def leaf(path: Any, shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        name = path[-1].name
        if name.endswith("norm"):
            return jnp.ones_like(shape)
        normal = jax.random.normal(key, shape.shape, shape.dtype)
        return normal * deviation.get(name, size["M"] ** -0.5)

    leaves = [leaf(*each, key) for each, key in zip(shapes, keys, strict=True)]
    return jax.tree.unflatten(tree, leaves)


@typechecked
def rms_norm(x: bf16["B/d L M"], gain: bf16["M"], eps: float) -> bf16["B/d L M"]:
    """Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467."""
    x32 = x.astype(f32.dtype)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * gain.astype(f32.dtype)).astype(bf16.dtype)


@typechecked
def rotation(
    position: u32["B/d L"], d_head: int, config: ModelConfig
) -> tuple[f32["B/d L half"], f32["B/d L half"]]:
    """The sines and cosines by which `rope` turns what stands at a position. Of D/2 pairs, pair i
    turns by the position times max_timescale^(-2i/D).

    Scaling turns pairs that turn seldom in the original length more slowly, by the factor:
    Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, as released with Llama 3.1."""
    half = d_head // 2
    timescale = config.rope_max_timescale ** (jnp.arange(half, dtype=f32.dtype) / half)
    if scaling := config.rope_scaling:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_len / (2 * jnp.pi * timescale)
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        timescale = timescale / (kept + (1 - kept) / scaling.factor)
    angle = position.astype(f32.dtype)[:, :, None] / timescale
    return jnp.sin(angle), jnp.cos(angle)


@typechecked
def rope(
    q: bf16["B/d L Q K/t D"], k: bf16["B/d L K/t D"], sin: f32["B/d L half"], cos: f32["B/d L half"]
) -> tuple[bf16["B/d L Q K/t D"], bf16["B/d L K/t D"]]:
    """Rotates each pair (i, i + D/2) of queries and keys. Su et al. 2021,
    https://arxiv.org/abs/2104.09864, section 3.4."""

    def rotated(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
        x1, x2 = jnp.split(x.astype(f32.dtype), 2, axis=-1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)

    sin, cos = sin[:, :, None], cos[:, :, None]  # the same for all heads
    return rotated(q, sin[:, :, None], cos[:, :, None]), rotated(k, sin, cos)


@typechecked
def decoder(
    weights: Any,
    inputs: u32["B/d L"],
    position: u32["B/d L"],
    attend: Callable[..., tuple[jax.Array, Any]],
    caches: Any,
    config: ModelConfig,
    gather: Callable[..., jax.Array] = ops.all_gather,
) -> tuple[bf16["B/d L M/t"], Any]:
    """The residual stream after the last layer: the one definition of the layers, for training,
    validation and generation. What differs between those is handed in:

    `attend(q, k, v, cache)` mixes a layer's values into the shape of q, and returns with them what
    is to be kept of the layer; `caches` has each layer's cache, stacked, and so is what is
    returned. Nothing else may let a position see another: generation computes one at a time.

    `gather` makes a weight whole. `weights` is a Weights as stored, or whole already, with another
    `gather`."""
    embed = gather("V/t M/d -> V/t M", weights.embed.astype(bf16.dtype))
    x = ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", embed, inputs)
    x = ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", x)
    sin, cos = rotation(position, weights.layers.w_k.shape[-1], config)

    # A block keeps its input and what is saved by name; the rest, gathers included, is done again
    # in the backward pass.
    @explicit_activation_checkpointing
    @typechecked
    def block(x: bf16["B/d L M/t"], scanned: Any) -> tuple[bf16["B/d L M/t"], Any]:
        layer, cache = scanned
        w = jax.tree.map(lambda leaf: leaf.astype(bf16.dtype), layer)

        gain = gather("M/t/d -> M", w.attention_norm)
        h = rms_norm(ops.all_gather("B/d L M/t -> B/d L M", x), gain, config.norm_eps)
        w_q = gather("M/d Q K/t D -> M Q K/t D", w.w_q)
        w_k = gather("M/d K/t D -> M K/t D", w.w_k)
        w_v = gather("M/d K/t D -> M K/t D", w.w_v)
        q = ops.einsum_unreduced("B/d L M, M Q K/t D -> B/d L Q K/t D", h, w_q)
        k = ops.einsum_unreduced("B/d L M, M K/t D -> B/d L K/t D", h, w_k)
        v = ops.einsum_unreduced("B/d L M, M K/t D -> B/d L K/t D", h, w_v)
        q, k = rope(q, k, sin, cos)
        q = save_for_backward(q)
        k = save_for_backward(k)
        v = save_for_backward(v)
        mixed, kept = attend(q, k, v, cache)
        mixed = save_for_backward(mixed)
        w_o = gather("M/d Q K/t D -> M Q K/t D", w.w_o)
        y = ops.einsum_unreduced("B/d L Q K/t D, M Q K/t D -> B/d L M {U:t}", mixed, w_o)
        x = save_for_backward(x + ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y))

        # SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202
        gain = gather("M/t/d -> M", w.mlp_norm)
        h = rms_norm(ops.all_gather("B/d L M/t -> B/d L M", x), gain, config.norm_eps)
        w_gate = gather("M/d F/t -> M F/t", w.w_gate)
        w_up = gather("M/d F/t -> M F/t", w.w_up)
        gate = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", h, w_gate))
        up = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", h, w_up))
        w_down = gather("M/d F/t -> M F/t", w.w_down)
        hidden = jax.nn.silu(gate) * up
        y = ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", hidden, w_down)
        return x + ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y), kept

    return lax.scan(block, x, (weights.layers, caches))


def head(weights: Any, gather: Callable[..., jax.Array] = ops.all_gather) -> Any:
    """What `logits` takes of the weights, whole along d: for both arguments see `decoder`."""
    gain = gather("M/t/d -> M", weights.final_norm.astype(bf16.dtype))
    return gain, gather("V/t M/d -> V/t M", weights.unembed.astype(bf16.dtype))


@typechecked
def logits(
    head: tuple[bf16["M"], bf16["V/t M"]], x: bf16["B/d L M/t"], config: ModelConfig
) -> f32["B/d L V/t"]:
    gain, unembed = head
    h = rms_norm(ops.all_gather("B/d L M/t -> B/d L M", x), gain, config.norm_eps)
    return ops.einsum_unreduced("B/d L M, V/t M -> B/d L V/t", h, unembed, dtype=f32)


@typechecked
def forward(weights: Weights, batch: TokenBatch, config: ModelConfig) -> bf16["B/d L M/t"]:
    """The residual stream after the last layer: of each target, made of the tokens before it in its
    document and row."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: tuple[()]) -> tuple[Any, tuple[()]]:
        mixed = kernels.attention(
            "B/d L Q K/t D, B/d L K/t D, B/d L K/t D, B/d L -> B/d L Q K/t D",
            q, k, v, batch.document,
        )  # fmt: skip
        return mixed, ()

    return decoder(weights, batch.inputs, batch.position, attend, (), config)[0]


@typechecked
def target_count(batch: TokenBatch) -> f32[""]:
    """The number of targets that count, on all devices together."""
    mask = batch.loss_mask.astype(f32.dtype)
    return ops.psum("{U:d} -> ", ops.reduce_sum("B/d L -> {U:d}", mask))


@typechecked
def total_loss(weights: Weights, batch: TokenBatch, config: Config) -> f32[""]:
    """Cross-entropy in nats, summed over all targets of all devices. The vocabulary stays split: of
    the logits only their maximum, the sum of their exponentials and the target's are reduced."""
    whole_head = head(weights)

    # For a part of the sequence at a time, as logits are the largest array by far.
    @typechecked
    def loss(
        head: tuple[bf16["M"], bf16["V/t M"]],
        x: bf16["B/d l M/t"],
        targets: u32["B/d l"],
        loss_mask: bool_["B/d l"],
    ) -> f32[""]:
        scores = logits(head, x, config.model)
        peak = ops.reduce_max("B/d l V/t -> B/d l", lax.stop_gradient(scores))
        scores = scores - peak[:, :, None]
        total = ops.reduce_sum("B/d l V/t -> B/d l {U:t}", jnp.exp(scores))
        total = ops.psum("B/d l {U:t} -> B/d l", total)
        chosen = ops.index_unreduced("B/d l [V/t], B/d l -> B/d l {U:t}", scores, targets)
        chosen = ops.psum("B/d l {U:t} -> B/d l", chosen)
        nats = (jnp.log(total) - chosen) * loss_mask
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d l -> {U:d}", nats))

    chunks, x = config.training.loss_chunks, forward(weights, batch, config.model)
    return sum_over_chunks(loss, chunks, whole_head, x, batch.targets, batch.loss_mask)


# --- Training step --------------------------------------------------------------------------------


@pytree_dataclass
class State:
    step: u32[""]  # steps done
    weights: Weights
    mu: Weights  # Adam's first moment
    nu: Weights  # Adam's second moment


@pytree_dataclass
class Metrics:
    loss: f32[""]
    learning_rate: f32[""]
    grad_norm: f32[""]
    skipped: u32[""]  # 1 if the update was left out, as loss or gradient isn't finite
    norms: f32["N"]  # those that `norm_names` names; none without metrics.norms_interval


@typechecked
def fresh_state(weights: Weights) -> State:
    """Step 0 with these weights and zero moments."""
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return State(jnp.uint32(0), weights, zeros, zeros)


@typechecked
def init_state(config: Config) -> State:
    """The same on any mesh."""
    make = jax.jit(lambda: fresh_state(init_weights(config)), out_shardings=make_shardings(State))
    return make()


def learning_rate(step: jax.Array, config: TrainingConfig) -> jax.Array:
    """Linear warm-up to the peak at `warmup_steps`, then half a cosine down to the final fraction
    at `steps_for_lr`. Counts steps from 1."""
    now = step.astype(f32.dtype)
    warmup = now / max(config.warmup_steps, 1)
    decay_steps = max(config.steps_for_lr - config.warmup_steps, 1)
    decay = jnp.clip((now - config.warmup_steps) / decay_steps, 0, 1)
    final = config.cosine_learning_rate_final_fraction
    cosine = final + (1 - final) * (1 + jnp.cos(jnp.pi * decay)) / 2
    return config.learning_rate * jnp.minimum(warmup, cosine)


@typechecked
def loss_and_grads(weights: Weights, batch: TokenBatch, config: Config) -> tuple[f32[""], Weights]:
    """The mean loss over all targets, and its gradient, which comes summed over the batch and split
    as the weights are: the backward pass of a weight's all_gather is a reduce-scatter, in the bf16
    that was gathered. Sums over microbatches run in f32."""
    take = functools.partial(jax.value_and_grad(total_loss), weights, config=config)
    count = config.training.microbatches
    if count == 1:
        total = take(batch)
    else:

        def add(total: Any, rows: Any) -> tuple[Any, tuple[()]]:
            # The barrier keeps the TPU's compiler (libtpu 0.0.50) from crashing.
            found = jax.tree.map(lax.optimization_barrier, take(rows))
            return jax.tree.map(jnp.add, total, found), ()

        parts = jax.tree.map(lambda x: rearrange(x, "(parts B) L -> parts B L", parts=count), batch)
        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, weights)
        total, () = lax.scan(add, zero, parts)
    targets = target_count(batch)
    return jax.tree.map(lambda x: x / targets, total)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
@typed_shard_map
def training_step(state: State, batch: TokenBatch, config: Config) -> tuple[State, Metrics]:
    """One step of AdamW: Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101, algorithm 2.
    As usual the decay is scaled by the learning rate, and gradients are clipped by their global
    norm first. All weights decay, gains included."""
    hyper, tree_map = config.training, jax.tree.map
    loss, raw_grads = loss_and_grads(state.weights, batch, config)
    grad_norm = jnp.sqrt(ops.sum_of_squares(Weights, raw_grads))
    clip = jnp.minimum(1, hyper.grad_clip / grad_norm)
    grads = tree_map(lambda g: g * clip, raw_grads)

    step = state.step + 1
    b1, b2, rate = hyper.adam_b1, hyper.adam_b2, learning_rate(step, hyper)
    mu = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
    nu = tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
    mu_scale = 1 / (1 - b1 ** step.astype(f32.dtype))
    nu_scale = 1 / (1 - b2 ** step.astype(f32.dtype))

    def update(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        root = jnp.sqrt(v * nu_scale + hyper.adam_eps_root) + hyper.adam_eps
        return w - rate * (m * mu_scale / root + hyper.weight_decay * w)

    weights = tree_map(update, state.weights, mu, nu)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    new, old = (weights, mu, nu), (state.weights, state.mu, state.nu)
    kept = tree_map(lambda x, before: jnp.where(finite, x, before), new, old)
    squares = [jnp.zeros(0)]
    if config.metrics.norms_interval:
        updates = tree_map(operator.sub, kept[0], state.weights)
        for tree in raw_grads, kept[0], updates:
            squares += map(jnp.atleast_1d, ops.sums_of_squares(Weights, tree, "layers"))
    norms = jnp.sqrt(jnp.concatenate(squares))
    metrics = Metrics(loss, rate, grad_norm, 1 - finite.astype(u32.dtype), norms)
    return State(step, *kept), metrics


def norm_names(config: Config) -> list[str]:
    """Of `Metrics.norms`: of the gradients before they are clipped, the weights and the updates,
    each tensor's, and each layer's of those that are stacked."""
    names = []
    for name, kind in named(type_tree(Weights)).items():
        stacked = kind.spec.dims[0].name == "layers"
        names += [f"{name}/{i}" for i in range(config.model.layers)] if stacked else [name]
    return [f"{what}_norm/{name}" for what in ("grad", "weight", "update") for name in names]


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def validation_step(weights: Weights, batch: TokenBatch, config: Config) -> f32[""]:
    return total_loss(weights, batch, config) / target_count(batch)


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def gradients(weights: Weights, batch: TokenBatch, config: Config) -> Weights:
    return loss_and_grads(weights, batch, config)[1]


def trace_step(config: Config, mesh: jax.sharding.AbstractMesh, sizes: dict[str, int]) -> Any:
    """The jaxpr of the training step on a mesh without devices, at other sizes than the config's if
    you like. Raises UserError where a dimension doesn't split over the mesh."""
    with jax.sharding.use_abstract_mesh(mesh):
        shapes = make_shapes(tuple[State, TokenBatch], sizes)
        return audit.traced(training_step, *shapes, config)


def lower_step(config: Config) -> jax.stages.Lowered:
    """The training step for the mesh in context, ready to compile; needs no arrays."""
    hint = tuple[State, TokenBatch]
    shapes, shardings = make_shapes(hint, dimensions(config)), make_shardings(hint)
    placed = jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, shardings)
    return training_step.lower(*placed, config)


def probe(config: Config) -> Any:
    """Traces the step at sizes where a mistaken layout can't go unnoticed because two sizes happen
    to agree, and returns its jaxpr there. Raises ShardTypeError, and whatever an edit may raise;
    takes about a second."""
    config = copy.deepcopy(config)
    for parts in "microbatches", "loss_chunks":
        setattr(config.training, parts, min(getattr(config.training, parts), 2))
    trace = functools.partial(trace_step, config)
    return audit.probe(trace, dataclasses.asdict(config.mesh), dimensions(config))


def check_types(config: Config) -> Any:
    """The probe's jaxpr. Raises UserError where the types in this file don't hold."""
    try:
        return probe(config)
    except Exception as error:  # ShardTypeError, or what JAX or Python says of an edit
        says = "train.py's types don't hold (tried at sizes that tell all dimensions apart)"
        raise UserError(f"{says}\n{explain(error)}") from None


# --- Loop -----------------------------------------------------------------------------------------


def step_flops(config: Config) -> tuple[int, int]:
    """Matmul FLOPs of a step, forward and backward, recomputation left out: those of projections,
    per token 6 for each weight of a matmul; and those of attention's two products, counted causal,
    per token 6 * L * heads * D a layer. Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
    appendix B."""
    size = dimensions(config)
    heads = size["Q"] * size["K"] * size["D"]
    per_layer = size["M"] * (2 * heads + 2 * size["K"] * size["D"] + 3 * size["F"])
    weights = size["layers"] * per_layer + size["V"] * size["M"]
    tokens = size["B"] * size["L"]
    return 6 * weights * tokens, 6 * size["layers"] * size["L"] * heads * tokens


@typechecked
def validate(config: Config, weights: Weights, data: Batches) -> jax.Array:
    """The mean of the losses of the split's first batches, the same ones each time."""
    count = config.training.validation_batches
    losses = [validation_step(weights, batch, config) for _, batch in data.from_step(0, count)]
    return sum(losses, start=jnp.float32(0)) / count


def starting_state(config: Config, saved: Checkpoints, data: Batches) -> tuple[State, str]:
    """The state to start from: of the newest checkpoint of the run, or of one that it is cloned
    from; and a line on where it is from. The initial one has none."""
    source = saved.starting_point(config.paths.clone_from)
    if not source.newest.step:
        return init_state(config), ""
    if source is not saved and config.paths.clone_weights_only:
        weights = source.restore("weights")
        make = jax.jit(fresh_state, donate_argnums=0, out_shardings=make_shardings(State))
        return make(weights), f"weights from {source.newest.path}"
    state = source.restore()
    data.resume(source.position)
    return state, f"resumed at step {source.newest.step} from {source.newest.path}"


@typechecked
def not_finite(config: Config, weights: Weights, batch: TokenBatch, origin: str) -> str:
    """Which gradients of a batch aren't finite, computed anew, and where the batch is from."""
    grads = named(gradients(weights, batch, config))
    bad = [name for name, grad in grads.items() if not jnp.isfinite(grad).all()]
    found = ", ".join(bad) or "none, with the weights of now"
    return f"gradients that are not finite: {found}; {origin}"


def train(config: Config, data: Batches, held_out: Batches | None, run: Run) -> None:
    """Trains to the last step, or until a signal says to stop."""
    hyper = config.training
    told = State, dimensions(config), config.to_yaml(), config.io.max_io_threads
    saved = Checkpoints(run.checkpoints, *told, config.checkpoints, say, run.stop.ask)
    if saved.newest.step >= hyper.steps:
        saved.check_model()
        return
    step_once = run.compile(lower_step(config))
    state, origin = starting_state(config, saved, data)
    run.begin(
        first=int(state.step),
        steps=hyper.steps,
        tokens=hyper.tokens.batch * hyper.tokens.len,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.weights)),
        flops=sum(step_flops(config)),
        max_skipped=hyper.max_skipped_updates,
        vectors={"norms": norm_names(config)},
        origin=origin,
    )

    def explain(step: int, batch: Any) -> str:
        saved.wait()
        return not_finite(config, state.weights, batch, data.origin_of(step))

    for step, batch in data.from_step(run.first, hyper.steps):
        with run.step(step, data.waited):
            state, metrics = step_once(state, batch)
        run.log(step, vars(metrics), functools.partial(explain, step, batch))
        if held_out and due(hyper.validation_interval, step, hyper.steps):
            run.settle()
            run.flush(validation_loss=validate(config, state.weights, held_out))
        if run.saves_after(step):
            run.flush()  # raises where a loss is no number, so that no checkpoint has it
            saved.save(step + 1, state, data.position)
        if run.stopping:
            break
    saved.wait()


@program(Config, "configs", names="paths.model_name")
def main(config: Config) -> int:
    mesh, sizes = make_mesh(config, dataclasses.asdict(config.mesh)), dimensions(config)
    run = Run(config)
    with jax.set_mesh(mesh):
        make_shapes(tuple[State, TokenBatch], sizes, DIMENSIONS)
        data, held_out = open_batches(config, sizes)
    with run:
        cache.unless_passed_before(config, lambda: check_types(config))
        with jax.set_mesh(mesh):
            train(config, data, held_out, run)
            return run.end()


if __name__ == "__main__":
    main()
