"""Generates token by token, with a cache of keys and values, and scores tokens."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

import train
from data.loader import TokenBatch
from shardlib import ops, types
from shardlib.errors import UserError
from shardlib.types import Stacked, bool_, f32, i32, typechecked, typed_shard_map, u32
from variants.cache import Cache, extend

PREFILL = 128  # tokens of a prompt that are computed in one step


@typechecked
def lay_out(weights: train.Stored) -> train.Weights:
    """Casts the weights and gathers them over r."""
    kinds = types.type_tree(train.Weights, weights)
    return jax.device_put(train.cast(weights), types.make_shardings(kinds))


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float  # divides the logits; 0: always the likeliest token
    top_k: int | None  # sample from this many of the likeliest tokens; None: from all
    top_p: float  # sample from the likeliest tokens that together have this probability
    ids: range  # the tokenizer's ids
    ends: tuple[int, ...] = ()  # the ids that end a text

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 <= self.top_p <= 1 and (self.top_k or 1) >= 1):
            given = f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}"
            raise UserError(f"{given}: they must be at least 0, at least 1, and 0 to 1")


@typechecked
def sample(logits: f32["B/d l/c V/t"], draws: f32["B/d"], how: Sampling) -> u32["B/d 1"]:
    """Samples an id from each row's last logits by inverting the cumulative distribution, likeliest
    id first, at a draw that is above 0 and at most 1. Top-p keeps the ids before which the
    cumulative probability is below top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751,
    section 3.1. It applies to the ids that top-k keeps. The temperature applies to all
    probabilities."""
    last = ops.all_gather("B/d V/t -> B/d V", logits[:, -1])[:, how.ids.start : how.ids.stop]
    falling, indices = lax.top_k(last, 1 if how.temperature == 0 else last.shape[-1])
    probabilities = jax.nn.softmax(falling[:, : how.top_k] / (how.temperature or 1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Where all are kept, `before` may be rounded to 1.
    kept = ((before < how.top_p) | (how.top_p == 1)) & (probabilities > 0)
    upto = jnp.cumsum(jnp.where(kept, probabilities, 0), axis=-1)
    chosen = (upto < draws[:, None] * upto[:, -1:]).sum(axis=-1, keepdims=True)
    # The sum of many zeros may be rounded up.
    chosen = jnp.minimum(chosen, jnp.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0))
    ids = how.ids.start + jnp.take_along_axis(indices, chosen, axis=-1).astype(u32.dtype)
    # The devices along t have chosen the same ids. Only a reduction tells JAX so.
    return ops.reduce_max("B/d T/t/c 1 -> B/d 1", ids[:, None])


@functools.partial(jax.jit, static_argnames=("config", "how"), donate_argnames="cache")
@typed_shard_map
def step(
    weights: train.Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L/c"],
    first: i32[""],
    start: i32["B/d"],
    draws: f32["B/d"],
    config: train.Config,
    how: Sampling,
) -> tuple[u32["B/d 1"], Stacked["layers", Cache]]:
    """Samples the ids that follow the inputs, given as to `extend`. Returns them with the extended
    cache."""
    logits, cache = extend(train, weights, cache, inputs, first, start, config, 1)
    return sample(logits, draws, how), cache


def round_up(length: int) -> int:
    """Rounds up to a multiple of PREFILL, as each length is compiled."""
    return -(-length // PREFILL) * PREFILL


def generate(
    model: Any, prompts: list[list[int]], numbers: list[int], tokens: int, rows: int,
    how: Sampling, seed: int = 0, longest: int = 0,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yields the next ids, one for each row, of texts that begin with the prompts, which include
    the start token; further rows are padding. A row's samples depend on the seed and its entry in
    `numbers`, not on other rows. Calls with the same rows, tokens and `longest`, the length of the
    longest prompt of all calls, share compiled programs. The devices run a step ahead of the
    yielded ids, so that they don't wait for the host."""
    length = round_up(max(map(len, prompts)))
    inputs, start = np.zeros((rows, length), np.uint32), np.full(rows, length - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start[row] = length - len(prompt)
        inputs[row, start[row] :] = prompt
    kind = Stacked["layers", Cache]
    slots = max(length, round_up(longest)) + tokens
    shapes = types.make_shapes(kind, train.dimensions(model.config) | {"B": rows, "S": slots})
    placed = types.make_shardings(kind)
    cache = jax.tree.map(lambda x, on: jnp.zeros(x.shape, x.dtype, device=on), shapes, placed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.array(numbers))
    draws = np.ones((rows, tokens), np.float32)
    draws[: len(prompts)] -= jax.vmap(lambda key: jax.random.uniform(key, (tokens,)))(keys)
    parts: list[Any] = np.split(inputs, length // PREFILL, axis=1)
    first, ids = 0, parts[0]
    for i in range(1 - len(parts), tokens):
        these = parts.pop(0) if parts else ids
        cache = jax.device_put(cache, placed)  # else `step` compiles again for its result
        given = these, np.int32(first), start, draws[:, max(i, 0)]
        before, (ids, cache) = ids, step(model.weights, cache, *given, model.config, how)
        first += these.shape[1]
        if i > 0:
            yield np.asarray(before)[:, 0]
    yield np.asarray(ids)[:, 0]


def continued(
    model: Any, prompts: list[list[int]], numbers: list[int], tokens: int, batch: int,
    how: Sampling, ended: Callable[[list[int]], bool], seed: int = 0,
) -> Iterator[list[int]]:  # fmt: skip
    """Yields the ids that follow each prompt: at most `tokens`, or until `ended(new_ids)`, called
    after each id, is true. A text also ends before an id of `how.ends`. Computes `batch` texts at a
    time; the other arguments are those of `generate`."""
    rows, longest = padded(min(batch, len(prompts))), max(map(len, prompts))
    for first in range(0, len(prompts), rows):
        part = slice(first, first + rows)
        texts: list[list[int]] = [[] for _ in prompts[part]]
        running = dict(enumerate(texts))
        given = prompts[part], numbers[part], tokens, rows, how, seed, longest
        for ids in generate(model, *given):
            for row, text in [*running.items()]:
                if (new := int(ids[row])) not in how.ends:
                    text.append(new)
                if new in how.ends or ended(text):
                    del running[row]
            if not running:
                break
        yield from texts


def padded(rows: int) -> int:
    """Rounds a number of rows up to one that splits over d."""
    parts = math.prod(types.mesh_shape()[axis] for axis in types.Dim("B", ("d",)).axes)
    return -(-rows // parts) * parts


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def scores(
    weights: train.Weights, batch: TokenBatch, config: train.ModelConfig
) -> tuple[f32["B/d L/c"], bool_["B/d L/c"]]:
    """Returns each target's log-probability, and whether no id is likelier. The vocabulary stays
    split, as in train.total_loss. A device holds the logits of at most 1,024 tokens at once,
    or of one token in each row."""
    output, (rows, length) = train.output_weights(weights), batch.targets.shape
    least = min(length, -(-rows * length // 1024))
    parts = next(n for n in range(least, length + 1) if length % n == 0)

    def score(part: Any) -> tuple[jax.Array, jax.Array]:
        logit, log_sum = train.against_largest(train.unembed(output, part[0], config), part[1])
        return logit - log_sum, logit == 0

    whole = train.forward(weights, batch, config)[0], batch.targets
    split = [rearrange(x, "B (parts l) ... -> parts B l ...", parts=parts) for x in whole]
    nats, best = (rearrange(x, "parts B l -> B (parts l)") for x in lax.map(score, split))
    return nats, best
