"""Converts a dataset that Hugging Face `datasets` opens to flat tokens.

    python -m tools.huggingface_to_flat_tokens --config-name=python_stdlib output=stdlib.zarr

The configs are in configs/convert. To continue an interrupted conversion, run the same command.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import sys
import sysconfig
import time
from typing import Annotated, Any

import jax
import numpy as np
from omegaconf import OmegaConf
from pydantic import Field
from tqdm import tqdm

from data import text
from data.flat_tokens import SPLITS, Writer
from data.formats import counted
from data.text import Source, Unit
from data.tokenizer import open_tokenizer
from runtime import storage
from runtime.program import program
from runtime.values import NOT_EMPTY, Path
from shardlib.errors import UserError

COMMIT_SECONDS = 10  # between commits: a conversion that is killed loses at most that much work
SECRETS = "token", "storage_options"
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fraction, times 2**64


@dataclasses.dataclass
class ConvertConfig(text.TextConfig):
    load_dataset: dict[str, Any]  # the arguments of datasets.load_dataset, except split
    # Without a validation_split, validation gets this share of train_split's documents.
    validation_share: Annotated[float, Field(gt=0, lt=1)]
    # Training, and also validation_split, ends with the document that reaches this; null: all.
    max_tokens: Annotated[int, Field(ge=1)] | None
    output: Annotated[Path, NOT_EMPTY]


def python_stdlib() -> list[str]:
    """Returns the source files of this machine's standard library, sorted by name. Excludes tests,
    installed packages and pydoc_data, a single file of help texts that is long enough to fill half
    of the validation split."""
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return sorted(str(root / file) for file in files if not excluded & set(file.parts))


OmegaConf.register_new_resolver("python_stdlib", python_stdlib, replace=True)


def for_validation(first: int, count: int, share: float) -> np.ndarray:
    """A mask, bool[count], of the documents from `first` on that go to the validation split: those
    whose number, times the golden ratio, has a fraction below `share`. They have an even share of
    each kind of documents that alternate. Document 0 is one of them."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return numbers * np.uint64(GOLDEN_RATIO) < share * 2**64  # modulo 2**64


def without_signature(x: Any) -> Any:
    """Returns a setting; a URL without its query, which may have a signature."""
    return re.sub(r"^(https?://[^?]*)\?.*", r"\1", x) if isinstance(x, str) else x


