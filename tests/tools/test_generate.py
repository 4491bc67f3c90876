"""Tests generation with a cache against the oracle's full forward pass, sampling against its
definition, and the tool's messages."""

import functools
import math
import re
import shutil
import socket
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import train
from checks import layout, numbers, preflight, trials
from data.flat_tokens import FlatTokens
from data.loader import TokenBatch
from runtime.run import MeshConfig
from shardlib import types
from shardlib.errors import UserError
from shardlib.mesh import abstract_mesh
from shardlib.types import Stacked, f32, i32, typed_shard_map, u32
from tests import golden, helpers, oracle
from tests.data.test_tokenizer import END_OF_MESSAGE, END_OF_TEXT, SPECIAL, write_tokenizer
from tests.files import edit_config, save_state, write_tokens
from tests.helpers import assert_close, mesh, plain, small_config
from tools.generate import __main__ as generate
from tools.generate import model as opened
from tools.generate import steps
from tools.generate.model import Text
from variants.cache import Cache, extend

TIMESCALE = 100  # of small_config


def random_weights(config, module=train):
    """Random weights as numpy arrays; gains are not 1 and logits are not small."""
    with jax.set_mesh(mesh(1, 1)):
        return jax.device_get(helpers.random_weights(module, config))


def oracle_logits(weights, inputs, window=10**9, model=oracle):
    """The oracle's f32[B, L, V] for one document per row, with attention limited to a window."""
    length = inputs.shape[1]
    age = np.arange(length)[:, None] - np.arange(length)
    sees = np.broadcast_to((age >= 0) & (age < window), (len(inputs), length, length))
    position = np.broadcast_to(np.arange(length), inputs.shape)
    return np.asarray(model.laid_out_logits(plain(weights), inputs, position, sees, TIMESCALE))


def cached_logits(tool, config, weights, inputs, on, start=0):
    """The same through the cache: some tokens at once, then one at a time, then some at once. The
    text of each row begins at its `start`."""

    @functools.partial(jax.jit, static_argnames="count")
    @typed_shard_map
    def step(
        weights: tool.train.Weights,
        cache: Stacked["layers", Cache],
        inputs: u32["B/d L/c"],
        first: i32[""],
        start: i32["B/d"],
        count: int,
    ) -> tuple[f32["B/d L/c V/t"], Stacked["layers", Cache]]:
        return extend(tool.train, weights, cache, inputs, first, start, config, count)

    with jax.set_mesh(on):
        shapes = types.make_shapes(Stacked["layers", Cache], train.dimensions(config) | {"S": 16})
        cache = jax.tree.map(lambda s: jnp.full(s.shape, 7, s.dtype), shapes)
        parts, first, start = [], 0, np.broadcast_to(np.int32(start), len(inputs))
        weights = tool.lay_out(weights)
        for count in 4, 1, 1, 1, 1, 4:
            given = weights, cache, inputs[:, first : first + count]
            actual, cache = step(*given, np.int32(first), start, count=count)
            parts.append(actual)
            first += count
        return np.concatenate(parts, axis=1)


def random_inputs():
    return np.random.default_rng(0).integers(0, 48, (8, 12)).astype(np.uint32)


def test_a_row_does_not_see_the_padding_before_its_start(in_f32):
    """Rows begin at 0, in the middle of what is computed at once, and after it. Windows are of five
    tokens, as after training with rows of five."""
    config = small_config("training.tokens.len=5")
    weights, inputs = random_weights(config), random_inputs()
    start = np.array([0, 1, 2, 3, 4, 5, 7, 11], np.int32)
    actual = cached_logits(steps, config, weights, inputs, mesh(4, 2), start)
    texts = np.stack([np.roll(row, -begin) for row, begin in zip(inputs, start, strict=True)])
    for row, wanted in enumerate(oracle_logits(weights, texts, 5)):
        begin = start[row]
        assert_close(actual[row, begin:], wanted[: 12 - begin], 1e-5)
    assert np.isfinite(actual).all()


