"""Tests generation with a cache against the oracle's full forward pass, sampling against its
definition, and the tool's messages."""

import dataclasses
import io
import json
import re
import shutil
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import train
from data.flat_tokens import SPLITS, FlatTokens, Writer
from runtime.checkpoint import Checkpoints, _checksum
from shardlib import audit, devices
from shardlib.types import (
    Stacked,
    f32,
    i32,
    make_shapes,
    make_shardings,
    type_tree,
    typed_shard_map,
    u32,
)
from tests import golden, oracle
from tests.helpers import IN_F32, assert_close, edited, mesh, of_model, small_config, token_batch
from tools import generate

MESHES = [(4, 2), (2, 4), (1, 8)]
TIMESCALE = 100  # of small_config


@pytest.fixture(scope="module")
def in_f32():
    """The tool with f32 in place of bf16."""
    module = edited("train.py", IN_F32)
    return edited(
        "tools/generate.py", IN_F32, ("import train\n", f"import {module.__name__} as train\n")
    )


def random_weights(config, module=train):
    """Random weights as a dict of numpy arrays; gains are not 1 and logits are not small."""
    with jax.set_mesh(mesh(1, 1)):
        rng = np.random.default_rng(7)
        shapes = make_shapes(of_model(module.Weights, config), train.dimensions(config))
        weights = jax.tree.map(lambda s: rng.normal(0, 0.4, s.shape).astype(s.dtype), shapes)
    layers = {name: value for name, value in vars(weights.layers).items() if value is not None}
    return vars(weights) | {"layers": layers}


def placed(kind, weights):
    """Turns that dict into `kind`, a module's Weights, on the mesh in context."""
    flat = {**weights, **weights["layers"]}

    def put(path, sharding, like):
        value = flat.get(path[-1].name)
        return None if value is None else jax.device_put(value.astype(like.dtype), sharding)

    return jax.tree_util.tree_map_with_path(put, make_shardings(kind), type_tree(kind))


def oracle_logits(weights, inputs, window=10**9):
    """The oracle's f32[B, L, V] for one document per row, with attention limited to a window."""
    length = inputs.shape[1]
    age = np.arange(length)[:, None] - np.arange(length)
    sees = np.broadcast_to((age >= 0) & (age < window), (len(inputs), length, length))
    position = np.broadcast_to(np.arange(length), inputs.shape)
    return np.asarray(oracle.laid_out_logits(weights, inputs, position, sees, TIMESCALE))


def cached_logits(tool, config, weights, inputs, on, start=0):
    """The same through the cache: some tokens at once, then one at a time, then some at once. The
    text of each row begins at its `start`."""

    @jax.jit
    @typed_shard_map
    def step(
        weights: tool.Weights,
        cache: Stacked["layers", tool.Cache],
        inputs: u32["B/d L"],
        first: i32[""],
        start: i32["B/d"],
    ) -> tuple[f32["B/d L V/t"], Stacked["layers", tool.Cache]]:
        x, cache = tool.extend(weights, cache, inputs, first, start, config)
        output = tool.train.output_weights(weights, tool.check_gathered)
        return tool.train.unembed(output, x, config.model), cache

    with jax.set_mesh(on):
        kind = Stacked["layers", tool.Cache]
        sizes = train.dimensions(config) | {"S": 16}
        cache = jax.tree.map(lambda s: jnp.full(s.shape, 7, s.dtype), make_shapes(kind, sizes))
        parts, first, start = [], 0, np.broadcast_to(np.int32(start), len(inputs))
        for count in 4, 1, 1, 1, 1, 4:
            here = inputs[:, first : first + count]
            where = np.int32(first), start
            actual, cache = step(placed(tool.Weights, weights), cache, here, *where)
            parts.append(actual)
            first += count
        return np.concatenate(parts, axis=1)


def random_inputs():
    return np.random.default_rng(0).integers(0, 48, (8, 12)).astype(np.uint32)


@pytest.mark.parametrize(
    ("axes", "length"),
    [((1, 1), 12), ((4, 2), 5), *(pytest.param(m, 12, marks=pytest.mark.slow) for m in MESHES)],
)
def test_the_logits_are_those_of_the_oracles_full_forward_pass(in_f32, axes, length):
    """Covers a window of five tokens too, as after training with rows of five."""
    config = small_config(f"training.tokens.len={length}")
    weights, inputs = random_weights(config), random_inputs()
    actual = cached_logits(in_f32, config, weights, inputs, mesh(*axes))
    assert_close(actual, oracle_logits(weights, inputs, length), 1e-5)