class Conversion:
    """The output and the progress of a conversion. From the first commit on, the output's attribute
    `conversion` records the progress and, once complete, how the output was made."""

    def __init__(self, config: ConvertConfig, sources: dict[str, Any]):
        self.config, self.sources = config, sources  # fingerprints by split
        settings = {k: v for k, v in config.values().items() if k != "output"}
        # A dataset may be published: without secrets, and signatures in URLs.
        load = {x: y for x, y in settings["load_dataset"].items() if x not in SECRETS}
        settings["load_dataset"] = jax.tree.map(without_signature, load)
        versions = {name: importlib.metadata.version(name) for name in ("datasets", "transformers")}
        vocabulary = open_tokenizer(config.tokenizer).vocabulary
        self.provenance = {"settings": settings, "versions": versions, "vocabulary": vocabulary}
        saved: Any = storage.attributes(config.output).get("conversion", {})
        if "positions" not in saved:
            saved = {}
        for key, before in jax.tree.map(without_signature, saved.get("settings", {})).items():
            went_on = key == "skip_not_text" and not before  # it may have ended at such a row
            if before != settings.get(key) and not went_on:
                with_what = f"with {key}={before}, not {settings.get(key)}"
                cure = "choose another output, or delete it"
                raise UserError(f"{config.output} is an unfinished conversion {with_what}; {cure}")
        # In train_split and validation_split; after null nothing more is read.
        self.positions: list[Any] = saved.get("positions", [{}, {}])
        for (split, now), position in zip(sources.items(), self.positions, strict=False):
            if position != {}:  # a part was read, or all
                text.check_source(split, saved.get("sources", sources)[split], now)
        self.empty = saved.get("empty", 0)  # documents
        written = saved.get("written", {})
        self.writers = {split: Writer(config.output, split, written.get(split)) for split in SPLITS}
        self.committed = time.monotonic()

    def add(self, unit: Unit, source: int) -> None:
        """Appends a unit of a source: 0 is train_split, 1 is validation_split. A source's position
        becomes None once its split has `max_tokens`."""
        lengths, sizes = unit.lengths[unit.lengths > 0], unit.sizes[unit.lengths > 0]
        self.empty += len(unit.lengths) - len(lengths)
        split, other = SPLITS[source], SPLITS[1 - source]
        share = 0.0 if self.config.validation_split else self.config.validation_share
        sequences = sum(writer.sequence_count for writer in self.writers.values())
        in_split = ~for_validation(sequences, len(lengths), share)
        if limit := self.config.max_tokens:
            totals = self.writers[split].token_count + np.cumsum(lengths * in_split)
            count = np.searchsorted(totals, limit) + 1
            lengths, sizes, in_split = lengths[:count], sizes[:count], in_split[:count]
        tokens = unit.tokens[: lengths.sum()]
        for name, mask in (split, in_split), (other, ~in_split):
            chosen = tokens[np.repeat(mask, lengths)]
            self.writers[name].extend(chosen, lengths[mask], int(sizes[mask].sum()))
        more = not limit or self.writers[split].token_count < limit
        self.positions[source] = unit.position if more else None
        if time.monotonic() - self.committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Writes all pending tokens, then records the progress: a conversion that is killed later
        continues from here."""
        written = {split: writer.flush() for split, writer in self.writers.items()}
        progress = {"positions": self.positions, "empty": self.empty, "written": written}
        self.record(progress | {"sources": self.sources})
        self.committed = time.monotonic()

    def record(self, progress: dict[str, Any]) -> None:
        with storage.opening(self.config.output, "written"):
            self.writers["train"].root.attrs["conversion"] = {**self.provenance, **progress}

    def close(self) -> None:
        """Marks the splits complete."""
        for writer in self.writers.values():
            writer.complete()
        self.record({})


def convert(config: ConvertConfig) -> None:
    """Converts a dataset, or continues its conversion. Raises UserError or OSError if something
    can't be read, tokenized or written."""
    names = [config.train_split, *filter(None, [config.validation_split])]
    sources = [Source(config.load_dataset, name, config, output=config.output) for name in names]
    # Finds most mistakes before anything is written.
    found = {source.split: source.check() for source in sources}
    files = sum(each["files"] for each in found.values())
    if both := set.intersection(*(source.names for source in sources)) if sources[1:] else ():
        raise UserError(f"{min(both)} is in both splits: leave it out of one")
    for note in dict.fromkeys(note for source in sources for note in source.notes):
        print(f"note: {note}")
    conversion = Conversion(config, found)
    if any(source.lossy for source in sources):
        for writer in conversion.writers.values():
            writer.text_bytes = None
    for i, source in enumerate(sources):
        added = [SPLITS[i]] if config.validation_split else SPLITS
        bar = tqdm(
            desc=names[i],
            total=config.max_tokens,
            initial=sum(conversion.writers[split].token_count for split in added),
            unit=" tokens",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,  # in a log file each is a line
            delay=1,
        )
        position = conversion.positions[i]
        with bar, contextlib.closing(text.units(source, position, text.cores())) as units:
            for unit in units:
                conversion.add(unit, i)
                bar.update(len(unit.tokens))
                if conversion.positions[i] is None:
                    break
        has_both = all(writer.sequence_count for writer in conversion.writers.values())
        if i == len(sources) - 1 and not has_both:
            raise UserError(
                "one document is too few for two splits: divide it, add another, or name a "
                "validation_split. A text file is one document or, with "
                "load_dataset.sample_by=line, each of its lines"
            )
        conversion.positions[i] = None
        conversion.commit()
    conversion.close()
    for writer in conversion.writers.values():
        sequences = counted(writer.sequence_count, "sequence")
        tokens = counted(writer.token_count, "token")
        print(f"{writer.name}: {sequences}, {tokens}, ids up to {writer.max_token_id}")
    train, validation = (conversion.writers[split].token_count for split in SPLITS)
    share, wanted = validation / (train + validation), config.validation_share
    if not config.validation_split and not wanted / 2 < share < 2 * wanted:
        why = "there are few documents, or they differ much in length"
        print(f"note: {share:.2%} of the tokens are for validation, not {wanted:.2%}: {why}")
    documents = counted(sum(w.sequence_count for w in conversion.writers.values()), "document")
    print(f"read {counted(files, 'file')}: {documents} with text, {conversion.empty:,} without")


@program(ConvertConfig, "configs/convert")
def main(config: ConvertConfig) -> None:
    try:
        convert(config)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr, flush=True)
        os._exit(130)  # at once: the worker threads would print errors


if __name__ == "__main__":
    main()