@pytest.mark.slow
def test_bf16_is_close():
    """The tolerance allows for about thirty successive roundings of at most 2**-9."""
    config = small_config()
    weights, inputs = random_weights(config), random_inputs()
    actual = cached_logits(steps, config, weights, inputs, mesh(4, 2))
    assert_close(actual, oracle_logits(weights, inputs), 3e-2)


def test_padding_does_not_change_the_rounding():
    """Positions count from a row's start: in bf16, rotations by other angles differ by far more."""
    config = small_config()
    weights, inputs = random_weights(config), random_inputs()
    inputs[1] = np.roll(inputs[0], 4)
    actual = cached_logits(steps, config, weights, inputs, mesh(4, 2), [0, 4, *[0] * 6])
    assert_close(actual[1, 4:], actual[0, :8], 1e-3)


def test_layouts_hold_at_sizes_that_tell_all_dimensions_apart():
    names = ["B", "L", "S", "M", "Q", "K", "D", "F", "V", "layers"]
    probe, sizes = layout.probe_mesh(MeshConfig(1, 1).axes, names)
    probe = abstract_mesh(dict(probe.shape) | {"c": 1})
    config = preflight.resized(small_config(), sizes, probe.shape, {})
    cache = types.type_tree(Stacked["layers", Cache])
    others = u32["B/d L/c"], i32[""], i32["B/d"], f32["B/d"]
    hint = train.weights_type(config.model), cache, *others
    for how in GREEDY, steps.Sampling(0.8, 5, 0.9, range(1, sizes["V"])):
        with jax.sharding.use_abstract_mesh(probe):
            shapes = types.make_shapes(hint, sizes)
            traced = steps.step.trace(*shapes, config, how)
        layout.check(traced.jaxpr.jaxpr, dict(probe.shape), sizes)


IDS = range(1, 48)
GREEDY = steps.Sampling(0, None, 1, IDS)


def continued(config, weights, on, prompts, numbers, rows, how, tokens=9, seed=0):
    with jax.set_mesh(on):
        started = [[config.model.start_token, *prompt] for prompt in prompts]
        args = started, numbers, tokens, rows, how, seed
        return np.stack([*steps.generate(model(config, weights), *args)], axis=1)


def model(config, weights):
    """A stand-in for tools.generate's Model, on the mesh in context."""
    return SimpleNamespace(config=config, weights=steps.lay_out(weights))


VARIANTS = {
    "dense": (),
    "window": ("model.sliding_window=5",),
    "biases and norms of heads": ("model.qkv_bias=true", "model.qk_norm=head"),
    "norms after and of all heads": ("model.norms_after=true", "model.qk_norm=all"),
    "experts": ("model.d_ff=0", "model.experts={count: 8, per_token: 2, d_ff: 24, bias: true}"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_that_of_forward_alone(variant, in_f32, monkeypatch):
    """Each next id is the likeliest after a whole forward pass without a cache. The prompt is
    computed in two parts."""
    monkeypatch.setattr(steps, "PREFILL", 16)
    config = small_config("training.tokens.len=32", *VARIANTS[variant])
    with jax.set_mesh(mesh(1, 1)):
        weights = numbers.stirred(train.init_state(config).weights)
        (_, forward, *_), _ = trials.of_generation(train, config, weights)
        ids = np.zeros((1, 33), np.uint32)
        ids[0, 1:18] = np.random.default_rng(0).integers(1, 48, 17)
        for at in range(17, 31):
            batch = TokenBatch.of(ids, np.zeros(ids.shape, np.bool_), 0)
            logits = numbers.run(forward, (weights, batch), config)
            ids[0, at + 1] = 1 + logits[0, at, 1:].argmax()
    with jax.set_mesh(mesh(2, 4)):
        placed = jax.device_put(weights, types.make_shardings(train.state_type(config).weights))
        model = SimpleNamespace(config=config, weights=steps.lay_out(placed))
        prompts = ids[:, :18].tolist()
        actual = np.array([*steps.generate(model, prompts, [0], 14, 2, GREEDY)])[:, 0]
    assert actual.tolist() == ids[0, 18:32].tolist() and len({*actual}) > 2


def test_prompts_of_any_length_share_programs_and_steps_their_memory(in_f32, monkeypatch):
    step, caches = steps.step, []
    step.clear_cache()
    monkeypatch.setattr(steps, "PREFILL", 16)
    monkeypatch.setattr(steps, "step", lambda *args: caches.append(args[1]) or step(*args))
    config = small_config("training.tokens.len=64")
    weights = random_weights(config)
    with jax.set_mesh(mesh(4, 2)):
        for length in 1, 15, 17, 64:
            args = [[3] * length], [0], 4, 4, GREEDY, 0, 64
            assert len([*steps.generate(model(config, weights), *args)]) == 4
    assert step._cache_size() == 2, "one for prompts and one for what follows"
    assert len(caches) == (1 + 1 + 2 + 4) + 4 * 3, "parts of prompts, and tokens"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))


