"""Measures how fast data is converted and loaded, each compared with an upper bound.

    python -m benchmarks.data --megabytes 500

The text is random pieces of the Python standard library's sources, in parquet files. The tokenizer
is a byte-level BPE with 32,000 ids, trained on that text. Takes some minutes, and as much disk
space as the text, in a temporary folder.
"""

import concurrent.futures
import multiprocessing
import pathlib
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import zarr

from data.flat_tokens import CHUNK, SPLITS, FlatTokens
from data.loader import BatchSpec, FlatTokensConfig, Loader
from shardlib.devices import make_mesh
from tools import arguments
from tools.huggingface_to_flat_tokens import ConvertConfig, convert, python_stdlib

SHARDS = 8
ROWS, LENGTH = 256, 1024  # shape of a batch
STEP = 0.21  # seconds: a lower bound for a step of 84m on an H200
T = TypeVar("T")


def make_text(folder: pathlib.Path, size: int) -> None:
    """Writes documents of 500 to 6,000 characters."""
    import pyarrow
    import pyarrow.parquet

    random.seed(0)
    sources = [pathlib.Path(file).read_text(errors="ignore") for file in python_stdlib()]
    for shard in range(SHARDS):
        texts: list[str] = []
        left = size // SHARDS
        while left > 0:
            source = random.choice(sources)
            start = random.randrange(max(1, len(source) - 500))
            texts.append(source[start : start + random.randrange(500, 6000)])
            left -= len(texts[-1])
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / f"{shard}.parquet", row_group_size=1000)


def texts_of(folder: pathlib.Path) -> Iterator[list[str]]:
    """Yields 256 documents at a time, from memory."""
    import pyarrow.parquet

    for file in sorted(folder.glob("*.parquet")):
        texts = pyarrow.parquet.read_table(file)["text"].to_pylist()
        yield from (texts[i : i + 256] for i in range(0, len(texts), 256))


def train_tokenizer(folder: pathlib.Path) -> None:
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    sample = (text for i, texts in enumerate(texts_of(folder)) if i % 8 == 0 for text in texts)
    tokenizer.train_from_iterator(sample, 32_000, special_tokens=["<unused>"], show_progress=False)
    tokenizer.save(str(folder / "bpe.json"))


def conversion(folder: pathlib.Path, tokenizer: str) -> tuple[int, float]:
    """Returns the number of tokens and the seconds, not counting imports."""
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    output = folder / f"{pathlib.Path(tokenizer).stem}.zarr"
    source = {"path": "parquet", "data_files": str(folder / "*.parquet")}
    config = ConvertConfig(
        source, "text", tokenizer, False, "train", None, 0.001, None, None, str(output)
    )
    start = time.perf_counter()
    convert(config)
    seconds = time.perf_counter() - start
    return sum(FlatTokens(str(output), split).token_count for split in SPLITS), seconds


def bare_tokenizer(folder: pathlib.Path) -> tuple[int, float]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "bpe.json"))
    count, seconds = 0, 0.0
    for texts in texts_of(folder):
        start = time.perf_counter()
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        seconds += time.perf_counter() - start
        count += sum(map(len, encoded))
    return count, seconds


def plain_write(folder: pathlib.Path) -> tuple[int, float]:
    """Writes the bytes dataset's tokens from memory, with the same chunks and compression."""
    source: Any = zarr.open_group(folder / "bytes_utf8.zarr")["train/encoded_tokens"]
    copy = zarr.create_array(
        folder / "copy.zarr",
        shape=source.shape,
        chunks=source.chunks,
        dtype=source.dtype,
        compressors=source.compressors,
    )
    seconds, size = 0.0, 8 * CHUNK
    for i in range(0, source.shape[0], size):
        values = source[i : i + size]
        start = time.perf_counter()
        copy[i : i + size] = values
        seconds += time.perf_counter() - start
    return source.shape[0], seconds


def open_loader(folder: pathlib.Path) -> Loader:
    path = str(folder / "bytes_utf8.zarr")
    config = FlatTokensConfig(path, (), 1, 128, CHUNK // LENGTH, 0, True)
    with jax.set_mesh(make_mesh({"r": 1, "s": 1, "c": 1, "t": 1})):
        return Loader(config, BatchSpec(ROWS, LENGTH, vocab=257, start_token=0), "train")


def batches(folder: pathlib.Path) -> tuple[int, float]:
    """Loads shuffled batches of 84m's shape as JAX arrays."""
    loader = open_loader(folder)
    steps = loader.dataset.token_count // (ROWS * LENGTH)
    start = time.perf_counter()
    for _, batch in loader.from_step(0, steps):
        jax.block_until_ready(batch)
    return steps * ROWS * LENGTH, time.perf_counter() - start


def wait_for_data(folder: pathlib.Path) -> float:
    """Returns the seconds of waiting per second of device time, over several shuffle buffers."""
    loader, waited = open_loader(folder), []
    for _, batch in loader.from_step(0, 300):
        waited.append(loader.waited)
        jax.block_until_ready(batch)
        time.sleep(STEP)
    return sum(waited[1:]) / (STEP * len(waited[1:]))


def plain_read(folder: pathlib.Path) -> tuple[int, float]:
    """Reads the tokens chunk by chunk."""
    source: Any = zarr.open_group(folder / "bytes_utf8.zarr")["train/encoded_tokens"]
    start = time.perf_counter()
    for i in range(0, source.shape[0], CHUNK):
        source[i : i + CHUNK]
    return source.shape[0], time.perf_counter() - start


def with_peak(function: Callable[..., tuple[int, float]], *args: Any) -> tuple[int, float, int]:
    """Calls a function and adds to its result the peak memory in bytes of this process."""
    count, seconds = function(*args)
    return count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_subprocess(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(function, *args).result()


def rate(function: Callable[..., tuple[int, float]], *args: Any) -> tuple[float, int]:
    """Prints and returns the tokens per second and the peak memory of a function."""
    count, seconds, peak = in_subprocess(with_peak, function, *args)
    name = f"{function.__name__} {pathlib.Path(args[1]).stem if len(args) > 1 else ''}"
    speed = count / seconds
    print(f"{name:24} {count:13,} tokens {speed:13,.0f} tokens/s, {peak / 1e9:5.2f} GB", flush=True)
    return speed, peak


def main() -> None:
    parser = arguments.parser("benchmarks.data", __doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the text")
    size = parser.parse_args().megabytes * 10**6
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        in_subprocess(make_text, folder, size)
        in_subprocess(train_tokenizer, folder)
        bare, _ = rate(bare_tokenizer, folder)
        bpe, peak = rate(conversion, folder, str(folder / "bpe.json"))
        again, _ = rate(bare_tokenizer, folder)
        text, _ = rate(conversion, folder, "bytes_utf8")
        write, _ = rate(plain_write, folder)
        read, _ = rate(plain_read, folder)
        load, _ = rate(batches, folder)
        read_again, _ = rate(plain_read, folder)
        waited = in_subprocess(wait_for_data, folder)
    print(f"speed of conversion relative to the bare tokenizer: {2 * bpe / (bare + again):.0%}")
    print(f"speed of converting bytes relative to a plain write: {text / write:.0%}")
    print(f"speed of batches relative to a plain read: {2 * load / (read + read_again):.0%}")
    print(f"batch of {ROWS * LENGTH:,} tokens: {ROWS * LENGTH / load * 1e3:.1f} ms")
    print(f"wait for data at {STEP} s per step: {waited:.2%} of the step")
    print(f"peak memory of the conversion: {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
