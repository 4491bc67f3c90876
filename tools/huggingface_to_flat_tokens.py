"""Converts a dataset that Hugging Face `datasets` opens to flat tokens.

    python -m tools.huggingface_to_flat_tokens --config-name=python_stdlib output=stdlib.zarr

The configs are in configs/convert. What is interrupted goes on where it was, by the same command.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import zarr
from omegaconf import MISSING, OmegaConf
from tqdm import tqdm

from data import text
from data.flat_tokens import SPLITS, Writer
from data.text import Source, Unit
from runtime import storage
from runtime.config import Bound, Name, NonNegativeInt, PositiveInt, Section
from runtime.program import program
from shardlib.errors import UserError

COMMIT_SECONDS = 10  # what is lost at most when a conversion is killed


@dataclasses.dataclass
class ConvertConfig(Section):
    load_dataset: dict[str, Any]  # the arguments of datasets.load_dataset, less split
    column: Name  # holds the text
    tokenizer: Name  # bytes_utf8, or what transformers.AutoTokenizer opens
    id_offset: NonNegativeInt  # added to ids: 1 where it uses 0, which the format reserves
    train_split: Name
    validation_split: str | None  # null: `validation_share` of the documents of train_split
    validation_share: Annotated[float, Bound(0, below=1)]
    # A split ends with the document that reaches so many; null: with the last.
    max_tokens: PositiveInt | None
    processes: PositiveInt | None  # that tokenize; null: this one, in a thread for each core
    output: Name = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.validation_split or self.validation_share):
            raise UserError(
                "validation_share=0, and no validation_split: a dataset has both splits"
            )


def python_stdlib() -> list[str]:
    """The standard library's own source files on this machine, in the order of their names. Left
    out are tests, installed packages, and pydoc_data: one file of help texts, long enough to be
    half of a validation split that it falls into."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return sorted(str(root / file) for file in files if not left_out & set(file.parts))


OmegaConf.register_new_resolver("python_stdlib", python_stdlib, replace=True)


def held_out(first: int, count: int, share: float) -> np.ndarray:
    """Which of the documents from the `first` on are for validation: an even share, so also the
    very first one. bool[count]."""
    number = first + np.arange(count + 1)
    return np.diff(np.ceil(number * share)) > 0


class Conversion:
    """What is in the output, and where in the sources to go on. That is an attribute of the output,
    `conversion`, from the first commit on; in the end it says how the output was made."""

    def __init__(self, config: ConvertConfig, shards: Sequence[int]):
        self.config = config
        with storage.opening(config.output):
            self.root: Any = zarr.open_group(config.output, mode="a")
        settings: Any = OmegaConf.to_container(OmegaConf.structured(config))
        settings = {k: v for k, v in settings.items() if k not in ("output", "processes")}
        versions = {name: importlib.metadata.version(name) for name in ("datasets", "transformers")}
        self.about = {"settings": settings, "versions": versions}
        saved: Any = self.root.attrs.get("conversion", {})
        if "positions" not in saved:
            saved = {}
        for key, value in settings.items() if saved else ():
            if (before := saved["settings"].get(key)) != value:
                raise UserError(
                    f"{config.output} holds an unfinished conversion with {key}={before}, not "
                    f"{value}; choose another output, or delete it"
                )
        starts = [text.start(min(text.LANES, count)) for count in shards]
        self.positions = saved.get("positions", starts)
        self.empty = saved.get("empty", 0)  # documents
        written = saved.get("written", {})
        self.writers = {split: Writer(config.output, split, written.get(split)) for split in SPLITS}
        self.committed = time.monotonic()

    def add(self, unit: Unit, source: int) -> bool:
        """Whether there is room for more."""
        lengths = unit.lengths[unit.lengths > 0]
        self.empty += len(unit.lengths) - len(lengths)
        own, other = SPLITS[source], SPLITS[1 - source]
        share = 0.0 if self.config.validation_split else self.config.validation_share
        sequences = sum(writer.sequence_count for writer in self.writers.values())
        is_own = ~held_out(sequences, len(lengths), share)
        if limit := self.config.max_tokens:
            reached = self.writers[own].token_count + np.cumsum(lengths * is_own)
            count = np.searchsorted(reached, limit) + 1
            lengths, is_own = lengths[:count], is_own[:count]
        tokens = unit.tokens[: lengths.sum()]
        for split, chosen in (own, is_own), (other, ~is_own):
            self.writers[split].extend(tokens[np.repeat(chosen, lengths)], lengths[chosen])
        self.positions[source] = unit.position
        if time.monotonic() - self.committed > COMMIT_SECONDS:
            self.commit()
        return not limit or self.writers[own].token_count < limit

    def commit(self) -> None:
        """From here a conversion that is killed goes on."""
        written = {split: writer.flush() for split, writer in self.writers.items()}
        progress = {"positions": self.positions, "empty": self.empty, "written": written}
        self.root.attrs["conversion"] = {**self.about, **progress}
        self.committed = time.monotonic()

    def close(self) -> None:
        """Marks the splits complete."""
        for writer in self.writers.values():
            writer.complete()
        self.root.attrs["conversion"] = self.about


def convert(config: ConvertConfig) -> None:
    """Raises UserError or OSError for what can't be read, tokenized or written."""
    names = [config.train_split, *filter(None, [config.validation_split])]
    how = config.column, config.tokenizer, config.id_offset
    # Most mistakes show here, before anything is written.
    checked = [Source(config.load_dataset, name, *how).check() for name in names]
    conversion = Conversion(config, [shards for _, shards in checked])
    for i, (source, _) in enumerate(checked):
        position = conversion.positions[i]
        lanes = range(len(position["lanes"]))
        bar = tqdm(
            desc=names[i],
            total=config.max_tokens,
            initial=sum(writer.token_count for writer in conversion.writers.values()),
            unit=" tokens",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,  # a line of a log file each
            delay=1,
        )
        with bar:
            for unit in text.units(source, lanes, position, config.processes or 1):
                more = conversion.add(unit, i)
                bar.update(len(unit.tokens))
                if not more:
                    break
        has_all = all(writer.sequence_count for writer in conversion.writers.values())
        if i == len(checked) - 1 and not has_all:
            raise UserError("one document is too few for two splits: name a validation_split")
        conversion.positions[i] = text.start(0)  # nothing more is read of it
        conversion.commit()
    conversion.close()
    for writer in conversion.writers.values():
        print(
            f"{writer.name}: {writer.sequence_count:,} sequences, "
            f"{writer.token_count:,} tokens, ids up to {writer.max_token_id}"
        )
    if conversion.empty:
        print(f"left out: {conversion.empty:,} empty documents")


@program(ConvertConfig, "configs/convert")
def main(config: ConvertConfig) -> None:
    try:
        convert(config)
    except KeyboardInterrupt:
        print(
            "interrupted; the same command goes on from where it was", file=sys.stderr, flush=True
        )
        os._exit(130)  # without a word from the threads that are at work


if __name__ == "__main__":
    main()