@pytest.mark.slow
def test_a_text_is_that_of_its_prompt_and_seed_alone(in_f32, monkeypatch):
    """Prompts of several lengths beside each other, two of which are computed in several parts, on
    another mesh. The last text is another sample of the first prompt, the last rows are padding."""
    monkeypatch.setattr(steps, "PREFILL", 4)
    config = small_config("training.tokens.len=13")
    weights, how = random_weights(config), steps.Sampling(1, None, 0.9, IDS)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 48, length).tolist() for length in (3, 10, 2, 9)]
    prompts.append(prompts[0])
    numbers = [0, 1, 2, 0, 1]
    together, other = (
        continued(config, weights, mesh(4, 2), prompts, numbers, 8, how, seed=seed)[:5]
        for seed in (0, 1)
    )
    alone = [
        continued(config, weights, mesh(1, 1), [prompt], [number], 1, how)[0]
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    assert (together == alone).all() and (together != other).any(axis=1).all()
    assert len(np.unique(alone, axis=0)) == 5


@pytest.mark.slow
def test_ids_come_as_often_as_they_are_likely():
    """The model gives all ids the same probability. Chi-squared has 46 degrees of freedom, and is
    above 86 once in 3,000 times."""
    config = small_config()
    weights = jax.tree.map(np.zeros_like, random_weights(config))
    given = [[]] * 16, [*range(16)], 16, steps.Sampling(1, None, 1, IDS), 120
    actual = continued(config, weights, mesh(1, 1), *given)
    counts = np.bincount(actual.ravel(), minlength=48)
    expected = actual.size / 47
    assert counts[0] == 0
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 86


def probabilities_kept(logits, how):
    """The probabilities after top-k and top-p by definition, one id at a time."""
    logits = np.asarray(logits, np.float64)
    likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])[: how.top_k]
    raised = {i: np.exp(logits[i] / how.temperature) for i in likeliest}
    total, kept, so_far = sum(raised.values()), {}, 0.0
    for i in likeliest:
        if not kept or so_far < how.top_p:
            kept[i] = raised[i]
        so_far += raised[i] / total
    return np.array([kept.get(i, 0) / sum(kept.values()) for i in range(len(logits))])


@functools.partial(jax.jit, static_argnames="how")
@typed_shard_map
def sample_on_mesh(
    logits: f32["B/d l/c V/t"], draws: f32["B/d"], how: steps.Sampling
) -> u32["B/d 1"]:
    return steps.sample(logits, draws, how)


def sample(logits, draws, how):
    with jax.set_mesh(mesh(1, 1)):
        return sample_on_mesh(logits[:, None], draws, how)[:, 0]


