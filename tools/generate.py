"""Generates text from a checkpoint's model, or measures how well the model predicts a dataset.

    python -m tools.generate runs/stdlib/checkpoints --prompt 'import os' --tokens 300
    python -m tools.generate runs/stdlib/checkpoints --prompts prompts.txt --samples 4
    python -m tools.generate runs/stdlib/checkpoints --evaluate stdlib.zarr

The model is the one in the checkpoint's config. Only the weights are read.

Text. The model gets its start token and the prompt, then generates one token per step with a cache
of keys and values. A prompt that begins with that token, parsed as a special one, gets no other. A
token attends to at most as many tokens as a row had in training, so a text may be longer than a
row. A text ends after --tokens, or when the model emits an id that ends one: the tokenizer's, or
one of a config.json or generation_config.json beside it, or of the imported model. A model trained
on flat tokens rarely emits it: the format marks the starts of documents and has no end token. The
tokenizer bytes_utf8 has no end-of-text id.

Prompts. --prompts FILE continues each line of a file. Texts are generated in batches of --batch,
and a text doesn't depend on the other prompts: it is what --prompt would give. A line that is
repeated gets further samples, like those of --samples. The names of special tokens in a prompt are
parsed.

Sampling. --temperature divides the logits. Then --top-k keeps the likeliest tokens, and --top-p
the likeliest of these, up to this probability in total.

Mesh. The weights are cast to --dtype and gathered over d once, so each device holds 1/t: raise --t
if the model is too large for one device, and --d to generate many samples. t must divide the number
of key-value heads (model.n_kv), model.d_ff, model.vocab and the number of experts; d * t must
divide model.d_model. Any such mesh will do, whatever mesh the model was trained on. If d doesn't
divide the batch, it is padded. The same seed gives the same text on any mesh, up to rounding.

Evaluation. The tokens of the validation split, in order, packed into rows of the training's length.
Attention doesn't cross documents. "Nats per token" is the mean loss over all tokens. "Bits per
byte" is the summed loss / ln 2, divided by the number of UTF-8 bytes of the decoded text. The model
is told where documents start and doesn't predict where they end, so boundaries cost no bits. As in
training, the first tokens of a row don't see the row before, so longer rows get lower losses.
--length sets another length of the rows.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from hydra import compose, initialize_config_dir
from jax import lax
from tqdm import tqdm

import train
from data import flat_tokens
from data.huggingface import rows_of
from data.loader import TokenBatch
from data.sources import check_same_tokenizer, kept_by_import, tokenizer_of_model
from data.text import Tokenizer
from runtime.checkpoint import Checkpoints, newest
from runtime.config import ROOT, within
from runtime.errors import user_errors
from runtime.run import all_finite
from shardlib import devices, kernels, ops
from shardlib.errors import UserError
from shardlib.types import (
    COMPUTE,
    Dim,
    Stacked,
    bool_,
    compute,
    computing_in,
    f32,
    i32,
    make_shapes,
    make_shardings,
    mesh_shape,
    named,
    pytree_dataclass,
    type_tree,
    typechecked,
    typed_shard_map,
    u32,
)
from tools import arguments
from variants import families

PREFILL = 128  # tokens of a prompt that are computed in one step

# --- Model ----------------------------------------------------------------------------------------
# train.py's model, with a cache of keys and values. S is the length of the cache. Rows aren't split
# here: c is 1.


@typechecked
def lay_out(weights: train.Stored) -> train.Weights:
    """Casts the weights and gathers them over r."""
    kinds = type_tree(train.Weights, weights)
    return jax.device_put(train.cast(weights), make_shardings(kinds))


@pytree_dataclass
class Cache:
    """A layer's keys, with RoPE applied, and values. Positions that are not yet computed are never
    attended to."""

    k: compute["B/d S/c K/t D"]
    v: compute["B/d S/c K/t D"]


@typechecked
def extend(
    weights: train.Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L/c"],
    first: i32[""],
    start: i32["B/d"],
    config: train.Config,
    count: int,
) -> tuple[f32["B/d l/c V/t"], Stacked["layers", Cache]]:
    """Computes the logits after the last `count` inputs, which are at indices from `first` on,
    given a cache of the indices before. Returns them with the extended cache. A token sees as many
    tokens as a row had in training. A row's text begins at its `start`, with position 0: what is
    before is padding, which the text doesn't see, as its positions are the largest ones."""

    def position(index: jax.Array) -> jax.Array:
        return (index - start[:, None]).astype(u32.dtype)

    here = position(first + jnp.arange(inputs.shape[1]))
    keys = position(jnp.arange(cache.k.shape[2]))
    begin = families.first_visible(jnp.zeros_like(here), here, config.training.tokens.len)
    unread = jax.tree.map(lambda x: jnp.zeros_like(inputs, x.dtype), type_tree(TokenBatch))
    batch = dataclasses.replace(unread, inputs=inputs, position=here, start=begin)
    layer, stored = jax.new_ref(jnp.int32(0)), jax.tree.map(jax.new_ref, cache)

    def recall(k: jax.Array, v: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        i = layer[...]
        layer[...] = i + 1
        for all_layers, new in (stored.k, k), (stored.v, v):
            all_layers[i] = lax.dynamic_update_slice_in_dim(all_layers[i], new, first, axis=1)
        return stored.k[i], stored.v[i], keys

    with kernels.recalling(recall):
        x, _ = train.forward(weights, batch, config.model)
    logits = train.unembed(train.output_weights(weights), x[:, -count:], config.model)
    return logits, jax.tree.map(jax.freeze, stored)


# --- Steps ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float  # divides the logits; 0: always the likeliest token
    top_k: int | None  # sample from this many of the likeliest tokens; None: from all
    top_p: float  # sample from the likeliest tokens that together have this probability
    ids: range  # the ids of the tokenizer
    ends: tuple[int, ...] = ()  # the ids that end a text


@typechecked
def sample(logits: f32["B/d l/c V/t"], draws: f32["B/d"], how: Sampling) -> u32["B/d 1"]:
    """Samples an id from each row's last logits by inverting the cumulative distribution, likeliest
    id first, at a draw that is above 0 and at most 1. Top-p keeps the ids before which the
    cumulative probability is below top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751,
    section 3.1. It applies to what top-k keeps. All probabilities are those at the given
    temperature."""
    last = ops.all_gather("B/d V/t -> B/d V", logits[:, -1])[:, how.ids.start : how.ids.stop]
    falling, indices = lax.top_k(last, 1 if how.temperature == 0 else last.shape[-1])
    probabilities = jax.nn.softmax(falling[:, : how.top_k] / (how.temperature or 1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    upto = jnp.cumsum(jnp.where(before < how.top_p, probabilities, 0), axis=-1)
    chosen = (upto < draws[:, None] * upto[:, -1:]).sum(axis=-1, keepdims=True)
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
    logits, cache = extend(weights, cache, inputs, first, start, config, 1)
    return sample(logits, draws, how), cache


def round_up(length: int) -> int:
    """Rounds up to a multiple of PREFILL, as each length is compiled."""
    return -(-length // PREFILL) * PREFILL


def generate(
    model: "Model", prompts: list[list[int]], numbers: list[int], tokens: int, rows: int,
    how: Sampling, seed: int = 0, longest: int = 0,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yields the next ids, one a row, of texts that begin with the prompts, which include the start
    token; further rows are padding. A row draws by the seed and its entry in `numbers`, whatever
    the other rows are. Calls with the same rows, tokens and `longest`, the length of the longest
    prompt of all calls, share what is compiled. The devices run a step ahead of what is yielded, so
    that they don't wait for the host."""
    length = round_up(max(map(len, prompts)))
    inputs, start = np.zeros((rows, length), np.uint32), np.full(rows, length - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start[row] = length - len(prompt)
        inputs[row, start[row] :] = prompt
    kind = Stacked["layers", Cache]
    slots = max(length, round_up(longest)) + tokens
    shapes = make_shapes(kind, train.dimensions(model.config) | {"B": rows, "S": slots})
    placed = make_shardings(kind)
    cache = jax.tree.map(lambda x, on: jnp.zeros(x.shape, x.dtype, device=on), shapes, placed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.array(numbers))
    draws = np.ones((rows, tokens), np.float32)
    draws[: len(prompts)] -= jax.vmap(lambda key: jax.random.uniform(key, (tokens,)))(keys)
    parts: list[Any] = np.split(inputs, length // PREFILL, axis=1)
    first, ids = 0, parts[0]
    for i in range(1 - len(parts), tokens):
        these = parts.pop(0) if parts else ids
        cache = jax.device_put(cache, placed)  # else one that a step returned is compiled anew
        given = these, np.int32(first), start, draws[:, max(i, 0)]
        before, (ids, cache) = ids, step(model.weights, cache, *given, model.config, how)
        first += these.shape[1]
        if i > 0:
            yield np.asarray(before)[:, 0]
    yield np.asarray(ids)[:, 0]


def continued(
    model: "Model", prompts: list[list[int]], numbers: list[int], tokens: int, batch: int,
    how: Sampling, ended: Callable[[list[int]], bool], seed: int = 0,
) -> Iterator[list[int]]:  # fmt: skip
    """Yields the ids that follow each prompt, given as to `generate`: at most so many tokens, or
    until `ended` says of a text's new ids, after each one, that it ends with them. A text also ends
    before an id that ends one. Computes a batch of texts at a time."""
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
    parts = math.prod(mesh_shape()[axis] for axis in Dim("B", ("d",)).axes)
    return -(-rows // parts) * parts


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def scores(
    weights: train.Weights, batch: TokenBatch, config: train.ModelConfig
) -> tuple[f32["B/d L/c"], bool_["B/d L/c"]]:
    """Each target's log-probability, and whether no id is likelier. The vocabulary stays split, as
    in train.total_loss. Logits of at most 1,024 tokens exist at once on a device, or of one in each
    row."""
    output, (rows, length) = train.output_weights(weights), batch.targets.shape
    least = min(length, -(-rows * length // 1024))
    parts = next(n for n in range(least, length + 1) if length % n == 0)

    def score(part: Any) -> tuple[jax.Array, jax.Array]:
        logits, targets = train.unembed(output, part[0], config), part[1]
        logits = logits - ops.reduce_max("B/d l/c V/t -> B/d l/c", logits)[:, :, None]
        logit = ops.index_unreduced("B/d l/c [V/t], B/d l/c -> B/d l/c {U:t}", logits, targets)
        sum_exp = ops.reduce_sum("B/d l/c V/t -> B/d l/c {U:t}", jnp.exp(logits))
        logit, sum_exp = (ops.psum("B/d l/c {U:t} -> B/d l/c", x) for x in (logit, sum_exp))
        return logit - jnp.log(sum_exp), logit == 0

    whole = train.forward(weights, batch, config)[0], batch.targets
    split = [rearrange(x, "B (parts l) ... -> parts B l ...", parts=parts) for x in whole]
    nats, best = (rearrange(x, "parts B l -> B (parts l)") for x in lax.map(score, split))
    return nats, best


# --- Checks ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def forward_logits(
    weights: train.Stored, batch: TokenBatch, config: train.Config
) -> f32["B/d L/c V/t"]:
    replica = train.gather_replica(train.cast(weights))
    x, _ = train.forward(replica, batch, config.model)
    return train.unembed(train.output_weights(replica), x, config.model)


@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def cached_logits(
    weights: train.Weights,
    cache: Stacked["layers", Cache],
    inputs: u32["B/d L/c"],
    config: train.Config,
) -> f32["B/d L/c V/t"]:
    """The same for half of a row in one step, as for a prompt, then for a token, then for the
    rest."""
    logits, first, half = [], 0, inputs.shape[1] // 2
    start = jnp.zeros(len(inputs), jnp.int32)
    for part in jnp.split(inputs, [half, half + 1], axis=1):
        count = part.shape[1]
        made, cache = extend(weights, cache, part, jnp.int32(first), start, config, count)
        logits.append(made)
        first += count
    return jnp.concatenate(logits, axis=1)


@typechecked
def trials(config: train.Config, weights: train.Stored) -> Iterator[tuple[Any, ...]]:
    """Yields what runtime/checks.py computes: names, functions, arrays and other arguments. The
    logits of "generation" must be those of "forward"."""
    sizes, random = train.dimensions(config), np.random.default_rng(0)
    rows, length = sizes["B"], sizes["L"]
    ids = random.integers(0, sizes["V"], (rows, length + 1)).astype(np.uint32)
    batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), config.model.start_token)
    yield "forward", forward_logits, (weights, batch), config
    kind = Stacked["layers", Cache]
    shapes = make_shapes(kind, sizes | {"S": length})
    cache = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    given = weights, cache, batch.inputs
    yield "generation", cached_logits, given, config
    draws, start = random.random(rows).astype(np.float32), np.zeros(rows, np.int32)
    # The likeliest id: with others, a draw near the bound between two of them gives either.
    how = Sampling(0.8, top_k=1, top_p=0.9, ids=range(sizes["V"]))
    yield "generate.step", step, (*given, np.int32(0), start, draws), config, how


# --- Text ----------------------------------------------------------------------------------------


ENDS_IN = "generation_config.json", "config.json"


class Text(Tokenizer):
    """The tokenizer that a model's dataset was made with, which here parses the names of special
    tokens. The ids that end a text are the tokenizer's, and those by the config.json and the
    generation_config.json in its folder, or in that of an imported model. Raises UserError or
    OSError if it can't be opened."""

    def __init__(self, name: str, imported: str | None = None):
        super().__init__(name)
        self.ids, ends = range(1, 257), [getattr(self.slow, "eos_token_id", None)]
        if self.slow is not None:
            self.ids = range(1 + max(self.slow.get_vocab().values()))
        for folder, file in itertools.product((name, imported or name), ENDS_IN):
            with contextlib.suppress(OSError, ValueError):
                said = json.loads(pathlib.Path(folder, file).read_text()).get("eos_token_id")
                ends += said if isinstance(said, list) else [said]
        self.ends = tuple(dict.fromkeys(i for i in ends if isinstance(i, int)))
        if self.fast:  # one written in Python does so anyway
            self.fast.encode_special_tokens = False

    def encode(self, text: str, config: train.Config) -> list[int]:
        """Returns the ids of a text. Raises UserError if it isn't UTF-8, or if the model lacks an
        id."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # Python keeps other bytes as halves of characters
            near = text[max(0, error.start - 20) : error.start + 20]
            raise UserError(f"a text is not UTF-8: {near!r}") from None
        ids, _ = flat_tokens.decode(self([text])[0])
        check_ids(f"the text {text[:40]!r}", int(ids.max(initial=0)), config.model)
        return ids.tolist()

    def prompt(self, text: str, config: train.Config) -> list[int]:
        """Returns the ids after the start token, unless they begin with it as a special token."""
        ids, start = self.encode(text, config), config.model.start_token
        named = self.slow is not None and start in self.slow.added_tokens_decoder
        return ids if named and ids[:1] == [start] else [start, *ids]

    def text(self, ids: Sequence[int] | np.ndarray, without_special: bool = False) -> str:
        return self.decode(np.array(ids, np.uint32), without_special)

    def count_bytes(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Counts the UTF-8 bytes of the decoded documents, without special tokens. If tokens aren't
        bytes, a character cut off at either end counts as the three bytes of a replacement
        character."""
        if self.slow is None:
            return len(ids)
        documents = np.split(ids, np.flatnonzero(is_start))
        return sum(len(self.text(ids, without_special=True).encode()) for ids in documents)


def check_ids(name: str, largest: int, model: train.ModelConfig) -> None:
    """Raises UserError if an id is beyond the model's vocabulary."""
    if largest > (last := model.vocab - 1):
        problem = f"{name} has ids up to {largest}, but the model's vocabulary ends at {last}"
        raise UserError(f"{problem}: they are from another tokenizer")


# --- Program --------------------------------------------------------------------------------------


def open_checkpoint(path: str) -> tuple[Checkpoints, train.Config]:
    """Returns the checkpoints and the config of the newest. Raises CheckpointError, or UserError if
    the model doesn't split over the mesh."""
    # Defaults for keys that a checkpoint lacks: an older one, or one of imported weights.
    none = ["paths.model_name=none", "flat_tokens.filespec=none"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        defaults = compose("local_test_synthetic", none)
    config = newest(path).config(train.Config, defaults=defaults)
    hint, sizes = train.state_type(config), train.dimensions(config)
    make_shapes(hint.weights, sizes, train.DIMENSIONS)  # raises if a dimension doesn't split
    return Checkpoints(path, hint, sizes, config.to_yaml(), 32, key="folder"), config


class Model:
    """The model of a checkpoint, on a mesh of its own. Raises CheckpointError, or UserError if the
    model doesn't split over it."""

    def __init__(self, path: str, d: int = 1, t: int = 1, dtype: str | None = None):
        with contextlib.suppress(RuntimeError):  # JAX has its devices
            devices.have_cpu_devices(d * t)
        # All of d are replicas, which hold whole weights along d: generating gathers none.
        self.mesh = devices.make_mesh(train.MeshConfig(d, t, r=d).axes)
        with jax.set_mesh(self.mesh):
            self.checkpoints, self.config = open_checkpoint(path)
        self.dtype = dtype or self.config.dtype

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), computing_in(self.dtype):
            yield

    @functools.cached_property
    def weights(self) -> Any:
        """Raises UserError unless all are finite."""
        with self.computing():
            weights = lay_out(self.checkpoints.restore("weights"))
        if bad := [name for name, finite in named(all_finite(weights)).items() if not finite]:
            which = f"{self.checkpoints.newest.path} has NaN or infinite weights"
            raise UserError(f"{which}, such as {bad[0]}: name another checkpoint")
        return weights

    def tokenizer(self, named: str | None) -> Text:
        """Opens the tokenizer of this name, else the model's. Raises UserError if there is none."""
        checkpoint = self.checkpoints.newest
        if not (named := named or tokenizer_of_model(checkpoint)):
            problem = "the run's dataset isn't on this machine or doesn't name its tokenizer"
            choices = "bytes_utf8, a tokenizers JSON file, or what transformers loads"
            raise UserError(f"{problem}; set --tokenizer to {choices}")
        return Text(named, kept_by_import(checkpoint))


def evaluate(
    model: Model, codec: Text | None, data: flat_tokens.FlatTokens, length: int, batches: int | None
) -> str:
    """Returns a line on how well the model predicts a split, or its first batches, in rows of a
    length. Batches have about as many tokens as in training. Raises UserError if the data's ids
    aren't the model's."""
    config, tokens = model.config, model.config.training.tokens
    check_ids(data.name, data.max_token_id, config.model)
    rows = padded(max(1, tokens.batch * tokens.len // length))
    size, nats = rows * length, 0.0
    for first in tqdm(range(0, data.token_count, size)[:batches], unit=" batches", disable=None):
        last = min(first + size, data.token_count)
        encoded, fill = data.read_encoded(max(first - 1, 0), last), first + size - last
        encoded = np.pad(encoded, (first == 0, fill), constant_values=flat_tokens.FILL)
        ids = flat_tokens.decode(rows_of(encoded, length))
        batch = TokenBatch.of(*ids, config.model.start_token)
        likelihoods = np.asarray(scores(model.weights, batch, config.model)[0], np.float64)
        nats -= likelihoods[batch.loss_mask].sum()
    bits = "bits per byte: name a --tokenizer to compute them"
    # In large parts, whatever the rows: what is cut at their ends is miscounted.
    parts = (data.read(i, min(i + 2**20, last)) for i in range(0, last, 2**20))
    if codec and (size_of_text := sum(codec.count_bytes(*part) for part in parts)):
        bits = f"{nats / math.log(2) / size_of_text:.4f} bits per byte"
    loss = nats / last
    perplexity = math.inf if loss > 709 else math.exp(loss)  # which raises for what is no float
    found = f"{loss:.4f} nats per token, perplexity {perplexity:.4g}, {bits}"
    return f"{data.name}, {last:,} tokens: {found}"


def write(args: argparse.Namespace, model: Model, codec: Text) -> None:
    """Prints the texts, a single one as it is generated. Raises UserError or OSError if the prompts
    can't be read, or aren't of the model's ids."""
    texts, shown = [args.prompt or ""], 0
    if args.prompts:
        lines = pathlib.Path(args.prompts).read_text("utf-8-sig", "surrogateescape")
        texts = lines.removesuffix("\n").split("\n")
    texts = [text for text in texts for _ in range(args.samples)]
    prompts = [codec.prompt(text, model.config) for text in texts]
    counts = collections.defaultdict[str, Iterator[int]](itertools.count)
    numbers = [next(counts[text]) for text in texts]

    def show(new: list[int]) -> bool:
        nonlocal shown
        if len(texts) == 1:  # without an incomplete character, which the next ids may change
            text = codec.text(prompts[0][1:] + new).rstrip("\N{REPLACEMENT CHARACTER}")
            print(text[shown:], end="", flush=True)
            shown = max(shown, len(text))
        return False

    how = Sampling(args.temperature, args.top_k, args.top_p, codec.ids, codec.ends)
    made = continued(model, prompts, numbers, args.tokens, args.batch, how, show, args.seed)
    for number, (prompt, new) in enumerate(zip(prompts, made, strict=True)):
        if len(texts) > 1:
            line, sample = divmod(number, args.samples)
            print(f"--- prompt {line + 1}, sample {sample + 1}")
        print(codec.text(prompt[1:] + new)[shown:])  # without the start token


def run(args: argparse.Namespace) -> None:
    """Runs the program. Raises UserError or OSError for a user's mistake."""
    model = Model(args.checkpoint, args.d, args.t, args.dtype)
    if not (args.dtype or args.evaluate) and jax.default_backend() == "cpu":
        model.dtype = "f32"  # else CPUs would widen all weights at every token
    checkpoint, named = model.checkpoints.newest, args.tokenizer
    with model.computing():
        if args.evaluate:
            if not named and (named := flat_tokens.tokenizer_of(args.evaluate)):
                check_same_tokenizer(checkpoint, named, f"--tokenizer={named}")
            codec = Text(named) if named else None
            data = flat_tokens.FlatTokens(args.evaluate, "validation")
            length = args.length or model.config.training.tokens.len
            print(evaluate(model, codec, data, length, args.batches))
        else:
            write(args, model, model.tokenizer(named))
    print(f"checkpoint: {checkpoint.path}", file=sys.stderr)


def main() -> None:
    parser = arguments.parser("tools.generate", __doc__)
    add = parser.add_argument
    add("checkpoint", help="a checkpoint, or a folder or bucket whose newest one is used")
    add("--d", type=within(int, 1), default=1, help="devices that share the batch")
    add("--t", type=within(int, 1), default=1, help="devices that share the weights")
    add("--dtype", choices=COMPUTE, help="default: the run's, but f32 for texts on CPUs")
    add("--tokenizer", help="bytes_utf8 or transformers'; default: the one that the dataset names")
    count, number, part = within(int, 1, 10**6), within(int, 0), within(float, 0, 1)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--prompt", type=str, help="beginning of the text; default: the start of a document")
    add("--prompts", metavar="FILE", help="generate from each line of a file")
    add("--evaluate", metavar="DATASET", help="print the loss on its validation split instead")
    add = parser.add_argument_group("texts").add_argument
    add("--tokens", type=count, default=128, help="tokens to generate; default: %(default)s")
    add("--samples", type=count, default=1, help="texts for each prompt; default: %(default)s")
    add("--batch", type=count, default=16, help="texts at a time; default: %(default)s")
    heat = within(float, 0, math.inf)
    add("--temperature", type=heat, default=0.8, help="default: %(default)s; 0: greedy")
    add("--top-k", type=count, help="sample from this many of the likeliest tokens; default: all")
    add("--top-p", type=part, default=1.0, help="sample from this much probability")
    add("--seed", type=number, default=0, help="seed of the samples; default: %(default)s")
    add = parser.add_argument_group("evaluation").add_argument
    add("--length", type=count, help="rows of this many tokens; default: the training's")
    add("--batches", type=count, help="evaluate this many batches of the split; default: all")
    args = parser.parse_args()
    if (args.length or args.batches) and not args.evaluate:
        parser.error("--length and --batches need --evaluate")
    with user_errors(), contextlib.suppress(KeyboardInterrupt):
        run(args)


if __name__ == "__main__":
    main()
