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

import dataclasses
import datetime
import functools
import itertools
import math
import operator
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from omegaconf import MISSING, OmegaConf

from data.huggingface import HuggingFaceConfig, StreamLoader
from data.loader import Batches, FlatTokensConfig, Loader, TokenBatch, numbers_without
from runtime import cache, hlo
from runtime.checkpoint import CheckpointError, Checkpoints, CheckpointsConfig, named
from runtime.config import (
    Bound,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    program,
)
from runtime.run import Run
from runtime.sinks import Row, check_destinations
from runtime.supervise import Lease, LeaseError, Stop, Watchdog
from shardlib import audit, devices, kernels, ops
from shardlib.activations import (
    explicit_activation_checkpointing,
    save_for_backward,
    sum_over_chunks,
)
from shardlib.errors import UserError
from shardlib.types import (
    Stacked,
    bf16,
    explain,
    f32,
    i32,
    make_shapes,
    make_shardings,
    pytree_dataclass,
    type_tree,
    typechecked,
    typed_shard_map,
    u32,
)

IMPORTED = time.perf_counter()

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
        if self.start_token >= self.vocab:
            raise UserError(f"model.start_token={self.start_token}: it must be below model.vocab")
        if self.d_head % 2:
            raise UserError(f"model.d_head={self.d_head}: RoPE rotates pairs, so it is even")


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
    adam_b1: Annotated[float, Bound(0, below=1)]
    adam_b2: Annotated[float, Bound(0, below=1)]
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
    skip_steps: tuple[int, ...]  # whose batches are left out; later steps get later ones
    max_skipped_updates: NonNegativeInt  # in a row, not being finite, before the run stops

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grad_clip > 0:
            raise UserError(
                f"training.grad_clip={self.grad_clip}: it must be above 0; inf clips none"
            )
        if not all(isinstance(step, int) and step >= 0 for step in self.skip_steps):
            raise UserError("training.skip_steps is a list of steps, which are at least 0")
        if self.tokens.len % self.loss_chunks:
            raise UserError(
                f"training.loss_chunks={self.loss_chunks} doesn't divide "
                f"training.tokens.len={self.tokens.len}"
            )


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig(Section, key="mesh"):
    """The mesh axes, outermost first. This is their one declaration."""

    d: PositiveInt
    t: PositiveInt


@dataclasses.dataclass(unsafe_hash=True)
class PathsConfig(Section, key="paths"):
    root_working_dir: str
    clone_from: str  # a folder of checkpoints, or one of them, that a new run starts from
    clone_weights_only: bool  # from step 0, or else with its whole state, from its step
    model_name: Name = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = pathlib.PurePath(self.model_name)
        if folder.is_absolute() or ".." in folder.parts or not folder.parts:
            raise UserError(
                f"paths.model_name={self.model_name}: it names a folder in paths.root_working_dir"
            )
        if "://" in self.root_working_dir:
            raise UserError(
                f"paths.root_working_dir={self.root_working_dir}: runs write to a local folder"
            )


@dataclasses.dataclass(unsafe_hash=True)
class IoConfig(Section, key="io"):
    max_io_threads: PositiveInt


@dataclasses.dataclass(unsafe_hash=True)
class MetricsConfig(Section, key="metrics"):
    to: tuple[str, ...]  # besides metrics.jsonl: tensorboard, wandb
    norms_interval: NonNegativeInt  # steps between norms of each tensor; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        check_destinations(self.to)