# Temperature, top-k, top-p.
SAMPLED = (0.5, None, 1), (2, 7, 0.9), (1, 99, 0.3), (1, None, 0), (2, None, 0.6)


@pytest.mark.parametrize("given", SAMPLED)
def test_evenly_spaced_draws_give_ids_by_their_probabilities(given):
    how = steps.Sampling(*given, range(30))
    logits = np.random.default_rng(2).normal(0, 2, 30).astype(np.float32)
    logits[[3, 8]] = -np.inf
    draws = (np.arange(5000) + 0.5) / 5000
    rows = jnp.broadcast_to(logits, (5000, 30))
    counts = np.bincount(sample(rows, jnp.float32(draws), how), minlength=30)
    np.testing.assert_allclose(counts, 5000 * probabilities_kept(logits, how), atol=1.01)


@pytest.mark.parametrize("wrong", [(-1, 5, 0.9), (math.nan, 5, 0.9), (1, -306, 0.9), (1, 5, 95)])
def test_sampling_out_of_range_is_refused(wrong):
    """A task of lm-eval may ask for anything."""
    with pytest.raises(UserError, match="they must be at least 0, at least 1, and 0 to 1"):
        steps.Sampling(*wrong, range(30))


def test_the_extremes_of_draws_give_ids_that_may_come():
    logits = jnp.array([[-jnp.inf, 1.0, 1.0, -jnp.inf, 0.5]] * 2)
    for top_p in 1, 0.5:
        how = steps.Sampling(1, None, top_p, range(5))
        first, last = sample(logits, jnp.float32([1e-30, 1]), how)
        assert first == 1 and last == np.flatnonzero(probabilities_kept(logits[0], how))[-1]


def test_no_id_outside_of_the_nucleus_is_sampled_however_many_there_are():
    """In f32 a sum over many zeros can grow."""
    logits = 3 * np.random.default_rng(7).standard_normal((1, 50304)).astype(np.float32)
    how = steps.Sampling(1, None, 0.95, range(50304))
    rank = np.flatnonzero(np.argsort(-logits[0]) == sample(logits, jnp.float32([1]), how)[0])
    kept = (np.cumsum(np.sort(jax.nn.softmax(logits[0]))[::-1].astype(float)) < 0.95).sum()
    assert abs(rank - kept) <= 1


