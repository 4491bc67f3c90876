"""Computes what train.py and tools.generate compute, at tiny sizes, for runtime/checks.py.

    python -m tools.tiny FILE [FUNCTION]

Reads a config from FILE.yaml and writes to FILE.pickle the arrays that each function returns, by
name. With a FUNCTION, writes what the ops in this one compute instead.
"""

import dataclasses
import functools
import math
import pathlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from omegaconf import OmegaConf

import train
from data.flat_tokens import NO_TOKEN
from data.loader import TokenBatch
from shardlib import numbers
from shardlib.devices import have_cpu_devices, make_mesh
from shardlib.errors import explain
from shardlib.kernels import balanced
from shardlib.types import (
    Stacked,
    computing_in,
    f32,
    make_shapes,
    named,
    typechecked,
    typed_shard_map,
    u32,
)
from tools import generate


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def forward(weights: train.Stored, batch: TokenBatch, config: train.Config) -> f32["B/d L/c V/t"]:
    """The logits as training computes them."""
    replica = train.gather_replica(train.cast(weights))
    x, _ = train.forward(replica, batch, config.model)
    return train.unembed(train.output_weights(replica), x, config.model)


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def generation(
    weights: train.Weights,
    cache: Stacked["layers", generate.Cache],
    inputs: u32["B/d L/c"],
    config: train.Config,
) -> f32["B/d L/c V/t"]:
    """The logits as generation computes them: for half of a row in one step, as for a prompt, then
    for one token after the other."""

    def extend(cache: Any, inputs: jax.Array, first: jax.Array) -> Any:
        start = jnp.zeros(len(inputs), jnp.int32)
        x, cache = generate.extend(weights, cache, inputs, first, start, config)
        output = train.output_weights(weights)
        return cache, train.unembed(output, x, config.model)

    def token(cache: Any, i: jax.Array) -> Any:
        return extend(cache, lax.dynamic_slice_in_dim(inputs, i, 1, axis=1), i)

    half = inputs.shape[1] // 2
    cache, prompt = extend(cache, inputs[:, :half], jnp.int32(0))
    _, rest = lax.scan(token, cache, jnp.arange(half, inputs.shape[1]))
    return jnp.concatenate([prompt, jnp.moveaxis(rest[:, :, 0], 0, 1)], axis=1)


@typechecked
def calls(config: train.Config, state: train.State, parts: int) -> Iterator[tuple[Any, ...]]:
    """Yields names, functions, the arrays that they take, as NumPy arrays, and other arguments.
    Rows are in the order of a mesh that splits them into `parts`, for functions whose results don't
    depend on that.
    Rows have documents of any length from one token on, shorter ones in later rows, and end in
    padding. For generation, which doesn't split rows, a row is one document."""
    sizes, random = train.dimensions(config), np.random.default_rng(0)
    shape = sizes["B"], sizes["L"]

    @typechecked
    def batch(is_start: Any, lengths: Any) -> TokenBatch:
        ids = random.integers(0, sizes["V"], (shape[0], shape[1] + 1))
        ids = np.where(np.arange(shape[1] + 1) > lengths, NO_TOKEN, ids).astype(np.uint32)
        return TokenBatch.of(ids, np.pad(is_start, ((0, 0), (1, 0))), config.model.start_token)

    often = (np.arange(shape[0]) / shape[0])[:, None] ** 3  # a document starts, by row
    lengths = random.integers(1, shape[1] + 1, (shape[0], 1))
    training = batch(random.random(shape) < often, lengths)
    training = jax.tree.map(lambda x: x[:, balanced(shape[1], parts)], training)
    whole = batch(np.zeros(shape, bool), shape[1])
    cached = Stacked["layers", generate.Cache]
    shapes = make_shapes(cached, sizes | {"S": shape[1]})
    cache = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    yield "validation_step", train.validation_step, (state.weights, training), config
    yield "gradients", train.gradients, (state.weights, training), config
    for step in 3, 999:  # in the middle of the schedule, and before what is done now and then
        at_step = dataclasses.replace(state, step=np.uint32(step))
        hyper = train.hyper_at(step, config.training)
        yield f"training_step {step}", train.training_step, (at_step, training, hyper), config
    yield "forward", forward, (state.weights, whole), config
    if config.mesh.c > 1:
        return
    rows = state.weights, cache, whole.inputs
    yield "generation", generation, rows, config
    draws = random.random(shape[0]).astype(np.float32)
    start = np.zeros(shape[0], np.int32)
    how = generate.Sampling(0.8, top_k=None, top_p=0.9, ids=range(sizes["V"]))
    yield "generate.step", generate.step, (*rows, np.int32(0), start, draws), config, how


def by_name(tree: Any) -> dict[str, np.ndarray]:
    arrays = named(jax.device_get(tree)).items()
    return {name.lstrip("0123456789/") or "its result": np.asarray(x) for name, x in arrays}


def results(config: train.Config, recorded: str = "") -> Iterator[tuple[str, Any]]:
    """Calls the functions on the mesh in context. Yields the name of each and the arrays that it
    returns, by name; of the one named `recorded`, and only of that, what its ops compute."""
    state = train.init_state(config)
    if not recorded:
        yield "init_state", by_name(state)
    state = numbers.stirred(state)
    # Else the moments would drown the gradients.
    mu, nu = jax.tree.map(lambda x: x * np.float32(1e-4), (state.mu, state.nu))
    state = dataclasses.replace(state, mu=mu, nu=nu)
    # What ops compute can be compared if the order is the same on all meshes.
    parts = 2 if recorded else config.mesh.c
    for name, *call in calls(config, state, parts):
        if recorded == name:
            with numbers.recording() as events:
                numbers.run(*call)
            yield name, events
        elif not recorded:
            yield name, by_name(numbers.run(*call))


def main() -> None:
    file, *recorded = sys.argv[1:]
    loaded = OmegaConf.load(f"{file}.yaml")
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(train.Config), loaded))
    have_cpu_devices(math.prod(config.mesh.axes.values()))
    with jax.set_mesh(make_mesh(config.mesh.axes)), computing_in(config.dtype):
        try:
            made = dict(results(config, *recorded))
        except Exception as error:  # any error of JAX or Python in an edited step
            sys.exit(explain(error))
    with pathlib.Path(f"{file}.pickle").open("wb") as stored:
        pickle.dump(made, stored)


if __name__ == "__main__":
    main()