@dataclasses.dataclass(unsafe_hash=True)
class Config(Section):
    model: ModelConfig
    training: TrainingConfig
    mesh: MeshConfig
    flat_tokens: FlatTokensConfig | None  # one of the two
    hf_dataset: HuggingFaceConfig | None
    paths: PathsConfig
    io: IoConfig
    metrics: MetricsConfig
    checkpoint_interval: NonNegativeInt  # steps; 0: at the end only
    checkpoints: CheckpointsConfig
    hang_timeout_seconds: NonNegativeFloat  # for a step, before it counts as hung; 0: none
    hang_ends: bool  # a step that hangs ends the run, or else is only reported
    profile: bool  # a few steps into profile/
    hlo_svg: bool  # the compiled step, drawn
    compiler_options: bool  # those of devices.COMPILER_OPTIONS
    num_hosts: PositiveInt
    coordinator: str  # address:port of the first host, where JAX can't find out; else empty
    process_id: NonNegativeInt  # of this host, from 0, if a coordinator is named
    heartbeat_timeout_seconds: PositiveInt  # without a sign of a host, after which the others end
    simulate_devices: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.flat_tokens) == bool(self.hf_dataset):
            raise UserError("set one of flat_tokens and hf_dataset, and the other one to null")
        rows = self.training.tokens.batch // self.mesh.d
        parts = self.training.microbatches
        if rows % parts:
            raise UserError(
                f"training.microbatches={parts} doesn't divide training.tokens.batch/mesh.d={rows}"
            )


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