def save_tokenizer(folder):
    """Saves a tokenizer that joins a space to the next word and drops the first one in decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(["the snow man, the snow"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def test_a_tokenizers_ids_and_bytes(tmp_path):
    config = small_config("model.vocab=264")
    codec = Text(save_tokenizer(tmp_path))
    assert codec.ends == (0,) and codec.ids == range(len(codec.slow))
    ids = np.array(codec.encode("the snow man", config))
    assert codec.decode(ids) == codec.decode([0, *ids], without_special=True) == "the snow man"
    assert codec.count_bytes(ids, np.arange(len(ids)) == 1) == len("the" + "snow man")
    inner = models.BPE({"a": 0, "b": 7}, [])
    Tokenizer(inner).save(str(tmp_path / "gaps.json"))
    assert Text(str(tmp_path / "gaps.json")).ids == range(8)
    codec = Text("bytes_utf8")
    ids = np.array(codec.encode("é", config))
    assert ids.tolist() == [0xC4, 0xAA] and codec.count_bytes(ids, ids == 0) == len(ids)
    assert codec.ends == () and codec.ids == range(1, 257)


def write_dataset(path, tokenizer="bytes_utf8", top=256):
    rng = np.random.default_rng(3)
    documents = [rng.integers(1, top + 1, length) for length in (30, 100, 2, 90)]
    documents[-1][-1] = top
    return write_tokens(path, documents, tokenizer=tokenizer)


def losses_of_rows(weights, ids, starts, length):
    """The oracle's loss of each token, predicted by itself, after the tokens before it in its
    row."""
    at = np.arange(len(ids))
    begin = at // length * length
    index = np.minimum(begin[:, None] + np.arange(length), at[:, None])
    before, *seen = oracle.layout(ids[index], starts[index], ids[np.maximum(begin - 1, 0)])
    logits = oracle.laid_out_logits(plain(weights), before, *seen, TIMESCALE)[at, at - begin]
    return -jax.nn.log_softmax(logits)[at, ids]


@pytest.mark.parametrize(("length", "of_one"), [(12, 96), (17, 136)])
def test_each_token_is_predicted_once_after_its_row_so_far(in_f32, length, of_one, tmp_path):
    """Rows of the training's length, and longer ones than the training's, which had microbatches
    and chunks."""
    parts = "training.microbatches=2", "training.loss_chunks=3", "mesh.c=2"
    config = small_config(*(parts if length == 17 else ()))
    weights, codec = random_weights(config), Text(save_tokenizer(tmp_path))
    data = FlatTokens(write_dataset(tmp_path / "x.zarr", top=12), "validation")
    ids, starts = data.read(0, 222)
    nats = losses_of_rows(weights, ids, starts, length).sum()
    texts = np.split(ids, np.flatnonzero(starts)[1:])
    size = len("".join(map(codec.decode, texts)).encode())
    with jax.set_mesh(mesh(4, 2)):
        opened = model(config, weights)
        actual = generate.evaluate(opened, codec, data, length, None)
        part = generate.evaluate(opened, codec, data, length, 1)
        fewer = generate.evaluate(opened, codec, data, length, 1, rows=4)
        whole, longer = (generate.evaluate(opened, codec, data, n, None) for n in (222, 10**6))
    assert actual == (
        f"{data.name}, 222 tokens: {nats / 222:.4f} nats per token, "
        f"perplexity {np.exp(nats / 222):.4g}, {nats / np.log(2) / size:.4f} bits per byte"
    )
    assert f", {of_one} tokens: " in part and f", {4 * length} tokens: " in fewer
    assert whole == longer, "one row has the whole split"


BATCHES = (16, 512), (1, 8192), (8, 1024), (13, 600), (1024, 8)


@pytest.mark.parametrize(("rows", "length"), BATCHES)
def test_logits_of_at_most_1024_tokens_exist_at_once(in_f32, rows, length):
    """Logits of 1,024 tokens, from a vocabulary of 128,256, and what is made of them are two arrays
    of 0.53 GB."""
    small = "model.vocab=128256", "model.n_q_per_kv=1", "model.n_kv=1", "model.layers=1"
    config = small_config(*small, f"training.tokens={{batch: {rows}, len: {length}}}")
    with jax.set_mesh(mesh(1, 1)):
        hint = train.weights_type(config.model), types.type_tree(TokenBatch)
        shapes = types.make_shapes(hint, train.dimensions(config))
        compiled = steps.scores.lower(*shapes, config.model).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e9


# --- The program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with checkpoints of small models, and datasets."""
    folder = tmp_path_factory.mktemp("run")
    write_dataset(folder / "bytes.zarr")
    write_dataset(folder / "other.zarr", top=300)
    write_dataset(folder / "nameless.zarr", "", top=47)
    (folder / "bytes.txt").write_bytes(b"\xff")
    (folder / "é.txt").write_text("e\né\n")
    with jax.set_mesh(mesh(4, 2)):
        for name, vocab in ("bytes", 264), ("nameless", 128):
            model = f"model.vocab={vocab}"
            config = small_config(f"flat_tokens.filespec={name}.zarr", model)
            save_state(folder / name, config, helpers.random_weights(train, config), 3)
    return folder


@pytest.fixture
def call(run, ended, monkeypatch):
    """A function that runs the tool in that folder."""
    monkeypatch.chdir(run)
    return functools.partial(ended, generate.main)