def test_a_row_does_not_see_the_padding_before_its_start(in_f32):
    """Rows begin at 0, in the middle of what is computed at once, and after it. Windows are of five
    tokens."""
    config = small_config("training.tokens.len=5")
    weights, inputs = random_weights(config), random_inputs()
    start = np.array([0, 1, 2, 3, 4, 5, 7, 11], np.int32)
    actual = cached_logits(in_f32, config, weights, inputs, mesh(4, 2), start)
    texts = np.stack([np.roll(row, -begin) for row, begin in zip(inputs, start, strict=True)])
    for row, wanted in enumerate(oracle_logits(weights, texts, 5)):
        begin = start[row]
        assert_close(actual[row, begin:], wanted[: 12 - begin], 1e-5)
    assert np.isfinite(actual).all()


def test_an_edit_of_trains_block_is_an_edit_of_generation():
    """The edit adds a weight. The logits are then those of the edited forward pass, and differ from
    those before."""
    another_norm = [
        ("    mlp_norm: f32", '    second_norm: f32["M/t/c/d"]\n    mlp_norm: f32'),
        ("hidden = hidden.astype(", "hidden = (hidden * w_second.mean()).astype("),
        (
            '            w_gate = gather("M/c',
            '            w_second = gather("M/t/c/s -> M", w.second_norm)\n'
            '            w_gate = gather("M/c',
        ),
    ]
    module = edited("train.py", IN_F32, *another_norm)
    importing = ("import train\n", f"import {module.__name__} as train\n")
    tool = edited("tools/generate.py", IN_F32, importing)
    config, inputs = small_config(), random_inputs()
    weights = random_weights(config, module)

    @jax.jit
    @typed_shard_map
    def whole_row(weights: module.Weights, batch: module.TokenBatch) -> f32["B/d L/c V/t"]:
        replica = module.gather_replica(weights)
        x, _ = module.forward(replica, batch, config.model)
        return module.unembed(module.output_weights(replica), x, config.model)

    with jax.set_mesh(mesh(4, 2)):
        one_document = np.broadcast_to(np.arange(12) == 0, inputs.shape)
        batch = token_batch(module.TokenBatch, inputs, one_document, 0)
        batch = dataclasses.replace(batch, inputs=inputs)
        wanted = np.asarray(whole_row(placed(module.Weights, weights), batch))
    actual = cached_logits(tool, config, weights, inputs, mesh(4, 2))
    assert_close(actual, wanted, 1e-5)
    before = oracle_logits(weights, inputs)
    assert np.abs(actual - before).max() > 0.1 * np.abs(before).max()


@pytest.mark.slow
def test_bf16_is_close():
    """The tolerance allows for about thirty successive roundings of at most 2**-9."""
    config = small_config()
    weights, inputs = random_weights(config), random_inputs()
    actual = cached_logits(generate, config, weights, inputs, mesh(4, 2))
    assert_close(actual, oracle_logits(weights, inputs), 3e-2)


def test_padding_does_not_change_the_rounding():
    """Positions count from a row's start: in bf16, rotations by other angles differ by far more."""
    config = small_config()
    weights, inputs = random_weights(config), random_inputs()
    inputs[1] = np.roll(inputs[0], 4)
    actual = cached_logits(generate, config, weights, inputs, mesh(4, 2), [0, 4, *[0] * 6])
    assert_close(actual[1, 4:], actual[0, :8], 1e-3)


def test_layouts_hold_at_sizes_that_tell_all_dimensions_apart():
    names = ["B", "L", "S", "M", "Q", "K", "D", "F", "V", "layers"]
    probe, sizes = devices.probe_mesh(train.MeshConfig(1, 1).axes, names)
    config = train.resized(small_config(), sizes, probe.shape, {})
    hint = tuple[
        generate.Weights,
        Stacked["layers", generate.Cache],
        u32["B/d L"],
        i32[""],
        i32["B/d"],
        f32["B/d"],
    ]
    for how in GREEDY, generate.Sampling(0.8, 5, 0.9, range(1, sizes["V"])):
        with jax.sharding.use_abstract_mesh(probe):
            shapes = make_shapes(of_model(hint, config), sizes)
            traced = generate.step.trace(*shapes, config, how)
        audit.check(traced.jaxpr.jaxpr, dict(probe.shape), sizes)


IDS = range(1, 48)
GREEDY = generate.Sampling(0, None, 1, IDS)


