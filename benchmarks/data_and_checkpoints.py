"""Measures how fast data is converted and loaded, and a checkpoint saved and restored, each with a
bound: the speed of a plain program for its slowest part. Some rounds exceed it, by chance or by a
better use of the cores.

    python -m benchmarks.data_and_checkpoints --config-name=pretrain model=84m simulate_devices=true

- The bound of a conversion is the tokenizer alone, on the same texts in memory: source files of the
  Python standard library, which the conversion reads from eight parquet files. The tokenizer is a
  byte-level BPE with as many ids as the config's model, trained on these sources.
- The bound of the config's shuffled batches is a plain read: of the same chunks, one after another,
  or of a .bin file with the same tokens, if batches come from there.
- The bound of a save until it is on disk, and of a restore from there, is to write or read plain
  files of the same bytes, one per device's part. The state is the one before the first step.

Each round measures everything once; a warm-up round comes first. Prints the medians, and the range
of the ratios. The config's dataset is ignored. Takes some minutes, three times as much memory as
the state, and in a temporary folder twice as much disk space.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import jax
import numpy as np
import pyarrow.parquet
import tokenizers
import zarr

import train
from data.flat_tokens import CHUNK, SPLITS, FlatTokens
from data.sources import open_batches
from runtime.checkpoint import Checkpoints
from runtime.program import program
from runtime.run import make_mesh
from tools.arguments import NOT_USED
from tools.bins import to_bin
from tools.huggingface_to_flat_tokens import ConvertConfig, convert, python_stdlib
from tools.tables import show, table

COPIES, ROUNDS = 16, 5  # of the texts, and of what is timed
THREADS = ThreadPoolExecutor(32)  # as many as write a checkpoint by base.yaml


# --- What is timed --------------------------------------------------------------------------------

# Each generator yields in turns a task's name, before the task, and the number of tokens or bytes
# that it handled, after it. Each task is followed by its bound.


def data(config: train.Config, folder: pathlib.Path, texts: list[str], bpe: Any) -> Iterator[Any]:
    text, tokenizer, output = (str(folder / x) for x in ("*.parquet", "bpe.json", "text.zarr"))
    for i in range(8):
        rows = pyarrow.table({"text": texts[i::8]})
        pyarrow.parquet.write_table(rows, text.replace("*", str(i)), row_group_size=1000)
    bpe.save(tokenizer)
    load = {"path": "parquet", "data_files": text}
    conversion = ConvertConfig(
        load_dataset=load, column="text", tokenizer=tokenizer, output=output,
        train_split="train", validation_split=None, validation_share=0.001, max_tokens=None,
    )  # fmt: skip
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as a conversion sets it, if nothing else did
    yield "conversion, tokens"
    with contextlib.redirect_stdout(sys.stderr):
        convert(conversion)
    yield sum(FlatTokens(output, split).token_count for split in SPLITS)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encode = tokenizers.Tokenizer.from_file(tokenizer).encode_batch_fast
    yield "the tokenizer alone"
    yield sum(len(x) for i in range(0, len(texts), 256) for x in encode(texts[i : i + 256]))

    binary = str(folder / "text.bin")
    to_bin(f"{output}/train", binary, None, header=False)
    chunks: Any = zarr.open_group(output)["train/encoded_tokens"]
    sizes, fixed = train.dimensions(config), {"training.validation_interval": 0}
    steps = chunks.size // (sizes["B"] * sizes["L"])
    for kind, given in ("zarr", {}), (".bin", {"flat_tokens.end_token": 0}):
        path = output if kind == "zarr" else binary
        changed = config.changed({"flat_tokens.filespec": path} | given | fixed)
        loader, _ = open_batches(changed, sizes)
        batches = (batch for _, batch in loader.from_step(0, steps))
        yield f"shuffled batches of {kind}, tokens"
        yield sum(jax.block_until_ready(batch).inputs.size for batch in batches)
        yield f"a plain read of {kind}"
        if kind == "zarr":
            yield sum(chunks[i : i + CHUNK].size for i in range(0, chunks.size, CHUNK))
        else:
            yield np.fromfile(binary, np.uint16).size


def checkpoint(config: train.Config, folder: pathlib.Path, state: train.State) -> Iterator[Any]:
    shards = (shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    parts = jax.device_get([shard.data for shard in shards if shard.replica_id == 0])
    nbytes, files = sum(x.nbytes for x in parts), [folder / f"{i}" for i in range(len(parts))]
    kind, sizes = train.state_type(config), train.dimensions(config)
    settings = f"{folder}/ours", kind, sizes, config.to_yaml(), config.io.max_io_threads
    checkpoints = Checkpoints(*settings, say=lambda _: None)
    yield "save, bytes"
    checkpoints.save(1, state)
    checkpoints.wait()
    each_file(folder, os.fsync)
    yield nbytes
    yield "writing plain files"
    list(THREADS.map(pathlib.Path.write_bytes, files, parts))
    each_file(folder, os.fsync)
    yield nbytes
    each_file(folder, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
    yield "restore, bytes"
    jax.block_until_ready(Checkpoints(*settings).restore())
    yield nbytes
    yield "reading plain files"
    yield sum(map(len, THREADS.map(pathlib.Path.read_bytes, files)))


def each_file(folder: pathlib.Path, call: Callable[[int], None]) -> None:
    def open_and_call(file: pathlib.Path) -> None:
        with file.open("rb") as opened:
            call(opened.fileno())

    list(THREADS.map(open_and_call, filter(pathlib.Path.is_file, folder.rglob("*"))))


# --- The program ----------------------------------------------------------------------------------


@program(train.Config, "configs", NOT_USED)
def main(config: train.Config) -> None:
    texts = [pathlib.Path(file).read_text(errors="ignore") for file in python_stdlib()]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, config.model.vocab, show_progress=False)
    rates: dict[str, list[float]] = {}
    with jax.set_mesh(make_mesh(config, config.mesh.axes)):
        state = train.init_state(config)
        kinds: list[Any] = [(data, COPIES * texts, bpe), (checkpoint, state)]
        for kind, *given in kinds * (ROUNDS + 1):
            with tempfile.TemporaryDirectory() as name:
                turns = kind(config, pathlib.Path(name), *given)
                for what in turns:
                    start = time.perf_counter()
                    rates.setdefault(what, []).append(next(turns) / (time.perf_counter() - start))
    rows, sides = [], [(what, measured[1:]) for what, measured in rates.items()]
    for (what, ours), (bound, best) in zip(sides[::2], sides[1::2], strict=True):
        ratios = sorted(a / b for a, b in zip(ours, best, strict=True))
        speeds = show(median(ours), "/s"), bound, show(median(best), "/s")
        middle, low, high = (f"{100 * x:.2g}%" for x in (median(ratios), ratios[0], ratios[-1]))
        rows.append((what, *speeds, middle, f"{low} to {high}"))
    print(table(("", "speed", "bound", "its speed", "ratio", "range"), rows))


if __name__ == "__main__":
    main()
