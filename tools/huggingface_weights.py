"""Converts weights between checkpoints and folders that `transformers` loads.

    python -m tools.huggingface_weights import Qwen3-0.6B runs/qwen3 --config qwen3.yaml
    python -m tools.huggingface_weights export runs/x runs/x_qwen3

The families are Llama 1 to 3.2, models like it such as SmolLM2, Mistral, Qwen2 and Qwen2.5, Qwen3
and OLMo 2; with experts Mixtral, OLMoE and Qwen3.

Import takes a folder of safetensors as `hf download` makes it, one tensor at a time. It prints, or
writes to --config, a config for `python -m train --config-dir=. --config-name=NAME
flat_tokens.filespec=...`, which starts from the imported weights. If the checkpoint is in a local
folder, the tokenizer, config.json and generation_config.json are kept beside it. An export of it,
or of a run that started from it, restores them, unless a run was allowed another tokenizer.

Settings of training alone aren't imported: dropout, router_jitter_noise, and router_aux_loss_coef,
as transformers averages loads and scores over layers before it multiplies them, so that its cost
differs from training.routing.balance_cost's. Nothing of training.routing is exported.

Export takes a checkpoint, or the newest complete one of a folder, and writes it as the first family
whose config.json can express the model. The weights stay float32, bit for bit, unless
--dtype=bfloat16 rounds them. The tokenizer is the one kept by the import that the run started from,
or --tokenizer, with the values that tools.huggingface_to_flat_tokens takes. It is refused if it
begins texts with another id than the model's start token, or with none while that id is a word.
The ids that end a text are the tokenizer's, and those of a config.json or generation_config.json
beside it. config.json is written last: a folder without it is unfinished. Memory must hold a file
of weights (4 GB) plus the layers that a chunk of the checkpoint spans, and both embeddings.

Both print warnings of tensors with NaN or infinite values.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import huggingface_hub
import jax
import numpy as np
import safetensors.numpy
from einops import rearrange
from omegaconf import OmegaConf
from tqdm import tqdm

import train
from configs.schema import TokensConfig
from data.flat_tokens import TokenizerId
from data.sources import has_tokenizer, kept_by_import, tokenizer_of_model
from data.tokenizer import difference, problem_of_start
from runtime import checkpoint, storage
from runtime.checkpoint import Checkpoint
from runtime.config import flat, load
from runtime.errors import user_errors
from runtime.run import MeshConfig
from shardlib.errors import UserError
from shardlib.mesh import abstract_mesh
from shardlib.types import type_tree
from tools import arguments
from tools.generate.model import Text, check_ids

SHARD_BYTES = 4 * 10**9  # limit for a file of weights, unless one tensor is larger
# The files of a tokenizer, and with them those of the settings for generation.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.spm", "*.codes", "dict.txt", "chat_template*", "additional_chat_templates/*"),
)
SETTINGS = *TOKENIZER, "generation_config.json"
SAMPLE = "The cats'\n\n  3,456 \u00e9e\u0301s,\tI'LL be \u4f60\u597d."  # to compare tokenizers
OTHERS = {".bin", ".safetensors", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}  # weights
UNFINISHED = "config.json.unfinished"  # its name until the export is complete
STEP = 1  # of an imported checkpoint; 0 would mean that there is none

# The Hugging Face name and dimensions, in einops notation, of each array of train.Weights. A {} in
# the name is an index of the first dimension: each layer, and each expert in it, has a tensor of
# its own. Query head k * Q + q in Hugging Face's (K Q D) is at [q, k] here.
LAYER = {
    "attention_norm": ("input_layernorm.weight", "M"),
    "w_q": ("self_attn.q_proj.weight", "(K Q D) M"),
    "w_k": ("self_attn.k_proj.weight", "(K D) M"),
    "w_v": ("self_attn.v_proj.weight", "(K D) M"),
    "w_o": ("self_attn.o_proj.weight", "M (K Q D)"),
    "mlp_norm": ("post_attention_layernorm.weight", "M"),
    "qkv/biases/b_q": ("self_attn.q_proj.bias", "(K Q D)"),
    "qkv/biases/b_k": ("self_attn.k_proj.bias", "(K D)"),
    "qkv/biases/b_v": ("self_attn.v_proj.bias", "(K D)"),
    "qkv/norms/q_norm": ("self_attn.q_norm.weight", "D"),
    "qkv/norms/k_norm": ("self_attn.k_norm.weight", "D"),
    "qkv/norms/all_q_norm": ("self_attn.q_norm.weight", "(K Q D)"),
    "qkv/norms/all_k_norm": ("self_attn.k_norm.weight", "(K D)"),
    "mlp/w_gate": ("mlp.gate_proj.weight", "F M"),
    "mlp/w_up": ("mlp.up_proj.weight", "F M"),
    "mlp/w_down": ("mlp.down_proj.weight", "M F"),
    "experts/w_router": ("mlp.gate.weight", "E M"),
    "experts/e_gate": ("mlp.experts.{}.gate_proj.weight", "E G M"),
    "experts/e_up": ("mlp.experts.{}.up_proj.weight", "E G M"),
    "experts/e_down": ("mlp.experts.{}.down_proj.weight", "E M G"),
}
EMBED, UNEMBED = "model.embed_tokens.weight", "lm_head.weight"
TENSORS = {
    "weights/embed": (EMBED, "V M"),
    "weights/final_norm": ("model.norm.weight", "M"),
    "weights/unembed": (UNEMBED, "V M"),
    **{
        f"weights/layers/{ours}": (f"model.layers.{{}}.{theirs}", f"layers {dims}")
        for ours, (theirs, dims) in LAYER.items()
    },
}
# The arrays that every model has.
REQUIRED = {name for name in TENSORS if re.fullmatch(r"weights/(layers/)?\w+", name)}
REQUIRED -= {"weights/unembed"}
# By family, parts of names that differ in its files.
RENAMED = {
    "mixtral": {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "olmo2": {
        "post_attention_layernorm": "post_feedforward_layernorm",
        "input_layernorm": "post_attention_layernorm",
    },
}

# By model_type, the fields of train.ModelConfig in which a family differs from Llama.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "all", "norms_after": True},
    "olmoe": {"qk_norm": "all"},
}
WITH_WINDOW = {"mistral", "mixtral"}  # may have a sliding window

# config.json's names for the fields of train.ModelConfig, of ExpertsConfig by family, and of
# RopeScalingConfig, which are in rope_parameters of type llama3.
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
    ours: str  # its dimensions here
    array: str
    index: tuple[int, ...]  # in the array: of a layer, or of a layer and an expert
    sizes: dict[str, int]  # the size of each dimension here, in order

    @property
    def shape(self) -> tuple[int, ...]:
        part = np.broadcast_to(np.float32(0), tuple(self.sizes.values()))  # takes no memory
        return rearrange(part, f"{self.ours} -> {self.theirs}").shape

    def convert(self, values: np.ndarray, before: str, after: str, dtype: Any) -> np.ndarray:
        """Rearranges and rounds values, from `ours` to `theirs` or back. Prints a warning if not
        all are finite."""
        values = rearrange(values, f"{before} -> {after}", **self.sizes)
        values = values.astype(dtype, order="C", copy=False)
        if not np.isfinite(values).all():
            print(f"warning: {self.name} has NaN or infinite values", file=sys.stderr)
        return values


def entries(model: train.ModelConfig) -> dict[str, Any]:
    """Describes a checkpoint's arrays of weights, by name, except their chunks."""
    known = flat(dataclasses.asdict(model), "model.")
    sizes = {name: known[key] for name, key in train.DIMENSIONS.items() if known.get(key)}
    hint = type_tree(train.Stored, train.weights_type(model))
    with jax.sharding.use_abstract_mesh(abstract_mesh(MeshConfig(1, 1).axes)):
        every = checkpoint.describe(hint, sizes)
    return {f"weights/{name}": entry for name, entry in every.items()}