def generated(tool, config, weights, on, prompt, how, rows=4, tokens=9, seed=0):
    """The new ids of `rows` samples of a prompt."""
    prompts, numbers = [prompt] * rows, list(range(rows))
    return continued(tool, config, weights, on, prompts, numbers, rows, how, tokens, seed)


def continued(tool, config, weights, on, prompts, numbers, rows, how, tokens=9, seed=0):
    with jax.set_mesh(on):
        started = [[config.model.start_token, *prompt] for prompt in prompts]
        args = started, numbers, tokens, rows, seed, how, config
        return np.concatenate(list(tool.generate(placed(tool.Weights, weights), *args)), axis=1)


def test_greedy_text_is_that_of_the_oracle(in_f32, monkeypatch):
    """Covers an empty prompt, and one that is computed in two parts."""
    monkeypatch.setattr(in_f32, "PREFILL", 16)
    config = small_config("training.tokens.len=64", "model.start_token=3")
    weights = random_weights(config)
    for length in 0, 17:
        prompt = np.random.default_rng(length).integers(1, 48, length).tolist()
        inputs = np.zeros((1, 32), np.uint32)
        inputs[0, : length + 1] = [3, *prompt]
        for at in range(length, length + 9):
            inputs[0, at + 1] = 1 + oracle_logits(weights, inputs)[0, at, 1:].argmax()
        actual = generated(in_f32, config, weights, mesh(4, 2), prompt, GREEDY)
        assert (actual == inputs[0, length + 1 : length + 10]).all()
    assert len(np.unique(actual[0])) > 4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_text_is_that_of_its_prompt_alone(in_f32, temperature, monkeypatch):
    """Prompts of several lengths beside each other, two of which are computed in several parts. The
    last rows are padding."""
    monkeypatch.setattr(in_f32, "PREFILL", 4)
    config = small_config("training.tokens.len=13")
    weights, how = random_weights(config), generate.Sampling(temperature, None, 0.9, IDS)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 48, length).tolist() for length in (3, 10, 2, 9, 3)]
    numbers = [0, 1, 2, 0, 1]
    together = continued(in_f32, config, weights, mesh(4, 2), prompts, numbers, 8, how)
    alone = [
        continued(in_f32, config, weights, mesh(1, 1), [prompt], [number], 1, how)[0]
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    assert (together[:5] == alone).all()
    assert len(np.unique(alone, axis=0)) == 5


@pytest.mark.slow
def test_a_seed_gives_the_same_text_on_any_mesh_and_beside_any_others(in_f32):
    config = small_config()
    weights, how = random_weights(config), generate.Sampling(1, None, 0.9, IDS)
    one, eight, other = (
        generated(in_f32, config, weights, mesh(*axes), [5, 6], how, rows, seed=seed)
        for axes, rows, seed in [((1, 2), 1, 0), ((4, 2), 8, 0), ((4, 2), 8, 1)]
    )
    assert (one[0] == eight[0]).all()
    assert len(np.unique(eight, axis=0)) == 8, "all samples differ"
    assert (other != eight).any(axis=1).all()


def test_a_step_is_compiled_once_and_reuses_the_caches_memory(in_f32, monkeypatch):
    step, caches = in_f32.step, []
    step.clear_cache()
    monkeypatch.setattr(in_f32, "step", lambda *args: caches.append(args[1]) or step(*args))
    config = small_config()
    generated(in_f32, config, random_weights(config), mesh(4, 2), [5] * 9, GREEDY)
    assert step._cache_size() == 2, "one for the prompt and one for what follows"
    assert len(caches) == 9 and all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 1), (2, 4)])
def test_layers_apart_give_the_same_text_and_are_not_copied(in_f32, axes, monkeypatch):
    """A step with layers in a loop, or without moving w_o, would hold copies of matrices."""
    config = small_config("model.d_model=64", "model.d_ff=512", "model.layers=4")
    weights, made = random_weights(config), []
    looped = generated(in_f32, config, weights, mesh(*axes), [5, 6], GREEDY)
    step = in_f32.step_apart
    monkeypatch.setattr(in_f32, "APART_FROM", 0)
    monkeypatch.setattr(in_f32, "step_apart", lambda *args: made.append(args) or step(*args))
    apart = generated(in_f32, config, weights, mesh(*axes), [5, 6], GREEDY)
    assert (apart == looped).all() and len(made) == 8
    split, cache, *others = made[0]
    one_matrix = split.layers.w_up[0].nbytes // axes[1]
    with jax.set_mesh(mesh(*axes)):
        shapes = jax.eval_shape(lambda *x: x, split, cache)
        memory = step.lower(*shapes, *others).compile().memory_analysis()
    assert memory.temp_size_in_bytes < one_matrix


