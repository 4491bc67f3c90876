"""Lists the functions that a check computes on two meshes. A trial is a name, a function, its
arrays, as NumPy arrays, and its other arguments. `program` is the module that defines the step:
train.py, or a copy of it."""

import contextlib
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checks import numbers
from configs.sizes import dimensions
from data.loader import TokenBatch, random_batch
from shardlib import types
from shardlib.types import ArrayType, Stacked, f32, has_arrays, type_tree, typed_shard_map, u32
from variants.cache import Cache, extend

Trial = tuple[Any, ...]


def beside_the_step(program: Any) -> dict[str, Any]:
    """The functions under typed_shard_map in the program, variants/ and kernels/, by name, except
    the training step and its gradients. Outside of the program, a name is `module.name`."""
    found = dict[str, Any]()
    rooms = program.__name__, "variants", "kernels"
    mine = {x for x in types.shard_mapped if x.__module__.partition(".")[0] in rooms}
    for module in sorted({x.__module__ for x in mine}):
        prefix = "" if module == program.__name__ else f"{module}."
        own = {x for x in mine if x.__module__ == module}
        known = {name: x for name, x in vars(sys.modules[module]).items() if callable(x)}
        found |= {prefix + name: x for name, x in known.items() if inspect.unwrap(x) in own}
    return {name: x for name, x in found.items() if name not in ("training_step", "gradients")}


def out_of_sight(program: Any) -> list[str]:
    """Names the program's functions that make a shard_map only when they are called."""

    def makes(code: Any) -> bool:
        inner = (x for x in code.co_consts if inspect.iscode(x))
        return bool({"shard_map", "typed_shard_map"} & {*code.co_names}) or any(map(makes, inner))

    found = (inspect.unwrap(x) for x in vars(program).values() if callable(x))
    functions = [x for x in found if inspect.isfunction(x) and x.__module__ == program.__name__]
    return [x.__name__ for x in functions if makes(x.__code__)]


class NothingFits(LookupError):
    """No argument fits the function's parameter of this name."""


def arguments(function: Any, given: tuple[Any, ...], config: Any) -> tuple[list[Any], list[Any]]:
    """Chooses a function's arguments by its annotations: arrays, then static ones. `given` are the
    arguments of `training_step`, or their types. A parameter for a tree gets one of these, or the
    state's weights or mu; for an array, its type, for `numbers.made`; for a section, the config,
    its model or training. Raises NothingFits with the name of a parameter that nothing fits."""
    hints = typing.get_type_hints(inspect.unwrap(function))
    arrays, static = list[Any](), list[Any]()
    given = *given, given[0].weights, given[0].mu
    left = [*given]
    sections = config, config.model, config.training
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if isinstance(hint, ArrayType) and not static:
            arrays.append(hint)
        elif has_arrays(hint) and not static and (fitting := [x for x in given if fits(hint, x)]):
            unused = [x for x in left if any(x is y for y in fitting)]
            arrays.append((unused or fitting)[0])
            left = [x for x in left if x is not arrays[-1]]
        elif isinstance(hint, type) and (ours := [x for x in sections if isinstance(x, hint)]):
            static.append(ours[0])
        elif parameter.default is inspect.Parameter.empty:
            raise NothingFits(name)
    return arrays, static


def fits(hint: Any, value: Any) -> bool:
    """Returns whether a tree, of arrays or of types, has the structure of the annotation."""
    with contextlib.suppress(TypeError, ValueError):
        kinds: Any = type_tree(hint, value)
        return bool(jax.tree.structure(kinds) == jax.tree.structure(value))  # type: ignore[operator]
    return False


def of_training(program: Any, config: Any, fresh: Any, state: Any, parts: int) -> Iterator[Trial]:
    """Yields trials of the functions that a run calls, given a fresh and a stirred state. `parts`
    is `random_batch`'s."""
    # Larger moments would drown the gradients. Without a full rank, Muon would magnify rounding.
    random = np.random.default_rng(0)
    mu = jax.tree.map(lambda x: 1e-3 * random.standard_normal(x.shape, np.float32), state.mu)
    nu = jax.tree.map(lambda x: x * np.float32(1e-4), state.nu)
    batch = random_batch(sizes := dimensions(config), config.model.start_token, parts)
    few = batch.loss_mask * (np.arange(len(batch.loss_mask)) * 2 < len(batch.loss_mask))[:, None]
    uneven = dataclasses.replace(batch, loss_mask=few)  # some devices have no target

    def at(step: int, batch: Any) -> tuple[Any, ...]:
        # At step 0, fields that an edit adds to the state are as in a run.
        there = state if step else dataclasses.replace(fresh, weights=state.weights)
        there = dataclasses.replace(there, step=np.uint32(step), mu=mu, nu=nu)
        hyper = program.hyper_at(step, config.training)
        if step == 1000:  # the others clip, which hides a factor of all gradients
            hyper = dataclasses.replace(hyper, grad_clip=np.float32(np.inf))
        return there, batch, hyper

    for name, function in beside_the_step(program).items():
        with contextlib.suppress(NothingFits):  # preflight.untried names it
            arrays, static = arguments(function, at(3, batch), config)
            yield name, function, tuple(numbers.made(x, sizes) for x in arrays), *static
    # Mid-schedule; in the warmup; and for code that runs only every so many steps, or updates.
    for step, rows in (3, batch), (0, batch), (1000, batch), (999, uneven):
        yield f"training_step {step}", program.training_step, at(step, rows), config


def of_generation(program: Any, config: Any, weights: Any) -> Iterator[Trial]:
    """Yields two trials that must give the same logits: training's forward pass, and generation
    with a cache of keys and values."""

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
        """Computes half of a row in one step, like a prompt, then token by token."""
        extended = functools.partial(extend, program, weights)
        start, half = jnp.zeros(len(inputs), jnp.int32), inputs.shape[1] // 2
        logits, cache = extended(cache, inputs[:, :half], jnp.int32(0), start, config, half)

        def one(cache: Any, token: Any) -> tuple[Any, jax.Array]:
            logits, cache = extended(cache, token[0], token[1], start, config, 1)
            return cache, logits[:, 0]

        rest = inputs[:, half:].T[..., None], jnp.arange(half, inputs.shape[1])
        _, others = lax.scan(one, cache, rest)
        return jnp.concatenate([logits, others.swapaxes(0, 1)], axis=1)

    sizes, random = dimensions(config), np.random.default_rng(0)
    rows, length = sizes["B"], sizes["L"]
    ids = random.integers(0, sizes["V"], (rows, length + 1)).astype(np.uint32)
    batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), config.model.start_token)
    kind = Stacked["layers", Cache]
    shapes = types.make_shapes(kind, sizes | {"S": length})
    cache = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    yield "forward", forward_logits, (weights, batch), config
    yield "generation", cached_logits, (weights, cache, batch.inputs), config