def init_weights(config: Config) -> Weights:
    """Normal, with deviation 1/sqrt(fan-in); those of the projections that add to the residual
    stream are scaled down by the root of the number of additions (GPT-2, section 2.3)."""
    size = dimensions(config)
    addition = (2 * size["layers"]) ** -0.5
    into_model = size["M"] ** -0.5
    gain = 0.0  # no deviation, from one
    deviation = Weights(
        embed=into_model,  # as small as the unembedding: a larger one learns slower
        layers=Layer(
            attention_norm=gain,
            w_q=into_model,
            w_k=into_model,
            w_v=into_model,
            w_o=addition * (size["Q"] * size["K"] * size["D"]) ** -0.5,
            mlp_norm=gain,
            w_gate=into_model,
            w_up=into_model,
            w_down=addition * size["F"] ** -0.5,
        ),
        final_norm=gain,
        unembed=into_model,
    )
    shapes, tree = jax.tree.flatten(make_shapes(Weights, size))
    keys = jax.random.split(jax.random.key(config.training.seed), len(shapes))
    leaves = [
        jax.random.normal(key, s.shape, s.dtype) * scale if scale else jnp.ones_like(s)
        for key, s, scale in zip(keys, shapes, jax.tree.leaves(deviation), strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


@typechecked
def rms_norm(x: bf16["B/d L M"], gain: bf16["M"], eps: float) -> bf16["B/d L M"]:
    """Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467."""
    x32 = x.astype(f32.dtype)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * gain.astype(f32.dtype)).astype(bf16.dtype)


def rope(x: jax.Array, config: ModelConfig, first: int | jax.Array = 0) -> jax.Array:
    """Rotates each pair (i, i + D/2) of x[B, L, ..., D] by the position, counted from `first`,
    times max_timescale^(-2i/D). Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4.

    Scaling turns pairs that turn seldom in the original length more slowly, by the factor:
    Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, as released with Llama 3.1."""
    length, half = x.shape[1], x.shape[-1] // 2
    timescale = config.rope_max_timescale ** (jnp.arange(half, dtype=f32.dtype) / half)
    if scaling := config.rope_scaling:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_len / (2 * jnp.pi * timescale)
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        timescale = timescale / (kept + (1 - kept) / scaling.factor)
    angle = (first + jnp.arange(length, dtype=f32.dtype))[:, None] / timescale
    angle = angle.reshape(length, *[1] * (x.ndim - 3), half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    x1, x2 = jnp.split(x.astype(f32.dtype), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


@typechecked
def forward(weights: Weights, batch: TokenBatch, config: ModelConfig) -> bf16["B/d L M/t"]:
    """The residual stream after the last layer: of each target, made of the tokens before it in its
    document and row."""
    previous = jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
    inputs = jnp.where(batch.is_start, config.start_token, previous)
    document = jnp.cumsum(batch.is_start.astype(i32.dtype), axis=1)

    embed = ops.all_gather("V/t M/d -> V/t M", weights.embed.astype(bf16.dtype))
    x = ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", embed, inputs)
    x = ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", x)

    # A block keeps its input and what is saved by name; the rest, gathers included, is done again
    # in the backward pass.
    @explicit_activation_checkpointing
    @typechecked
    def block(x: bf16["B/d L M/t"], layer: Layer) -> tuple[bf16["B/d L M/t"], tuple[()]]:
        w = jax.tree.map(lambda leaf: leaf.astype(bf16.dtype), layer)

        gain = ops.all_gather("M/t/d -> M", w.attention_norm)
        h = rms_norm(ops.all_gather("B/d L M/t -> B/d L M", x), gain, config.norm_eps)
        w_q = ops.all_gather("M/d Q K/t D -> M Q K/t D", w.w_q)
        w_k = ops.all_gather("M/d K/t D -> M K/t D", w.w_k)
        w_v = ops.all_gather("M/d K/t D -> M K/t D", w.w_v)
        q = ops.einsum_unreduced("B/d L M, M Q K/t D -> B/d L Q K/t D", h, w_q)
        k = ops.einsum_unreduced("B/d L M, M K/t D -> B/d L K/t D", h, w_k)
        v = ops.einsum_unreduced("B/d L M, M K/t D -> B/d L K/t D", h, w_v)
        q = save_for_backward(rope(q, config))
        k = save_for_backward(rope(k, config))
        v = save_for_backward(v)
        mixed = kernels.attention(
            "B/d L Q K/t D, B/d L K/t D, B/d L K/t D, B/d L -> B/d L Q K/t D", q, k, v, document
        )
        mixed = save_for_backward(mixed)
        w_o = ops.all_gather("M/d Q K/t D -> M Q K/t D", w.w_o)
        y = ops.einsum_unreduced("B/d L Q K/t D, M Q K/t D -> B/d L M {U:t}", mixed, w_o)
        x = save_for_backward(x + ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y))

        # SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202
        gain = ops.all_gather("M/t/d -> M", w.mlp_norm)
        h = rms_norm(ops.all_gather("B/d L M/t -> B/d L M", x), gain, config.norm_eps)
        w_gate = ops.all_gather("M/d F/t -> M F/t", w.w_gate)
        w_up = ops.all_gather("M/d F/t -> M F/t", w.w_up)
        gate = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", h, w_gate))
        up = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", h, w_up))
        w_down = ops.all_gather("M/d F/t -> M F/t", w.w_down)
        hidden = jax.nn.silu(gate) * up
        y = ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", hidden, w_down)
        return x + ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y), ()

    x, () = lax.scan(block, x, weights.layers)
    return x


@typechecked
def target_count(batch: TokenBatch) -> f32[""]:
    """Of all devices; 0 is padding."""
    is_target = (batch.targets != 0).astype(f32.dtype)
    return ops.psum("{U:d} -> ", ops.reduce_sum("B/d L -> {U:d}", is_target))


@typechecked
def total_loss(weights: Weights, batch: TokenBatch, config: Config) -> f32[""]:
    """Cross-entropy in nats, summed over all targets of all devices. The vocabulary stays split: of
    the logits only their maximum, the sum of their exponentials and the target's are reduced."""
    gain = ops.all_gather("M/t/d -> M", weights.final_norm.astype(bf16.dtype))
    unembed = ops.all_gather("V/t M/d -> V/t M", weights.unembed.astype(bf16.dtype))

    # For a part of the sequence at a time, as logits are the largest array by far.
    @typechecked
    def loss(
        shared: tuple[bf16["M"], bf16["V/t M"]], x: bf16["B/d l M/t"], targets: u32["B/d l"]
    ) -> f32[""]:
        gain, unembed = shared
        h = rms_norm(ops.all_gather("B/d l M/t -> B/d l M", x), gain, config.model.norm_eps)
        logits = ops.einsum_unreduced("B/d l M, V/t M -> B/d l V/t", h, unembed, dtype=f32)
        peak = ops.reduce_max("B/d l V/t -> B/d l", lax.stop_gradient(logits))
        logits = logits - peak[:, :, None]
        total = ops.reduce_sum("B/d l V/t -> B/d l {U:t}", jnp.exp(logits))
        total = ops.psum("B/d l {U:t} -> B/d l", total)
        chosen = ops.index_unreduced("B/d l [V/t], B/d l -> B/d l {U:t}", logits, targets)
        chosen = ops.psum("B/d l {U:t} -> B/d l", chosen)
        nats = (jnp.log(total) - chosen) * (targets != 0)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d l -> {U:d}", nats))

    x = forward(weights, batch, config.model)
    return sum_over_chunks(loss, config.training.loss_chunks, (gain, unembed), x, batch.targets)


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


def first_state(weights: Weights) -> State:
    """The state before the first step, by the weights to start from."""
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return State(jnp.uint32(0), weights, zeros, zeros)


def init_state(config: Config) -> State:
    """The same on any mesh."""
    make = jax.jit(lambda: first_state(init_weights(config)), out_shardings=make_shardings(State))
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

        def add(total: Any, rows: TokenBatch) -> tuple[Any, tuple[()]]:
            # The barrier keeps the TPU's compiler (libtpu 0.0.50) from crashing.
            found = jax.tree.map(lax.optimization_barrier, take(rows))
            return jax.tree.map(jnp.add, total, found), ()

        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
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
    kinds = named(type_tree(Weights))
    stacked = {name for name, kind in kinds.items() if kind.spec.dims[0].name == "layers"}
    return [
        f"{what}_norm/{name}" + f"/{i}" * (name in stacked)
        for what in ("grad", "weight", "update")
        for name in kinds
        for i in range(config.model.layers if name in stacked else 1)
    ]


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
        return training_step.trace(*shapes, config).jaxpr.jaxpr


def lower_step(config: Config) -> jax.stages.Lowered:
    """The training step for the mesh in context, ready to compile; needs no arrays."""
    hint = tuple[State, TokenBatch]
    shapes, shardings = make_shapes(hint, dimensions(config)), make_shardings(hint)
    placed = jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, shardings)
    return training_step.lower(*placed, config)