@pytest.mark.slow
def test_ids_come_as_often_as_they_are_likely():
    """The model gives all ids the same probability. Chi-squared has 46 degrees of freedom, and is
    above 86 once in 3,000 times."""
    config = small_config()
    weights = jax.tree.map(np.zeros_like, random_weights(config))
    how = generate.Sampling(1, None, 1, IDS)
    actual = generated(generate, config, weights, mesh(1, 1), [], how, rows=16, tokens=120)
    counts = np.bincount(actual.ravel(), minlength=48)
    expected = actual.size / 47
    assert counts[0] == 0
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 86


def probabilities_kept(logits, how):
    """The probabilities after top-k, top-p and min-p by definition, one id at a time."""
    logits = np.asarray(logits, np.float64)
    likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])[: how.top_k]
    raised = {i: np.exp(logits[i] / how.temperature) for i in likeliest}
    total, kept, so_far = sum(raised.values()), {}, 0.0
    for i in likeliest:
        if not kept or (so_far < how.top_p and raised[i] >= how.min_p * raised[likeliest[0]]):
            kept[i] = raised[i]
        so_far += raised[i] / total
    return np.array([kept.get(i, 0) / sum(kept.values()) for i in range(len(logits))])


def sample(logits, draws, how):
    with jax.set_mesh(mesh(1, 1)):
        return jax.jit(generate.sample, static_argnums=2)(logits, draws, how)


@pytest.mark.parametrize("top_k", [None, 7, 99])
@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p"),
    [(0.5, 1.0, 0), (2.0, 0.9, 0), (1.0, 0.3, 0), (1, 0, 0), (2, 1, 0.2), (2, 0.6, 0.2), (1, 1, 1)],
)
def test_evenly_spaced_draws_give_ids_by_their_probabilities(temperature, top_p, min_p, top_k):
    how = generate.Sampling(temperature, top_k, top_p, IDS, min_p)
    logits = np.random.default_rng(2).normal(0, 2, 30).astype(np.float32)
    logits[[3, 8]] = -np.inf
    draws = (np.arange(5000) + 0.5) / 5000
    rows = jnp.broadcast_to(logits, (5000, 30))
    counts = np.bincount(sample(rows, jnp.float32(draws), how), minlength=30)
    np.testing.assert_allclose(counts, 5000 * probabilities_kept(logits, how), atol=1.01)


def test_the_extremes_of_draws_give_ids_that_may_come():
    logits = jnp.array([[-jnp.inf, 1.0, 1.0, -jnp.inf, 0.5]] * 2)
    for how in generate.Sampling(1, None, 1, IDS), generate.Sampling(1, None, 0.5, IDS):
        first, last = sample(logits, jnp.float32([1e-30, 1]), how)
        assert first == 1 and last == np.flatnonzero(probabilities_kept(logits[0], how))[-1]


def test_without_temperature_it_is_the_likeliest():
    logits = jax.random.normal(jax.random.key(0), (50, 40))
    actual = sample(logits, jnp.ones(50), generate.Sampling(0, 3, 0.5, IDS))
    assert (actual == np.asarray(logits).argmax(axis=1)).all()


def save_tokenizer(folder):
    """Saves a tokenizer that joins a space to the next word and drops the first one in decoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(["the snow man, the snow"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def test_a_tokenizers_ids_and_bytes(tmp_path):
    codec = generate.Text(save_tokenizer(tmp_path))
    assert codec.ends == {0} and codec.ids == range(len(codec.tokenizer.slow))
    ids = np.array(codec.encode("the snow man"))
    assert codec.decode(ids) == "the snow man"
    assert codec.count_bytes(ids, np.arange(len(ids)) == 1) == len("the" + "snow man")
    codec = generate.Text("bytes_utf8")
    assert codec.encode("é") == [0xC4, 0xAA]
    assert not codec.ends and codec.ids == range(1, 257)


CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END, BEGIN_TURN, END_TURN = range(3)


def save_chat_tokenizer(folder, template=CHATML, settings="{}"):
    """Saves a BPE of bytes with three special tokens, and a generation_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=263,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([__doc__], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)
    return str(folder)


