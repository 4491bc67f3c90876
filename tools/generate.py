"""Generates text from a checkpoint's model, or measures how well the model predicts a dataset.

    python -m tools.generate runs/stdlib/checkpoints --prompt 'import os' --tokens 300
    python -m tools.generate runs/stdlib/checkpoints --evaluate stdlib.zarr

A checkpoint's config says what model it is. Of its arrays only the weights are read.

Text. The model is given its start token, then the prompt; each token that it adds is fed to it in
turn, so that a step computes one token, and finds the keys and values of those before in a cache.
A token sees as many tokens as a row of the training had, so a text may be longer. The weights are
cast to bf16 and gathered over d once, so that each device holds 1/t of them: t is for a model that
is too large for one device, d for many samples. The batch is the samples, and some that nobody sees
where d doesn't divide their number. The same seed gives the same text on any mesh, but for the
rounding of bf16.

A text ends after --tokens, or where the model gives the tokenizer's end-of-text id. A model
of flat tokens hardly will: their documents start, by a mark on a token, and have none to end with.
So bytes_utf8 has no such id.

Evaluation. All tokens of the validation split, in order, packed into rows as long as those of the
training; no document sees another. "Nats per token" is the sum of the losses of all tokens by their
number. "Bits per byte" is that sum / ln 2 by the number of bytes, in UTF-8, of the text that the
tokens spell. The model is told where documents start, and isn't asked where one ends: both are
free, and no byte stands for them. A row's first tokens see nothing of the row before, as in
training, so longer rows get lower numbers.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_dir
from jax import lax

import train
from data import flat_tokens, text
from data.loader import TokenBatch
from runtime.checkpoint import Checkpoints, newest
from runtime.config import ROOT
from runtime.errors import user_errors
from shardlib import devices, ops
from shardlib.errors import UserError
from shardlib.types import (
    ArrayType,
    Dim,
    Mapped,
    Spec,
    Stacked,
    array_type,
    bf16,
    check,
    f32,
    i32,
    make_shapes,
    make_shardings,
    mesh_shape,
    parse_signature,
    pytree_dataclass,
    typechecked,
    typed_shard_map,
    u32,
)

PREFILL = 128  # tokens of a prompt that are computed together

# --- Model ----------------------------------------------------------------------------------------
# That of train.py, over weights that are whole along d and with a cache of keys and values. S is
# the length of the cache.


def gathered(stored: ArrayType) -> ArrayType:
    """The type of a weight to be read once for each token: in bf16, and whole where it is stored
    split over d, so that a token waits for no gather of weights."""
    dims = (Dim(dim.name, () if "d" in dim.axes else dim.axes) for dim in stored.spec.dims)
    return array_type(bf16, Spec(tuple(dims)))


Weights = Mapped[gathered, train.Weights]


@typechecked
def lay_out(weights: train.Weights) -> Weights:
    """Casts the weights to bf16 and gathers them, as generation takes them."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(bf16.dtype), weights)
    return jax.device_put(narrow, make_shardings(Weights))


def whole(signature: str, weight: jax.Array) -> jax.Array:
    """Stands in for train.py's gathers of weights: checks that the weight is whole already."""
    _, result = parse_signature(signature)
    check(weight, result, f"a weight, of which train.py says {signature}, as tools.generate has it")
    return weight


@pytree_dataclass
class Cache:
    """A layer's keys, rotated, and values. What is at later positions than those computed so far is
    never seen."""

    k: bf16["B/d S K/t D"]
    v: bf16["B/d S K/t D"]


def insert(cache: Any, new: Any, first: jax.Array) -> Any:
    """The cache of one layer, or of all, with new keys and values at positions from `first` on."""
    update = lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda old, part: update(old, part, first, axis=-3), cache, new)


