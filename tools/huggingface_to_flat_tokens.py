"""Converts a dataset that Hugging Face `datasets` opens to flat tokens.

    python -m tools.huggingface_to_flat_tokens --config-name=python_stdlib output=stdlib.zarr

The configs are in configs/convert.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from omegaconf import MISSING, OmegaConf

from data.config import program
from data.flat_tokens import SPLITS, Writer


@dataclasses.dataclass
class ConvertConfig:
    load_dataset: dict[str, Any]  # the arguments of datasets.load_dataset, less split and streaming
    column: str  # holds the text
    tokenizer: str  # bytes_utf8, or what transformers.AutoTokenizer opens
    id_offset: int  # added to a tokenizer's ids: 1 where it uses id 0, which the format reserves
    train_split: str
    validation_split: str | None  # null: `validation_share` of the documents of train_split
    validation_share: float
    output: str = MISSING


def python_stdlib() -> list[str]:
    """The standard library's own source files on this machine, in the order of their names. Left
    out are tests, installed packages, and pydoc_data: one file of help texts, long enough to be
    half of a validation split that it falls into."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return sorted(str(root / file) for file in files if not left_out & set(file.parts))


OmegaConf.register_new_resolver("python_stdlib", python_stdlib, replace=True)


def make_tokenizer(name: str, id_offset: int) -> Callable[[str], np.ndarray]:
    """Text to ids; without special tokens, as the format marks where a sequence starts."""
    if name == "bytes_utf8":
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 1
    import transformers  # takes a second to import, and bytes don't need it

    tokenizer = transformers.AutoTokenizer.from_pretrained(name)

    def tokenize(text: str) -> np.ndarray:
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)
        if not id_offset and len(ids) and not ids.min():
            raise ValueError(f"{name} uses id 0, which the format reserves: set id_offset=1")
        return ids + id_offset

    return tokenize


def documents(config: ConvertConfig) -> Iterator[tuple[str, str]]:
    """Each document's text with the split it belongs to, in the dataset's order. Raises ValueError
    where the dataset or its column can't be had."""
    import datasets

    def texts(split: str) -> Iterator[str]:
        try:
            rows = datasets.load_dataset(**config.load_dataset, split=split, streaming=True)
        except TypeError as error:  # an argument that it doesn't take
            raise ValueError(f"load_dataset: {error}") from None
        for row in rows:
            if not isinstance(row.get(config.column), str):
                columns = ", ".join(
                    f"{name}: {type(value).__name__}" for name, value in row.items()
                )
                raise ValueError(f"column={config.column} is no text; the columns are {columns}")
            yield row[config.column]

    train, validation = SPLITS
    share = 0 if config.validation_split else config.validation_share
    for i, text in enumerate(texts(config.train_split)):
        yield (validation if int((i + 1) * share) > int(i * share) else train), text
    if config.validation_split:
        for text in texts(config.validation_split):
            yield validation, text


def convert(config: ConvertConfig) -> None:
    """Raises ValueError or OSError for what can't be read, tokenized or written."""
    if not 0 <= config.validation_share < 1:
        raise ValueError(f"validation_share={config.validation_share}: it is from 0 to below 1")
    tokenize = make_tokenizer(config.tokenizer, config.id_offset)
    texts = documents(config)
    first = next(texts, None)  # before anything is written: most mistakes show here
    if first is None:
        raise ValueError(f"the split {config.train_split} has no documents")
    empty = 0
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(Writer(config.output, split)) for split in SPLITS}
        for split, text in itertools.chain([first], texts):
            ids = tokenize(text)
            if len(ids):
                writers[split].append(ids)
            else:
                empty += 1
        if not writers["validation"].sequence_count:
            count = writers["train"].sequence_count
            raise ValueError(
                f"validation_share={config.validation_share} of {count} documents is none: raise "
                "it, or name a validation_split"
            )
    for writer in writers.values():
        print(
            f"{writer.name}: {writer.sequence_count:,} sequences, "
            f"{writer.token_count:,} tokens, ids up to {writer.max_token_id}"
        )
    if empty:
        print(f"left out: {empty:,} empty documents")


@program(ConvertConfig, "configs/convert")
def main(config: ConvertConfig) -> None:
    try:
        convert(config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
