"""Lists the functions that a check computes on two meshes. A trial is a name, a function, its
arrays, as NumPy arrays, and its other arguments. `program` is the module that defines the step:
train.py, or a copy of it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.sizes import dimensions
from data.loader import TokenBatch, random_batch
from shardlib.types import Stacked, f32, make_shapes, typed_shard_map, u32
from variants.cache import Cache, extend

Trial = tuple[Any, ...]


def of_training(program: Any, config: Any, state: Any, order: int) -> Iterator[Trial]:
    """Yields the functions that a run calls. `order` is that of `random_batch`."""
    # Else the moments would drown the gradients.
    mu, nu = jax.tree.map(lambda x: x * np.float32(1e-4), (state.mu, state.nu))
    batch = random_batch(dimensions(config), config.model.start_token, order)
    yield "validation_step", program.validation_step, (state.weights, batch), config
    yield "gradients", program.gradients, (state.weights, batch), config
    few = batch.loss_mask * (np.arange(len(batch.loss_mask)) * 2 < len(batch.loss_mask))[:, None]
    uneven = dataclasses.replace(batch, loss_mask=few)  # some devices have no target
    # In the middle of the schedule, and before what is done now and then.
    for step, given in (3, batch), (999, uneven):
        at_step = dataclasses.replace(state, step=np.uint32(step), mu=mu, nu=nu)
        hyper = program.hyper_at(step, config.training)
        yield f"training_step {step}", program.training_step, (at_step, given, hyper), config


def of_generation(program: Any, config: Any, weights: Any) -> Iterator[Trial]:
    """Yields the logits by training's forward pass, and those by a cache of keys and values, which
    must be the same."""

    @functools.partial(jax.jit, static_argnames="config")
    @typed_shard_map
    def forward_logits(
        weights: program.Stored, batch: TokenBatch, config: Any
    ) -> f32["B/d L/c V/t"]:
        replica = program.gather_replica(program.cast(weights))
        x, _ = program.forward(replica, batch, config.model)
        return program.unembed(program.output_weights(replica), x, config.model)

    @functools.partial(jax.jit, static_argnames="config")
    @typed_shard_map
    def cached_logits(
        weights: program.Weights,
        cache: Stacked["layers", Cache],
        inputs: u32["B/d L/c"],
        config: Any,
    ) -> f32["B/d L/c V/t"]:
        """Computes half of a row in one step, like a prompt, then one token, then the rest."""
        logits, first, half = [], 0, inputs.shape[1] // 2
        start = jnp.zeros(len(inputs), jnp.int32)
        for part in jnp.split(inputs, [half, half + 1], axis=1):
            given = part, jnp.int32(first), start, config, part.shape[1]
            made, cache = extend(program, weights, cache, *given)
            logits.append(made)
            first += part.shape[1]
        return jnp.concatenate(logits, axis=1)

    sizes, random = dimensions(config), np.random.default_rng(0)
    rows, length = sizes["B"], sizes["L"]
    ids = random.integers(0, sizes["V"], (rows, length + 1)).astype(np.uint32)
    batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), config.model.start_token)
    kind = Stacked["layers", Cache]
    shapes = make_shapes(kind, sizes | {"S": length})
    cache = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    yield "forward", forward_logits, (weights, batch), config
    yield "generation", cached_logits, (weights, cache, batch.inputs), config
