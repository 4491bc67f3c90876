"""A checkpoint's weights <-> a folder that Hugging Face `transformers` loads as a Llama.

    python -m tools.huggingface_weights export runs/x/checkpoints x_llama --tokenizer=gpt2
    python -m tools.huggingface_weights import Llama-3.2-1B llama

Export takes the newest complete checkpoint, or the one named. It keeps all bits of the weights,
unless --dtype=bfloat16 rounds them. config.json comes last: without it, a folder is unfinished.

Import takes Llamas, and Mistrals without a sliding window, as safetensors. It prints the section
`model` that a config needs for a run to start from them, by paths.clone_from.

Where a dataset's ids are a tokenizer's plus an offset, --id-offset moves the rows of the embeddings
likewise; the last ones become the first.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import operator
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import OmegaConf
from tqdm import tqdm

import train
from runtime import checkpoint, storage
from runtime.checkpoint import Checkpoint, CheckpointError, show_entry
from runtime.errors import user_errors
from runtime.storage import DamageError
from shardlib.errors import UserError

SHARD_BYTES = 4 * 10**9  # of a file of weights, at most, unless one tensor is larger
READ_BYTES = 2**31  # of a checkpoint's layers, read at once at most, unless one is larger
STEP = 1  # of an imported checkpoint: the least that counts as one

# Hugging Face's name of each array of train.Weights, or of a layer's part of it, and its dimensions
# there. `K Q D` is a single one, in which query head k * Q + q is ours at [q, k].
TENSORS = {
    "embed": ("model.embed_tokens.weight", "V, M"),
    "layers/attention_norm": ("model.layers.{}.input_layernorm.weight", "M"),
    "layers/w_q": ("model.layers.{}.self_attn.q_proj.weight", "K Q D, M"),
    "layers/w_k": ("model.layers.{}.self_attn.k_proj.weight", "K D, M"),
    "layers/w_v": ("model.layers.{}.self_attn.v_proj.weight", "K D, M"),
    "layers/w_o": ("model.layers.{}.self_attn.o_proj.weight", "M, K Q D"),
    "layers/mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "M"),
    "layers/w_gate": ("model.layers.{}.mlp.gate_proj.weight", "F, M"),
    "layers/w_up": ("model.layers.{}.mlp.up_proj.weight", "F, M"),
    "layers/w_down": ("model.layers.{}.mlp.down_proj.weight", "M, F"),
    "final_norm": ("model.norm.weight", "M"),
    "unembed": ("lm_head.weight", "V, M"),
}
# What RoPE of the type llama3 has there, and in train.RopeScalingConfig.
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_len",
}
EMBED, UNEMBED = TENSORS["embed"][0], TENSORS["unembed"][0]
SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # dtypes


# --- The two layouts ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One of Hugging Face's tensors, and where its values are in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    array: str
    layer: int | None  # the index of the array's first dimension
    split: tuple[int, ...]  # the shape, before several dimensions were made one
    order: tuple[int, ...]  # of those dimensions, as the array has them
    rolled: int  # rows that stand at the start of the array and at the end of the tensor

    def ours(self, values: np.ndarray) -> np.ndarray:
        values = values.reshape(self.split).transpose(self.order)
        return np.roll(values, self.rolled, axis=0) if self.rolled else values

    def theirs(self, values: np.ndarray) -> np.ndarray:
        values = np.roll(values, -self.rolled, axis=0) if self.rolled else values
        return values.transpose(np.argsort(self.order)).reshape(self.shape)


def sizes(model: train.ModelConfig) -> dict[str, int]:
    keys = {name: key.split(".") for name, key in train.DIMENSIONS.items()}
    return {n: operator.attrgetter(k[1])(model) for n, k in keys.items() if k[0] == "model"}


def entries(model: train.ModelConfig) -> dict[str, Any]:
    """The arrays of a checkpoint of the weights."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1, 1), ("d", "t"))):
        found = checkpoint.entries(train.State, sizes(model))
    return {name: entry for name, entry in found.items() if name.startswith("weights/")}