@typechecked
def extend(
    weights: Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L"],
    first: i32[""],
    config: train.Config,
) -> tuple[bf16["B/d L M/t"], Stacked["layers", Cache]]:
    """The residual stream of inputs at positions from `first` on, with those before in the cache;
    and the cache with these in it too. Attention is causal, and sees as many positions as a row of
    the training has."""
    position = first + jnp.arange(inputs.shape[1])
    age = position[:, None] - jnp.arange(cache.k.shape[2])
    visible = (age >= 0) & (age < config.training.tokens.len)

    @typechecked
    def attend(
        q: bf16["B/d L Q K/t D"], k: bf16["B/d L K/t D"], v: bf16["B/d L K/t D"], layer: Cache
    ) -> tuple[bf16["B/d L Q K/t D"], Any]:
        new = Cache(k, v)
        layer = insert(layer, new, first)
        scores = ops.einsum_unreduced(
            "B/d L Q K/t D, B/d S K/t D -> B/d Q K/t L S", q, layer.k, dtype=f32
        )
        scores = jnp.where(visible, scores / math.sqrt(q.shape[-1]), -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(bf16.dtype)
        mixed = ops.einsum_unreduced(
            "B/d Q K/t L S, B/d S K/t D -> B/d L Q K/t D", probabilities, layer.v
        )
        return mixed, new

    positions = jnp.broadcast_to(position.astype(u32.dtype), inputs.shape)
    x, new = train.decoder(weights, inputs, positions, attend, cache, config.model, whole)
    # All layers' at once, after the loop, so that the cache is written in place.
    return x, insert(cache, new, first)


# --- Steps ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float  # that logits are divided by; 0: the likeliest token
    top_k: int | None  # of so many of the likeliest tokens; None: of all
    top_p: float  # of the likeliest tokens that have this share of the probability together
    ids: range  # of these tokens


@typechecked
def sample(logits: f32["B/d N"], draws: f32["B/d"], how: Sampling) -> i32["B/d"]:
    """Chooses a place in each row: the likeliest first, that at which the sum of the probabilities
    reaches the draw, which is above 0 and at most 1. Top-p keeps the places before which the sum is
    less than that: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, section 3.1. It is taken
    of what top-k keeps."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    falling, places = lax.top_k(logits, logits.shape[-1])
    probabilities = jax.nn.softmax(falling[:, : how.top_k] / how.temperature, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    upto = jnp.cumsum(jnp.where(before < how.top_p, probabilities, 0), axis=-1)
    chosen = (upto < draws[:, None] * upto[:, -1:]).sum(axis=-1, keepdims=True)
    return jnp.take_along_axis(places, chosen, axis=-1)[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "how"), donate_argnames="cache")
@typed_shard_map
def step(
    weights: Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L"],
    first: i32[""],
    draws: f32["B/d"],
    config: train.Config,
    how: Sampling,
) -> tuple[u32["B/d 1"], Stacked["layers", Cache]]:
    """The ids that follow inputs at positions from `first` on, and the cache with the inputs in
    it."""
    x, cache = extend(weights, cache, inputs, first, config)
    logits = train.logits(train.head(weights, whole), x[:, -1:], config.model)[:, 0]
    logits = ops.all_gather("B/d V/t -> B/d V", logits)[:, how.ids.start : how.ids.stop]
    chosen = how.ids.start + sample(logits, draws, how).astype(u32.dtype)
    # All along t have drawn the same, which JAX takes from a reduction alone.
    return ops.reduce_max("B/d T/t 1 -> B/d 1", chosen[:, None, None]), cache


@typechecked
def generate(
    weights: Weights,
    prompt: list[int],
    tokens: int,
    samples: int,
    seed: int,
    how: Sampling,
    config: train.Config,
) -> Iterator[jax.Array]:
    """Yields the next ids, u32[rows, 1], of so many texts that begin with the prompt, and of some
    more where d doesn't divide `samples`."""
    rows = multiple(samples, mesh_shape()["d"])
    inputs = np.tile(np.array([config.model.start_token, *prompt], np.uint32), (rows, 1))
    length = inputs.shape[1]
    kind = Stacked["layers", Cache]
    shapes = make_shapes(kind, train.dimensions(config) | {"B": rows, "S": length + tokens})
    empty = functools.partial(jax.tree.map, jnp.zeros_like, shapes)
    cache = jax.jit(empty, out_shardings=make_shardings(kind))()
    # Each row has a key of its own: what it draws depends on no other row, nor on their number.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    draws = 1 - np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (tokens,)))(keys))
    for first in range(0, length, PREFILL):
        part = inputs[:, first : first + PREFILL]
        ids, cache = step(weights, cache, part, np.int32(first), draws[:, 0], config, how)
    yield ids
    for i in range(1, tokens):
        here = np.int32(length + i - 1)
        ids, cache = step(weights, cache, ids, here, draws[:, i], config, how)
        yield ids


def multiple(least: int, of: int) -> int:
    """The first multiple that isn't less."""
    return -(-least // of) * of


# --- Text -----------------------------------------------------------------------------------------


class Text:
    """Text <-> ids, by the tokenizer that the dataset was made by."""

    def __init__(self, name: str, id_offset: int):
        self.tokenizer = text.Tokenizer(name, id_offset)
        self.is_bytes = name == "bytes_utf8"
        if self.is_bytes:
            self.offset, count, end = 1, 256, None
        else:
            slow = self.tokenizer.slow
            self.offset, count, end = id_offset, len(slow), slow.eos_token_id
        self.ids = range(max(1, self.offset), count + self.offset)  # the format reserves 0
        self.end = None if end is None else end + self.offset  # the id of the end of a text

    def encode(self, prompt: str) -> list[int]:
        import pyarrow

        stored, _ = self.tokenizer(pyarrow.chunked_array([[prompt]]))
        return flat_tokens.decode(stored)[0].tolist()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(np.array(ids, np.uint32))

    def count_bytes(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Of the text of documents that start where it says. A character that is cut at either end
        counts as the three bytes of a replacement character, where tokens aren't bytes."""
        if self.is_bytes:
            return len(ids)
        documents = np.split(ids, np.flatnonzero(is_start))
        return sum(len(self.decode(document).encode()) for document in documents)


# --- Program --------------------------------------------------------------------------------------


def open_checkpoint(path: str) -> tuple[Checkpoints, train.Config]:
    """The checkpoints, and the config of the newest. Raises CheckpointError."""
    # What a checkpoint doesn't say, from before a key was there, or of imported weights.
    none = ["paths.model_name=none", "flat_tokens.filespec=none"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        defaults = compose("local_test_synthetic", none)
    config = newest(path).config(train.Config, defaults=defaults)
    told = train.State, train.dimensions(config), config.to_yaml()
    return Checkpoints(path, *told, io_threads=32, key="folder"), config


def check_ids(name: str, largest: int, config: train.Config) -> None:
    """Raises UserError if the model has no such id."""
    last = config.model.vocab - 1
    if largest > last:
        raise UserError(
            f"{name} has ids up to {largest}, and the model's vocabulary ends with {last}: it was "
            "made by another tokenizer"
        )


@typechecked
def evaluate(
    weights: train.Weights,
    data: flat_tokens.FlatTokens,
    batches: int | None,
    by: Text | None,
    config: train.Config,
) -> str:
    """Says in a line how well the model predicts a split, or its first batches."""
    check_ids(data.name, data.max_token_id, config)
    tokens = config.training.tokens
    rows = multiple(tokens.batch, mesh_shape()["d"])
    size, nats, targets, size_of_text = rows * tokens.len, 0.0, 0, 0
    for first in range(0, data.token_count, size)[:batches]:
        read = data.read(first, min(first + size, data.token_count))
        count = len(read[0])
        ids, starts = (np.pad(part, (0, size - count)).reshape(rows, -1) for part in read)
        batch = TokenBatch.of(ids, starts, config.model.start_token)
        nats += count * float(train.validation_step(weights, batch, config))
        targets += count
        size_of_text += by.count_bytes(*read) if by else 0
    bits = "bits per byte need a --tokenizer"
    if size_of_text:
        bits = f"{nats / math.log(2) / size_of_text:.4f} bits per byte"
    return (
        f"{data.name}, {targets:,} tokens: {nats / targets:.4f} nats per token, "
        f"perplexity {math.exp(nats / targets):.4g}, {bits}"
    )


@typechecked
def write(given: argparse.Namespace, weights: Weights, by: Text, config: train.Config) -> None:
    """Prints the texts to stdout, a single one as it comes, and the speed to stderr."""
    prompt = by.encode(given.prompt)
    check_ids("the prompt", max(prompt, default=0), config)
    how = Sampling(given.temperature, given.top_k, given.top_p, by.ids)
    steps = generate(weights, prompt, given.tokens, given.samples, given.seed, how, config)
    texts, ended = [list(prompt) for _ in range(given.samples)], np.zeros(given.samples, bool)
    one, shown = given.samples == 1, ""
    times = [time.perf_counter()]
    # The devices are a step ahead, so that they don't wait for the host.
    for ids, _ in itertools.pairwise(itertools.chain(steps, [None])):
        new = np.asarray(ids)[: given.samples, 0]
        times.append(time.perf_counter())
        ended |= new == by.end
        for i in np.flatnonzero(~ended):
            texts[i].append(int(new[i]))
        # Half a character waits for the rest of it.
        if one and not (now := by.decode(texts[0])).endswith("\N{REPLACEMENT CHARACTER}"):
            print(now[len(shown) :], end="", flush=True)
            shown = now
        if ended.all():
            break
    for number, whole_text in enumerate(map(by.decode, texts), 1):
        print(whole_text[len(shown) :] if one else f"--- sample {number}\n{whole_text}")
    later = len(times) - 2
    rate = later * given.samples / max(times[-1] - times[1], 1e-9)
    print(
        f"{later + 1} tokens: the first after {times[1] - times[0]:.1f} s, compiling included, "
        f"then {rate:,.0f} tokens/s",
        file=sys.stderr,
    )


def run(given: argparse.Namespace) -> None:
    """Raises UserError or OSError for what a user can mend."""
    axes = dataclasses.asdict(given.mesh)
    devices.have_cpu_devices(math.prod(axes.values()))
    with jax.set_mesh(devices.make_mesh(axes)):
        checkpoints, config = open_checkpoint(given.checkpoint)
        named = given.tokenizer and (given.tokenizer, given.id_offset)
        if given.evaluate:
            named = named or flat_tokens.tokenizer_of(given.evaluate)
            by = Text(*named) if named else None
            data = flat_tokens.FlatTokens(given.evaluate, "validation")
            print(evaluate(checkpoints.restore("weights"), data, given.batches, by, config))
        else:
            named = named or config.source().tokenizer_used()
            if not named:
                raise UserError(
                    "the run's dataset isn't here, or doesn't say by which tokenizer it was made: "
                    "name it by --tokenizer, which is bytes_utf8 or one of transformers'"
                )
            by = Text(*named)
            write(given, lay_out(checkpoints.restore("weights")), by, config)
        print(f"by {checkpoints.newest.path}", file=sys.stderr)


def within(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """A type for argparse: a number from `low` to `high`."""

    def number(written: str) -> Any:
        if not low <= (value := kind(written)) <= high:
            raise argparse.ArgumentTypeError(f"{written} is not from {low} to {high}")
        return value

    return number


def mesh(written: str) -> train.MeshConfig:
    """A type for argparse: `t=2,d=4`. Axes that aren't named are 1."""
    sizes = {field.name: 1 for field in dataclasses.fields(train.MeshConfig)}
    named = dict(part.split("=") for part in written.split(","))
    return train.MeshConfig(**sizes | {name: int(size) for name, size in named.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, within(int, 1)
    add("checkpoint", help="a folder or bucket of checkpoints, or one of them")
    add("--prompt", default="", help="what the text begins with; by default, a document's start")
    add("--tokens", type=count, default=128, help="so many to add to it")
    add("--samples", type=count, default=1, help="so many texts; one is shown as it comes")
    add("--temperature", type=within(float, 0), default=0.8, help="0: the likeliest token")
    add("--top-k", type=count, help="of so many of the likeliest tokens; of all by default")
    add("--top-p", type=within(float, 0, 1), default=1.0, help="of those that have this share")
    add("--seed", type=int, default=0)
    add("--evaluate", metavar="DATASET", help="flat tokens: the loss of its validation split")
    add("--batches", type=count, help="so many of the split, from its start; all by default")
    add("--mesh", type=mesh, default="t=1", metavar="d=4,t=2", help="simulated on CPUs")
    add("--tokenizer", help="its name, if the dataset doesn't say by which it was made")
    add("--id-offset", type=int, default=0, help="the same")
    with user_errors(), contextlib.suppress(KeyboardInterrupt):
        run(parser.parse_args())


if __name__ == "__main__":
    main()
