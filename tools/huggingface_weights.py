"""Converts weights between checkpoints and folders that `transformers` loads.

    python -m tools.huggingface_weights import Qwen3-0.6B runs/qwen3 --config=qwen3.yaml
    python -m tools.huggingface_weights export runs/x/checkpoints runs/x_qwen3

The families are Llama 1 to 3.2, models like it such as SmolLM2, Mistral, Qwen2 and Qwen2.5, Qwen3
and OLMo 2; with experts Mixtral, OLMoE and Qwen3.

Import takes a folder of safetensors as `hf download` makes it, one tensor at a time. It prints the
`model` section that a run's config needs to start from the imported weights with paths.clone_from.
--config=FILE writes a whole config, for `python -m train --config-dir=. --config-name=FILE
flat_tokens.filespec=...`. The tokenizer, config.json and generation_config.json are kept beside the
checkpoint, if that is in a local folder, and come back from an export, also of a run that started
from it: what config.json says is lost only where a run was allowed another tokenizer.

What config.json says of training alone isn't imported: dropout, router_jitter_noise, and
router_aux_loss_coef, as transformers averages loads and scores over layers before it multiplies
them, which is another cost than training.routing.balance_cost's. Nothing of training.routing is
exported.

Export takes a checkpoint, or the newest complete one of a folder. The weights stay float32, bit for
bit, unless --dtype=bfloat16 rounds them. The tokenizer and the ids that end a text come from
--tokenizer, a folder or hub repository, or from the import that the run started from. config.json
is written last: a folder without it is unfinished. Memory must hold a file of weights (4 GB) plus
the layers that a chunk of the checkpoint spans, and both embeddings.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import time
from collections.abc import Container, Iterator
from typing import Any, cast

import huggingface_hub
import jax
import numpy as np
import safetensors.numpy
from einops import rearrange
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

import train
from data.sources import has_tokenizer, kept_by_import
from data.text import Tokenizer
from runtime import checkpoint, storage
from runtime.checkpoint import Checkpoint
from runtime.config import flat
from runtime.errors import user_errors
from shardlib.devices import abstract_mesh
from shardlib.errors import UserError
from shardlib.types import type_tree
from tools import arguments

# The files of a tokenizer, and what generation needs to know.
SETTINGS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "generation_config.json"),
)
SHARD_BYTES = 4 * 10**9  # limit for a file of weights, unless one tensor is larger
STEP = 1  # of an imported checkpoint; 0 would mean that there is none

# The Hugging Face name and dimensions, in einops notation, of each array of train.Weights. A {} in
# the name is an index of the first dimension: each layer, and each expert in it, has a tensor of
# its own. Query head k * Q + q in Hugging Face's (K Q D) is at [q, k] here.
TENSORS = {
    "weights/embed": ("model.embed_tokens.weight", "V M"),
    "weights/layers/attention_norm": ("model.layers.{}.input_layernorm.weight", "layers M"),
    "weights/layers/w_q": ("model.layers.{}.self_attn.q_proj.weight", "layers (K Q D) M"),
    "weights/layers/w_k": ("model.layers.{}.self_attn.k_proj.weight", "layers (K D) M"),
    "weights/layers/w_v": ("model.layers.{}.self_attn.v_proj.weight", "layers (K D) M"),
    "weights/layers/w_o": ("model.layers.{}.self_attn.o_proj.weight", "layers M (K Q D)"),
    "weights/layers/mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "layers M"),
    "weights/final_norm": ("model.norm.weight", "M"),
    "weights/unembed": ("lm_head.weight", "V M"),
    **{
        f"weights/layers/{ours}": (f"model.layers.{{}}.{theirs}", dims)
        for ours, theirs, dims in (
            ("qkv/biases/b_q", "self_attn.q_proj.bias", "layers (K Q D)"),
            ("qkv/biases/b_k", "self_attn.k_proj.bias", "layers (K D)"),
            ("qkv/biases/b_v", "self_attn.v_proj.bias", "layers (K D)"),
            ("qkv/norms/q_norm", "self_attn.q_norm.weight", "layers D"),
            ("qkv/norms/k_norm", "self_attn.k_norm.weight", "layers D"),
            ("qkv/norms/all_q_norm", "self_attn.q_norm.weight", "layers (K Q D)"),
            ("qkv/norms/all_k_norm", "self_attn.k_norm.weight", "layers (K D)"),
            ("mlp/w_gate", "mlp.gate_proj.weight", "layers F M"),
            ("mlp/w_up", "mlp.up_proj.weight", "layers F M"),
            ("mlp/w_down", "mlp.down_proj.weight", "layers M F"),
            ("experts/w_router", "mlp.gate.weight", "layers E M"),
            ("experts/e_gate", "mlp.experts.{}.gate_proj.weight", "layers E G M"),
            ("experts/e_up", "mlp.experts.{}.up_proj.weight", "layers E G M"),
            ("experts/e_down", "mlp.experts.{}.down_proj.weight", "layers E M G"),
        )
    },
}
EMBED, UNEMBED = TENSORS["weights/embed"][0], TENSORS["weights/unembed"][0]
# The tensors that transformers 5 has in memory, and in files with save_original_format=False: one
# for all experts of a layer. Which part of an expert's rows there is an array's, of how many.
IN_MEMORY = {
    "weights/layers/experts/w_router": ("model.layers.{}.mlp.gate.weight", 0, 1),
    "weights/layers/experts/e_gate": ("model.layers.{}.mlp.experts.gate_up_proj", 0, 2),
    "weights/layers/experts/e_up": ("model.layers.{}.mlp.experts.gate_up_proj", 1, 2),
    "weights/layers/experts/e_down": ("model.layers.{}.mlp.experts.down_proj", 0, 1),
}
# What has another name in a family's files.
RENAMED = {
    "mixtral": {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "olmo2": {
        "post_attention_layernorm": "post_feedforward_layernorm",
        "input_layernorm": "post_attention_layernorm",
    },
}

# The families by model_type: the class in transformers, and in what train.ModelConfig its models
# differ from Llama's. ANY: config.json says it.
ANY = object()
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": ANY}),
    "mixtral": ("MixtralForCausalLM", {"sliding_window": ANY}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": "head"}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": "head", "experts.renormalize": ANY}),
    "olmo2": ("Olmo2ForCausalLM", {"qk_norm": "all", "norms_after": True}),
    "olmoe": ("OlmoeForCausalLM", {"qk_norm": "all", "experts.renormalize": ANY}),
}
# What all families with experts have, unless stated otherwise.
EXPERTS = {"score": "softmax", "renormalize": True, "bias": False}

# config.json's names for the fields of train.ModelConfig, for those of train.ExpertsConfig by
# family, and for those of train.RopeScalingConfig, which are in its rope_parameters of type llama3.
MODEL = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "n_kv",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
OF_EXPERTS = {"num_experts": "count", "num_experts_per_tok": "per_token"}
MIXTURES = {
    "mixtral": OF_EXPERTS | {"num_local_experts": "count", "intermediate_size": "d_ff"},
    "olmoe": OF_EXPERTS | {"intermediate_size": "d_ff", "norm_topk_prob": "renormalize"},
    "qwen3_moe": OF_EXPERTS | {"moe_intermediate_size": "d_ff", "norm_topk_prob": "renormalize"},
}
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_len",
}


# --- The two formats ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, and where its values are in a checkpoint."""

    name: str
    theirs: str  # its dimensions in Hugging Face's files, in einops notation
    array: str
    index: tuple[int, ...]  # in the array: of a layer, or of a layer and an expert
    stacked: dict[str, int]  # the size of each dimension that the index is in, in order
    sizes: dict[str, int]  # the size of each other dimension here, in order

    @property
    def ours(self) -> str:
        return " ".join(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        part = jax.ShapeDtypeStruct(tuple(self.sizes.values()), np.float32)
        return jax.eval_shape(lambda x: rearrange(x, f"{self.ours} -> {self.theirs}"), part).shape

    def place(self, names: Container[str]) -> tuple[str, tuple[int, ...], Any]:
        """The name and shape, in a folder that has these names, of what holds the tensor's values,
        and their index in it."""
        name, part, parts = IN_MEMORY.get(self.array, ("", 0, 1))
        if (name := name.format(*self.index)) not in names:
            return self.name, self.shape, ...
        rows, columns = self.shape
        shape = (*[*self.stacked.values()][1:], parts * rows, columns)
        return name, shape, (*self.index[1:], slice(part * rows, (part + 1) * rows))

    def to_ours(self, values: np.ndarray) -> np.ndarray:
        return rearrange(values, f"{self.theirs} -> {self.ours}", **self.sizes)

    def to_theirs(self, values: np.ndarray) -> np.ndarray:
        return rearrange(values, f"{self.ours} -> {self.theirs}")


def sizes(model: train.ModelConfig) -> dict[str, int]:
    known = flat(dataclasses.asdict(model), "model.")
    return {name: known[key] for name, key in train.DIMENSIONS.items() if known.get(key)}


def stacked(array: str) -> list[str]:
    """The dimensions of an array of which each index has a tensor of its own."""
    name, theirs = TENSORS.get(array, ("", ""))
    return theirs.split()[: name.count("{}")]


def entries(model: train.ModelConfig) -> dict[str, Any]:
    """Describes the arrays of a checkpoint of the weights, by name, except their chunks."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(train.MeshConfig(1, 1).axes)):
        every = checkpoint.describe(
            type_tree(train.Stored, train.weights_type(model)), sizes(model)
        )
    return {f"weights/{name}": entry for name, entry in every.items()}


def tensors(model: train.ModelConfig) -> list[Tensor]:
    """Lists all tensors of a model, those of an array in order. Raises UserError unless TENSORS has
    one entry for each array of the model, and no more for those beside it."""
    result, arrays = [], entries(model)
    renamed = RENAMED.get(family_of(model), {})
    folders = {os.path.dirname(array) for array in arrays}
    expected = [array for array in TENSORS if os.path.dirname(array) in folders]
    if model.tied_embeddings:
        expected.remove("weights/unembed")
    norms = {"q_norm", "k_norm"} if model.qk_norm == "all" else {"all_q_norm", "all_k_norm"}
    expected = [array for array in expected if os.path.basename(array) not in norms]
    for array in dict.fromkeys([*arrays, *expected]):
        name, theirs = TENSORS.get(array, ("", ""))
        entry = arrays.get(array, {"dimension_names": [], "shape": []})
        size = dict(zip(entry["dimension_names"], entry["shape"], strict=True))
        kind, first = entry["attributes"]["type"] if array in arrays else "missing", stacked(array)
        wrong = sorted(size) != sorted(re.findall(r"\w+", theirs)) or "float32[" not in kind
        if wrong or [*size][: len(first)] != first:
            raise UserError(
                f"{array} is {kind} in train.py; transformers' files have "
                + (f"float32[{theirs}]" if theirs else "no tensor for it")
            )
        for old, new in renamed.items():
            name = name.replace(old, new)
        lengths = {dim: size.pop(dim) for dim in first}
        dims = theirs.removeprefix(" ".join(first)).strip()
        for index in itertools.product(*map(range, lengths.values())):
            result.append(Tensor(name.format(*index), dims, array, index, lengths, size))
    return result


def family_of(model: train.ModelConfig) -> str:
    """Returns the model_type that a model is exported as. Raises UserError if there is none."""
    plain: dict[str, Any] = {"norms_after": False, "qkv_bias": False, "qk_norm": None}
    plain["sliding_window"] = None
    if model.experts:
        plain |= {"d_ff": 0} | {f"experts.{key}": value for key, value in EXPERTS.items()}
    known = flat(dataclasses.asdict(model))
    found = {key: known[key] for key in plain}
    for name, (_, options) in FAMILIES.items():
        wanted = plain | options
        same = all(wanted[key] in (ANY, value) for key, value in found.items())
        if same and (name in MIXTURES) == bool(model.experts):
            return name
    settings = ", ".join(f"model.{key}={value}" for key, value in found.items())
    raise UserError(f"no family of transformers ({', '.join(FAMILIES)}) has {settings}")


def described(model: train.ModelConfig, length: int) -> dict[str, Any]:
    """The entries of config.json that determine what the model computes, and the row length it was
    trained on, with the names of transformers 5."""
    rope = {"rope_type": "default", "rope_theta": float(model.rope_max_timescale)}
    if scaling := model.rope_scaling:
        rope |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
        rope["rope_type"] = "llama3"
    held = {theirs: getattr(model, ours) for theirs, ours in MODEL.items()}
    if experts := model.experts:
        del held["intermediate_size"]
        names = MIXTURES[family_of(model)]
        held |= {theirs: getattr(experts, ours) for theirs, ours in names.items()}
        # Of Qwen3, layers without experts; of OLMoE, a limit of queries, keys and values.
        held |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "clip_qkv": None}
    return {
        **held,
        "head_dim": model.d_head,
        "num_attention_heads": model.n_q_per_kv * model.n_kv,
        "max_position_embeddings": length,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,  # Qwen2, which has biases, has no such key
        "mlp_bias": False,
        "sliding_window": model.sliding_window,
    }


def check_empty(path: str) -> None:
    if storage.names(path):
        raise UserError(f"{path} isn't empty: choose a new or empty folder")


def copy_settings(name: str, folder: pathlib.Path, vocab: float = math.inf) -> dict[str, Any]:
    """Copies the tokenizer's files, chat template and generation_config.json from a folder or hub
    repository. Returns the ids that end a text and that pad a batch. Raises UserError if there is
    no tokenizer, or if it has ids that the model hasn't."""
    if os.path.isfile(name):
        raise UserError(f"{name} is a file: name a folder that has it as tokenizer.json")
    try:
        tokenizer = Tokenizer(name).slow
        if not os.path.isdir(name):
            name = huggingface_hub.snapshot_download(
                name, allow_patterns=[*SETTINGS, "config.json"]
            )
    except Exception as error:  # what tokenizers raises is a plain Exception
        raise UserError(f"{name} has no tokenizer: {error}".split("\n")[0]) from None
    if (largest := max(tokenizer.get_vocab().values())) >= vocab:
        raise UserError(
            f"the tokenizer {name} has ids up to {largest}, but the model's vocabulary ends at "
            f"{vocab - 1}: choose the tokenizer of the model's dataset"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in {file for pattern in SETTINGS for file in pathlib.Path(name).glob(pattern)}:
        shutil.copyfile(file, folder / file.name)
    ids = {key: getattr(tokenizer, key) for key in ("eos_token_id", "pad_token_id")}
    config = pathlib.Path(name, "config.json")  # it may name several that end a text
    theirs = json.loads(config.read_text()) if config.is_file() else {}
    return ids | {key: theirs[key] for key in ids if theirs.get(key) is not None}


# --- Export ---------------------------------------------------------------------------------------


def model_of(source: Checkpoint) -> tuple[train.ModelConfig, int]:
    """Returns the config of the model in a checkpoint, and the row length it was trained on. Raises
    CheckpointError if the model isn't train.py's."""
    model = source.config(train.ModelConfig, "model")
    length = source.config(train.TokensConfig, "training.tokens", {"batch": 1}).len
    source.check({}, entries(model), "weights/", "export it with the train.py that made it")
    return model, length


def stored(source: Checkpoint, wanted: list[Tensor]) -> Iterator[np.ndarray]:
    """Yields the values of tensors as they are in the checkpoint."""
    for name in dict.fromkeys(tensor.array for tensor in wanted):
        array, depth = source.arrays[name], len(stacked(name))
        steps = [*array.chunks[:depth]]  # read whole chunks
        if steps[:1] != [1]:  # several layers, each with all of its experts
            steps[1:] = array.shape[1:depth]
        starts = (range(0, size, step) for size, step in zip(array.shape, steps, strict=False))
        for first in itertools.product(*starts):
            part = (slice(i, i + step) for i, step in zip(first, steps, strict=True))
            yield from source.read(name, tuple(part)).reshape(-1, *array.shape[depth:])


def write_weights(
    folder: pathlib.Path, wanted: list[Tensor], values: Iterator[np.ndarray], dtype: Any
) -> int:
    """Writes safetensors files, and an index if there are several. Returns their total number of
    bytes."""
    nbytes = {tensor.name: math.prod(tensor.shape) * dtype.itemsize for tensor in wanted}
    files = huggingface_hub.split_state_dict_into_shards_factory(
        nbytes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max(SHARD_BYTES, *nbytes.values()),
    )
    pairs = zip(tqdm(wanted, unit=" tensors", disable=None), values, strict=True)
    for file, names in files.filename_to_tensors.items():
        part = {
            tensor.name: tensor.to_theirs(value).astype(dtype, order="C", copy=False)
            for tensor, value in itertools.islice(pairs, len(names))
        }
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        del part  # frees it before the next file is read
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files.metadata["total_size"]


def export_weights(path: str, output: str, dtype: str, tokenizer: str = "") -> None:
    """Exports a checkpoint. Raises UserError or OSError if it can't be read, if no family of
    transformers has the model, or if the output can't be written."""
    if "://" in output:
        raise UserError(f"{output}: the output must be a local folder")
    check_empty(output)
    source, folder = checkpoint.newest(path), pathlib.Path(output)
    model, length = model_of(source)
    family, wanted = family_of(model), tensors(model)
    if family == "llama" and model.d_model % (model.n_q_per_kv * model.n_kv):
        raise UserError("LlamaConfig needs model.d_model to be a multiple of the query heads")
    if family == "olmoe" and model.d_model != model.d_head * model.n_q_per_kv * model.n_kv:
        raise UserError("OlmoeConfig needs model.d_model to be d_head times the query heads")
    theirs: dict[str, Any] = {"eos_token_id": None}
    folder.mkdir(parents=True, exist_ok=True)
    if kept := kept_by_import(source):
        theirs = json.loads(pathlib.Path(kept, "config.json").read_text())
        if not tokenizer and has_tokenizer(kept):
            theirs |= copy_settings(kept, folder)
    if tokenizer:
        theirs |= copy_settings(tokenizer, folder, model.vocab)
    total = write_weights(folder, wanted, stored(source, wanted), np.dtype(dtype))
    original = model.rope_scaling.original_len if model.rope_scaling else 0
    length = max(length, original, theirs.get("max_position_embeddings", 0))
    config = theirs | described(model, length)
    rope = dict(config["rope_parameters"])
    config |= {
        "architectures": [FAMILIES[family][0]],
        "model_type": family,
        "bos_token_id": model.start_token,
        "dtype": dtype,
        # The names of transformers 4, which other programs read.
        "torch_dtype": dtype,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if model.rope_scaling else None,
    }
    unfinished = folder / "config.json.unfinished"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    unfinished.replace(folder / "config.json")
    step = source.metadata["step"]
    print(f"exported {source.path}, step {step:,}: {total:,} bytes of {dtype} in {output}")
    if not [*folder.glob("tokenizer*")]:
        print("without a tokenizer: name a --tokenizer to add it, and the ids that end a text")


# --- Import ---------------------------------------------------------------------------------------


def model_in(folder: pathlib.Path) -> tuple[train.ModelConfig, int]:
    """Returns the model that config.json describes, and its row length. Raises UserError if it
    computes anything other than train.py's model."""
    import transformers  # takes two seconds, and export doesn't need it

    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        if values["model_type"] not in FAMILIES:
            raise UserError(f"model_type is {values['model_type']}, not {', '.join(FAMILIES)}")
        # Fills in defaults for what the file leaves out.
        config: Any = transformers.AutoConfig.for_model(**values)
    except Exception as error:  # transformers' validation errors have classes of their own
        raise UserError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    # Entries without effect; "type" is an older name of rope_type.
    ignored = ("type", config.rope_parameters["rope_type"]), ("partial_rotary_factor", 1)
    rope = dict(entry for entry in config.rope_parameters.items() if entry not in ignored)
    config.rope_parameters = rope
    vocab, length = config.vocab_size, config.max_position_embeddings
    heads = config.num_attention_heads
    if min(length, heads, config.num_key_value_heads) < 1:
        raise UserError(f"{path}: max_position_embeddings and numbers of heads must be positive")
    # Families without a token that starts a text put one that ends it between texts.
    end = config.eos_token_id
    end = next(iter(end), None) if isinstance(end, list) else end
    start = end if config.bos_token_id is None else config.bos_token_id
    if not (isinstance(start, int) and 0 <= start < vocab):
        raise UserError(
            f"{path}: bos_token_id is {json.dumps(start)}; set it to the id of the token that "
            f"starts a document, below vocab_size={vocab}"
        )
    if getattr(config, "head_dim", 0) is None:  # for Mixtral this is valid
        config.head_dim = config.hidden_size // heads
    scaling, theta = None, rope["rope_theta"]
    if isinstance(theta, float) and theta.is_integer():
        theta = int(theta)
    if rope["rope_type"] == "llama3":
        scaling = {ours: rope[key] for key, ours in LLAMA3.items()}
    values = {ours: getattr(config, theirs) for theirs, ours in MODEL.items()} | {
        "d_head": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "n_q_per_kv": heads // config.num_key_value_heads,
        "rope_max_timescale": theta,
        "rope_scaling": scaling,
        "start_token": start,
    }
    options = FAMILIES[config.model_type][1]
    values |= {key: option for key, option in options.items() if option is not ANY}
    values["sliding_window"] = getattr(config, "sliding_window", None)
    if names := MIXTURES.get(config.model_type):
        experts = {ours: getattr(config, theirs) for theirs, ours in names.items()}
        values |= {"d_ff": 0, "experts": EXPERTS | experts}
    try:
        checked = OmegaConf.merge(OmegaConf.structured(train.ModelConfig), values)
        model = cast(train.ModelConfig, OmegaConf.to_object(checked))
    except OmegaConfBaseException as error:  # of a value's type, which transformers doesn't check
        problem = f"{error.full_key}: {str(error).splitlines()[0]}"
        raise UserError(f"{path} doesn't give train.py's model: {problem}") from None
    except UserError as error:
        raise UserError(f"{path} doesn't give train.py's model: {error}") from None
    # The models compute the same if exporting ours would give the same config.json.
    wanted = described(model, length) | {"quantization_config": None}
    if "sliding_window" not in options:
        wanted |= {"sliding_window": None, "layer_types": ["full_attention"] * model.layers}
    for key, ours in wanted.items():
        theirs = getattr(config, key, ours)
        if theirs != ours:
            problem = f"{key} is {json.dumps(theirs)}; train.py's model needs {json.dumps(ours)}"
            raise UserError(f"{path}: {problem}")
    return model, length


def open_tensors(
    folder: pathlib.Path, model: train.ModelConfig
) -> tuple[train.ModelConfig, dict[str, Any]]:
    """Opens the tensors of a folder without reading their values. Returns them with the model,
    whose embeddings aren't tied if the folder has two. Raises UserError unless it has exactly the
    model's tensors, in the right shapes."""
    opened: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            file = safetensors.safe_open(path, "numpy")
        except safetensors.SafetensorError as error:
            raise UserError(f"{path} can't be read: {error}") from None
        names = file.keys()
        # Old Llamas store their RoPE frequencies, which follow from the config.
        slices = {n: file.get_slice(n) for n in names if not n.endswith("rotary_emb.inv_freq")}
        if duplicates := opened.keys() & slices.keys():
            raise UserError(f"{path} and another file both have {min(duplicates)}: remove one")
        opened |= slices
    kinds = dict.fromkeys(["F32", "F16", "BF16"], "float")
    if model.tied_embeddings and EMBED in opened and UNEMBED in opened:
        if np.array_equal(opened[EMBED][:], opened[UNEMBED][:]):
            del opened[UNEMBED]
        else:  # transformers uses both, whatever config.json says
            model = dataclasses.replace(model, tied_embeddings=False)
    types, places = {}, [tensor.place(opened) for tensor in tensors(model)]
    expected = {name: f"float{list(shape)}" for name, shape, _ in places}
    for name, data in opened.items():
        types[name] = kinds.get(data.get_dtype(), data.get_dtype()) + str(data.get_shape())
    for name in expected | types:
        if (one := types.get(name, "missing")) != (other := expected.get(name, "no such tensor")):
            files = f"{folder}/model*.safetensors"
            raise UserError(f"{files}: {name} is {one}; config.json's model has {other}")
    return model, opened


def import_weights(path: str, output: str, config_file: str = "") -> None:
    """Imports a folder. Raises UserError or OSError if it can't be read, if train.py's model can't
    represent it, or if the output can't be written."""
    check_empty(output)
    if config_file:
        named = config_file.endswith(".yaml") and os.path.basename(config_file) != "base.yaml"
        if not named or os.path.exists(config_file) or not os.path.isdir(place_of(config_file)):
            raise UserError(
                f"--config={config_file}: name a new file NAME.yaml, other than base.yaml, in a "
                "folder that exists"
            )
    folder = pathlib.Path(path)
    model, length = model_in(folder)
    model, opened = open_tensors(folder, model)
    wanted = tensors(model)
    section = OmegaConf.to_yaml(OmegaConf.create({"model": dataclasses.asdict(model)}))
    rows = {"training": {"tokens": {"batch": 1, "len": length}}}
    config = section + OmegaConf.to_yaml(OmegaConf.create(rows))
    arrays = {}
    for name, entry in entries(model).items():
        lengths = zip(entry["dimension_names"], entry["shape"], strict=True)
        part = [1 if dim in stacked(name) else size for dim, size in lengths]
        arrays[name] = checkpoint.in_chunks(entry, part)
    target = Checkpoint(f"{output.rstrip('/')}/{STEP:08d}.{time.time_ns() // 10**6}")
    with storage.opening(target.path):
        target.create(arrays, config)
        into = target.writable(arrays)
        for tensor in tqdm(wanted, unit=" tensors", disable=None):
            name, _, part = tensor.place(opened)
            values = tensor.to_ours(opened[name][part]).astype(np.float32, order="C")
            storage.write(into[tensor.array], (*tensor.index, ...), values)
        target.record(host=0, hosts=1)
        target.mark()
    if "://" not in output:
        kept = pathlib.Path(output, "huggingface")
        kept.mkdir()
        if has_tokenizer(folder):
            copy_settings(str(folder), kept)
        theirs = json.loads((folder / "config.json").read_text())
        theirs["max_position_embeddings"] = length  # transformers' default if it isn't there
        (kept / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    if not config_file:
        print(f"# Start a run with paths.clone_from={output} and this config:\n{section}", end="")
        return
    pathlib.Path(config_file).write_text(run_config(section, model, length, output))
    name = os.path.basename(config_file).removesuffix(".yaml")
    print(
        f"wrote {config_file}: python -m train --config-dir={place_of(config_file)} "
        f"--config-name={name} flat_tokens.filespec=DATASET paths.model_name=NAME"
    )


def place_of(file: str) -> str:
    return os.path.dirname(os.path.abspath(file))


def run_config(section: str, model: train.ModelConfig, length: int, output: str) -> str:
    """Returns a config that continues the training of an imported model, on 8 devices if that
    divides its width."""
    settings = {
        "mesh": {"d": math.gcd(8, model.d_model), "t": 1},
        "training": {
            "tokens": {"batch": 8, "len": min(length, 2048)},
            "steps": 1000,
            "warmup_steps": 100,
            "learning_rate": 1e-5,
        },
        "paths": {"clone_from": os.path.abspath(output) if "://" not in output else output},
    }
    head = "# Continues the training of a model imported from Hugging Face's format."
    return f"{head}\ndefaults:\n  - base\n  - _self_\n\n{section}\n{OmegaConf.to_yaml(settings)}"


# --- The program ----------------------------------------------------------------------------------


def main() -> None:
    parser = arguments.parser("tools.huggingface_weights", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="checkpoint -> Hugging Face folder")
    out.add_argument("checkpoint", help="a checkpoint, or a folder or bucket of them")
    out.add_argument("output", help="folder to create")
    out.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    out.add_argument(
        "--tokenizer", default="", help="folder or hub repository; default: as imported"
    )
    into = commands.add_parser("import", help="Hugging Face folder -> checkpoint")
    into.add_argument("folder", help="folder with config.json and safetensors files")
    into.add_argument("output", help="folder or bucket of checkpoints to create")
    into.add_argument("--config", default="", metavar="FILE", help="write the config of a run")
    with user_errors():
        args = parser.parse_args()
        if args.command == "export":
            export_weights(args.checkpoint, args.output, args.dtype, args.tokenizer)
        else:
            import_weights(args.folder, args.output, args.config)


if __name__ == "__main__":
    main()
