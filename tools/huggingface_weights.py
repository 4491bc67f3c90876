"""A checkpoint's weights <-> a folder that Hugging Face `transformers` loads as a Llama.

    python -m tools.huggingface_weights export runs/x/checkpoints x_llama
    python -m tools.huggingface_weights import Llama-3.2-1B llama

Export takes the newest complete checkpoint, or the one named. It keeps all bits of the weights,
unless --dtype=bfloat16 rounds them. config.json comes last: without it, a folder is unfinished.
A file of weights, 4 GB, with the layers that a chunk of the checkpoint spans, must fit into memory,
and so must both embeddings. A tokenizer that belongs to the model is saved beside it by
transformers' own `save_pretrained`.

Import takes Llamas, and Mistrals without a sliding window, from a folder that `hf download` made
with their safetensors, a tensor at a time. It prints the section `model` that a config needs for a
run to start from them, by paths.clone_from.

Where a dataset's ids are a tokenizer's plus an offset, --id-offset moves the rows of the embeddings
likewise; the last ones become the first.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from einops import rearrange
from huggingface_hub import split_state_dict_into_shards_factory
from omegaconf import OmegaConf
from tqdm import tqdm

import train
from runtime import checkpoint, storage
from runtime.checkpoint import Checkpoint, show_entry
from runtime.config import flat
from runtime.errors import user_errors
from runtime.storage import DamageError
from shardlib.devices import abstract_mesh
from shardlib.errors import UserError

SHARD_BYTES = 4 * 10**9  # of a file of weights, at most, unless one tensor is larger
STEP = 1  # of an imported checkpoint: the least that counts as one

# Hugging Face's name of each array of train.Weights, or of a layer of it, and its dimensions there,
# as einops writes them. Query head k * Q + q of (K Q D) is ours at [q, k].
TENSORS = {
    "weights/embed": ("model.embed_tokens.weight", "V M"),
    "weights/layers/attention_norm": ("model.layers.{}.input_layernorm.weight", "layers M"),
    "weights/layers/w_q": ("model.layers.{}.self_attn.q_proj.weight", "layers (K Q D) M"),
    "weights/layers/w_k": ("model.layers.{}.self_attn.k_proj.weight", "layers (K D) M"),
    "weights/layers/w_v": ("model.layers.{}.self_attn.v_proj.weight", "layers (K D) M"),
    "weights/layers/w_o": ("model.layers.{}.self_attn.o_proj.weight", "layers M (K Q D)"),
    "weights/layers/mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "layers M"),
    "weights/layers/w_gate": ("model.layers.{}.mlp.gate_proj.weight", "layers F M"),
    "weights/layers/w_up": ("model.layers.{}.mlp.up_proj.weight", "layers F M"),
    "weights/layers/w_down": ("model.layers.{}.mlp.down_proj.weight", "layers M F"),
    "weights/final_norm": ("model.norm.weight", "M"),
    "weights/unembed": ("lm_head.weight", "V M"),
}
EMBED, UNEMBED = TENSORS["weights/embed"][0], TENSORS["weights/unembed"][0]

# What config.json calls the fields of train.ModelConfig and train.RopeScalingConfig; the latter are
# in its RoPE of the type llama3.
MODEL = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "n_kv",
    "head_dim": "d_head",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
}
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_len",
}


# --- The two forms --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One of Hugging Face's tensors, and where its values are in a checkpoint."""

    name: str
    theirs: str  # its dimensions, as einops writes them
    array: str
    index: Any  # a layer of the array, or all of it
    sizes: dict[str, int]  # of the dimensions that this part has, in order
    id_offset: int  # 0 unless the first dimension is ids

    @property
    def ours(self) -> str:
        return " ".join(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        part = jax.ShapeDtypeStruct(tuple(self.sizes.values()), np.float32)
        return jax.eval_shape(lambda x: rearrange(x, f"{self.ours} -> {self.theirs}"), part).shape

    def to_ours(self, values: np.ndarray) -> np.ndarray:
        values = rearrange(values, f"{self.theirs} -> {self.ours}", **self.sizes)
        return np.roll(values, self.id_offset, axis=0)

    def to_theirs(self, values: np.ndarray) -> np.ndarray:
        values = np.roll(values, -self.id_offset, axis=0)
        return rearrange(values, f"{self.ours} -> {self.theirs}")


def sizes(model: train.ModelConfig) -> dict[str, int]:
    known = flat(vars(model), "model.")
    return {name: known[key] for name, key in train.DIMENSIONS.items() if key in known}


def entries(model: train.ModelConfig) -> dict[str, Any]:
    """The arrays of a checkpoint of the weights."""
    axes = dataclasses.fields(train.MeshConfig)
    with jax.sharding.use_abstract_mesh(abstract_mesh({axis.name: 1 for axis in axes})):
        found = checkpoint.entries(train.State, sizes(model))
    return {name: entry for name, entry in found.items() if name.startswith("weights/")}


def tensors(model: train.ModelConfig, id_offset: int) -> list[Tensor]:
    """All of a model, an array's layers one after the other. Raises UserError unless Llama's files
    have a tensor for each array of train.Weights, and no more."""
    made, arrays = [], entries(model)
    for array in arrays | TENSORS:
        name, theirs = TENSORS.get(array, ("", ""))
        entry = arrays.get(array, {"dtype": "float32", "dimensions": [], "shape": []})
        size = dict(zip(entry["dimensions"], entry["shape"], strict=True))
        if sorted(size) != sorted(re.findall(r"\w+", theirs)) or entry["dtype"] != "float32":
            raise UserError(
                f"{array} is {show_entry(arrays.get(array))} in train.py; Llama's files have "
                + (f"float32[{theirs}]" if theirs else "no tensor for it")
            )
        dims, rolled = theirs.removeprefix("layers "), id_offset if "V" in size else 0
        for index in range(size.pop("layers")) if "layers" in size else [...]:
            made.append(Tensor(name.format(index), dims, array, index, size, rolled))
    return made


def llama_config(model: train.ModelConfig, length: int, id_offset: int) -> dict[str, Any]:
    """What config.json says of the function that a model computes, and of the rows that it was
    trained on, by the names of transformers 5."""
    rope = {"rope_type": "default", "rope_theta": float(model.rope_max_timescale)}
    if scaling := model.rope_scaling:
        rope |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
        rope["rope_type"] = "llama3"
    return {
        **{theirs: getattr(model, ours) for theirs, ours in MODEL.items()},
        "num_attention_heads": model.n_q_per_kv * model.n_kv,
        "max_position_embeddings": length,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": (model.start_token - id_offset) % model.vocab,
    }


def check_empty(path: str) -> None:
    if storage.names(path):
        raise UserError(f"{path} isn't empty: name a folder that is, or isn't there yet")


# --- Export ---------------------------------------------------------------------------------------


def model_of(source: Checkpoint) -> tuple[train.ModelConfig, int]:
    """The model whose weights are in a checkpoint, and the length of the rows it was trained on.
    Raises CheckpointError for another model than train.py's."""
    model = source.config(train.ModelConfig, "model")
    length = source.config(train.TokensConfig, "training.tokens", {"batch": 1}).len
    source.check({}, entries(model), "weights/", "export it with the train.py that made it")
    return model, length


def is_tied(source: Checkpoint) -> bool:
    """Whether the embedding and the unembedding are equal bit for bit."""
    one, other = (source.read(source.array(f"weights/{name}")) for name in ("embed", "unembed"))
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def stored(source: Checkpoint, wanted: list[Tensor]) -> Iterator[np.ndarray]:
    """The values of tensors, as the checkpoint has them."""
    for name in dict.fromkeys(tensor.array for tensor in wanted):
        array, stacked = source.array(name), TENSORS[name][1].startswith("layers")
        count = array.chunks[0] if stacked else array.shape[0]  # a chunk is read whole
        for first in range(0, array.shape[0], count):
            values = source.read(array, slice(first, first + count))
            yield from values if stacked else [values]


def write_weights(
    folder: pathlib.Path, wanted: list[Tensor], values: Iterator[np.ndarray], dtype: Any
) -> int:
    """Writes files of safetensors, and if there are several, an index of them. Returns the number
    of their bytes."""
    nbytes = {tensor.name: math.prod(tensor.shape) * dtype.itemsize for tensor in wanted}
    files = split_state_dict_into_shards_factory(
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
        del part  # before the next one is read
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files.metadata["total_size"]


def export_weights(path: str, output: str, dtype: str, id_offset: int) -> None:
    """Raises UserError or OSError for what can't be read, said in a Llama's terms, or written."""
    if "://" in output:
        raise UserError(f"{output}: the output is a local folder")
    check_empty(output)
    source, folder = checkpoint.newest(path), pathlib.Path(output)
    model, length = model_of(source)
    if model.d_model % (model.n_q_per_kv * model.n_kv):
        raise UserError("LlamaConfig wants model.d_model to be a multiple of its query heads")
    wanted = tensors(model, id_offset)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tied = is_tied(source)
        wanted = [tensor for tensor in wanted if not tied or tensor.name != UNEMBED]
        total = write_weights(folder, wanted, stored(source, wanted), np.dtype(dtype))
    except DamageError as error:
        raise UserError(f"{source.path} is damaged: {error}") from None
    config = llama_config(model, length, id_offset)
    rope = dict(config["rope_parameters"])
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": tied,
        "eos_token_id": None,  # no document's end is a token
        "dtype": dtype,
        # By the names of transformers 4, which other programs read.
        "torch_dtype": dtype,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if model.rope_scaling else None,
    }
    unfinished = folder / "config.json.unfinished"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    unfinished.replace(folder / "config.json")
    step = source.metadata["step"]
    print(f"exported {source.path}, step {step:,}: {total:,} bytes of {dtype} in {output}")


# --- Import ---------------------------------------------------------------------------------------


def model_in(folder: pathlib.Path, id_offset: int) -> tuple[train.ModelConfig, int, bool]:
    """The model that config.json describes, the length of its rows, and whether its embeddings are
    tied. Raises UserError for another function than train.py's model computes."""
    import transformers  # two seconds, which an export doesn't need

    path = folder / "config.json"
    try:
        said = json.loads(path.read_text())
        if said["model_type"] not in ("llama", "mistral"):
            raise UserError(f"model_type is {said['model_type']}, not llama or mistral")
        # It knows the defaults of what a file leaves out.
        config: Any = transformers.AutoConfig.for_model(**said)
    except Exception as error:  # its validation's errors have classes of their own
        raise UserError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    # "type" is an older name of rope_type.
    silent = ("type", config.rope_parameters["rope_type"]), ("partial_rotary_factor", 1)
    rope = dict(said for said in config.rope_parameters.items() if said not in silent)
    config.rope_parameters = rope
    start, vocab, length = config.bos_token_id, config.vocab_size, config.max_position_embeddings
    if min(length, config.num_key_value_heads) < 1:
        raise UserError(f"{path}: max_position_embeddings and num_key_value_heads are at least 1")
    if start not in range(vocab):
        raise UserError(
            f"{path}: bos_token_id is {json.dumps(start)}; set it to the id of what starts a "
            f"document, below vocab_size={vocab}"
        )
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = train.RopeScalingConfig(**{ours: rope[key] for key, ours in LLAMA3.items()})
    model = train.ModelConfig(
        **{ours: getattr(config, theirs) for theirs, ours in MODEL.items()},
        n_q_per_kv=config.num_attention_heads // config.num_key_value_heads,
        rope_max_timescale=int(rope["rope_theta"]),
        rope_scaling=scaling,
        start_token=(start + id_offset) % vocab,
    )
    # The function is the same if this model, exported, says the same.
    wanted = {"sliding_window": None, "quantization_config": None}
    for key, here in (wanted | llama_config(model, length, id_offset)).items():
        there = getattr(config, key, here)
        if there != here:
            found, own = json.dumps(there), json.dumps(here)
            raise UserError(f"{path}: {key} is {found}; train.py's model has {own}")
    return model, length, config.tie_word_embeddings


def find(folder: pathlib.Path, wanted: list[Tensor], tied: bool) -> dict[str, Any]:
    """The tensors of a folder, unread. Raises UserError unless just the wanted ones are there, in
    these shapes."""
    there: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            file = safetensors.safe_open(path, "numpy")
        except safetensors.SafetensorError as error:
            raise UserError(f"{path} can't be read: {error}") from None
        names = file.keys()
        # Old Llamas have their RoPE's frequencies, which follow from the config.
        slices = {n: file.get_slice(n) for n in names if not n.endswith("rotary_emb.inv_freq")}
        if twice := there.keys() & slices.keys():
            raise UserError(f"{path} has {min(twice)}, and so has another file: move one away")
        there |= slices
    if tied and EMBED in there:
        there.setdefault(UNEMBED, there[EMBED])  # its own goes first, as in transformers
    kinds = dict.fromkeys(["F32", "F16", "BF16"], "float")
    found, known = {}, {tensor.name: f"float{list(tensor.shape)}" for tensor in wanted}
    for name, one in there.items():
        found[name] = kinds.get(one.get_dtype(), one.get_dtype()) + str(one.get_shape())
    for name in known | found:
        if (one := found.get(name, "missing")) != (other := known.get(name, "missing")):
            files = f"{folder}/model*.safetensors"
            raise UserError(f"{files}: {name} is {one}; in the model of config.json it is {other}")
    return there


def import_weights(path: str, output: str, id_offset: int) -> None:
    """Raises UserError or OSError for what can't be read, represented or written."""
    check_empty(output)
    folder = pathlib.Path(path)
    model, length, tied = model_in(folder, id_offset)
    wanted = tensors(model, id_offset)
    there = find(folder, wanted, tied)
    section = OmegaConf.to_yaml(OmegaConf.create({"model": dataclasses.asdict(model)}))
    # For tools.generate: a part of the logits at a time, as rows may be long.
    chunks = math.gcd(length, max(1, length // 1024))
    rows = {"training": {"tokens": {"batch": 1, "len": length}, "loss_chunks": chunks}}
    config = section + OmegaConf.to_yaml(OmegaConf.create(rows))
    arrays = {}
    for name, entry in entries(model).items():
        lengths = zip(entry["dimensions"], entry["shape"], strict=True)
        arrays[name] = entry, [1 if dim == "layers" else size for dim, size in lengths]
    target = f"{output.rstrip('/')}/{STEP:08d}.{time.time_ns() // 10**6}"
    with storage.opening(target):
        group = checkpoint.create(target, arrays, {"step": STEP, "config": config, "hosts": 1})
        for tensor in tqdm(wanted, unit=" tensors", disable=None):
            values = tensor.to_ours(there[tensor.name][:]).astype(np.float32, order="C")
            checkpoint.write(group, tensor.array, tensor.index, values)
        checkpoint.report(group, 0, len(wanted), None, None)
        checkpoint.complete(group, [None])
    print(f"# A run starts from it with paths.clone_from={output} and\n{section}", end="")


# --- The program ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.huggingface_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a checkpoint to Hugging Face's files")
    out.add_argument("checkpoint", help="a folder or bucket of checkpoints, or one of them")
    out.add_argument("output", help="a folder, to be made")
    out.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    into = commands.add_parser("import", help="Hugging Face's files to a checkpoint")
    into.add_argument("folder", help="with config.json and safetensors")
    into.add_argument("output", help="a folder or bucket of checkpoints, to be made")
    for command in out, into:
        command.add_argument("--id-offset", type=int, default=0, help="as the dataset's id_offset")
    given = parser.parse_args()
    with user_errors():
        if given.command == "export":
            export_weights(given.checkpoint, given.output, given.dtype, given.id_offset)
        else:
            import_weights(given.folder, given.output, given.id_offset)


if __name__ == "__main__":
    main()
