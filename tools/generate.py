"""Text from a checkpoint's model, or how well the model predicts a dataset.

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
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_dir
from jax import lax

import train
from data import flat_tokens, text
from data.flat_tokens import FlatTokens, FlatTokensError
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
    parse_signature,
    pytree_dataclass,
    typechecked,
    typed_shard_map,
    u32,
)

PREFILL = 256  # tokens of a prompt, at most, that are computed together

# --- Model ----------------------------------------------------------------------------------------
# That of train.py, over weights that are whole along d and with a cache of keys and values. S is
# the length of the cache.


def gathered(stored: ArrayType) -> ArrayType:
    """The type of a weight to be read once for each token: in bf16, and whole where it is stored
    split over d, so that a token waits for no gather of weights."""
    dims = (Dim(dim.name, () if "d" in dim.axes else dim.axes) for dim in stored.spec.dims)
    return array_type(bf16, Spec(tuple(dims)))


Weights = Mapped[gathered, train.Weights]


def lay_out(weights: train.Weights) -> Weights:
    """The weights as generation takes them, on the mesh in context."""
    shardings, tree = jax.tree.flatten(make_shardings(Weights))
    pairs = zip(jax.tree.leaves(weights), shardings, strict=True)
    leaves = [jax.device_put(leaf.astype(bf16.dtype), where) for leaf, where in pairs]
    return jax.tree.unflatten(tree, leaves)


def whole(signature: str, weight: jax.Array) -> jax.Array:
    """Stands in for train.py's gathers of weights: checks that the weight is whole already."""
    _, result = parse_signature(signature)
    check(weight, result, f"a weight, of which train.py says {signature}, as tools.generate has it")
    return weight


@pytree_dataclass
class Cache:
    """A layer's keys, rotated, and values, at the positions before the inputs at hand; what is at
    later ones is never seen."""

    k: bf16["B/d S K/t D"]
    v: bf16["B/d S K/t D"]


@typechecked
def attention(
    q: bf16["B/d L Q K/t D"],
    k: bf16["B/d L K/t D"],
    v: bf16["B/d L K/t D"],
    cache: Cache,
    first: i32[""],
    window: int,
) -> bf16["B/d L Q K/t D"]:
    """Causal attention of queries at positions from `first` on, to the keys and values in the cache
    and to those that come with them. Each query sees `window` positions, up to its own."""
    cached, length = cache.k.shape[1], q.shape[1]
    scores = [
        ops.einsum_unreduced("B/d L Q K/t D, B/d S K/t D -> B/d Q K/t L S", q, cache.k, dtype=f32),
        ops.einsum_unreduced("B/d L Q K/t D, B/d N K/t D -> B/d Q K/t L N", q, k, dtype=f32),
    ]
    slot = jnp.arange(cached + length)
    position = jnp.where(slot < cached, slot, first + slot - cached)
    age = (first + jnp.arange(length))[:, None] - position
    visible = (age >= 0) & (age < window) & ((slot < first) | (slot >= cached))
    scaled = jnp.concatenate(scores, axis=-1) / math.sqrt(q.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(visible, scaled, -jnp.inf), axis=-1).astype(bf16.dtype)
    old, new = jnp.split(probabilities, [cached], axis=-1)
    mixed = ops.einsum_unreduced(
        "B/d Q K/t L S, B/d S K/t D -> B/d L Q K/t D", old, cache.v, dtype=f32
    ) + ops.einsum_unreduced("B/d Q K/t L N, B/d N K/t D -> B/d L Q K/t D", new, v, dtype=f32)
    return mixed.astype(bf16.dtype)


@typechecked
def extend(
    weights: Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L"],
    first: i32[""],
    config: train.Config,
) -> tuple[bf16["B/d L M/t"], Stacked["layers", Cache]]:
    """The residual stream of inputs at positions from `first` on, with those before in the cache;
    and the cache with these in it too."""

    def attend(q: Any, k: Any, v: Any, cache: Cache) -> tuple[jax.Array, Cache]:
        return attention(q, k, v, cache, first, config.training.tokens.len), Cache(k, v)

    place = (first + jnp.arange(inputs.shape[1])).astype(u32.dtype)
    position = jnp.broadcast_to(place, inputs.shape)
    x, new = train.decoder(weights, inputs, position, attend, cache, config.model, whole)
    # All layers' at once, after the loop, so that the cache is written in place.
    at = (0, 0, first, 0, 0)
    return x, jax.tree.map(lambda old, x: lax.dynamic_update_slice(old, x, at), cache, new)