def test_special_tokens_in_a_text_and_a_conversation(tmp_path):
    codec = generate.Text(save_chat_tokenizer(tmp_path, settings='{"eos_token_id": [0, 77]}'))
    ordinary = codec.encode("a<|im_end|>")
    assert codec.decode(ordinary) == "a<|im_end|>" and END_TURN not in ordinary
    codec.parse_special_tokens()
    assert codec.encode("a<|im_end|>") == [ordinary[0], END_TURN]
    assert codec.ends == {END, 77}
    codec.start_chat()
    assert codec.ends == {END, 77, END_TURN}, "the template ends an answer with another one"
    ids = codec.chat([{"role": "user", "content": "Hi"}], 0)
    turn = [BEGIN_TURN, *codec.encode("user\nHi"), END_TURN, *codec.encode("\n")]
    assert ids == [*turn, BEGIN_TURN, *codec.encode("assistant\n")]
    codec.tokenizer.slow.bos_token = "<|im_start|>"
    assert codec.chat([{"role": "user", "content": "Hi"}], BEGIN_TURN) == ids[1:]
    assert codec.chat([{"role": "user", "content": "Hi"}], END) == ids


def write_dataset(path, tokenizer="bytes_utf8", top=47, lengths=(30, 100, 2, 90)):
    rng = np.random.default_rng(3)
    for split in SPLITS:
        with Writer(str(path), split) as writer:
            for length in lengths:
                writer.append(rng.integers(1, top + 1, length))
    if tokenizer:
        about = {"settings": {"tokenizer": tokenizer}}
        zarr.open_group(str(path)).attrs["conversion"] = about
    return str(path)


@pytest.mark.parametrize("axes", [(1, 1), (4, 2)])
def test_the_loss_is_the_oracles_mean_over_all_tokens_of_the_split(in_f32, axes, tmp_path):
    """222 tokens: two batches of 8 rows of 12, and 30 tokens."""
    config, codec = small_config(), generate.Text("bytes_utf8")
    weights = random_weights(config)
    data = FlatTokens(write_dataset(tmp_path / "x.zarr"), "validation")
    ids, starts = (np.pad(x, (0, 18)).reshape(20, 12) for x in data.read(0, 222))
    preceding = np.pad(ids[:-1, -1], (1, 0))
    # A row's mean loss, times its number of targets, is its sum.
    nats = sum(
        float(oracle.mean_loss(weights, *(x[i : i + 1] for x in (ids, starts)), TIMESCALE, before))
        * np.count_nonzero(ids[i])
        for i, before in enumerate(preceding[:19])
    )
    with jax.set_mesh(mesh(*axes)):
        placed_weights = placed(in_f32.train.Weights, weights)
        actual = in_f32.evaluate(placed_weights, data, None, None, codec, config)
        part = in_f32.evaluate(placed_weights, data, 2, None, codec, config)
    assert actual == (
        f"{data.name}, 222 tokens: {nats / 222:.4f} nats per token, "
        f"perplexity {np.exp(nats / 222):.4g}, {nats / 222 * np.log2(np.e):.4f} bits per byte"
    )
    assert ", 192 tokens: " in part