def tensors(model: train.ModelConfig, family: str) -> list[Tensor]:
    """Lists all tensors of a model, those of an array in order. Raises UserError unless the model
    has all REQUIRED arrays, and none but those of TENSORS."""
    result, arrays = [], entries(model)
    if lacking := sorted(REQUIRED - arrays.keys()):
        raise UserError(f"{lacking[0]} is missing in train.py; transformers' files have it")
    for array, entry in arrays.items():
        name, theirs = TENSORS.get(array, ("", ""))
        size = dict(zip(entry["dimension_names"], entry["shape"], strict=True))
        # The dimensions along which each index is a tensor of its own.
        kind, first = entry["attributes"]["type"], theirs.split()[: name.count("{}")]
        same = sorted(size) == sorted(re.findall(r"\w+", theirs)) and [*size][: len(first)] == first
        if not same or "float32[" not in kind:
            has = f"float32[{theirs}]" if theirs else "no tensor for it"
            raise UserError(f"{array} is {kind} in train.py; transformers' files have {has}")
        for old, new in RENAMED.get(family, {}).items():
            name = name.replace(old, new)
        counts = [size.pop(dim) for dim in first]
        dims = theirs.removeprefix(" ".join(first)).strip()
        for index in np.ndindex(*counts):
            result.append(Tensor(name.format(*index), dims, " ".join(size), array, index, size))
    return result