def test_a_text_from_a_checkpoint(call):
    out, error, code = call("bytes", "--prompt=☃", "--tokens=9", "--temperature=0")
    assert out.startswith("☃") and out.endswith("\n") and not code
    assert "checkpoint: bytes/00000003." in error
    several = "--prompt=naïve", "--samples=3", "--d=4", "--t=2", "--tokens=40"
    out, error, _ = call("bytes", *several)
    _, *texts = re.split(r"--- prompt 1, sample \d\n", out)
    assert len({*texts}) == 3 and all(text.startswith("naïve") for text in texts)


def test_prompts_in_a_file(call, tmp_path, monkeypatch):
    """Three prompts with two samples each, the last two alike, in batches of four. A row goes on
    with its prompt's last byte and its number."""
    prompts, asked = ["ab", "é\u2028", "é\u2028"], []
    (tmp_path / "prompts.txt").write_text("\ufeff" + "".join(f"{line}\n" for line in prompts))

    def echo(_, prompts, numbers, tokens, rows, *others):
        asked.append((numbers, rows))
        new = [[prompt[-1], 49 + n] for prompt, n in zip(prompts, numbers, strict=True)]
        return list(np.array(new + [[1, 1]] * (rows - len(new))).T)

    monkeypatch.setattr(steps, "generate", echo)
    out, _, code = call("bytes", f"--prompts={tmp_path}/prompts.txt", "--samples=2", "--batch=4")
    assert not code and asked == [([0, 1, 0, 1], 4), ([2, 3], 4)]
    text = "é\u2028\N{REPLACEMENT CHARACTER}"
    made = ("abb0", "abb1"), (f"{text}0", f"{text}1"), (f"{text}2", f"{text}3")
    assert out == "".join(
        f"--- prompt {i}, sample {j}\n{text}\n"
        for i, texts in enumerate(made, 1)
        for j, text in enumerate(texts, 1)
    )


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_text_comes_as_soon_as_it_is_certain(kind, call, tmp_path, monkeypatch):
    """An incomplete character is held back, and a word comes with the space before it."""
    name, text, waiting = "bytes_utf8", "the snow ☃ 😀, man", 5
    if kind == "words":
        name, text, waiting = save_tokenizer(tmp_path), "the snow man", 0
    config = small_config("model.vocab=264")
    ids, prompt = (Text(name).encode(each, config) for each in (text, "the"))
    new = [np.array([i]) for i in ids[len(prompt) :]]
    monkeypatch.setattr(steps, "generate", lambda *_: new)
    pieces = []

    def show(piece, file=sys.stdout, **_):
        if file is sys.stdout:
            pieces.append(piece)

    monkeypatch.setattr(generate, "print", show, raising=False)
    assert not call("bytes", "--prompt=the", f"--tokenizer={name}")[2]
    assert "".join(pieces) == text
    assert len([*filter(None, pieces)]) == len(new) - waiting