def losses_of_windows(weights, ids, starts, length, stride):
    """The oracle's loss of each token, predicted by itself: after the tokens before it from the
    beginning of the one row in which it is among the last `stride` tokens."""
    losses = []
    for i in range(len(ids)):
        begin = max(0, i // stride * stride + stride - length)
        row, is_start = np.zeros(length, ids.dtype), np.zeros(length, bool)
        row[: i + 1 - begin], is_start[: i + 1 - begin] = ids[begin : i + 1], starts[begin : i + 1]
        before, position, sees = oracle.layout(row[None], is_start[None], ids[max(begin - 1, 0)])
        logits = oracle.laid_out_logits(weights, before, position, sees, TIMESCALE)[0, i - begin]
        losses.append(-jax.nn.log_softmax(logits)[ids[i]])
    return np.array(losses)


@pytest.mark.parametrize(("axes", "length", "stride"), [((4, 2), 17, 5), ((1, 1), 6, 1)])
def test_each_token_is_predicted_once_after_what_its_row_has_before_it(
    in_f32, axes, length, stride, tmp_path
):
    """Longer and shorter rows than the training's, which had microbatches and chunks."""
    parts = "training.microbatches=2", "training.loss_chunks=3", "mesh.c=2"
    config = small_config(*parts)
    weights, codec = random_weights(config), generate.Text(save_tokenizer(tmp_path))
    data = FlatTokens(write_dataset(tmp_path / "x.zarr", top=12, lengths=(3, 40, 1, 23)), "train")
    ids, starts = data.read(0, 67)
    nats = losses_of_windows(weights, ids, starts, length, stride).sum()
    texts = np.split(ids, np.flatnonzero(starts)[1:])
    size = len("".join(map(codec.decode, texts)).encode())
    with jax.set_mesh(mesh(*axes)):
        other = in_f32.with_rows(config, length)
        placed_weights = placed(in_f32.train.Weights, weights)
        actual = in_f32.evaluate(placed_weights, data, None, stride, codec, other)
    assert f"67 tokens: {nats / 67:.4f} nats per token" in actual
    assert f"{nats / np.log(2) / size:.4f} bits per byte" in actual


def test_rows_of_any_length_do_without_groups_of_tokens():
    groups = "training.routing.group=6", "model.experts={count: 4, per_token: 2, d_ff: 8}"
    config = generate.with_rows(small_config(*groups), 17)
    assert config.training.tokens.len == 17
    assert config.training.routing.capacity_factor is config.training.routing.group is None


# --- The program ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with checkpoints of small models, and datasets."""
    folder = tmp_path_factory.mktemp("run")
    write_dataset(folder / "bytes.zarr", top=256)
    write_dataset(folder / "other.zarr", top=300)
    write_dataset(folder / "nameless.zarr", None)
    save_chat_tokenizer(folder / "chat")
    save_chat_tokenizer(folder / "refusing", "{{ raise_exception('no such role') }}")
    save_chat_tokenizer(folder / "damaged_settings", settings="[1]")
    (folder / "wrong.jsonl").write_text('"a"\n["b"]\n')
    (folder / "empty.txt").touch()
    (folder / "bytes.txt").write_bytes(b"\xff")
    (folder / "é.txt").write_text("e\né\n")
    with jax.set_mesh(mesh(4, 2)):
        for name, vocab, n_kv in ("bytes", 264, 8), ("nameless", 128, 8), ("two_heads", 128, 2):
            model = f"model.vocab={vocab}", f"model.n_kv={n_kv}"
            config = small_config(f"flat_tokens.filespec={name}.zarr", *model)
            settings = train.state_type(config), train.dimensions(config), config.to_yaml(), 4
            checkpoints = Checkpoints(str(folder / name), *settings, say=lambda _: None)
            weights = placed(train.Weights, random_weights(config))
            step = jax.device_put(jnp.uint32(3), make_shardings(u32[""]))
            state = train.State(step, weights, weights, weights)
            checkpoints.save(3, state)
            checkpoints.wait()
    return folder


def call(capsys, monkeypatch, folder, *arguments):
    """Runs the tool. Returns what it printed to stdout and stderr, and its exit message."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    message = ""
    try:
        generate.main()
    except SystemExit as stop:
        message = str(stop.code)
    return *capsys.readouterr(), message


def test_a_text_from_a_checkpoint(run, capsys, monkeypatch):
    greedy = "bytes", "--prompt=☃", "--tokens=9", "--temperature=0"
    out, error, message = call(capsys, monkeypatch, run, *greedy)
    assert out.startswith("☃") and out.endswith("\n") and not message
    assert "bytes/00000003." in error and "9 tokens: " in error
    assert "note: " not in error
    several = "--samples=3", "--mesh=t=2,d=4,r=2", "--prompt=naïve"
    out, error, _ = call(capsys, monkeypatch, run, "bytes", *several)
    assert re.findall("--- sample .", out) == [f"--- sample {i}" for i in (1, 2, 3)]
    note = "note: texts have up to 134 tokens; a token attends to at most 12, as many as a row had"
    assert note in error


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompts_in_a_file(name, run, tmp_path, capsys, monkeypatch):
    """Three prompts with two samples each, in batches of four. A row goes on with its prompt's last
    byte and its number. stderr is a terminal."""
    prompts, asked = ["ab", "é\u2028", "an"], []
    lines = map(json.dumps, prompts) if name.endswith("jsonl") else prompts
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))

    def echo(_, prompts, numbers, tokens, rows, *others):
        asked.append((numbers, rows))
        new = [[prompt[-1], 49 + n] for prompt, n in zip(prompts, numbers, strict=True)]
        new += [[1, 1]] * (rows - len(new))
        return list(np.array(new).T[:, :, None])

    monkeypatch.setattr(generate, "generate", echo)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = f"--prompts={tmp_path / name}", "--samples=2", "--batch=4", "--stop=0"
    out, error, message = call(capsys, monkeypatch, run, "bytes", *options)
    assert not message
    assert asked == [([0, 1, 0, 1], 4), ([0, 1], 4)]
    assert out == "".join(
        f"--- prompt {i}, sample {j}\n{prompt}{last}{number}\n"
        for i, (prompt, last) in enumerate(
            zip(prompts, "b\N{REPLACEMENT CHARACTER}n", strict=True), 1
        )
        for j, number in ((1, ""), (2, "1"))
    )
    assert "texts 1-4 of 6" in error and "texts 5-6 of 6" in error


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("one, more", ["wo", ", m"], ["two o", "n", "e"]),
        ("aab", ["ab"], ["two ", "a"]),
        ("aac", ["ab"], ["two ", "a", "ac"]),
        ("one ☃!", [" ☃!"], ["two o", "n", "e"]),
        ("ab", ["a", "b", "o a"], ["two "]),
    ],
)
def test_a_text_ends_before_a_stop_string(text, stops, pieces, run, capsys, monkeypatch):
    """Text that may still become a stop string is held back. The prompt may have one."""
    new = [np.array([[i]]) for i in generate.Text("bytes_utf8").encode(text)]
    monkeypatch.setattr(generate, "generate", lambda *_: new)
    options = "--prompt=two ", *(f"--stop={stop}" for stop in stops)
    printed = shown(capsys, monkeypatch, run, *options)
    assert printed == [*pieces, ""]


def test_a_conversation(run, tmp_path, capsys, monkeypatch):
    """Each turn has the whole conversation before it, and prints the answer alone."""
    name = save_chat_tokenizer(tmp_path)
    codec, asked = generate.Text(name), []
    answers = iter([[*codec.encode("Snow. "), END_TURN, 70], [*codec.encode("More"), END, 70]])

    def answer(_, prompts, *others):
        asked.append(codec.decode(prompts[0][1:]))
        return [np.array([[i]]) for i in next(answers)]

    monkeypatch.setattr(generate, "generate", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What?\nAnd then?\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    options = "--chat", f"--tokenizer={name}"
    out, error, message = call(capsys, monkeypatch, run, "bytes", *options)
    assert out == "Snow. \nMore\n" and not message
    assert error.count("> ") == 3
    first = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    second = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [first, f"{first}Snow. <|im_end|>\n{second}"]
    answers = iter([codec.encode("Snow")] * 2)
    several = call(capsys, monkeypatch, run, "bytes", "--prompt=What?", *options)
    assert several[0] == "Snow\n" and asked[2] == first


def shown(capsys, monkeypatch, folder, *options):
    """The pieces in which the tool prints a text to stdout."""
    pieces = []

    def show(piece, file=sys.stdout, **_):
        if file is sys.stdout:
            pieces.append(piece)

    monkeypatch.setattr(generate, "print", show, raising=False)
    assert not call(capsys, monkeypatch, folder, "bytes", *options)[2]
    return pieces


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_text_comes_as_soon_as_it_is_certain(kind, run, tmp_path, capsys, monkeypatch):
    """An incomplete character is held back, and a word comes with the space before it."""
    if kind == "bytes":
        name, text, waiting = "bytes_utf8", "the snow ☃ 😀, man", 5
    else:
        name, text, waiting = save_tokenizer(tmp_path), "the snow man", 0
    ids = generate.Text(name).encode(text)
    prompt = generate.Text(name).encode("the")
    new = [np.array([[i]]) for i in ids[len(prompt) :]]
    monkeypatch.setattr(generate, "generate", lambda *_: new)
    pieces = shown(capsys, monkeypatch, run, "--prompt=the", f"--tokenizer={name}")
    assert "".join(pieces) == text
    assert pieces.pop() == "" and len(pieces) == len(new) - waiting


def test_it_ends_where_the_model_ends_the_text(run, capsys, monkeypatch):
    ids = iter([[[65], [66]], [[67], [5]], [[5], [66]]])
    monkeypatch.setattr(generate, "generate", lambda *_: map(np.array, ids))
    text = generate.Text("bytes_utf8")
    text.ends = {5}
    monkeypatch.setattr(generate, "Text", lambda *_: text)
    out, _, _ = call(capsys, monkeypatch, run, "bytes", "--samples=2", "--tokens=4")
    assert out == "--- sample 1\n@B\n--- sample 2\nA\n"


def test_a_loss_from_a_checkpoint(run, capsys, monkeypatch):
    out, _, message = call(capsys, monkeypatch, run, "bytes", "--evaluate=bytes.zarr")
    assert out.startswith("bytes.zarr/validation, 222 tokens: ") and "bits per byte\n" in out
    short = "--evaluate=nameless.zarr", "--batches=1"
    out, _, message = call(capsys, monkeypatch, run, "bytes", *short)
    assert "bits per byte: name a --tokenizer" in out and not message


WRONG = {
    "a chat without a template": ["bytes", "--chat"],
    "a template that refuses": ["bytes", "--chat", "--prompt=x", "--tokenizer=refusing"],
    "special tokens of bytes": ["bytes", "--special-tokens"],
    "a damaged generation_config.json": ["bytes", "--tokenizer=damaged_settings"],
    "several answers in a conversation": ["bytes", "--chat", "--tokenizer=chat", "--samples=2"],
    "prompts that aren't JSON strings": ["bytes", "--prompts=wrong.jsonl"],
    "prompts that aren't text": ["bytes", "--prompts=bytes.txt"],
    "no prompts": ["bytes", "--prompts=empty.txt"],
    "a file of prompts that isn't there": ["bytes", "--prompts=none.txt"],
    "a line of another tokenizer": ["nameless", "--tokenizer=bytes_utf8", "--prompts=é.txt"],
    "no checkpoint": ["none"],
    "a damaged chunk": ["damaged"],
    "no tokenizer": ["nameless"],
    "a prompt of another tokenizer": ["nameless", "--tokenizer=bytes_utf8", "--prompt=é"],
    "a mesh that doesn't divide": ["bytes", "--mesh=t=3"],
    "a mesh that doesn't divide the heads": ["two_heads", "--mesh=t=4"],
    "no dataset": ["bytes", "--evaluate=none.zarr"],
    "a dataset of other ids": ["bytes", "--evaluate=other.zarr"],
    "a stride beyond a row": ["bytes", "--evaluate=bytes.zarr", "--length=5", "--stride=6"],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_says_of_a_mistake(case, run, tmp_path, capsys, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    if case == "a damaged chunk":
        shutil.copytree(run / "bytes", tmp_path / "run/damaged")
        (chunk,) = (tmp_path / "run/damaged").glob("*/weights/embed/c/0/0")
        chunk.write_bytes(chunk.read_bytes()[:-5])
    out, error, message = call(capsys, monkeypatch, tmp_path / "run", *WRONG[case])
    assert not out and "Traceback" not in error and message.startswith("error: ")
    golden.check("generate.txt", case, f"{error}{message}")


def test_a_remote_dataset_that_only_a_checkpoint_names_is_not_opened(
    run, tmp_path, capsys, monkeypatch
):
    shutil.copytree(run / "bytes", tmp_path / "remote")
    (path,) = (tmp_path / "remote").glob("0*")
    attributes = zarr.open_group(path).attrs
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/tokens.zarr"
        about = attributes.asdict()
        text = about["config"].replace("filespec: bytes.zarr", f"filespec: {url}")
        assert url in text
        about["config"] = text
        attributes.update(about | {"checksum": _checksum(about)})
        _, _, message = call(capsys, monkeypatch, tmp_path, "remote")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert message.startswith("error: the run's dataset isn't on this machine or doesn't name its")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--mesh=2x2", "invalid mesh value: '2x2'"),
        ("--mesh=d=0", "mesh.d=0: it must be at least 1"),
        ("--mesh=d=3,r=2", "mesh.r=2: it must divide mesh.d=3"),
        ("--mesh=c=2", "no axis c: choose from d, t, r"),
        ("--tokens=0", "0 is not between 1 and 1000000"),
        ("--top-p=1.5", "1.5 is not between 0 and 1"),
        ("--prompts=x --prompt=y", "not allowed with argument"),
        ("--stop=", "it must not be empty"),
        ("--evaluate=x --stop=y", "--stop is for texts, not for --evaluate"),
        ("--evaluate=x --prompt=", "--prompt is for texts, not for --evaluate"),
        ("--stride=3", "--stride needs --evaluate"),
        ("--temperature=nan", "nan is not between 0 and inf"),
    ],
)
def test_options_that_make_no_sense(option, problem, run, capsys, monkeypatch):
    _, error, message = call(capsys, monkeypatch, run, "bytes", *option.split())
    assert message == "2" and problem in error