def described(model: train.ModelConfig, length: int, family: str) -> dict[str, Any]:
    """Returns the entries of config.json that determine what the model computes, and its row
    length, as transformers 5 names them. The family may have no such model: see config_of."""
    rope = {"rope_type": "default", "rope_theta": float(model.rope_max_timescale)}
    if scaling := model.rope_scaling:
        rope |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
        rope["rope_type"] = "llama3"
    held = {theirs: getattr(model, ours) for theirs, ours in MODEL.items()}
    if model.experts:
        del held["intermediate_size"]
        held |= {theirs: getattr(model.experts, ours) for theirs, ours in MIXTURES[family].items()}
        # Qwen3's layers without experts; OLMoE's limit on queries, keys and values.
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


def model_from(values: dict[str, Any]) -> tuple[train.ModelConfig, int]:
    """Returns the model that the entries of a config.json describe, and its row length. Raises an
    exception of any kind if that isn't a model of train.py's."""
    import transformers  # takes two seconds

    if (family := values.get("model_type")) not in FAMILIES:
        raise UserError(f"model_type is {family}, not {', '.join(FAMILIES)}")
    # Fills in defaults for what is left out.
    config: Any = transformers.AutoConfig.for_model(**values)
    config.standardize_rope_params()  # as the model does: some entries have two places
    # Entries without effect; "type" is an older name of rope_type.
    ignored = ("type", config.rope_parameters["rope_type"]), ("partial_rotary_factor", 1)
    rope = dict(entry for entry in config.rope_parameters.items() if entry not in ignored)
    config.rope_parameters, theta = rope, rope["rope_theta"]
    if (other := values.get("rope_theta")) not in (None, theta):
        raise UserError(f"rope_theta is {other}, but {theta} in rope_parameters: fix the wrong one")
    # Families without a start token put the end token between texts.
    end = config.eos_token_id
    end = next(iter(end), None) if isinstance(end, list) else end
    start = end if config.bos_token_id is None else config.bos_token_id
    if start is None:
        raise UserError("bos_token_id is null: set it to the id that starts a document")
    heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // heads
    found = {ours: getattr(config, theirs) for theirs, ours in MODEL.items()} | {
        "d_head": config.head_dim,
        "n_q_per_kv": heads // config.num_key_value_heads,
        "rope_max_timescale": theta,
        "rope_scaling": None,
        "start_token": start,
        "sliding_window": config.sliding_window if family in WITH_WINDOW else None,
        **FAMILIES[family],
    }
    if rope["rope_type"] == "llama3":
        found["rope_scaling"] = {ours: rope[key] for key, ours in LLAMA3.items()}
    if names := MIXTURES.get(family):
        experts = {ours: getattr(config, theirs) for theirs, ours in names.items()}
        found |= {"d_ff": 0, "experts": {"bias": False} | experts}
    model, length = load(train.ModelConfig, found), config.max_position_embeddings
    # The models compute the same if exporting ours would give the same config.json.
    wanted = described(model, length, family)
    wanted |= {"quantization_config": None, "is_causal": True}
    kind = "sliding_attention" if model.sliding_window else "full_attention"
    wanted["layer_types"] = [kind] * model.layers
    if family == "olmoe":  # its norms of queries have the size of the residual stream
        wanted["hidden_size"] = heads * model.d_head
    for key, ours in wanted.items():
        if (theirs := getattr(config, key, ours)) != ours:
            one, other = json.dumps(theirs), json.dumps(ours)
            raise UserError(f"{key} is {one}; train.py's model needs {other}")
    return model, length