def tensors(model: train.ModelConfig, id_offset: int) -> list[Tensor]:
    """All of a model, an array's layers one after the other. Raises UserError unless Llama's files
    have a tensor for each array of train.Weights, and no more."""
    made, size, arrays = [], sizes(model), entries(model)
    for array in dict.fromkeys([*arrays, *(f"weights/{name}" for name in TENSORS)]):
        name, text = TENSORS.get(array.removeprefix("weights/"), ("", ""))
        if not name:
            raise UserError(f"{array}: Llama's files have no tensor for it")
        if array not in arrays:
            raise UserError(f"{array}: Llama's files need it, and train.py's model lacks it")
        entry, stacked = arrays[array], "{}" in name
        groups = [group.split() for group in text.split(", ")]
        theirs, ours = list(itertools.chain(*groups)), entry["dimensions"][stacked:]
        if sorted(theirs) != sorted(ours) or entry["dtype"] != "float32":
            raise UserError(
                f"{array} is {show_entry(entry)}; Llama's files have float32[{text}] for it"
                + (", of each layer" if stacked else "")
            )
        shape = tuple(math.prod(size[dim] for dim in group) for group in groups)
        split, order = tuple(size[dim] for dim in theirs), tuple(theirs.index(dim) for dim in ours)
        rolled = id_offset if theirs[0] == "V" else 0
        for i in range(model.layers) if stacked else [None]:
            made.append(Tensor(name.format(i), shape, array, i, split, order, rolled))
    return made


def size_of(tensor: Tensor, dtype: Any) -> int:
    """In bytes."""
    return math.prod(tensor.shape) * jnp.dtype(dtype).itemsize


def progress(tensors: Iterable[Tensor], dtype: Any) -> tqdm:
    """Counts bytes, on a terminal only."""
    total = sum(size_of(tensor, dtype) for tensor in tensors)
    return tqdm(total=total, unit="B", unit_scale=True, disable=None)


def check_empty(path: str) -> None:
    if storage.names(path):
        raise UserError(f"{path} isn't empty: name a folder that is, or isn't there yet")


# --- Export ---------------------------------------------------------------------------------------


def model_of(source: Checkpoint) -> tuple[train.ModelConfig, int]:
    """The model whose weights are in a checkpoint, and the length of the rows it was trained on.
    Raises CheckpointError for another model than train.py's."""
    model = source.config(train.ModelConfig, "model")
    length = source.config(train.TokensConfig, "training.tokens", {"batch": 1}).len
    wanted, arrays = entries(model), source.about["arrays"]
    for name in dict.fromkeys([*wanted, *(n for n in arrays if n.startswith("weights/"))]):
        there, here = show_entry(arrays.get(name)), show_entry(wanted.get(name))
        if there != here:
            raise CheckpointError(
                f"{source.path} is of another model: {name} is {there} there, {here} in train.py"
            )
    return model, length


def is_tied(source: Checkpoint) -> bool:
    """Whether the embedding and the unembedding are equal bit for bit."""
    one, other = (source.array(f"weights/{name}") for name in ("embed", "unembed"))

    def rows(array: Any, first: int) -> np.ndarray:
        return source.read(array, slice(first, first + one.chunks[0])).view(np.uint32)

    starts = range(0, one.shape[0], one.chunks[0])
    return all(np.array_equal(rows(one, i), rows(other, i)) for i in starts)