# --- Steps ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float  # that logits are divided by; 0: the likeliest token
    top_k: int  # of so many of the likeliest tokens; 0: of all
    top_p: float  # of the likeliest tokens that have this share of the probability together


def sample(logits: jax.Array, draws: jax.Array, how: Sampling) -> jax.Array:
    """For logits f32[B, V] an id i32[B] each, which depends on draws, f32[B] from 0 to below 1:
    that at which the cumulative probability of the ids, the likeliest first, passes the draw. Top-p
    keeps the ids before which there is less than that: Holtzman et al. 2019,
    https://arxiv.org/abs/1904.09751, section 3.1. It is taken of what top-k keeps."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(i32.dtype)
    ids = lax.broadcasted_iota(i32.dtype, logits.shape, 1)
    falling, ids = lax.sort((-logits, ids), num_keys=1)
    if how.top_k:
        falling, ids = falling[:, : how.top_k], ids[:, : how.top_k]
    probabilities = jax.nn.softmax(-falling / how.temperature, axis=-1)
    upto = jnp.cumsum(probabilities, axis=-1)
    probabilities = jnp.where(upto - probabilities < how.top_p, probabilities, 0)
    upto = jnp.cumsum(probabilities, axis=-1)
    passed = (upto <= draws[:, None] * upto[:, -1:]).sum(axis=-1, keepdims=True)
    # Rounding may take the draw beyond all: the last that has a share is meant.
    last = (probabilities > 0).sum(axis=-1, keepdims=True) - 1
    chosen = jnp.arange(ids.shape[1]) == jnp.minimum(passed, last)
    return jnp.where(chosen, ids, 0).sum(axis=-1)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
@typed_shard_map
def prefill(
    weights: Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L"],
    first: i32[""],
    config: train.Config,
) -> Stacked["layers", Cache]:
    """The cache with the inputs at positions from `first` on in it."""
    return extend(weights, cache, inputs, first, config)[1]


@functools.partial(jax.jit, static_argnames=("config", "how"), donate_argnames="cache")
@typed_shard_map
def decode(
    weights: Weights,
    cache: Stacked["layers", Cache],
    ids: u32["B/d"],
    position: i32[""],
    draws: f32["S B/d"],
    vocabulary: u32["V/t"],
    config: train.Config,
    how: Sampling,
) -> tuple[u32["B/d"], i32[""], Stacked["layers", Cache]]:
    """The next ids, by the draws at the position of those given, and what the next step takes with
    them. `vocabulary` is each id that may come, and 0 in the place of one that may not."""
    x, cache = extend(weights, cache, ids[:, None], position, config)
    logits = train.logits(train.head(weights, whole), x, config.model)[:, 0]
    logits = jnp.where(vocabulary > 0, logits, -jnp.inf)
    logits = ops.all_gather("B/d V/t -> B/d V", logits)
    draw = lax.dynamic_index_in_dim(draws, position, keepdims=False)
    chosen = sample(logits, draw, how)
    # All along t have chosen the same, which JAX only takes from a sum of what each part has of it.
    ids = ops.index_unreduced("[V/t], B/d -> B/d {U:t}", vocabulary, chosen)
    return ops.psum("B/d {U:t} -> B/d", ids), position + 1, cache


def generate(
    weights: Weights,
    prompt: list[int],
    tokens: int,
    rows: int,
    seed: int,
    how: Sampling,
    vocabulary: np.ndarray,
    config: train.Config,
) -> Iterator[np.ndarray]:
    """The next so many ids, uint32[rows] each, of as many texts that begin with the prompt. The
    devices are a step ahead of what this gives, so that they don't wait for the host."""
    inputs = np.array([config.model.start_token, *prompt], np.uint32)
    *known, last = inputs
    length = -(-(len(inputs) + tokens) // PREFILL) * PREFILL
    sizes = train.dimensions(config) | {"B": rows, "S": length}
    kind = Stacked["layers", Cache]
    empty = functools.partial(jax.tree.map, jnp.zeros_like, make_shapes(kind, sizes))
    cache = jax.jit(empty, out_shardings=make_shardings(kind))()
    # In parts of few lengths, which divide the cache's, so that few programs are compiled.
    part = min(PREFILL, max(16, 1 << (len(known) - 1).bit_length())) if known else 1
    for first in range(0, len(known), part):
        here = np.zeros((rows, part), np.uint32)
        here[:, : len(known[first : first + part])] = known[first : first + part]
        cache = prefill(weights, cache, here, np.int32(first), config)
    # Each row has a key of its own: what it draws depends on no other row, nor on their number.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    draws = jax.vmap(lambda key: jax.random.uniform(key, (length,)), out_axes=1)(keys)
    start = np.full(rows, last), np.int32(len(known)), draws, vocabulary
    hint = tuple[u32["B/d"], i32[""], f32["S B/d"], u32["V/t"]]
    ids, position, draws, vocabulary = jax.device_put(start, make_shardings(hint))
    before = None
    for _ in range(tokens):
        ids, position, cache = decode(weights, cache, ids, position, draws, vocabulary, config, how)
        if before is not None:
            yield np.asarray(before)
        before = ids
    yield np.asarray(before)


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def summed_loss(
    weights: train.Weights, batch: TokenBatch, config: train.Config
) -> tuple[f32[""], f32[""]]:
    """In nats, and over how many targets."""
    return train.total_loss(weights, batch, config), train.target_count(batch)


# --- Text -----------------------------------------------------------------------------------------


class Text:
    """Text <-> ids, by the tokenizer that the dataset was made by."""

    def __init__(self, name: str, id_offset: int):
        self.tokenizer, self.offset = text.Tokenizer(name, id_offset), id_offset
        self.is_bytes = name == "bytes_utf8"
        self.end: int | None = None  # the id of the end of a text
        count = 256
        if self.is_bytes:
            self.offset = 1
        else:
            found, count = self.tokenizer.slow.eos_token_id, len(self.tokenizer.slow)
            self.end = None if found is None else found + id_offset
        self.ids = range(max(1, self.offset), count + self.offset)  # the format reserves 0

    def encode(self, prompt: str) -> list[int]:
        import pyarrow

        stored, _ = self.tokenizer(pyarrow.chunked_array([[prompt]]))
        return flat_tokens.decode(stored)[0].tolist()

    def decode(self, ids: Any) -> str:
        own = np.asarray(ids, np.int64) - self.offset
        if self.is_bytes:
            return own.astype(np.uint8).tobytes().decode(errors="replace")
        # Clean-up would change what is before a token as it comes.
        options = {"clean_up_tokenization_spaces": False}
        return str(self.tokenizer.slow.decode(own.tolist(), **options))

    def count_bytes(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Of the text of documents that start where it says. A character that is cut at either end
        counts as the three bytes of a replacement character, where tokens aren't bytes."""
        if self.is_bytes:
            return len(ids)
        parts = np.split(ids, np.flatnonzero(is_start))
        return sum(len(self.decode(part).encode()) for part in parts)


class Stream:
    """Ids that come one by one -> text as soon as it is certain: half a character waits for the
    rest of it. Some tokens before are decoded with each, as it may depend on them whether there is
    a space."""

    def __init__(self, decode: Callable[[Any], str], before: list[int]):
        self.decode, self.ids, self.shown = decode, list(before), len(before)

    def add(self, new: int) -> str:
        self.ids.append(new)
        return "" if self.decode(self.ids).endswith("\N{REPLACEMENT CHARACTER}") else self.end()

    def end(self) -> str:
        """What still waits."""
        found = self.decode(self.ids)[len(self.decode(self.ids[: self.shown])) :]
        self.ids = self.ids[self.shown :]
        self.shown = len(self.ids)
        return found


# --- Program --------------------------------------------------------------------------------------


def open_checkpoint(path: str) -> tuple[Checkpoints, train.Config]:
    """The checkpoints, and the config of the newest. Raises CheckpointError."""
    # What a checkpoint doesn't say, from before a key was there, or of imported weights.
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        other = compose(
            "local_test_synthetic", ["paths.model_name=none", "flat_tokens.filespec=none"]
        )
    config = newest(path).config(train.Config, defaults=other)
    told = train.State, train.dimensions(config), config.to_yaml()
    return Checkpoints(path, *told, io_threads=32, key="folder"), config


def parse_mesh(mesh: str) -> dict[str, int]:
    """`t=2,d=1` -> the axes in the mesh's order; those that aren't named are 1."""
    names = [field.name for field in dataclasses.fields(train.MeshConfig)]
    given = dict(part.partition("=")[::2] for part in mesh.split(","))
    if not given.keys() <= set(names) or not all(map(str.isdecimal, given.values())):
        raise UserError(f"--mesh {mesh}: write it like {','.join(f'{n}=1' for n in names)}")
    axes = {name: int(given.get(name, 1)) for name in names}
    if min(axes.values()) < 1:
        raise UserError(f"--mesh {mesh}: each axis is at least 1")
    return axes


def evaluate(
    weights: train.Weights,
    data: FlatTokens,
    batches: int | None,
    by: Text | None,
    config: train.Config,
) -> tuple[float, int, int]:
    """The sum of the losses of a split's tokens in nats, their number, and that of their bytes; no
    bytes without a tokenizer. Raises FlatTokensError."""
    if data.max_token_id >= config.model.vocab:
        raise FlatTokensError(
            f"{data.name} has ids up to {data.max_token_id}; the model's vocabulary ends with "
            f"{config.model.vocab - 1}"
        )
    tokens, d = config.training.tokens, config.mesh.d
    rows = -(-tokens.batch // d) * d
    size, nats, targets, size_of_text = rows * tokens.len, 0.0, 0, 0
    for first in range(0, data.token_count, size)[:batches]:
        read = data.read(first, min(first + size, data.token_count))
        ids, starts = (np.pad(part, (0, size - len(part))).reshape(rows, -1) for part in read)
        batch = TokenBatch.of(ids, starts, config.model.start_token)
        batch = jax.device_put(batch, make_shardings(TokenBatch))
        loss, count = summed_loss(weights, batch, config)
        nats, targets = nats + float(loss), targets + int(count)
        size_of_text += by.count_bytes(*read) if by else 0
    return nats, targets, size_of_text


def show_losses(nats: float, tokens: int, size_of_text: int) -> str:
    per_token = nats / tokens
    bits = f"{nats / math.log(2) / size_of_text:.4f} bits per byte" if size_of_text else ""
    return (
        f"{tokens:,} tokens: {per_token:.4f} nats per token, perplexity {math.exp(per_token):.4g}, "
        + (bits or "bits per byte need a --tokenizer")
    )


def write(given: argparse.Namespace, weights: Weights, by: Text, config: train.Config) -> None:
    """The text to stdout, as it comes if it is one, and the speed to stderr."""
    vocab, d = config.model.vocab, config.mesh.d
    prompt = by.encode(given.prompt)
    if max(prompt, default=0) >= vocab:
        raise UserError(
            f"the prompt has id {max(prompt)}, and the model's vocabulary ends with {vocab - 1}: "
            "it is of another --tokenizer"
        )
    vocabulary = np.arange(vocab, dtype=np.uint32)
    vocabulary[[i for i in range(vocab) if i not in by.ids]] = 0
    how = Sampling(given.temperature, min(given.top_k, vocab), given.top_p)
    rows = -(-given.samples // d) * d
    one = given.samples == 1
    streams = [Stream(by.decode, prompt) for _ in range(given.samples)]
    texts, ended = [given.prompt] * given.samples, [False] * given.samples
    print(given.prompt if one else "", end="", flush=True)
    began = time.perf_counter()
    args = prompt, given.tokens, rows, given.seed, how, vocabulary, config
    for count, ids in enumerate(generate(weights, *args)):
        if count == 0:
            first = time.perf_counter()
        for i, stream in enumerate(streams):
            ended[i] |= ids[i] == by.end
            new = "" if ended[i] else stream.add(int(ids[i]))
            texts[i] += new
            print(new if one else "", end="", flush=True)
        if all(ended):
            break
    seconds = time.perf_counter() - first
    for i, stream in enumerate(streams):
        rest = stream.end()
        print(rest if one else f"--- sample {i + 1}\n{texts[i]}{rest}")
    read = sum(x.nbytes for x in jax.tree.leaves((weights.layers, weights.unembed)))
    share = ""
    if chip := devices.find_chip(jax.devices()[0].device_kind):
        rate = read / config.mesh.t * count / max(seconds, 1e-9)
        share = f", weights read at {rate / chip.bandwidth:.0%} of the memory's bandwidth"
    print(
        f"{count + 1} tokens: the first after {first - began:.1f} s, compiling included, then "
        f"{count * given.samples / max(seconds, 1e-9):,.0f} tokens/s{share}",
        file=sys.stderr,
    )


def run(given: argparse.Namespace) -> None:
    """Raises UserError or OSError for what a user can mend."""
    for name, low in ("tokens", 1), ("samples", 1), ("top_k", 0), ("temperature", 0), ("seed", 0):
        if not getattr(given, name) >= low:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {getattr(given, name)}: it must be at least {low}")
    if not 0 < given.top_p <= 1:
        raise UserError(f"--top-p {given.top_p}: it is above 0, and at most 1")
    if given.batches is not None and given.batches < 1:
        raise UserError(f"--batches {given.batches}: it must be at least 1")
    axes = parse_mesh(given.mesh)
    devices.have_cpu_devices(math.prod(axes.values()))
    with jax.set_mesh(devices.make_mesh(axes)):
        checkpoints, config = open_checkpoint(given.checkpoint)
        hyper = dataclasses.replace(config.training, microbatches=1)  # any mesh will do
        config = dataclasses.replace(config, mesh=train.MeshConfig(**axes), training=hyper)
        named = (given.tokenizer, given.id_offset) if given.tokenizer else None
        if given.evaluate:
            named = named or flat_tokens.tokenizer_of(given.evaluate)
        elif config.flat_tokens or config.hf_dataset:
            named = named or config.source().tokenizer_used()
        if not named and not given.evaluate:
            raise UserError(
                "the run's dataset isn't here, or doesn't say by which tokenizer it was made: "
                "name it by --tokenizer, which is bytes_utf8 or one of transformers'"
            )
        by = Text(*named) if named else None
        try:
            make_shapes(train.Weights, train.dimensions(config))
        except UserError as error:
            raise UserError(f"--mesh {given.mesh}: {error}") from None
        weights = checkpoints.restore("weights")
        print(f"{checkpoints.newest}", file=sys.stderr)
        if given.evaluate:
            data = FlatTokens(given.evaluate, "validation")
            losses = evaluate(weights, data, given.batches, by, config)
            print(f"{data.name}, {show_losses(*losses)}")
        else:
            assert by, "it was looked for above"
            write(given, lay_out(weights), by, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="a folder or bucket of checkpoints, or one of them")
    add("--prompt", default="", help="what the text begins with; by default, a document's start")
    add("--tokens", type=int, default=128, metavar="N", help="to add to it")
    add("--samples", type=int, default=1, metavar="N", help="texts; one is shown as it comes")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens; 0: of all")
    add("--top-p", type=float, default=1.0, metavar="P", help="of those that have this share")
    add("--seed", type=int, default=0)
    add("--evaluate", metavar="DATASET", help="flat tokens: the loss of its validation split")
    add("--batches", type=int, metavar="N", help="of the split, from its start; all by default")
    add("--mesh", default="d=1,t=1", help="simulated where there are only CPUs")
    add("--tokenizer", metavar="NAME", help="if the dataset doesn't say by which it was made")
    add("--id-offset", type=int, default=0, help="the same")
    with user_errors():
        try:
            run(parser.parse_args())
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
