"""A cache of keys and values, with which the model computes a row in parts: a prompt, then token by
token. Generation and its check use it. S is the length of the cache, and c is 1."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from data.loader import TokenBatch
from kernels.attention import recalling
from shardlib.types import Stacked, compute, f32, i32, pytree_dataclass, type_tree, typechecked, u32
from variants.families import first_visible


@pytree_dataclass
class Cache:
    """A layer's keys, with RoPE applied, and values. Positions that are not yet computed are never
    attended to."""

    k: compute["B/d S/c K/t D"]
    v: compute["B/d S/c K/t D"]


@typechecked
def extend(
    model: Any,
    weights: Any,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L/c"],
    first: i32[""],
    start: i32["B/d"],
    config: Any,
    count: int,
) -> tuple[f32["B/d l/c V/t"], Stacked["layers", Cache]]:
    """Returns the logits after the last `count` inputs, and the extended cache. The inputs are at
    indices from `first` on; the cache holds the indices before. A token sees at most as many tokens
    as a row had in training. A row's text begins at its `start`, with position 0. The padding
    before it has negative positions, which as u32 are the largest, so the text doesn't see it.

    `model` is the module that defines the model, train.py or a copy; `weights` are its Weights.
    """

    def position(index: jax.Array) -> jax.Array:
        return (index - start[:, None]).astype(u32.dtype)

    here = position(first + jnp.arange(inputs.shape[1]))
    keys = position(jnp.arange(cache.k.shape[2]))
    begin = first_visible(jnp.zeros_like(here), here, config.training.tokens.len)
    unread = jax.tree.map(lambda x: jnp.zeros_like(inputs, x.dtype), type_tree(TokenBatch))
    batch = dataclasses.replace(unread, inputs=inputs, position=here, start=begin)
    layer, stored = jax.new_ref(jnp.int32(0)), jax.tree.map(jax.new_ref, cache)

    def recall(k: jax.Array, v: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        i = layer[...]
        layer[...] = i + 1
        for all_layers, new in (stored.k, k), (stored.v, v):
            all_layers[i] = lax.dynamic_update_slice_in_dim(all_layers[i], new, first, axis=1)
        return stored.k[i], stored.v[i], keys

    with recalling(recall):
        x, _ = model.forward(weights, batch, config.model)
    logits = model.unembed(model.output_weights(weights), x[:, -count:], config.model)
    return logits, jax.tree.map(jax.freeze, stored)
