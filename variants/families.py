"""Functions and types for families of models that differ from Llama in queries, keys and values, in
norms or in positions. train.py calls `qkv_type`, `QKV.adjusted`, `norm_after`, `first_visible` and
`RopeScalingConfig.slowed`."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from runtime.config import Section
from runtime.initial import bias, gain
from runtime.values import F32, PositiveInt, one_of
from shardlib import ops
from shardlib.activations import save_for_backward
from shardlib.types import choose, compute, f32, pytree_dataclass, typechecked, u32

QK_NORMS = Annotated[str, one_of("head all")]  # see HeadNorms and AllNorms


@dataclasses.dataclass(unsafe_hash=True)
class RopeScalingConfig(Section, key="model.rope_scaling"):
    """Llama 3.1's RoPE scaling, for rows longer than those of the original training."""

    factor: F32
    low_frequency_factor: F32
    high_frequency_factor: F32
    original_len: PositiveInt  # tokens in a row of the original training

    def __post_init__(self) -> None:
        self.require(self.factor >= 1, "factor", "it must be at least 1")
        above = self.low_frequency_factor < self.high_frequency_factor
        self.require(above, "high_frequency_factor", "it must be above low_frequency_factor")

    def slowed(self, timescale: jax.Array) -> jax.Array:
        """The timescale of each pair. Pairs that turn only a few times within the original length
        are slowed by `factor`: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, as
        released with Llama 3.1."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_len / (2 * jnp.pi * timescale)
        unscaled = jnp.clip((turns - low) / (high - low), 0, 1)
        return timescale / (unscaled + (1 - unscaled) / self.factor)


@typechecked
def first_visible(start: u32["B/d L/c"], position: u32["B/d L/c"], window: int) -> u32["B/d L/c"]:
    """The position of the first token that a token sees: it sees at most the last `window` tokens
    of its document, which begins at `start`."""
    return jnp.maximum(start, position - jnp.minimum(position, window - 1))


# --- Norms ----------------------------------------------------------------------------------------


def _squares(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(f32.dtype))


def _mean_over_t(means: jax.Array) -> jax.Array:
    """Adds up the devices' contributions to the mean of all squares."""
    means = ops.psum("B/d L/c {U:t} -> B/d L/c", means)
    return ops.broadcast("B/d L/c -> B/d L/c", means)


def _normed(x: jax.Array, squares: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of x over its last dimensions, the gain's, given the mean of its squares."""
    scale = jnp.expand_dims(lax.rsqrt(squares + eps), tuple(range(-gain.ndim, 0)))
    return (x.astype(f32.dtype) * scale * gain.astype(f32.dtype)).astype(x.dtype)


@typechecked
def norm_after(
    y: compute["B/d L/c M/t"], gain: compute["M/t/c/s"], eps: float
) -> compute["B/d L/c M/t"]:
    """Normalizes the result of attention or the feed-forward: OLMo 2,
    https://arxiv.org/abs/2501.00656."""
    gain = ops.all_gather("M/t/c/s -> M/t", gain)
    y = save_for_backward(y)
    squares = ops.reduce_mean("B/d L/c M/t -> B/d L/c {U:t}", _squares(y))
    return _normed(y, _mean_over_t(squares), gain, eps)


# --- Queries, keys and values ---------------------------------------------------------------------
# The weights here are small. They aren't split over d and c, and stay in f32.


@pytree_dataclass
class Biases:
    """Biases of all three: Qwen2."""

    b_q: f32["Q K/t D", bias]
    b_k: f32["K/t D", bias]
    b_v: f32["K/t D", bias]


@pytree_dataclass
class HeadNorms:
    """An RMSNorm of each head: Qwen3."""

    q_norm: f32["D", gain]
    k_norm: f32["D", gain]

    def __call__(self, q: jax.Array, k: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
        squares = ops.reduce_mean("B/d L/c Q K/t D -> B/d L/c Q K/t", _squares(q))
        q = _normed(q, squares, self.q_norm, eps)
        squares = ops.reduce_mean("B/d L/c K/t D -> B/d L/c K/t", _squares(k))
        return q, _normed(k, squares, self.k_norm, eps)


@pytree_dataclass
class AllNorms:
    """An RMSNorm of all heads at once: OLMo 2."""

    all_q_norm: f32["Q K/t D", gain]
    all_k_norm: f32["K/t D", gain]

    def __call__(self, q: jax.Array, k: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
        squares = ops.reduce_mean("B/d L/c Q K/t D -> B/d L/c {U:t}", _squares(q))
        q = _normed(q, _mean_over_t(squares), self.all_q_norm, eps)
        squares = ops.reduce_mean("B/d L/c K/t D -> B/d L/c {U:t}", _squares(k))
        return q, _normed(k, _mean_over_t(squares), self.all_k_norm, eps)


@pytree_dataclass
class QKV:
    """Weights that act on queries, keys and values after their projections and before RoPE."""

    biases: Biases | None
    norms: HeadNorms | AllNorms | None

    @typechecked
    def adjusted(
        self,
        q: compute["B/d L/c Q K/t D"],
        k: compute["B/d L/c K/t D"],
        v: compute["B/d L/c K/t D"],
        eps: float,
    ) -> tuple[compute["B/d L/c Q K/t D"], compute["B/d L/c K/t D"], compute["B/d L/c K/t D"]]:
        if b := self.biases:
            q, k, v = ((x + b_x).astype(x.dtype) for x, b_x in ((q, b.b_q), (k, b.b_k), (v, b.b_v)))
        return (*self.norms(q, k, eps), v) if self.norms else (q, k, v)


def qkv_type(biases: bool, norms: str | None) -> Any:
    """The types of a config's QKV, or None for Llama's."""
    kinds = {"head": HeadNorms, "all": AllNorms, None: None}
    return (biases or norms) and choose(QKV, biases=biases, norms=kinds[norms])
