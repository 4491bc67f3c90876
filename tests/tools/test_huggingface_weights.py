"""Tests conversion against the Llama papers in plain numpy with Hugging Face's names, and against
`transformers` itself if PyTorch is installed."""

import copy
import dataclasses
import json
import math
import os
import re
import shutil
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers
import zarr
from omegaconf import OmegaConf
from tokenizers.processors import TemplateProcessing

import train
from data.loader import TokenBatch
from runtime import checkpoint
from runtime.checkpoint import CheckpointError, Checkpoints, named
from runtime.config import load
from shardlib.errors import UserError
from shardlib.types import computing_in, f32, make_shardings, typed_shard_map
from tests import golden, helpers
from tests.data.test_tokenizer import trained_tokenizer
from tests.files import arrays, edit_config, save_state
from tests.helpers import assert_close, mesh, slow_but_for, small_config
from tools import huggingface_weights as tool
from tools.generate import model as models

LLAMA_2 = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "vocab_size": 48, "rope_theta": 10000.0, "bos_token_id": 1,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA_3 = LLAMA_2 | {
    "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 500.0, "bos_token_id": 40,
    "head_dim": 16,  # RoPE frequencies of all three kinds: kept, scaled, interpolated
    "rope_scaling": SCALED,
}  # fmt: skip
MISTRAL = LLAMA_2 | {"model_type": "mistral", "num_key_value_heads": 2, "rope_theta": 4000000000.5}
MISTRAL |= {"sliding_window": 9}
SMOLLM_2 = LLAMA_2 | {"num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": 0}
QWEN_2 = LLAMA_3 | {"model_type": "qwen2", "rope_scaling": None, "bos_token_id": 3}
del QWEN_2["head_dim"]
QWEN_3 = LLAMA_3 | {"model_type": "qwen3", "rope_scaling": None, "tie_word_embeddings": True}
QWEN_3 |= {"bos_token_id": 0}
# Between texts it has a token that ends them, and none that starts them.
OLMO_2 = LLAMA_2 | {"model_type": "olmo2", "num_key_value_heads": 2, "eos_token_id": 7}
OLMO_2 |= {"bos_token_id": None}
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
OLMOE = OLMO_2 | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3}
OLMOE |= {"norm_topk_prob": False, "clip_qkv": None}
QWEN_3_MOE = QWEN_3 | {
    "model_type": "qwen3_moe", "tie_word_embeddings": False, "moe_intermediate_size": 24,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
del QWEN_3_MOE["intermediate_size"]  # of layers without experts


def experts_in(config):
    return config.get("num_local_experts") or config.get("num_experts") or 0


FAMILIES = {
    "Llama 3.1": LLAMA_3, "Mistral": MISTRAL, "Qwen2": QWEN_2, "Qwen3": QWEN_3, "OLMo 2": OLMO_2,
    "Mixtral": MIXTRAL, "OLMoE": OLMOE, "Qwen3 with experts": QWEN_3_MOE,
}  # fmt: skip
WITH_EXPERTS = {name: config for name, config in FAMILIES.items() if experts_in(config)}


def start_of(config):
    return config["eos_token_id"] if config["bos_token_id"] is None else config["bos_token_id"]


def block_of(config, layer):
    """The name of a layer's MLP or mixture, and those of a gate, an up and a down in it."""
    if config["model_type"] == "mixtral":
        return f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    return f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")


def random_tensors(config, dtype=np.float32):
    """Random tensors for a config with all sizes, with gains far from 1 and no small weights."""
    rng, tensors = np.random.default_rng(0), {}
    M, F = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    D = config.get("head_dim", M // heads)

    def draw(name, *shape):
        name, _, bias = name.partition(" ")
        values = rng.normal(size=shape) * 1.5 / math.sqrt(shape[-1]) + (len(shape) == 1)
        tensors[f"{name}.{bias or 'weight'}"] = values.astype(dtype)

    kind = config["model_type"]
    draw("model.embed_tokens", config["vocab_size"], M)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        draw(f"{layer}.{'post_feedforward' if kind == 'olmo2' else 'input'}_layernorm", M)
        for name, size in {"q": heads * D, "k": keys * D, "v": keys * D}.items():
            if name != "v" and kind in ("olmo2", "olmoe", "qwen3", "qwen3_moe"):
                draw(f"{layer}.self_attn.{name}_norm", size if "olmo" in kind else D)
            if kind == "qwen2":
                draw(f"{layer}.self_attn.{name}_proj bias", size)
            draw(f"{layer}.self_attn.{name}_proj", size, M)
        draw(f"{layer}.self_attn.o_proj", M, heads * D)
        draw(f"{layer}.post_attention_layernorm", M)
        block, names = block_of(config, layer)
        if count := experts_in(config):
            draw(f"{block}.gate", count, M)
        for one in [f"{block}.experts.{e}" for e in range(count)] or [block]:
            for name, shape in zip(names, [(F, M), (F, M), (M, F)], strict=True):
                draw(f"{one}.{name}", *shape)
    draw("model.norm", M)
    if not config.get("tie_word_embeddings"):
        draw("lm_head", config["vocab_size"], M)
    return tensors


WEIGHTS = "model.safetensors"


def write_folder(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def tensors_in(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def bits(tensors):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


# --- The papers -----------------------------------------------------------------------------------


def wavelengths(config, D):
    """The wavelength in tokens of each RoPE pair: https://arxiv.org/abs/2104.09864, section 3.4.2.
    Llama 3.1's scaling: a wavelength that fits into the original context at most low_freq_factor
    times becomes `factor` times longer, and one that fits at least high_freq_factor times stays.
    Between the two, frequencies are interpolated."""
    waves = []
    for pair in range(D // 2):
        wave = 2 * math.pi * config["rope_theta"] ** (2 * pair / D)
        if scaling := config.get("rope_scaling"):
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            times = scaling["original_max_position_embeddings"] / wave
            if times < low:
                wave *= scaling["factor"]
            elif times < high:
                share = (times - low) / (high - low)
                wave = 1 / (share / wave + (1 - share) / (wave * scaling["factor"]))
        waves.append(wave)
    return np.array(waves)


def paper_logits(folder, ids):
    """The float64[B, L, V] logits of ids[B, L] with causal attention. Touvron et al. 2023, section
    2.2 of https://arxiv.org/abs/2302.13971 and of https://arxiv.org/abs/2307.09288. Windows: Jiang
    et al. 2023, https://arxiv.org/abs/2310.06825; biases: Qwen2, https://arxiv.org/abs/2407.10671,
    section 2.2; norms of heads: Qwen3, https://arxiv.org/abs/2505.09388, section 2; norms after:
    OLMo 2, https://arxiv.org/abs/2501.00656, section 3.2. Experts: Mixtral,
    https://arxiv.org/abs/2401.04088, section 2.1, which takes the softmax over the chosen ones; and
    OLMoE, https://arxiv.org/abs/2409.02060, section 2, over all."""
    config = config_in(folder)
    w = {name: x.astype(np.float64) for name, x in tensors_in(folder).items()}
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    D, length = config.get("head_dim") or config["hidden_size"] // heads, ids.shape[1]
    turn = np.exp(2j * np.pi * np.arange(length)[:, None] / wavelengths(config, D))

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * gain

    def rotated(x):
        pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def swiglu(x, gate, up, down):
        gate = x @ gate.T
        return gate / (1 + np.exp(-gate)) * (x @ up.T) @ down.T

    def mixture(x, block, names):
        """The weighted sum of what the experts of a token return, one token at a time."""
        result, scores = np.zeros_like(x), x @ layer[f"{block}.gate"].T
        chosen_alone = config["model_type"] == "mixtral" or config["norm_topk_prob"]
        for at in np.ndindex(x.shape[:2]):
            chosen = np.argsort(-scores[at])[: config["num_experts_per_tok"]]
            parts = softmax(scores[at][chosen]) if chosen_alone else softmax(scores[at])[chosen]
            for expert, part in zip(chosen, parts, strict=True):
                matrices = (layer[f"{block}.experts.{expert}.{name}"] for name in names)
                result[at] += part * swiglu(x[at], *matrices)
        return result

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in w.items()
        }
        olmo = "post_feedforward_layernorm" in layer
        of_all = layer.get("self_attn.q_norm", np.ones(D)).size > D
        h = x if olmo else norm(x, layer["input_layernorm"])
        queries, all_keys, values = (
            h @ layer[f"self_attn.{name}_proj"].T + layer.get(f"self_attn.{name}_proj.bias", 0)
            for name in "qkv"
        )
        if of_all:
            queries = norm(queries, layer["self_attn.q_norm"])
            all_keys = norm(all_keys, layer["self_attn.k_norm"])
        age = np.arange(length)[:, None] - np.arange(length)
        sees = (age >= 0) & (age < (config.get("sliding_window") or length))
        mixed = []
        for head in range(heads):
            query = slice(head * D, (head + 1) * D)
            shared = head // (heads // keys)
            shared = slice(shared * D, (shared + 1) * D)
            q, k = queries[..., query], all_keys[..., shared]
            if "self_attn.q_norm" in layer and not of_all:
                q, k = norm(q, layer["self_attn.q_norm"]), norm(k, layer["self_attn.k_norm"])
            scores = rotated(q) @ rotated(k).swapaxes(1, 2) / math.sqrt(D)
            scores = np.where(sees, scores, -np.inf)
            mixed.append(softmax(scores) @ values[..., shared])
        y = np.concatenate(mixed, -1) @ layer["self_attn.o_proj"].T
        x = x + (norm(y, layer["post_attention_layernorm"]) if olmo else y)
        h = x if olmo else norm(x, layer["post_attention_layernorm"])
        block, names = block_of(config, f"model.layers.{i}")
        block = block.removeprefix(f"model.layers.{i}.")
        if f"{block}.gate" in layer:
            y = mixture(h, block, names)
        else:
            y = swiglu(h, *(layer[f"{block}.{name}"] for name in names))
        x = x + (norm(y, layer["post_feedforward_layernorm"]) if olmo else y)
    unembed = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return norm(x, w["model.norm.weight"]) @ w[f"{unembed}.weight"].T


# --- train.py -------------------------------------------------------------------------------------


@pytest.fixture
def run(train_here):
    """A function that runs the program and returns what it printed and its exit message."""
    return lambda *given: train_here(*map(str, given), program=tool.main)


def train_logits(checkpoints, targets, dtype="f32"):
    """The newest checkpoint's f32[B, L, V] logits by train.py's model, for targets[B, L]."""
    with jax.set_mesh(mesh(2, 2)), computing_in(dtype):
        source, config = models.open_checkpoint(str(checkpoints))
        model = config.model

        @jax.jit
        @typed_shard_map
        def logits(weights: train.Stored, batch: TokenBatch) -> f32["B/d L/c V/t"]:
            replica = train.gather_replica(train.cast(weights))
            x, _ = train.forward(replica, batch, model)
            return train.unembed(train.output_weights(replica), x, model)

        starts = np.tile(np.arange(targets.shape[1]) == 0, (len(targets), 1))
        batch = helpers.token_batch(TokenBatch, targets, starts, model.start_token)
        batch = jax.tree.map(jax.device_put, batch, make_shardings(TokenBatch))
        return np.asarray(logits(source.restore("weights"), batch))


def draw_targets(config):
    return np.random.default_rng(1).integers(0, config["vocab_size"], (4, 24))


def inputs(targets, start):
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)


DTYPES = {"Llama 3.1": ml_dtypes.bfloat16, "Mistral": np.float16}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_import_is_the_papers_and_exported_to_the_same_bits(family, tmp_path, run, monkeypatch):
    config, dtype = FAMILIES[family], DTYPES.get(family, np.float32)
    tensors = random_tensors(config, dtype)
    folder = write_folder(tmp_path / "hf", config, tensors)
    out, message = run("import", folder, tmp_path / "ours")
    assert not message
    golden.check("huggingface_weights.txt", family, out.replace(str(tmp_path), "..."))
    targets = draw_targets(config)
    actual = train_logits(tmp_path / "ours", targets)
    wanted = paper_logits(folder, inputs(targets, start_of(config)))
    assert_close(actual, wanted, 1e-5)

    name = "bfloat16" if dtype == ml_dtypes.bfloat16 else "float32"
    wanted = {key: value.astype(name) for key, value in tensors.items()}
    limit = max(value.nbytes for value in wanted.values())
    monkeypatch.setattr(tool, "SHARD_BYTES", limit)
    out = tmp_path / "again"
    assert not run("export", tmp_path / "ours", out, f"--dtype={name}")[1]
    assert bits(tensors_in(out)) == bits(wanted)
    same = config.keys() - {"bos_token_id", "eos_token_id"}
    assert all(config_in(out)[key] == config[key] for key in same)
    assert config_in(out)["bos_token_id"] == start_of(config)
    assert config_in(out)["dtype"] == config_in(out)["torch_dtype"] == name
    # No file is too large, and the index lists them all.
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    for file in files:
        stored = safetensors.numpy.load_file(file)
        assert sum(value.nbytes for value in stored.values()) <= limit
        assert all(index["weight_map"].pop(key) == file.name for key in stored)
    assert not index["weight_map"]


def save_trained(path, *overrides):
    """Saves a whole state at step 7. A chunk of its arrays holds all layers of a device's shard,
    d_head isn't d_model over the number of heads, and RoPE is scaled."""
    config = small_config(
        "model.d_model=48", "model.n_kv=4", "model.layers=5", "model.d_head=16",
        "model.rope_max_timescale=500", "model.start_token=9", "model.norm_eps=1e-4",
        "model.rope_scaling={factor: 8, low_frequency_factor: 1, high_frequency_factor: 4, "
        "original_len: 16}", "training.tokens={batch: 8, len: 24}", *overrides,
    )  # fmt: skip
    with jax.set_mesh(mesh(4, 2)):
        save_state(path, config, helpers.random_weights(train, config), 7)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return save_trained(tmp_path_factory.mktemp("trained"))


MIXTURE = "model.d_ff=0", "model.experts={count: 4, per_token: 2, d_ff: 24, bias: false}"


def only(folder):
    """The only checkpoint in a folder."""
    (path,) = folder.glob("0*")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layers", [5, 1])
def test_an_exported_model_is_the_papers_and_is_imported_with_the_same_bits(layers, tmp_path, run):
    """A chunk holds all of five layers, or half of the experts of a single one."""
    trained = save_trained(tmp_path / "trained", *MIXTURE, f"model.layers={layers}")
    folder = tmp_path / "hf"
    out, message = run("export", trained, folder)
    layer = 2 * 48 + 2 * 48 * 8 * 16 + 2 * 48 * 4 * 16 + 4 * (48 + 3 * 48 * 24)
    count = 2 * 48 * 48 + 48 + layers * layer
    assert not message and f"step 7: {4 * count:,} bytes of float32 in " in out
    targets = draw_targets(LLAMA_2)
    actual = train_logits(trained, targets)
    assert_close(actual, paper_logits(folder, inputs(targets, 9)), 1e-5)

    out, message = run("import", folder, tmp_path / "ours")
    kept = arrays(only(tmp_path / "ours"))
    assert kept == {name: arrays(only(trained))[name] for name in kept}
    groups = (zarr.open_group(only(path), mode="r") for path in (trained, tmp_path / "ours"))
    before, after = (OmegaConf.create(group.attrs["config"]) for group in groups)
    assert after.model == before.model == OmegaConf.create(out).model
    assert after.training.tokens.len == before.training.tokens.len
    # With only the names of transformers 4, and with only those of 5.
    config, model = config_in(folder), tool.model_in(folder)
    for lacking in ["rope_parameters"], ["rope_theta", "rope_scaling"]:
        text = json.dumps({key: value for key, value in config.items() if key not in lacking})
        (folder / "config.json").write_text(text)
        assert tool.model_in(folder) == model


def test_old_frequencies_are_read_over_and_an_unembedding_of_its_own_is_not(tmp_path, run):
    """A stored unembedding wins over tie_word_embeddings, as in transformers."""
    tensors = random_tensors(LLAMA_2)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(3)}
    folder = write_folder(tmp_path / "hf", LLAMA_2 | {"tie_word_embeddings": True}, tensors | old)
    assert not run("import", folder, tmp_path / "ours")[1]
    run("export", tmp_path / "ours", tmp_path / "again")
    assert bits(tensors_in(tmp_path / "again")) == bits(tensors)


def test_rows_before_the_scaling_are_those_that_transformers_takes():
    config = LLAMA_3 | {"original_max_position_embeddings": 32}
    model, _ = tool.model_from(copy.deepcopy(config))
    theirs = transformers.LlamaConfig(**copy.deepcopy(config))
    theirs.standardize_rope_params()
    taken = theirs.rope_parameters["original_max_position_embeddings"]
    assert model.rope_scaling.original_len == taken != 16


def test_a_start_token_that_no_config_names_is_told(tmp_path, capsys):
    for name, config, told in ("a", OLMO_2, True), ("b", LLAMA_2, False):
        folder = write_folder(tmp_path / name, config, random_tensors(config))
        tool.import_weights(str(folder), f"{tmp_path}/ours of {name}")
        assert ("documents start with the id 7 in train.py" in capsys.readouterr().err) == told


def test_what_a_config_says_beside_the_model_survives_import_training_and_export(tmp_path, run):
    """Rows of runs are of 24 tokens. Llama 3.1 was trained on rows of 16 before its RoPE was
    scaled, and on rows of 64 after that. A run started from another one's checkpoint."""
    more = {"initializer_range": 0.5, "eos_token_id": [7, 8], "pretraining_tp": 1}
    longest = {"long": 64, "short": 8, "the family's": 2048}
    for name, length in longest.items():
        config = LLAMA_3 | more | {"max_position_embeddings": length}
        if length == 2048:
            del config["max_position_embeddings"]
        folder, ours = tmp_path / name, tmp_path / f"ours of {name}"
        write_folder(folder, config, random_tensors(LLAMA_3))
        assert not run("import", folder, ours)[1]
        for clone in tmp_path / f"run of {name}", tmp_path / f"second of {name}":
            path = clone / only(ours).name
            shutil.copytree(only(ours), path)
            with_config("training:", f"paths: {{clone_from: {ours}}}\ntraining:")(path)
            with_config(f"len: {length}\n", "len: 24\n")(path)
            ours = clone
        assert not run("export", ours, tmp_path / f"{name} again")[1]
        found = config_in(tmp_path / f"{name} again")
        assert found.items() >= more.items()
        assert found["max_position_embeddings"] == max(length, 24)
    shutil.rmtree(tmp_path / "ours of long")
    run("import", tmp_path / "short", tmp_path / "ours of long")  # later than the run
    run("export", tmp_path / "run of long", tmp_path / "alone")
    assert not {*more} <= config_in(tmp_path / "alone").keys(), "another import's"
    path = save_trained(tmp_path / "of its own", "training.tokens.len=8")
    run("export", path, tmp_path / "exported")
    assert config_in(tmp_path / "exported")["max_position_embeddings"] == 16, "before the scaling"


def test_a_run_starts_from_an_imported_model(tmp_path, run):
    config = QWEN_3_MOE | {"vocab_size": 128}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    out, _ = run("import", folder, tmp_path / "ours")
    model = OmegaConf.to_container(OmegaConf.create(out).model)
    start = helpers.compose_config(
        "local_test_synthetic",
        *(f"model.{key}={json.dumps(value)}".replace('"', "") for key, value in model.items()),
        f"paths.clone_from={tmp_path}/ours",
        "paths.model_name=clone",
    )
    settings = train.state_type(start), train.dimensions(start), start.to_yaml(), 4
    with jax.set_mesh(mesh(2, 2)):
        with pytest.raises(CheckpointError, match="/ours has an imported model"):
            Checkpoints(f"{tmp_path}/ours/checkpoints", *settings).starting_point("", True)
        none = Checkpoints(str(tmp_path / "none"), *settings)
        state = helpers.starting_state(start, none)
        actual = {name: value.tobytes() for name, value in named(jax.device_get(state)).items()}
        wanted = arrays(only(tmp_path / "ours"))
        assert {name: actual.pop(name) for name in wanted} == wanted
        assert not any(map(any, actual.values())), "moments, and the step"
        start.paths.clone_weights_only = False
        case, folder = "a clone of a whole state", (str(tmp_path), "...")
        with golden.raises("huggingface_weights.txt", case, CheckpointError, folder):
            helpers.starting_state(start, none)


# --- Mistakes, and work that is cut off -----------------------------------------------------------


def config_with(**changes):
    def change(folder):
        (folder / "config.json").write_text(json.dumps(config_in(folder) | changes))

    return change


def tensors_with(change):
    def changed(folder):
        tensors = tensors_in(folder)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / WEIGHTS)

    return changed


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
IMPORTS = {
    "another model_type": config_with(model_type="gemma2"),
    "biases of attention": config_with(attention_bias=True),
    "linear RoPE scaling": config_with(rope_scaling={"type": "linear", "factor": 2.0}),
    "a RoPE scaling without its factor": config_with(rope_scaling={"rope_type": "llama3"}),
    "partial RoPE": config_with(partial_rotary_factor=0.5),
    "a base of RoPE below 1": config_with(rope_theta=0.5),
    "two bases of RoPE": config_with(rope_parameters={"rope_theta": 500.0}),
    "attention in both directions": config_with(is_causal=False),
    "code of its own": config_with(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"}),
    "an adapter": lambda folder: (folder / "adapter_config.json").touch(),
    "no start token": config_with(bos_token_id=None, eos_token_id=None),
    "heads that don't share evenly": config_with(num_key_value_heads=3),
    "a quantized model": config_with(quantization_config={"quant_method": "fp8"}),
    "fewer layers": config_with(num_hidden_layers=2),
    "a missing tensor": tensors_with(lambda tensors: tensors.pop(NORM)),
    "a wrong shape": tensors_with(lambda t: t.update({GATE: np.ones((32, 40), np.float32)})),
    "a wrong dtype": tensors_with(lambda t: t.update({GATE: np.ones((40, 32), np.int8)})),
    "the same tensors twice": lambda x: shutil.copy(x / WEIGHTS, x / "model-2.safetensors"),
    "weights of PyTorch's alone": lambda x: (x / WEIGHTS).rename(x / "pytorch_model.bin"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "weights cut short": lambda folder: os.truncate(folder / WEIGHTS, 50_000),
    "no folder": shutil.rmtree,
}


def check_message(case, out, message):
    """Compares the message without the texts of other packages."""
    assert not out and message.startswith("error: ") and "\n" not in message
    text = re.sub(r"(can't be read|Missing required keys).*", r"\1: ...", message)
    golden.check("huggingface_weights.txt", case, text)


CASES = {case: (LLAMA_2, change) for case, change in IMPORTS.items()} | {
    "a layer without a window": (
        MISTRAL,
        config_with(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "clipped queries and keys": (OLMOE, config_with(clip_qkv=8.0)),
    "every other layer without experts": (QWEN_3_MOE, config_with(decoder_sparse_step=2)),
    "a layer without experts": (QWEN_3_MOE, config_with(mlp_only_layers=[1])),
    "more experts of a token than there are": (MIXTRAL, config_with(num_experts_per_tok=7)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_such_model_is_refused(case, here, run):
    config, change = CASES[case]
    change(write_folder(here / "hf", config, random_tensors(config)))
    check_message(case, *run("import", "hf", "ours"))
    assert not (here / "ours").exists()


WRONG = ["x", None, math.inf, [], {"a": 1}, -1, 10**30, 2.5, math.nan]
KEYS = [*LLAMA_3, "hidden_act", "attention_bias", "tie_word_embeddings", "rope_parameters"]


@pytest.mark.parametrize("wrong", slow_but_for(WRONG[:3], WRONG), ids=repr)
def test_a_wrong_value_of_any_entry_of_a_config_gets_one_message(wrong, tmp_path):
    changes = [LLAMA_3 | {key: wrong} for key in KEYS]
    for config in MIXTRAL, OLMOE, QWEN_3_MOE:
        changes += [config | {key: wrong} for key in config.keys() - LLAMA_2.keys()]
    changes += [LLAMA_3 | {"rope_scaling": SCALED | {key: wrong}} for key in SCALED]
    refused = 0
    for config in changes:
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            model, _ = tool.model_in(tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            load(type(model), model.values())  # raises for a wrong type
    assert refused > len(changes) / 2


def with_config(old, new):
    return lambda path: edit_config(path, lambda text: text.replace(old, new))


EXPORTS = {
    "a missing chunk": (lambda path: (path / "weights/embed/c/0/0").unlink(), "hf"),
    "a checkpoint of an older model": (with_config("norm_eps", "norm_epsilon"), "hf"),
    "a checkpoint of other arrays": (with_config("d_ff: 40", "d_ff: 80"), "hf"),
    "a bucket to write to": (lambda path: None, "gs://bucket/hf"),
    "a folder that isn't empty": (lambda path: None, "."),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_what_can_not_be_exported_is_refused(case, trained, here, run):
    path = here / "ours" / only(trained).name
    shutil.copytree(only(trained), path)
    change, output = EXPORTS[case]
    change(path)
    check_message(case, *run("export", "ours", output))
    assert not (here / "hf/config.json").exists()


VALUES = '    w_v: compute["M'
EDITS = {
    "a weight that no Llama has": (VALUES, f'    scale: compute["M/t/c/s", gain]\n{VALUES}'),
    "a weight that is no more": ('    final_norm: compute["M/t/c/s", gain]\n', ""),
    "a weight of other dimensions": (f"{VALUES}/c/s K", f"{VALUES}/c/s Q K"),
    "a weight of another dtype": ("array_type(f32, over_r", "array_type(compute, over_r"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_model_that_llamas_files_can_not_say_is_refused(case, tmp_path, monkeypatch, run):
    module = helpers.edited("train.py", EDITS[case])
    monkeypatch.setattr(tool, "train", module)
    write_folder(tmp_path / "llama", LLAMA_2, random_tensors(LLAMA_2))
    check_message(case, *run("import", tmp_path / "llama", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_width_that_no_llama_has_is_exported_as_a_mistral(tmp_path, run):
    path = save_trained(tmp_path / "wide", "model.d_model=40", "model.n_q_per_kv=4")
    assert not run("export", path, tmp_path / "hf")[1]
    config = config_in(tmp_path / "hf")
    assert config["architectures"] == ["MistralForCausalLM"] and config["sliding_window"] is None
    assert tool.model_in(tmp_path / "hf")[0] == tool.model_of(checkpoint.newest(str(path)))[0]


MODELS = {
    "a width that no OLMoE has": [*MIXTURE, "model.qk_norm=all"],
    "a bias of the router": [*MIXTURE, "model.experts.bias=true"],
    "an expert that all tokens take": [*MIXTURE, "model.d_ff=40"],
    "scores that Mixtral hasn't": [*MIXTURE, "+model.experts.renormalize=false"],
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_no_family_has_is_refused(case, trained, tmp_path, run, monkeypatch):
    monkeypatch.setattr(tool, "model_of", lambda _: (small_config(*MODELS[case]).model, 8))
    check_message(case, *run("export", trained, tmp_path / "hf"))


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def test_an_import_that_is_cut_off_is_no_checkpoint(tmp_path, run, monkeypatch):
    """The import fails at its last write. Its config is written later, and replaces no file."""
    folder, config = write_folder(tmp_path / "hf", LLAMA_2, random_tensors(LLAMA_2)), tmp_path / "x"
    monkeypatch.setattr(checkpoint.Checkpoint, "record", no_space)
    out, message = run("import", folder, tmp_path / "ours", f"--config={config}")
    assert not out and "No space left on device" in message and "\n" not in message
    assert not config.exists()
    config.write_text("mine")
    _, message = run("import", folder, tmp_path / "other", f"--config={config}")
    assert message == f"error: {config} exists; choose another --config"
    _, message = run("import", folder, tmp_path / "new", f"--config={tmp_path}/new/mine.yaml")
    assert "/new/mine.yaml is in " in message and not (tmp_path / "new").exists()
    assert config.read_text() == "mine" and not (tmp_path / "other").exists()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        checkpoint.newest(str(tmp_path / "ours"))


@pytest.mark.parametrize("place, name", [(safetensors.numpy, "save_file"), (Path, "replace")])
def test_an_export_that_is_cut_off_is_no_model(place, name, trained, tmp_path, run, monkeypatch):
    """The export fails at a file of weights, or at config.json."""
    monkeypatch.setattr(place, name, no_space)
    out, message = run("export", trained, tmp_path / "hf")
    assert not out and "No space left on device" in message
    assert not (tmp_path / "hf/config.json").exists()


@pytest.mark.slow
def test_an_import_holds_a_tensor_at_a_time_and_an_export_a_file(tmp_path, run, monkeypatch):
    """The model has 202 tensors, each a small part."""
    config = MIXTRAL | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    tensors = random_tensors(config)
    total = sum(value.nbytes for value in tensors.values())
    largest = max(value.nbytes for value in tensors.values())
    monkeypatch.setattr(tool, "SHARD_BYTES", 6 * largest)
    folder = write_folder(tmp_path / "hf", config, tensors)
    del tensors
    for made in tmp_path / "once", tmp_path / "again":  # the first time, modules are imported
        ours, theirs, peaks = made / "ours", made / "theirs", []
        for command in ("import", folder, ours), ("export", ours, theirs):
            tracemalloc.start()
            assert not run(*command)[1]
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[0] < 6 * largest and peaks[1] < 10 * largest < total / 9


# --- transformers ---------------------------------------------------------------------------------


def random_model(torch, config):
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_transformers_saved_and_loads(family, tmp_path, run):
    torch = pytest.importorskip("torch")
    random_model(torch, FAMILIES[family]).save_pretrained(tmp_path / "hf")
    assert not run("import", tmp_path / "hf", tmp_path / "ours")[1]
    assert not run("export", tmp_path / "ours", tmp_path / "again")[1]
    targets = draw_targets(FAMILIES[family])
    wanted = train_logits(tmp_path / "ours", targets)
    for folder in tmp_path / "hf", tmp_path / "again":
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        ids = torch.tensor(inputs(targets, start_of(FAMILIES[family])))
        with torch.no_grad():
            logits = model(ids).logits.numpy()
        assert_close(logits, wanted, 1e-5)
    # In bf16 we are as close to these as transformers is; with experts at most positions, as either
    # may take another expert where two are nearly as good.
    with torch.no_grad():
        theirs = model.bfloat16()(ids).logits.float().numpy()
    ours = train_logits(tmp_path / "ours", targets, "bf16")
    size = np.median if family in WITH_EXPERTS else np.linalg.norm
    ours, theirs = (size(np.linalg.norm(x - logits, axis=-1)) for x in (ours, theirs))
    assert 1e-4 < ours < 1.2 * theirs


@pytest.fixture(scope="module")
def of_words(tmp_path_factory):
    """A folder with checkpoints of models that start texts with 0 and with 1, and a tokenizer that
    puts 1 first."""
    folder = tmp_path_factory.mktemp("of_words")
    special = ["<unk>", "<s>", "</s>", "<|turn|>"]
    inner = trained_tokenizer(["two and two is four"], special, "<s>")
    named = {"eos_token": "</s>", "pad_token": "</s>"}
    opened = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)
    opened.save_pretrained(folder / "words")
    inner.save(str(folder / "words.json"))
    for start in 0, 1:
        save_trained(folder / f"start{start}", "model.vocab=320", f"model.start_token={start}")
    return folder


@pytest.mark.parametrize("name", ["words", "words.json"])
def test_a_tokenizer_goes_with_the_model_whose_texts_it_starts(name, of_words, tmp_path, run):
    umask = os.umask(0o027)
    try:
        tokenizer = f"--tokenizer={of_words / name}"
        assert not run("export", of_words / "start1", tmp_path / "hf", tokenizer)[1]
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o640}
    finally:
        os.umask(umask)
    config = config_in(tmp_path / "hf")
    assert config["bos_token_id"] == 1
    assert config["eos_token_id"] == config["pad_token_id"] == (2 if name == "words" else None)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(path)("two is")["input_ids"]
        for path in (of_words / "words", tmp_path / "hf")
    )
    assert theirs == ours and ours[0] == 1
    out, message = run("export", of_words / "start0", tmp_path / "no", tokenizer)
    assert not out and not [*(tmp_path / "no").iterdir()]
    case = "a tokenizer that starts texts with another id"
    message = re.sub(r"tokenizer /.*/words[^,]*", "...", message)
    golden.check("huggingface_weights.txt", case, message)


def test_an_export_that_opens_another_tokenizer_says_so(of_words, tmp_path, run):
    """transformers opens any tokenizer beside a Qwen2 as Qwen2's, which splits numbers."""
    inner = trained_tokenizer(["3,456 is 456"] * 9, ["<unk>", "<s>", "</s>"], "<s>")
    inner.save(str(tmp_path / "numbers.json"))
    save_trained(tmp_path / "ours", "model.vocab=320", "model.start_token=1", "model.qkv_bias=true")
    for path, opened in (of_words / "start1", ""), (tmp_path / "ours", "Qwen2Tokenizer"):
        folder, tokenizer = tmp_path / f"hf {opened}", f"--tokenizer={tmp_path / 'numbers.json'}"
        out, message = run("export", path, folder, tokenizer)
        warning = f"warning: AutoTokenizer opens {folder} as {opened}, with other ids"
        assert not message and (warning in out) == (opened != "")
        assert "first id" not in out
    added = [("<s>", 1), ("</s>", 2)]
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=added)
    inner.save(str(tmp_path / "numbers.json"))
    out, _ = run("export", of_words / "start1", tmp_path / "ends", tokenizer)
    assert "warning: AutoTokenizer adds </s> to the end of a prompt: take it off" in out
    inner.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    inner.save(str(tmp_path / "numbers.json"))
    out, _ = run("export", of_words / "start1", tmp_path / "bare", tokenizer)
    assert "warning: AutoTokenizer doesn't begin a prompt with 1: make it the first id" in out


def test_an_imported_model_keeps_its_family_and_its_chat_templates(of_words, tmp_path, run):
    config = MISTRAL | {"sliding_window": None, "vocab_size": 320}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    shutil.copytree(of_words / "words", folder, dirs_exist_ok=True)
    template = "additional_chat_templates/tools.jinja"
    (folder / template).parent.mkdir()
    (folder / template).write_text("{{ x }}")
    assert not run("import", folder, tmp_path / "ours")[1]
    assert not run("export", tmp_path / "ours", tmp_path / "again")[1]
    assert config_in(tmp_path / "again")["model_type"] == "mistral"
    assert (tmp_path / "again" / template).read_text() == "{{ x }}"


def test_tokens_that_a_runs_dataset_adds_are_exported(of_words, tmp_path, run, monkeypatch):
    config = MISTRAL | {"sliding_window": None, "vocab_size": 320}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    shutil.copytree(of_words / "words", folder, dirs_exist_ok=True)
    assert not run("import", folder, tmp_path / "ours")[1]
    more = transformers.PreTrainedTokenizerFast.from_pretrained(of_words / "words")
    more.add_special_tokens({"eos_token": "<|im_end|>"})
    more.save_pretrained(tmp_path / "more")
    monkeypatch.setattr(
        tool, "tokenizer_of_model", lambda _: tool.TokenizerId(str(tmp_path / "more"))
    )
    assert not run("export", tmp_path / "ours", tmp_path / "again")[1]
    assert config_in(tmp_path / "again")["eos_token_id"] == more.eos_token_id
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert opened.convert_tokens_to_ids("<|im_end|>") == more.eos_token_id


def test_a_model_with_another_rope_than_its_import_is_exported():
    """An older config.json has the RoPE's settings in other places than a newer one."""
    old = SMOLLM_2 | {"rope_theta": 1e4, "layer_types": ["full_attention"] * 3}
    model, length = tool.model_from(old)
    longer = dataclasses.replace(model, rope_max_timescale=500_000)
    assert tool.model_from(tool.config_of(longer, length, old))[0] == longer


def test_all_ids_that_end_a_text_are_exported(of_words, tmp_path, run):
    shutil.copytree(of_words / "words", tmp_path / "words")
    (tmp_path / "words/generation_config.json").write_text('{"eos_token_id": [3, 2], "top_k": 9}')
    tokenizer = f"--tokenizer={tmp_path / 'words'}"
    assert not run("export", of_words / "start1", tmp_path / "hf", tokenizer)[1]
    assert config_in(tmp_path / "hf")["eos_token_id"] == [2, 3]
    assert not (tmp_path / "hf/generation_config.json").exists(), "another model's sampling"


def test_a_model_of_bytes_is_exported_without_a_tokenizer(tmp_path, run, monkeypatch):
    path = save_trained(tmp_path / "bytes", "model.vocab=320", "model.start_token=0")
    monkeypatch.setattr(tool, "tokenizer_of_model", lambda _: tool.TokenizerId("bytes_utf8"))
    for number, more in enumerate([[], ["--tokenizer=bytes_utf8"]]):
        out, message = run("export", path, tmp_path / f"hf{number}", *more)
        assert not message and "ids are bytes plus 1, a text starts with the id 0" in out
        assert "--tokenizer" not in out


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_named(bad, tmp_path, capsys):
    """On import, on export, and where rounding makes them."""
    tensors = random_tensors(LLAMA_2)
    tensors["model.norm.weight"][3] = bad
    tensors["lm_head.weight"][5, 2] = 3.4e38  # infinite in bf16
    tool.import_weights(str(write_folder(tmp_path / "hf", LLAMA_2, tensors)), f"{tmp_path}/ours")
    warning = "warning: {} has NaN or infinite values\n".format
    error = capsys.readouterr().err
    assert warning("model.norm.weight") in error and error.count("warning") == 1
    for dtype in "float32", "bfloat16":
        tool.export_weights(f"{tmp_path}/ours", f"{tmp_path}/{dtype}", dtype)
        error = capsys.readouterr().err
        assert warning("model.norm.weight") in error
        assert (warning("lm_head.weight") in error) == (dtype == "bfloat16")