def compile_step(config: Config, lowered: jax.stages.Lowered, **more: Any) -> jax.stages.Compiled:
    """With the compiler options of the mesh's chips, and these."""
    kind = jax.sharding.get_mesh().devices.flat[0].device_kind
    options = devices.compiler_options(kind) if config.compiler_options else {}
    return lowered.compile(compiler_options=options | more)


def probe(config: Config) -> Any:
    """Traces the step at sizes where a mistaken layout can't go unnoticed because two sizes happen
    to agree, and returns its jaxpr there. Raises ShardTypeError; takes about a second."""
    mesh, sizes = devices.probe_mesh(dataclasses.asdict(config.mesh), dimensions(config))
    hyper = config.training
    halves: Any = {key: min(getattr(hyper, key), 2) for key in ("microbatches", "loss_chunks")}
    rows = 2 * math.prod(dataclasses.astuple(config.mesh))
    halves["tokens"] = dataclasses.replace(hyper.tokens, batch=rows, len=2)
    config = dataclasses.replace(config, training=dataclasses.replace(hyper, **halves))
    jaxpr = trace_step(config, mesh, sizes)
    audit.check(jaxpr, dict(mesh.shape), sizes)
    audit.check_numbers(jaxpr, trace_step(config, devices.turned(mesh), sizes))
    return jaxpr


def check_types(config: Config) -> Any:
    """The probe's jaxpr. Raises UserError where the types in this file don't hold."""
    try:
        return probe(config)
    except TypeError as error:  # ShardTypeError, or JAX's of shapes that don't match
        says = "train.py's types don't hold (tried at sizes that tell all dimensions apart)"
        raise UserError(f"{says}\n{explain(error)}") from None


# --- Loop -----------------------------------------------------------------------------------------