# Entries of an imported config.json, of any version, for which `described` has others.
ELSEWHERE = "rope_theta", "rope_scaling", "original_max_position_embeddings", "layer_types"


def config_of(model: train.ModelConfig, length: int, more: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json, with the entries `more`, of the first family from which an import
    gives this model back; its own is tried first. Raises UserError if there is none."""
    problems = []
    families = [name for name in FAMILIES if (name in MIXTURES) == bool(model.experts)]
    for family in sorted(families, key=lambda name: name != more.get("model_type")):
        config = {key: x for key, x in more.items() if key not in ELSEWHERE}
        config |= described(model, length, family)
        config |= {"model_type": family, "bos_token_id": model.start_token}
        try:
            if (found := model_from(config)[0]) == model:
                return config
            ours, theirs = (flat(dataclasses.asdict(one)) for one in (model, found))
            key = next(key for key in ours | theirs if ours.get(key) != theirs.get(key))
            problems.append(f"{family} has model.{key}={theirs.get(key)}")
        except Exception as error:  # transformers' validation errors have classes of their own
            problems.append(f"{family}: {' '.join(str(error).split())}")
    raise UserError(f"no family of transformers has such a model: {'; '.join(problems)}")


def check_empty(path: str) -> None:
    if storage.names(path):
        raise UserError(f"{path} isn't empty: choose a new or empty folder")


def copy_files(patterns: Iterable[str], source: str, folder: pathlib.Path) -> None:
    """Copies the files of a folder that match one of the patterns."""
    found = {file for pattern in patterns for file in pathlib.Path(source).glob(pattern)}
    for file in filter(pathlib.Path.is_file, found):
        copied = folder / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)


def say_if_opened_otherwise(folder: pathlib.Path, used: Any, start: int) -> None:
    """Prints a warning if transformers' AutoTokenizer, which goes by the family of the model, gives
    a text other ids than `used`, with which the data was tokenized, adds one at its end, or doesn't
    begin it with `start`."""
    from transformers import AutoTokenizer

    try:
        auto = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many types
        problem = " ".join(str(error).split())
        print(f"warning: AutoTokenizer can't open {folder}: {problem}", file=sys.stderr)
        return
    one, other = (x(SAMPLE, add_special_tokens=False)["input_ids"] for x in (auto, used))
    whole = auto(SAMPLE)["input_ids"]
    if one != other:
        problem = f"AutoTokenizer opens {folder} as {type(auto).__name__}, with other ids"
        cure = "use transformers.PreTrainedTokenizerFast.from_pretrained"
        print(f"warning: {problem} than in training: {cure}")
    elif whole[-1:] != one[-1:]:
        added = auto.convert_ids_to_tokens(whole[-1])
        print(f"warning: AutoTokenizer adds {added} to the end of a prompt: take it off")
    if one == other and whole[:1] != [start]:
        print(f"warning: AutoTokenizer doesn't begin a prompt with {start}: make it the first id")


# --- Export ---------------------------------------------------------------------------------------


def model_of(source: Checkpoint) -> tuple[train.ModelConfig, int]:
    """Returns the config of the model in a checkpoint, and the row length it was trained on. Raises
    CheckpointError if the model isn't train.py's."""
    model = source.config(train.ModelConfig)
    length = source.config(TokensConfig, {"batch": 1}).len
    source.check({}, entries(model), "weights/", "export it with the train.py that made it")
    return model, length


def copy_tokenizer(
    name: str, folder: pathlib.Path, model: train.ModelConfig, kept: str | None = None
) -> dict[str, Any]:
    """Copies a tokenizer. Returns the ids that end a text, also those in the folder `kept`, and the
    one that pads a batch. Raises UserError if there is no tokenizer, or if its ids or its start of
    a text don't suit the model."""
    tokenizer = Text(name, kept)
    if tokenizer.slow and not os.path.exists(name):
        wanted = [*SETTINGS, "config.json"]
        tokenizer = Text(huggingface_hub.snapshot_download(name, allow_patterns=wanted), kept)
    check_ids(f"the tokenizer {name}", tokenizer.ids[-1], model)
    if problem := problem_of_start(tokenizer, model.start_token):
        cure = "Export without it, and begin each text with the model's start token"
        raise UserError(f"{problem}. {cure}")
    if os.path.isfile(name):
        shutil.copyfile(name, folder / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    elif tokenizer.slow:
        copy_files(TOKENIZER, tokenizer.name, folder)  # not how another model samples
    ends, pad = list[Any](tokenizer.ends) or [None], getattr(tokenizer.slow, "pad_token_id", None)
    return {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": pad}


def stored(source: Checkpoint, wanted: list[Tensor]) -> Iterator[np.ndarray]:
    """Yields the values of tensors as they are in the checkpoint."""
    for name, depth in {tensor.array: len(tensor.index) for tensor in wanted}.items():
        array = source.arrays[name]
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
        some = itertools.islice(pairs, len(names))
        part = {x.name: x.convert(value, x.ours, x.theirs, dtype) for x, value in some}
        try:
            safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{folder / file} can't be written: {error}") from None
        shutil.copymode(folder / UNFINISHED, folder / file)  # safetensors makes files with mode 600
        del part  # frees it before the next file is read
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files.metadata["total_size"]


def export_weights(path: str, output: str, dtype: str, tokenizer: str | None = None) -> None:
    """Exports a checkpoint. Raises UserError or OSError if it can't be read, if no family of
    transformers has the model, or if the output can't be written."""
    # This import takes two seconds.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if "://" in output:
        raise UserError(f"{output}: the output must be a local folder")
    check_empty(output)
    source, folder = checkpoint.newest(path), pathlib.Path(output)
    model, length = model_of(source)
    if model.rope_scaling:
        length = max(length, model.rope_scaling.original_len)
    config: dict[str, Any] = {"eos_token_id": None}
    recorded = tokenizer_of_model(source)
    if tokenizer and recorded and recorded.vocabulary:
        used = TokenizerId(tokenizer, Text(tokenizer).vocabulary)
        if problem := difference(recorded, used):
            problem = f"the model's tokenizer is {recorded.name}, not {tokenizer}: {problem}"
            raise UserError(f"{problem}. Name the model's, or a copy of it")
    if kept := kept_by_import(source, print):
        config = json.loads(pathlib.Path(kept, "config.json").read_text())
        length = max(length, model_in(pathlib.Path(kept))[1])
        if not tokenizer and recorded and has_tokenizer(kept) and recorded.name != kept:
            tokenizer = recorded.name
            print(f"the tokenizer is {tokenizer}, which has more tokens than the import's, {kept}")
    config = config_of(model, length, config)
    wanted, rope = tensors(model, config["model_type"]), dict(config["rope_parameters"])
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        config |= copy_tokenizer(tokenizer, folder, model, kept)
    elif kept:
        copy_files(SETTINGS, kept, folder)
        if has_tokenizer(kept) and (said := problem_of_start(Text(kept), model.start_token)):
            print(f"warning: {said}")
    config.setdefault("transformers_version", importlib.metadata.version("transformers"))
    config |= {
        "architectures": [CLASSES[config["model_type"]]],
        "dtype": dtype,
        # The names of transformers 4, which other programs read.
        "torch_dtype": dtype,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if model.rope_scaling else None,
    }
    (folder / UNFINISHED).write_text(json.dumps(config, indent=2) + "\n")
    total = write_weights(folder, wanted, stored(source, wanted), np.dtype(dtype))
    (folder / UNFINISHED).replace(folder / "config.json")
    step = source.metadata["step"]
    print(f"exported {source.path}, step {step:,}: {total:,} bytes of {dtype} in {output}")
    if (tokenizer or (recorded and recorded.name)) == "bytes_utf8":
        print(f"no tokenizer: ids are bytes plus 1, a text starts with the id {model.start_token}")
    elif has_tokenizer(folder):
        say_if_opened_otherwise(folder, Text(tokenizer or str(kept)).slow, model.start_token)
    else:
        print("the export has no tokenizer: --tokenizer adds one, and the ids that end a text")


# --- Import ---------------------------------------------------------------------------------------


def model_in(folder: pathlib.Path) -> tuple[train.ModelConfig, int]:
    """Returns the model that config.json describes, and its row length. Raises UserError if it
    computes anything other than train.py's model."""
    path = folder / "config.json"
    try:
        return model_from(json.loads(path.read_text()))
    except Exception as error:  # transformers' validation errors have classes of their own
        problem = " ".join(str(error).split())
        raise UserError(f"{path} can't be imported: {problem}") from None


def open_tensors(folder: pathlib.Path) -> dict[str, Any]:
    """Opens the tensors of a folder without reading their values."""
    opened: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            file = safetensors.safe_open(path, "numpy")
        except safetensors.SafetensorError as error:
            with path.open("rb") as start:
                lfs = start.read(23) == b"version https://git-lfs"
            cure = "; it is a pointer of Git LFS: get the file with git lfs pull" if lfs else ""
            raise UserError(f"{path} can't be read: {error}{cure}") from None
        names = file.keys()
        # Old Llamas store their RoPE frequencies, which follow from the config.
        slices = {n: file.get_slice(n) for n in names if not n.endswith("rotary_emb.inv_freq")}
        if duplicates := opened.keys() & slices.keys():
            raise UserError(f"{path} and another file both have {min(duplicates)}: remove one")
        opened |= slices
    if not opened:
        others = ", ".join(path.name for path in sorted(folder.iterdir()) if path.suffix in OTHERS)
        cure = f", only {others}: load it with transformers, and save_pretrained that"
        raise UserError(f"{folder} has no model*.safetensors{cure if others else ''}")
    return opened


def check_tensors(opened: dict[str, Any], wanted: list[Tensor], folder: pathlib.Path) -> None:
    """Raises UserError unless a folder has exactly these tensors, in the right shapes."""
    expected = {tensor.name: f"float{list(tensor.shape)}" for tensor in wanted}
    kinds = {name: f"{data.get_dtype()}{data.get_shape()}" for name, data in opened.items()}
    types = {name: re.sub(r"^B?F(16|32)\b", "float", kind) for name, kind in kinds.items()}
    for name in expected | types:
        if (one := types.get(name, "missing")) != (other := expected.get(name, "no such tensor")):
            files = f"{folder}/model*.safetensors"
            raise UserError(f"{files}: {name} is {one}; config.json's model has {other}")


def import_weights(path: str, output: str) -> str:
    """Imports a folder. Returns a config that starts from it. Raises UserError or OSError if it
    can't be read, if train.py's model can't represent it, or if the output can't be written."""
    check_empty(output)
    folder = pathlib.Path(path)
    if (adapter := folder / "adapter_config.json").exists():
        cure = "merge it into the model with PEFT's merge_and_unload, and save_pretrained that"
        raise UserError(f"{adapter} is of an adapter, which would be left out: {cure}")
    model, length = model_in(folder)
    theirs = json.loads((folder / "config.json").read_text())
    if own := [key for key in theirs.get("auto_map") or {} if key.startswith("AutoModel")]:
        raise UserError(f"config.json's auto_map has {own[0]}: the model has code of its own")
    # Opens the tokenizer before it writes anything.
    problem = has_tokenizer(folder) and problem_of_start(Text(path), model.start_token)
    opened = open_tensors(folder)
    if model.tied_embeddings and EMBED in opened and UNEMBED in opened:
        if np.array_equal(opened[EMBED][:], opened[UNEMBED][:]):
            del opened[UNEMBED]
        else:  # transformers uses both, whatever config.json says
            model = dataclasses.replace(model, tied_embeddings=False)
    wanted = tensors(model, theirs["model_type"])
    check_tensors(opened, wanted, folder)
    chunks = {x.array: [1] * len(x.index) + [*x.sizes.values()] for x in wanted}
    every = entries(model).items()
    arrays = {name: checkpoint.in_chunks(entry, chunks[name]) for name, entry in every}
    target = Checkpoint(f"{output.rstrip('/')}/{STEP:08d}.{time.time_ns() // 10**6}")
    section = {"model": dataclasses.asdict(model)}
    rows = {"training": {"tokens": {"batch": 1, "len": length}}}
    with storage.opening(target.path):
        if "://" not in output:
            kept = pathlib.Path(output, "huggingface")
            kept.mkdir(parents=True)
            copy_files(SETTINGS, path, kept)
            shutil.copyfile(folder / "config.json", kept / "config.json")
        target.create(arrays, OmegaConf.to_yaml(section | rows))
        into = target.writable(arrays)
        for tensor in tqdm(wanted, unit=" tensors", disable=None):
            values = tensor.convert(opened[tensor.name][:], tensor.theirs, tensor.ours, np.float32)
            storage.write(into[tensor.array], (*tensor.index, ...), values)
        target.record(host=0, hosts=1)
        target.mark()
    if theirs.get("bos_token_id") is None:
        start = f"documents start with the id {model.start_token} in train.py"
        cure = "if the model was trained with another, set bos_token_id, and import again"
        print(f"note: config.json has no bos_token_id: {start}; {cure}", file=sys.stderr)
    if problem:
        print(f"warning: {problem}", file=sys.stderr)
    return HOW_TO_START + OmegaConf.to_yaml(run_config(model, length, output))


HOW_TO_START = """\
# Continues the training of an imported model. If this is saved as NAME.yaml, start a run with:
# python -m train --config-dir=. --config-name=NAME flat_tokens.filespec=DATA paths.model_name=RUN
"""


def run_config(model: train.ModelConfig, length: int, output: str) -> dict[str, Any]:
    """Returns a config that continues the training of an imported model, on up to 8 devices, which
    divide its width."""
    tokens = {"batch": 8, "len": min(length, 2048)}
    return {
        "defaults": ["base", "_self_"],
        "model": dataclasses.asdict(model),
        "mesh": {"d": math.gcd(8, model.d_model), "t": 1},
        "training": {"tokens": tokens, "steps": 1000, "warmup_steps": 100, "learning_rate": 1e-5},
        "paths": {"clone_from": os.path.abspath(output) if "://" not in output else output},
    }


# --- The program ----------------------------------------------------------------------------------


def main() -> None:
    parser = arguments.parser("tools.huggingface_weights", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="checkpoint -> Hugging Face folder")
    out.add_argument("checkpoint", help="a checkpoint, or a folder or bucket of them")
    out.add_argument("output", help="folder to create")
    out.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    out.add_argument("--tokenizer", help="as the converter's; default: as imported")
    into = commands.add_parser("import", help="Hugging Face folder -> checkpoint")
    into.add_argument("folder", help="folder with config.json and safetensors files")
    into.add_argument("output", help="folder or bucket of checkpoints to create")
    into.add_argument("--config", metavar="NAME.yaml", help="file to create; default: print it")
    with user_errors():
        args = parser.parse_args()
        if args.command == "export":
            export_weights(args.checkpoint, args.output, args.dtype, args.tokenizer)
        elif args.config and os.path.exists(args.config):
            raise UserError(f"{args.config} exists; choose another --config")
        else:
            if args.config:  # before the import, which takes longer
                into_output = pathlib.Path(args.output).absolute()
                if pathlib.Path(args.config).absolute().is_relative_to(into_output):
                    raise UserError(f"--config={args.config} is in {args.output}: choose another")
                os.makedirs(folder := os.path.dirname(args.config) or ".", exist_ok=True)
                if not os.access(folder, os.W_OK):
                    raise UserError(f"--config={args.config} is in a folder that isn't writable")
            config = import_weights(args.folder, args.output)
            if args.config:
                pathlib.Path(args.config).write_text(config)
                print(f"{args.output} and {args.config} written")
            else:
                print(config, end="")


if __name__ == "__main__":
    main()