def stored(source: Checkpoint, wanted: list[Tensor]) -> Iterator[np.ndarray]:
    """The values of tensors, as the checkpoint has them."""
    for name, group in itertools.groupby(wanted, key=lambda tensor: tensor.array):
        array, layers = source.array(name), list(group)
        if layers[0].layer is None:
            yield source.read(array)
            continue
        # A chunk may span layers, and is read whole.
        count = min(array.chunks[0], max(1, READ_BYTES // size_of(layers[0], array.dtype)))
        for first in range(0, len(layers), count):
            yield from source.read(array, slice(first, first + count))


def shards(wanted: list[Tensor], dtype: str) -> list[list[Tensor]]:
    made: list[list[Tensor]] = []
    total = 0
    for tensor in wanted:
        size = size_of(tensor, dtype)
        if not made or total + size > SHARD_BYTES:
            made.append([])
            total = 0
        made[-1].append(tensor)
        total += size
    return made


def write_shard(
    path: pathlib.Path, part: list[Tensor], dtype: str, values: Iterator[np.ndarray], bar: tqdm
) -> None:
    """A file of safetensors, a tensor at a time; their library would want all of them at once.
    https://github.com/huggingface/safetensors#format"""
    kind = next(name for name, each in SAFETENSORS.items() if each == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in part:
        first, end = end, end + size_of(tensor, dtype)
        about = {"dtype": kind, "shape": tensor.shape, "data_offsets": (first, end)}
        header[tensor.name] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in part:
            turned = tensor.theirs(next(values)).astype(jnp.dtype(dtype), order="C", copy=False)
            file.write(turned.reshape(-1).view(np.uint8).data)
            bar.update(turned.nbytes)


def save_tokenizer(name: str, vocab: int, folder: pathlib.Path) -> None:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        problem = str(error).split("\n")[0]
        raise UserError(f"--tokenizer={name} can't be opened: {problem}") from None
    if len(tokenizer) > vocab:
        raise UserError(f"--tokenizer={name} has {len(tokenizer)} ids, the model {vocab}")
    tokenizer.save_pretrained(folder)


def llama_config(model: train.ModelConfig, length: int, id_offset: int) -> dict[str, Any]:
    """What config.json says of a model. RoPE is there under the names of transformers 5, and under
    those of 4, which other programs read."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling := model.rope_scaling:
        rope = {"rope_type": "llama3"}
        rope |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
    theta = float(model.rope_max_timescale)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.n_q_per_kv * model.n_kv,
        "num_key_value_heads": model.n_kv,
        "head_dim": model.d_head,
        "vocab_size": model.vocab,
        "max_position_embeddings": length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope if model.rope_scaling else None,
        "rope_parameters": {"rope_theta": theta, **rope},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": (model.start_token - id_offset) % model.vocab,
        "eos_token_id": None,  # no document's end is a token
        "pad_token_id": None,
    }


def export_weights(
    path: str, output: str, dtype: str, tokenizer: str | None, id_offset: int
) -> None:
    """Raises UserError or OSError for what can't be read, said in a Llama's terms, or written."""
    if "://" in output:
        raise UserError(f"{output}: the output is a local folder")
    check_empty(output)
    source = checkpoint.newest(path)
    model, length = model_of(source)
    if model.d_model % (model.n_q_per_kv * model.n_kv):
        raise UserError("LlamaConfig wants model.d_model to be a multiple of its query heads")
    wanted, folder = tensors(model, id_offset), pathlib.Path(output)
    if tokenizer:
        save_tokenizer(tokenizer, model.vocab, folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tied = is_tied(source)
        wanted = [t for t in wanted if not tied or t.name != UNEMBED]
        values, parts = stored(source, wanted), shards(wanted, dtype)
        places: dict[str, str] = {}
        with progress(wanted, dtype) as bar:
            for i, part in enumerate(parts, 1):
                shard = f"-{i:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
                file = f"model{shard}.safetensors"
                write_shard(folder / file, part, dtype, values, bar)
                places |= {tensor.name: file for tensor in part}
    except DamageError as error:
        raise UserError(f"{source.path} is damaged: {error}") from None
    total = sum(size_of(tensor, dtype) for tensor in wanted)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = llama_config(model, length, id_offset)
    config |= {"tie_word_embeddings": tied, "torch_dtype": dtype, "dtype": dtype}
    unfinished = folder / "config.json.unfinished"
    unfinished.write_text(json.dumps(config, indent=2) + "\n")
    unfinished.replace(folder / "config.json")
    step = source.about["step"]
    print(f"exported {source.path}, step {step:,}: {total:,} bytes of {dtype} in {output}")


# --- Import ---------------------------------------------------------------------------------------


def model_in(folder: pathlib.Path, id_offset: int) -> tuple[train.ModelConfig, int, bool]:
    """The model that config.json describes, the length of its rows, and whether its embeddings are
    tied. Raises UserError for what train.py's model hasn't, by the name that it has there."""
    path = folder / "config.json"
    try:
        kind = json.loads(path.read_text())["model_type"]
    except FileNotFoundError:
        raise UserError(f"{path} isn't there; `hf download` makes such a folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} can't be read: {error!r}") from None
    if kind not in ("llama", "mistral"):
        raise UserError(f"{path}: model_type is {kind}; this model is a llama or mistral")
    import transformers  # knows the defaults of what a file leaves out

    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # those of its validation are of classes of their own
        problem = " ".join(str(error).split())
        raise UserError(f"{path} can't be read: {problem}") from None
    rope = dict(config.rope_parameters)
    rope.pop("type", None)  # an older name of rope_type
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    wanted = [
        ("attention_bias", getattr(config, "attention_bias", False), False),
        ("mlp_bias", getattr(config, "mlp_bias", False), False),
        ("sliding_window", getattr(config, "sliding_window", None), None),
        ("hidden_act", config.hidden_act, "silu"),
        ("quantization_config", getattr(config, "quantization_config", None), None),
    ]
    for key, value, only in wanted:
        if value != only:
            there, here = json.dumps(value), json.dumps(only)
            raise UserError(f"{path}: {key} is {there}; this model has {here} only")
    known = LLAMA3 if rope_type == "llama3" else {}
    if rope_type not in ("default", "llama3"):
        raise UserError(f"{path}: rope_type is {rope_type}; this model has default and llama3")
    if odd := sorted(rope.keys() ^ known.keys()):
        raise UserError(f"{path}: {odd[0]} is no part of this model's rope_type {rope_type}")
    if theta != int(theta):
        raise UserError(f"{path}: rope_theta is {theta}; this model's is an integer")
    start, vocab = config.bos_token_id, config.vocab_size
    if start is None or not 0 <= start < vocab:
        raise UserError(
            f"{path}: bos_token_id is {json.dumps(start)}; set it to the id of what starts a "
            f"document, below vocab_size={vocab}"
        )
    if heads % keys:
        raise UserError(f"{path}: num_attention_heads={heads} isn't a multiple of {keys}")
    scaling = {known[key]: value for key, value in rope.items()}
    model = train.ModelConfig(
        d_model=config.hidden_size,
        n_q_per_kv=heads // keys,
        n_kv=keys,
        d_head=config.head_dim,
        layers=config.num_hidden_layers,
        vocab=vocab,
        d_ff=config.intermediate_size,
        rope_max_timescale=int(theta),
        rope_scaling=train.RopeScalingConfig(**scaling) if scaling else None,
        norm_eps=config.rms_norm_eps,
        start_token=(start + id_offset) % vocab,
    )
    return model, config.max_position_embeddings, config.tie_word_embeddings


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[Any]:
    """A file of safetensors. Raises OSError where it is none."""
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} can't be read: {error}") from None


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    index, one = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} can't be read: {error!r}") from None
    else:
        names = {one.name}
    paths = [folder / name for name in sorted(names)]
    if lost := [path for path in paths if not path.exists()]:
        other = sorted(folder.glob("*.bin"))
        there = f"; {other[0].name} isn't read: save it as safetensors" if other else ""
        raise UserError(f"{lost[0]} isn't there{there}")
    return paths


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        with reading(self.path) as file:
            return file.get_tensor(self.name)


def find(folder: pathlib.Path, wanted: list[Tensor], tied: bool) -> dict[str, Stored]:
    """The tensors by their names. Raises UserError unless just the wanted ones are there, in these
    shapes."""
    there: dict[str, Stored] = {}
    for path in weight_files(folder):
        with reading(path) as file:
            names = file.keys()
            for name in names:
                part = file.get_slice(name)
                there[name] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())
    if tied and EMBED in there:
        one = there[EMBED]
        other = there.setdefault(UNEMBED, one)
        if other is not one and not np.array_equal(other.read(), one.read()):
            raise UserError(f"{folder} has a {UNEMBED} of its own, and tie_word_embeddings=true")
    # Old Llamas have their RoPE's frequencies, which follow from the config.
    given = {name for name in there if not name.endswith(".rotary_emb.inv_freq")}
    names = {tensor.name for tensor in wanted}
    for what, odd in ("lacks", names - given), ("has what this model lacks:", given - names):
        if odd:
            more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise UserError(f"{folder} {what} {min(odd)}{more}")
    for tensor in wanted:
        one = there[tensor.name]
        if one.shape != tensor.shape:
            raise UserError(
                f"{one.path}: {one.name} is {list(one.shape)}, by config.json {list(tensor.shape)}"
            )
        if one.dtype not in SAFETENSORS:
            raise UserError(
                f"{one.path}: {one.name} is {one.dtype}, none of {', '.join(SAFETENSORS)}"
            )
    return there


def import_weights(folder: str, output: str, id_offset: int) -> None:
    """Raises UserError or OSError for what can't be read, represented or written."""
    check_empty(output)
    model, length, tied = model_in(pathlib.Path(folder), id_offset)
    wanted = tensors(model, id_offset)
    there = find(pathlib.Path(folder), wanted, tied)
    section = OmegaConf.to_yaml(OmegaConf.create({"model": dataclasses.asdict(model)}))
    # For tools.generate: a part of the logits at a time, as rows may be long.
    tokens = {"batch": 1, "len": length}
    rows = {"training": {"tokens": tokens, "loss_chunks": math.gcd(length, max(1, length // 1024))}}
    config = section + OmegaConf.to_yaml(OmegaConf.create(rows))
    about = {"step": STEP, "config": config, "hosts": 1}
    arrays = {}
    for name, entry in entries(model).items():
        lengths = zip(entry["dimensions"], entry["shape"], strict=True)
        arrays[name] = entry, [1 if dim == "layers" else size for dim, size in lengths]
    path = f"{output.rstrip('/')}/{STEP:08d}.{time.time_ns() // 10**6}"
    with storage.opening(path):
        group = checkpoint.create(path, arrays, about)
    with progress(wanted, "float32") as bar:
        for tensor in wanted:
            values = tensor.ours(there[tensor.name].read()).astype(np.float32, order="C")
            index = ... if tensor.layer is None else slice(tensor.layer, tensor.layer + 1)
            part = values if tensor.layer is None else values[None]
            with storage.opening(path):
                checkpoint.write(group, tensor.array, index, part)
            bar.update(values.nbytes)
    with storage.opening(path):
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
    out.add_argument("--tokenizer", help="what transformers.AutoTokenizer opens, to go with it")
    out.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    into = commands.add_parser("import", help="Hugging Face's files to a checkpoint")
    into.add_argument("folder", help="with config.json and safetensors")
    into.add_argument("checkpoints", help="a folder or bucket, to be made")
    for command in out, into:
        command.add_argument("--id-offset", type=int, default=0, help="as the dataset's id_offset")
    given = parser.parse_args()
    with user_errors():
        try:
            if given.id_offset < 0:
                raise UserError(f"--id-offset={given.id_offset}: it must be at least 0")
            if given.command == "export":
                export_weights(
                    given.checkpoint, given.output, given.dtype, given.tokenizer, given.id_offset
                )
            else:
                import_weights(given.folder, given.checkpoints, given.id_offset)
        except KeyboardInterrupt:
            sys.exit("interrupted: what is written isn't complete, and can be deleted")


if __name__ == "__main__":
    main()
