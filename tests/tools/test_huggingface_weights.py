"""Against the Llama papers in plain numpy, by Hugging Face's names, and `transformers` itself where
PyTorch is there."""

import itertools
import json
import math
import pathlib
import re
import shutil
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import zarr
from omegaconf import OmegaConf

import train
from data.loader import TokenBatch
from runtime import checkpoint
from runtime.checkpoint import CheckpointError, Checkpoints, named
from shardlib.types import make_shapes, make_shardings, typed_shard_map
from tests import golden
from tests.helpers import (
    IN_F32,
    arrays,
    assert_close,
    compose_config,
    edited,
    mesh,
    rows,
    small_config,
    train_here,
)
from tests.tools.test_huggingface_to_flat_tokens import train_tokenizer
from tools import huggingface_weights as tool

LLAMA_2 = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 48,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
}
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA_3 = LLAMA_2 | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,  # its frequencies are kept, scaled, and in between
    "rope_theta": 500.0,
    "rope_scaling": SCALED,
    "bos_token_id": 40,
}
MISTRAL = LLAMA_2 | {
    "model_type": "mistral",
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
SMOLLM_2 = LLAMA_2 | {"num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": 0}
FAMILIES = {"Llama 2": LLAMA_2, "Llama 3.1": LLAMA_3, "Mistral": MISTRAL, "SmolLM2": SMOLLM_2}


def random_tensors(config, dtype=np.float32, seed=0):
    """Of a config that names all sizes; gains are far from one, and other weights not small."""
    rng, made = np.random.default_rng(seed), {}
    M, F = config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    D = config.get("head_dim", M // heads)

    def draw(name, *shape):
        values = rng.normal(size=shape) * 1.5 / math.sqrt(shape[-1]) + (len(shape) == 1)
        made[f"{name}.weight"] = values.astype(dtype)

    draw("model.embed_tokens", config["vocab_size"], M)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        draw(f"{layer}.input_layernorm", M)
        draw(f"{layer}.self_attn.q_proj", heads * D, M)
        draw(f"{layer}.self_attn.k_proj", keys * D, M)
        draw(f"{layer}.self_attn.v_proj", keys * D, M)
        draw(f"{layer}.self_attn.o_proj", M, heads * D)
        draw(f"{layer}.post_attention_layernorm", M)
        draw(f"{layer}.mlp.gate_proj", F, M)
        draw(f"{layer}.mlp.up_proj", F, M)
        draw(f"{layer}.mlp.down_proj", M, F)
    draw("model.norm", M)
    if not config.get("tie_word_embeddings"):
        draw("lm_head", config["vocab_size"], M)
    return made


def write_folder(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def tensors_in(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def bits(tensors):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


# --- The papers -----------------------------------------------------------------------------------


def wavelengths(config, D):
    """Tokens per turn of each pair of a head. https://arxiv.org/abs/2104.09864, section 3.4.2.
    Llama 3.1's scaling: a wavelength that is in the original context at most low_freq_factor times
    becomes `factor` times longer, one that is in it at least high_freq_factor times stays; between,
    the frequencies are mixed."""
    made = []
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
        made.append(wave)
    return np.array(made)


def paper_logits(folder, ids):
    """float64[B, L, V] of ids[B, L], each of which sees itself and those before. Touvron et al.
    2023, section 2.2 of https://arxiv.org/abs/2302.13971 and of https://arxiv.org/abs/2307.09288."""
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

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in w.items()
        }
        h = norm(x, layer["input_layernorm"])
        mixed = []
        for head in range(heads):
            own = slice(head * D, (head + 1) * D)
            shared = head // (heads // keys)
            shared = slice(shared * D, (shared + 1) * D)
            q = rotated(h @ layer["self_attn.q_proj"][own].T)
            k = rotated(h @ layer["self_attn.k_proj"][shared].T)
            scores = q @ k.swapaxes(1, 2) / math.sqrt(D)
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            mixed.append(shares @ (h @ layer["self_attn.v_proj"][shared].T))
        x = x + np.concatenate(mixed, -1) @ layer["self_attn.o_proj"].T
        h = norm(x, layer["post_attention_layernorm"])
        gate = h @ layer["mlp.gate_proj"].T
        hidden = gate / (1 + np.exp(-gate)) * (h @ layer["mlp.up_proj"].T)
        x = x + hidden @ layer["mlp.down_proj"].T
    unembed = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return norm(x, w["model.norm.weight"]) @ w[f"{unembed}.weight"].T


# --- Ours -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_f32():
    return edited("train.py", IN_F32)


def run(capsys, monkeypatch, *arguments):
    """What it printed, and the message it ended with, if any."""
    monkeypatch.setattr(sys, "argv", ["huggingface_weights", *map(str, arguments)])
    message = ""
    try:
        tool.main()
    except SystemExit as stop:
        message = str(stop)
    return capsys.readouterr().out, message


def our_logits(module, checkpoints, targets):
    """f32[B, L, V] at each of targets[B, L], made of those before it, by the newest checkpoint."""
    found = checkpoint.newest(str(checkpoints))
    model = tool.model_of(found)[0]
    told = module.State, tool.sizes(model), checkpoint_config(found.path), 4

    def logits(weights: module.Weights, batch: module.TokenBatch) -> module.f32["B/d L V/t"]:
        x = module.forward(weights, batch, model)
        return module.logits(module.head(weights), x, model)

    with jax.set_mesh(mesh(2, 2)):
        weights = Checkpoints(found.path, *told).restore("weights")
        starts = np.arange(targets.shape[1]) == 0
        starts = np.tile(starts, (len(targets), 1))
        batch = TokenBatch.of(targets.astype(np.uint32), starts, model.start_token)
        batch = jax.tree.map(jax.device_put, batch, make_shardings(TokenBatch))
        return np.asarray(jax.jit(typed_shard_map(logits))(weights, batch))


def checkpoint_config(path):
    return zarr.open_group(path, mode="r").attrs["config"]


def draw_targets(config):
    return np.random.default_rng(1).integers(0, config["vocab_size"], (4, 24))


def inputs(targets, start):
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)


def only(folder):
    """The one checkpoint in a folder."""
    (found,) = folder.iterdir()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_is_the_papers(family, in_f32, tmp_path, capsys, monkeypatch):
    config = FAMILIES[family]
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    out, message = run(capsys, monkeypatch, "import", folder, tmp_path / "ours")
    assert not message
    golden.check("huggingface_weights.txt", family, out.replace(str(tmp_path), "..."))
    targets = draw_targets(config)
    found = our_logits(in_f32, tmp_path / "ours", targets)
    wanted = paper_logits(folder, inputs(targets, config["bos_token_id"]))
    assert_close(found, wanted, 1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of whole states, of a mesh whose devices hold parts of every array. The newest is
    of step 7; the head dimension isn't the model's over the heads, and RoPE is scaled."""
    path = tmp_path_factory.mktemp("trained")
    config = small_config(
        "model.d_model=48", "model.n_kv=4", "model.layers=5", "model.d_head=16",
        "model.rope_max_timescale=500", "model.start_token=9", "model.norm_eps=1e-4",
        "model.rope_scaling={factor: 8, low_frequency_factor: 1, high_frequency_factor: 4, "
        "original_len: 16}", "training.tokens={batch: 8, len: 24}",
    )  # fmt: skip
    with jax.set_mesh(mesh(4, 2)):
        state = train.init_state(config)
        keys = iter(jax.random.split(jax.random.key(1), 100))
        state = jax.tree.map(  # gains of one and small weights would hide mistakes
            lambda w: w + 0.2 * jax.random.normal(next(keys), w.shape) if w.ndim else w, state
        )
        state = jax.tree.map(jax.device_put, state, make_shardings(train.State))
        told = train.State, train.dimensions(config), config.to_yaml(), 4
        checkpoints = Checkpoints(str(path), *told, say=lambda _: None)
        for step in 6, 7:
            checkpoints.save(step, state)
        checkpoints.wait()
    return path


def newest(path):
    return max(path.iterdir())


def weights_in(path):
    """The bytes of each array of the weights, read by zarr alone."""
    return {k: v for k, v in arrays(path).items() if k.startswith("weights/")}


def test_an_exported_model_is_the_papers(trained, in_f32, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "READ_BYTES", 2 * 48 * 64 * 4)  # two layers of most arrays
    out, message = run(capsys, monkeypatch, "export", trained, tmp_path / "hf")
    count = 2 * 48 * 48 + 48 + 5 * (2 * 48 + 2 * 48 * 8 * 16 + 2 * 48 * 4 * 16 + 3 * 48 * 40)
    assert not message and f"step 7: {4 * count:,} bytes of float32 in " in out
    targets = np.random.default_rng(1).integers(0, 48, (4, 24))
    found = our_logits(in_f32, trained, targets)
    wanted = paper_logits(tmp_path / "hf", inputs(targets, 9))
    assert_close(found, wanted, 1e-5)
    config = config_in(tmp_path / "hf")
    assert config["max_position_embeddings"] == 24 and config["bos_token_id"] == 9
    assert config["rope_parameters"] == {"rope_theta": 500.0, **config["rope_scaling"]}


def test_the_config_is_what_transformers_reads_by_its_old_names_and_its_new(
    trained, tmp_path, capsys, monkeypatch
):
    from transformers import AutoConfig

    run(capsys, monkeypatch, "export", trained, tmp_path / "hf")
    whole, config = AutoConfig.from_pretrained(tmp_path / "hf"), config_in(tmp_path / "hf")
    assert {key: getattr(whole, key) for key in LLAMA_2 if key != "rope_theta"} == {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 24,
        "rms_norm_eps": 1e-4, "vocab_size": 48, "bos_token_id": 9,
    }  # fmt: skip
    assert whole.rope_parameters == {"rope_theta": 500.0, **SCALED}
    assert whole.head_dim == 16 and whole.eos_token_id is None and not whole.tie_word_embeddings
    for lacking in ["rope_parameters"], ["rope_theta", "rope_scaling"]:
        text = json.dumps({k: v for k, v in config.items() if k not in lacking})
        (tmp_path / "hf/config.json").write_text(text)
        other = AutoConfig.from_pretrained(tmp_path / "hf")
        assert other.rope_parameters == whole.rope_parameters


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_import_and_export_keep_every_bit(dtype, family, tmp_path, capsys, monkeypatch):
    config = FAMILIES[family]
    tensors = random_tensors(config, dtype)
    folder = write_folder(tmp_path / "hf", config, tensors)
    assert not run(capsys, monkeypatch, "import", folder, tmp_path / "ours")[1]
    name = "bfloat16" if dtype == ml_dtypes.bfloat16 else "float32"
    wanted = tensors
    if dtype == np.float16:
        wanted = {key: value.astype(np.float32) for key, value in tensors.items()}
    limit = max(value.nbytes for value in wanted.values()) + 100
    monkeypatch.setattr(tool, "SHARD_BYTES", limit)
    out = tmp_path / "again"
    assert not run(capsys, monkeypatch, "export", tmp_path / "ours", out, f"--dtype={name}")[1]
    assert bits(tensors_in(out)) == bits(wanted)
    same = config.keys() - {"model_type", "sliding_window"}
    assert all(config_in(out)[key] == config[key] for key in same)
    assert config_in(out)["tie_word_embeddings"] is (family == "SmolLM2")
    assert config_in(out)["dtype"] == config_in(out)["torch_dtype"] == name
    # In files that aren't too large, which the index finds.
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    for file in files:
        there = safetensors.numpy.load_file(file)
        assert sum(value.nbytes for value in there.values()) <= limit
        assert all(index["weight_map"].pop(key) == file.name for key in there)
    assert not index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


def test_export_and_import_keep_every_bit(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "SHARD_BYTES", 100_000)
    run(capsys, monkeypatch, "export", newest(trained), tmp_path / "hf")
    out, message = run(capsys, monkeypatch, "import", tmp_path / "hf", tmp_path / "ours")
    assert not message
    assert arrays(only(tmp_path / "ours")) == weights_in(newest(trained))
    before = OmegaConf.create(checkpoint_config(newest(trained)))
    after = OmegaConf.create(checkpoint_config(only(tmp_path / "ours")))
    assert after.model == before.model == OmegaConf.create(out).model
    assert after.training.tokens.len == before.training.tokens.len


def test_an_id_offset_moves_the_embeddings(in_f32, tmp_path, capsys, monkeypatch):
    """Our id is theirs plus 2, and our first two are their last."""
    folder = write_folder(tmp_path / "hf", LLAMA_3, random_tensors(LLAMA_3))
    ours = tmp_path / "ours"
    assert not run(capsys, monkeypatch, "import", folder, ours, "--id-offset=2")[1]
    assert tool.model_of(checkpoint.newest(str(ours)))[0].start_token == 42
    targets = draw_targets(LLAMA_3)
    found = our_logits(in_f32, ours, targets)
    wanted = paper_logits(folder, inputs((targets - 2) % 48, 40))
    assert_close(found, wanted[..., (np.arange(48) - 2) % 48], 1e-5)
    assert not run(capsys, monkeypatch, "export", ours, tmp_path / "b", "--id-offset=2")[1]
    assert bits(tensors_in(tmp_path / "b")) == bits(tensors_in(folder))
    assert config_in(tmp_path / "b")["bos_token_id"] == 40


def test_old_frequencies_and_a_tied_copy_are_read_over(tmp_path, capsys, monkeypatch):
    tensors = random_tensors(SMOLLM_2)
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    more |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(3)}
    folder = write_folder(tmp_path / "hf", SMOLLM_2, tensors | more)
    assert not run(capsys, monkeypatch, "import", folder, tmp_path / "ours")[1]
    run(capsys, monkeypatch, "export", tmp_path / "ours", tmp_path / "again")
    assert bits(tensors_in(tmp_path / "again")) == bits(tensors)


def test_a_run_starts_from_an_imported_model(tmp_path, capsys, monkeypatch):
    config = LLAMA_3 | {"vocab_size": 128}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    out, _ = run(capsys, monkeypatch, "import", folder, tmp_path / "ours")
    model = OmegaConf.to_container(OmegaConf.create(out).model)
    overrides = [
        *(f"model.{key}={value}".replace("'", "") for key, value in model.items()),
        "training.tokens={batch: 8, len: 16}", "mesh={d: 2, t: 2}", "paths.model_name=clone",
        f"paths.root_working_dir={tmp_path}", f"paths.clone_from={tmp_path}/ours",
        "training={steps: 3, steps_for_lr: 3, warmup_steps: 1, learning_rate: 1e-2}",
    ]  # fmt: skip
    start = compose_config("local_test_synthetic", *overrides)
    told = train.State, train.dimensions(start), start.to_yaml(), 4
    with jax.set_mesh(mesh(2, 2)):
        none = Checkpoints(str(tmp_path / "none"), *told)
        state, _ = train.starting_state(start, none, None)
        found = {name: value.tobytes() for name, value in named(jax.device_get(state)).items()}
        wanted = arrays(only(tmp_path / "ours"))
        assert {name: found.pop(name) for name in wanted} == wanted
        assert not any(map(any, found.values())), "Adam's moments, and the step"

        start.paths.clone_weights_only = False
        with pytest.raises(CheckpointError) as error:
            train.starting_state(start, none, None)
        message = str(error.value).replace(str(tmp_path), "...")
        golden.check("huggingface_weights.txt", "a clone of a whole state", message)

    command = ["--config-name=local_test_synthetic", *overrides]
    out, message = train_here(capsys, monkeypatch, *command)
    assert not message and f"weights from {only(tmp_path / 'ours')}" in out
    made = rows(tmp_path / "clone")
    assert len(made) == 3 and made[-1]["loss"] < made[0]["loss"]


# --- Mistakes, and work that is cut off -----------------------------------------------------------


def config_with(**changes):
    def change(folder):
        (folder / "config.json").write_text(json.dumps(config_in(folder) | changes))

    return change


def tensors_with(change):
    def changed(folder):
        tensors = tensors_in(folder)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")

    return changed


def as_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


INDEX = "model.safetensors.index.json"
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
IMPORTS = {
    "another model_type": config_with(model_type="qwen2"),
    "a model_type that nobody knows": config_with(model_type="mine"),
    "biases of attention": config_with(attention_bias=True),
    "biases of the feed-forward": config_with(mlp_bias=True),
    "another activation": config_with(hidden_act="gelu"),
    "a sliding window": config_with(model_type="mistral", sliding_window=4096),
    "Mistral's own sliding window": config_with(model_type="mistral"),
    "linear RoPE scaling": config_with(rope_scaling={"type": "linear", "factor": 2.0}),
    "dynamic RoPE scaling": config_with(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "yarn": config_with(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    "a RoPE scaling without its factor": config_with(
        rope_scaling={k: v for k, v in SCALED.items() if k != "factor"}
    ),
    "partial RoPE": config_with(partial_rotary_factor=0.5),
    "a base of RoPE that isn't whole": config_with(rope_theta=10000.5),
    "no start token": config_with(bos_token_id=None),
    "a start token that is no id": config_with(bos_token_id=48),
    "heads that don't share evenly": config_with(num_key_value_heads=3),
    "a quantized model": config_with(quantization_config={"quant_method": "fp8"}),
    "a size of another type": config_with(hidden_size="32"),
    "another size": config_with(hidden_size=64),
    "fewer layers": config_with(num_hidden_layers=2),
    "a missing tensor": tensors_with(lambda tensors: tensors.pop(NORM)),
    "missing tensors": config_with(num_hidden_layers=4),
    "a bias": tensors_with(lambda t: t.update({"model.norm.bias": np.ones(32)})),
    "a wrong shape": tensors_with(lambda t: t.update({GATE: np.ones((32, 40), np.float32)})),
    "a wrong dtype": tensors_with(lambda t: t.update({GATE: np.ones((40, 32), np.int8)})),
    "an unembedding of its own": config_with(tie_word_embeddings=True),
    "weights as .bin alone": as_bin,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut short": lambda folder: cut(folder / "model.safetensors"),
    "an index of a file that isn't there": lambda folder: (folder / INDEX).write_text(
        '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
    ),
    "an index cut short": lambda folder: (folder / INDEX).write_text('{"weight_map"'),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a config cut short": lambda folder: cut(folder / "config.json"),
    "no folder": shutil.rmtree,
}


def check_message(case, message):
    """Less what others say."""
    said = re.sub(r"(can't be (read|opened)): .*", r"\1: ...", message)
    golden.check("huggingface_weights.txt", case, said)


@pytest.mark.parametrize("case", IMPORTS)
def test_what_is_no_such_model_is_refused(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "hf", LLAMA_2, random_tensors(LLAMA_2))
    IMPORTS[case](folder)
    out, message = run(capsys, monkeypatch, "import", "hf", "ours")
    assert not out and message.startswith("error: ") and "\n" not in message
    assert not (tmp_path / "ours").exists()
    check_message(case, message)


def flip(path):
    first, *rest = path.read_bytes()
    path.write_bytes(bytes([first ^ 1, *rest]))


def about_with(**changes):
    def change(path):
        attributes = zarr.open_group(path).attrs.asdict() | changes
        attributes["checksum"] = checkpoint._checksum(attributes)
        zarr.open_group(path).update_attributes(attributes)

    return change


def with_config(old, new):
    def change(path):
        about_with(config=checkpoint_config(path).replace(old, new))(path)

    return change


EXPORTS = {
    "a flipped bit": (lambda path: flip(path / "weights/layers/w_q/c/0/0/0/0/0"), []),
    "a missing chunk": (lambda path: (path / "weights/embed/c/0/0").unlink(), []),
    "attributes that were changed": (lambda path: zarr.open_group(path).attrs.update(step=8), []),
    "attributes cut short": (lambda path: cut(path / "zarr.json"), []),
    "a checkpoint of another format": (about_with(format=2), []),
    "a checkpoint of an older model": (with_config("norm_eps", "norm_epsilon"), []),
    "a checkpoint of other arrays": (with_config("d_ff: 40", "d_ff: 80"), []),
    "a width that no Llama has": (None, []),
    "no checkpoint": (shutil.rmtree, []),
    "a bucket to write to": (lambda path: None, ["output=gs://bucket/hf"]),
    "a folder that isn't empty": (lambda path: None, ["output=."]),
    "a tokenizer that isn't there": (lambda path: None, ["--tokenizer=nowhere/at-all"]),
    "a tokenizer that is too large": (lambda path: None, ["--tokenizer=tokenizer"]),
    "an offset below 0": (lambda path: None, ["--id-offset=-1"]),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_what_can_not_be_exported_is_refused(case, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ours" / newest(trained).name
    shutil.copytree(newest(trained), path)
    train_tokenizer(tmp_path / "tokenizer", ["<unused>", "<s>"])
    change, options = EXPORTS[case]
    if change is None:
        monkeypatch.setattr(tool, "model_of", lambda _: (small_config("model.d_model=40").model, 8))
    else:
        change(path)
    output = next((o.removeprefix("output=") for o in options if o.startswith("output=")), "hf")
    options = [option for option in options if not option.startswith("output=")]
    out, message = run(capsys, monkeypatch, "export", "ours", output, *options)
    assert not out and message.startswith("error: ") and "\n" not in message
    assert not (tmp_path / "hf/config.json").exists()
    check_message(case, message)


EDITS = {
    "a weight that no Llama has": ('    w_v: f32["M', '    q_norm: f32["M/t/d"]\n    w_v: f32["M'),
    "a weight that is no more": ('    final_norm: f32["M/t/d"]\n', ""),
    "a weight of other dimensions": ('    w_v: f32["M/d K/t D"]', '    w_v: f32["M/d Q K/t D"]'),
    "a weight of another dtype": ('    unembed: f32["V/t M/d"]', '    unembed: bf16["V/t M/d"]'),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_model_that_llamas_files_can_not_say_is_refused(case, tmp_path, capsys, monkeypatch):
    """Of an edited train.py, whose checkpoint is exported, and which a Llama is imported to."""
    module = edited("train.py", EDITS[case])
    imported = ("import train\n", f"import {module.__name__} as train\n")
    edited_tool = edited("tools/huggingface_weights.py", imported)
    monkeypatch.setattr(sys.modules[__name__], "tool", edited_tool)
    config = small_config()
    told = module.State, train.dimensions(config), config.to_yaml(), 4
    with jax.set_mesh(mesh(1, 1)):
        shapes = make_shapes(*told[:2])
        checkpoints = Checkpoints(str(tmp_path / "ours"), *told, say=lambda _: None)
        checkpoints.save(7, jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes))
        checkpoints.wait()
    folder = write_folder(tmp_path / "llama", LLAMA_2, random_tensors(LLAMA_2))
    for command in ("export", tmp_path / "ours", "out"), ("import", folder, "out"):
        monkeypatch.chdir(tmp_path)
        out, message = run(capsys, monkeypatch, *command)
        assert not out and not (tmp_path / "out").exists()
        golden.check("huggingface_weights.txt", f"{case}: {command[0]}", message)


def test_a_tokenizer_goes_along(trained, tmp_path, capsys, monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(tmp_path / "tokenizer", ["<unused>", "<s>"])
    config = LLAMA_2 | {"vocab_size": 320}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    run(capsys, monkeypatch, "import", folder, tmp_path / "ours")
    out = tmp_path / "again"
    wanted = f"--tokenizer={tmp_path / 'tokenizer'}"
    assert not run(capsys, monkeypatch, "export", tmp_path / "ours", out, wanted)[1]
    found = AutoTokenizer.from_pretrained(out)
    assert found("document 1!")["input_ids"] == tokenizer.encode("document 1!").ids


def test_an_import_that_is_cut_off_is_no_checkpoint(tmp_path, capsys, monkeypatch):
    """At any write: that of a chunk, and that of the mark."""
    put, count, failing = zarr.storage.LocalStore.set, [0], [0]

    async def set_or_stop(self, key, value, *args, **kwargs):
        count[0] += 1
        if count[0] == failing[0]:
            raise OSError(28, "No space left on device", key)
        await put(self, key, value, *args, **kwargs)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", set_or_stop)
    config = LLAMA_2 | {"num_hidden_layers": 1}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    assert not run(capsys, monkeypatch, "import", folder, tmp_path / "whole")[1]
    total = count[0]
    assert total > 25
    for number in range(1, total + 1):
        count[0], failing[0] = 0, number
        path = tmp_path / str(number)
        out, message = run(capsys, monkeypatch, "import", folder, path)
        assert not out and "No space left on device" in message and "\n" not in message
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            checkpoint.newest(str(path))
    _, message = run(capsys, monkeypatch, "import", folder, path)
    assert message == f"error: {path} isn't empty: name a folder that is, or isn't there yet"


def test_an_export_that_is_cut_off_is_no_model(trained, tmp_path, capsys, monkeypatch):
    """Before some tensor, and before the config."""
    stored = tool.stored

    def stored_until(stop):
        def some(*arguments):
            yield from itertools.islice(stored(*arguments), stop)
            raise KeyboardInterrupt

        return some

    for stop in 0, 1, 20, 5 * 9 + 2:
        monkeypatch.setattr(tool, "stored", stored_until(stop))
        _, message = run(capsys, monkeypatch, "export", trained, tmp_path / str(stop))
        assert message.startswith("interrupted")
        assert not (tmp_path / f"{stop}/config.json").exists()
    monkeypatch.setattr(tool, "stored", stored)

    def stop_at_replace(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "replace", stop_at_replace)
        run(capsys, monkeypatch, "export", trained, tmp_path / "last")
    assert not (tmp_path / "last/config.json").exists()


def test_no_more_than_a_few_tensors_are_held_at_a_time(tmp_path, capsys, monkeypatch):
    """Of 120, a small part of the model."""
    monkeypatch.setattr(tool, "READ_BYTES", 2**18)
    config = LLAMA_2 | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24}
    tensors = random_tensors(config)
    total = sum(value.nbytes for value in tensors.values())
    largest = max(value.nbytes for value in tensors.values())
    folder = write_folder(tmp_path / "hf", config, tensors)
    del tensors
    for command in (
        ["import", folder, tmp_path / "ours"],
        ["export", tmp_path / "ours", tmp_path / "b"],
    ):
        tracemalloc.start()
        assert not run(capsys, monkeypatch, *command)[1]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * largest < total / 15


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def their_logits(torch, folder, ids):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_model_is_what_transformers_saved(
    torch, family, in_f32, tmp_path, capsys, monkeypatch
):
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    model.save_pretrained(tmp_path / "hf")
    assert not run(capsys, monkeypatch, "import", tmp_path / "hf", tmp_path / "ours")[1]
    targets = draw_targets(FAMILIES[family])
    ids = inputs(targets, config.bos_token_id)
    found = our_logits(in_f32, tmp_path / "ours", targets)
    assert_close(found, their_logits(torch, tmp_path / "hf", ids), 1e-5)
    run(capsys, monkeypatch, "export", tmp_path / "ours", tmp_path / "again")
    assert bits(tensors_in(tmp_path / "again")) == bits(tensors_in(tmp_path / "hf"))
    assert_close(their_logits(torch, tmp_path / "again", ids), found, 1e-5)


@pytest.mark.parametrize("shard_bytes", [4 * 10**9, 100_000])
def test_transformers_loads_what_is_exported(
    torch, trained, shard_bytes, in_f32, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(tool, "SHARD_BYTES", shard_bytes)
    run(capsys, monkeypatch, "export", trained, tmp_path / "hf")
    targets = np.random.default_rng(1).integers(0, 48, (4, 24))
    wanted = our_logits(in_f32, trained, targets)
    assert_close(their_logits(torch, tmp_path / "hf", inputs(targets, 9)), wanted, 1e-5)