def test_a_prompt_that_begins_with_the_start_token_gets_no_other(run, call, monkeypatch):
    """The start token is 0, which is special, and in a tokenizer without special tokens "!"."""
    given, start, new = [], "<|endoftext|>", [np.array([5])]
    monkeypatch.setattr(steps, "generate", lambda _, prompts, *__: given.extend(prompts) or new)
    plain = Tokenizer(models.WordLevel({"!": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.save(str(run / "plain.json"))

    def asked(prompt, *options):
        given.clear()
        assert not call("bytes", f"--prompt={prompt}", *options)[2]
        return given[0]

    parsed = ("--tokenizer=special",)
    special = write_tokenizer(run / "special", eos_token=start)
    a = Text(special).encode("a", small_config("model.vocab=264"))
    assert asked("a", *parsed) == [0, *a]
    assert asked("", *parsed) == asked(start, *parsed) == [0]
    assert asked(f"{start}a", *parsed) == [0, *a]
    assert asked(f"{start}{start}a", *parsed) == [0, 0, *a]
    assert asked(f"a{start}", *parsed) == [0, *a, 0]
    assert asked("<|im_start|>a", *parsed) == [0, 1, *a]
    assert asked("! a", "--tokenizer=plain.json") == [0, 0, 1], "a word"


def test_all_ids_end_a_text_that_the_tokenizer_or_a_config_beside_it_names(tmp_path):
    its = write_tokenizer(tmp_path / "its", eos_token=SPECIAL[END_OF_TEXT])
    (tmp_path / "its/generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported/config.json").write_text('{"eos_token_id": 7}')
    codec = Text(its, str(tmp_path / "imported"))
    assert codec.ends == (END_OF_TEXT, END_OF_MESSAGE, 7)
    (tmp_path / "imported/config.json").write_text('{"eos_token_id": null}')
    assert Text("bytes_utf8", str(tmp_path / "imported")).ends == ()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("more", [["--prompt=a"], ["--evaluate=bytes.zarr"]])
def test_weights_that_are_not_finite_are_refused(bad, more, run, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "bytes", tmp_path / "bytes")
    shutil.copytree(run / "bytes.zarr", tmp_path / "bytes.zarr")
    (path,) = (tmp_path / "bytes").glob("0*")
    zarr.open_group(path)["weights/layers/w_o"][1, 0, 0, 0] = bad
    out, _, message = call("bytes", *more)
    problem = "^error: bytes/0.* has NaN or infinite weights, such as layers/w_o"
    assert not out and re.search(problem, message)


def test_it_ends_where_the_model_ends_the_text(run, call, monkeypatch):
    ids = iter([[65, 66], [67, 5], [5, 66]])
    monkeypatch.setattr(steps, "generate", lambda *_: map(np.array, ids))
    text = Text("bytes_utf8")
    text.ends = 9, 5
    monkeypatch.setattr(opened, "Text", lambda *_: text)
    (run / "two.txt").write_text("\n\n")
    out, _, _ = call("bytes", "--prompts=two.txt", "--tokens=4")
    assert out == "--- prompt 1, sample 1\n@B\n--- prompt 2, sample 1\nA\n"


def test_a_loss_from_a_checkpoint(call, monkeypatch):
    out, *_ = call("bytes", "--evaluate=bytes.zarr")
    assert out.startswith("bytes.zarr/validation, 222 tokens: ") and "bits per byte\n" in out
    short = "--evaluate=nameless.zarr", "--batches=1"
    out, _, code = call("bytes", *short)
    assert "bits per byte: name a --tokenizer" in out and not code

    def scores(_, batch, __):
        return np.full(batch.loss_mask.shape, -1e6), None

    monkeypatch.setattr(generate, "scores", scores)
    out, _, code = call("bytes", *short)
    assert ", perplexity inf, " in out and not code


WRONG = {
    "prompts that aren't text": ["bytes", "--prompts=bytes.txt"],
    "a prompt that isn't text": ["bytes", "--prompt=caf\udce9"],
    "a file of prompts that isn't there": ["bytes", "--prompts=none.txt"],
    "a line of another tokenizer": ["nameless", "--tokenizer=bytes_utf8", "--prompts=é.txt"],
    "no checkpoint": ["none"],
    "a mesh that doesn't divide": ["bytes", "--t=3"],
    "a dataset of other ids": ["bytes", "--evaluate=other.zarr"],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_says_of_a_mistake(case, call):
    out, error, message = call(*WRONG[case])
    assert not out and message.startswith("error: ")
    golden.check("generate.txt", case, f"{error}{message}")


def test_a_remote_dataset_that_only_a_checkpoint_names_is_not_opened(
    run, call, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "bytes", tmp_path / "remote")
    (path,) = (tmp_path / "remote").glob("0*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/tokens.zarr"

        def move(text):
            assert "filespec: bytes.zarr" in text
            return text.replace("bytes.zarr", url)

        edit_config(path, move)
        *_, message = call("remote")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert message.startswith("error: no tokenizer is known: ")