def make_mesh(config: Config) -> jax.sharding.Mesh:
    """Raises UserError if the devices or hosts that the config asks for can't be had."""
    axes = dataclasses.asdict(config.mesh)
    if config.simulate_devices:
        devices.simulate_cpu_devices(math.prod(axes.values()) // config.num_hosts)
    if config.num_hosts > 1:
        try:
            found = dict[str, Any](heartbeat_timeout_seconds=config.heartbeat_timeout_seconds)
            if config.coordinator:
                found |= {"coordinator_address": config.coordinator}
                found |= {"num_processes": config.num_hosts, "process_id": config.process_id}
            jax.distributed.initialize(**found)
        except ValueError as error:
            raise UserError(f"num_hosts={config.num_hosts}: {error}") from None
    if jax.process_count() != config.num_hosts:
        raise UserError(f"num_hosts={config.num_hosts}, but there are {jax.process_count()}")
    return devices.make_mesh(axes)


def make_loaders(config: Config) -> tuple[Batches, Batches | None]:
    """Batches of the training and, if used, the validation split. Raises UserError where a
    dimension doesn't split over the mesh, or the dataset doesn't fit the config."""
    size = dimensions(config)
    try:
        make_shapes(tuple[State, TokenBatch], size)
    except UserError as error:
        keys = (f"{name} is {key}" for name, key in DIMENSIONS.items() if f"{name}=" in str(error))
        raise UserError(f"{error}; {', '.join(keys)}") from None
    make: Callable[..., Batches]
    if config.hf_dataset:
        make = functools.partial(StreamLoader, config.hf_dataset)
    elif config.flat_tokens:
        make = functools.partial(Loader, config.flat_tokens, config.io.max_io_threads)
    make = functools.partial(make, size["B"], size["L"], size["V"])
    return make("train"), make("validation") if config.training.validation_interval else None


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


def validate(config: Config, weights: Weights, loader: Batches) -> jax.Array:
    """The mean of the losses of the split's first batches, the same ones each time."""
    count = config.training.validation_batches
    losses = [validation_step(weights, batch, config) for batch in loader.batches(0, count)]
    return sum(losses, start=jnp.float32(0)) / count


class NotFiniteError(UserError):
    """A loss or gradient that is no number, more often than the config allows."""


def begin(config: Config, checkpoints: Checkpoints, loader: Batches) -> tuple[State, str]:
    """The state to start from: of the newest checkpoint of the run, or of one that it is cloned
    from; and a line on where it is from. The initial one has none."""
    source, fresh, path = checkpoints, False, config.paths.clone_from
    if path and not checkpoints.newest_step:
        source = Checkpoints(path, config.io.max_io_threads)
        source.key, fresh = "paths.clone_from", config.paths.clone_weights_only
        if not source.newest_step:
            raise CheckpointError(
                f"paths.clone_from={path} has no complete checkpoint; name a run's folder of "
                "checkpoints, or one of them"
            )
    if not source.newest_step:
        return init_state(config), ""
    if fresh:
        weights = source.restore(Weights, dimensions(config), to_yaml(config), "weights/")
        make = jax.jit(first_state, donate_argnums=0, out_shardings=make_shardings(State))
        return make(weights), f"weights from {source.newest}"
    state = source.restore(State, dimensions(config), to_yaml(config))
    if config.hf_dataset:
        loader.position = source.position()
    return state, f"resumed at step {source.newest_step} from {source.newest}"


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def not_finite(config: Config, state: State, batch: TokenBatch, number: int, data: Batches) -> str:
    """Which gradients of a batch aren't finite, computed anew, and where the batch is from."""
    grads = named(gradients(state.weights, batch, config))
    bad = [name for name, grad in grads.items() if not jnp.isfinite(grad).all()]
    found = ", ".join(bad) or "none, with the weights of now"
    return f"gradients that are not finite: {found}; batch {number} is of {data.origin(number)}"


class Meter:
    """Logs each step while the next one is at work, for to read a step's metrics is to wait for it.
    `settle` does so at once, before something else follows: its time is not the step's then, and a
    checkpoint's steps all have their rows, and no NaN.

    Raises NotFiniteError after too many updates in a row that were left out; `explain` says more of
    a step and its batch."""

    def __init__(
        self, config: Config, run: Run, first: int, explain: Callable[[int, TokenBatch], str]
    ):
        self.config, self.run, self.first, self.explain = config, run, first, explain
        self.tokens = config.training.tokens.batch * config.training.tokens.len
        self.kind, self.seconds = jax.devices()[0].device_kind, list[float]()
        self.skipped = 0  # updates, in a row
        self.unread: tuple[int, Metrics, float, TokenBatch] | None = None
        self.restart()

    def restart(self) -> None:
        """What was done since the last step isn't the next one's."""
        self.since = time.perf_counter()

    def add(self, step: int, metrics: Metrics, waited: float, batch: TokenBatch) -> None:
        self.settle()
        self.unread = step, metrics, waited, batch

    def settle(self, validate: Callable[[], float] | None = None) -> None:
        if not self.unread:
            return
        (step, metrics, waited, batch), self.unread = self.unread, None
        *scalars, norms = vars(metrics).items()
        row = {"step": step} | {name: float(value) for name, value in scalars}
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        if step == self.first:
            self.run.say(f"time to first step: {now - IMPORTED:.1f} s after the imports")
        row |= {"tokens_per_second": self.tokens / self.seconds[-1], "data_wait_seconds": waited}
        if validate:
            row["validation_loss"] = validate()
        if due(self.config.metrics.norms_interval, step, self.config.training.steps):
            row |= zip(norm_names(self.config), norms[1].tolist(), strict=True)
        self.run.log(row)
        self.show(row)
        self.skipped = self.skipped + 1 if row["skipped"] else 0
        if self.skipped:
            found = f"step {step}: loss {row['loss']:.5g}, gradient norm {row['grad_norm']:.5g}"
            if self.skipped > self.config.training.max_skipped_updates:
                raise NotFiniteError(
                    f"{found}; {self.explain(step, batch)}. No checkpoint has it. "
                    "training.skip_steps leaves batches out, training.max_skipped_updates lets "
                    "some be"
                )
            self.run.say(f"warning: {found}; the update is left out, {self.skipped} in a row")
        self.restart()

    def show(self, row: Row) -> None:
        """The progress, of which every fiftieth of the run's stays, and each validation's."""
        step, steps = row["step"], self.config.training.steps
        typical = statistics.median(self.seconds[-20:])
        left = datetime.timedelta(seconds=round(typical * (steps - step - 1)))
        shown = [f"step {step}/{steps}", f"loss {row['loss']:.4f}"]
        if "validation_loss" in row:
            shown.append(f"validation loss {row['validation_loss']:.4f}")
        shown += [f"{self.tokens / typical:,.0f} tokens/s"]
        shown += [f"MFU {self.mfu(typical)}"] * bool(devices.find_chip(self.kind))
        stays = step % max(1, steps // 50) == 0 or "validation_loss" in row
        self.run.show("  ".join([*shown, f"{left} left"]), stays)

    def mfu(self, seconds: float) -> str:
        count = math.prod(dataclasses.astuple(self.config.mesh))
        return devices.mfu(self.kind, count, sum(step_flops(self.config)) / seconds)


def due(interval: int, step: int, steps: int) -> bool:
    """At the end of a step: every `interval` steps, unless it is 0; and at the run's end, unless
    it is never due."""
    return interval > 0 and ((step + 1) % interval == 0 or step + 1 == steps)


def train(
    config: Config, loader: Batches, validation: Batches | None, stops: Stop, lease: Lease
) -> int:
    """Trains from the newest checkpoint, or the first step, to the last, or until a signal says to
    stop; returns the exit code."""
    hyper = config.training
    run = Run(config.paths.root_working_dir, config.paths.model_name, config.metrics.to)
    root, name = config.checkpoints.root, config.paths.model_name
    path = f"{root}/{name}/checkpoints" if root else f"{run.folder}/checkpoints"
    threads = config.io.max_io_threads
    checkpoints = Checkpoints(path, threads, config.checkpoints, run.say, stops.ask)
    if checkpoints.newest_step >= hyper.steps:
        checkpoints.check_model(State, dimensions(config), to_yaml(config))
        run.say(
            f"{run.folder} is complete: {checkpoints.newest_step} steps are done. To go on, set "
            "training.steps above that; to start anew, choose another paths.model_name"
        )
        return 0
    lowered = lower_step(config)
    step_once = compile_step(config, lowered)
    state, origin = begin(config, checkpoints, loader)
    first = int(state.step)
    run.open(to_yaml(config), first)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
    tokens = hyper.tokens.batch * hyper.tokens.len
    run.say(f"{count:,} parameters, {tokens:,} tokens per step, {run.folder}")
    if origin:
        run.say(origin)
    if config.hlo_svg:
        drawn = hlo.draw(functools.partial(compile_step, config, lowered), run.folder / "step")
        run.say(f"drew {drawn}")

    def explain(step: int, batch: TokenBatch) -> str:
        checkpoints.wait()
        number = next(itertools.islice(numbers_without(hyper.skip_steps), step, None))
        return not_finite(config, state, batch, number, loader)

    def validation_loss() -> float:
        assert validation
        return float(validate(config, state.weights, validation))

    meter = Meter(config, run, first, explain)
    profiled = min(first + 2, hyper.steps - 1), min(first + 4, hyper.steps - 1)
    profile = run.folder / f"profile/host_{jax.process_index()}"
    hangs = run.folder / f"hang.host_{jax.process_index()}.txt"
    batches = loader.batches(first, hyper.steps, hyper.skip_steps)
    done, stopping = first, False
    with Watchdog(config.hang_timeout_seconds, config.hang_ends, hangs) as watchdog:
        for step, batch in enumerate(batches, first):
            if config.profile and step == profiled[0]:
                jax.block_until_ready(state)
                hlo.start_profile(profile, f"steps_{profiled[0]}_to_{profiled[1]}")
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = step_once(state, batch)
            meter.add(step, metrics, loader.waited, batch)
            stopping, done = stops.after(step), step + 1
            if due(hyper.validation_interval, step, hyper.steps):
                meter.settle(validation_loss)
            if config.profile and step == profiled[1]:
                meter.settle()
                jax.block_until_ready(state)
                run.say(f"profiled {hlo.stop_profile(profile, step_once)}")
                meter.restart()
            if lease.lost():
                raise LeaseError(f"{run.folder} was taken over by another run")
            if (
                stopping
                or done == hyper.steps
                or due(config.checkpoint_interval, step, hyper.steps)
            ):
                meter.settle()
                checkpoints.save(done, state, State, to_yaml(config), loader.position)
                meter.restart()
            watchdog.beat()
            if stopping:
                break
    checkpoints.wait()
    if stopping and done < hyper.steps:
        run.say(f"stopped after step {done} by {stops.signal.name}; the same command goes on there")
        return 128 + stops.signal
    typical = statistics.median(meter.seconds[1:] or meter.seconds)
    run.say(
        f"done: {hyper.steps - first} steps, {typical:.3f} s per step (median), "
        f"{tokens / typical:,.0f} tokens/s, MFU {meter.mfu(typical)}"
    )
    return 0


@program(Config, "configs", names="paths.model_name")
def main(config: Config) -> None:
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        loaders = make_loaders(config)
    root = config.paths.root_working_dir
    cache.unless_passed_before(root, config, lambda: check_types(config))
    cache.use_cache(root)
    folder = Run(root, config.paths.model_name).folder
    with jax.set_mesh(mesh), Stop() as stops, Lease(folder, jax.process_index() == 0) as lease:
        if code := train(config, *loaders, stops, lease):
            sys.exit(code)


if __name__ == "__main__":
    main()
