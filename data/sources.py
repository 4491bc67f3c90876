"""The sources of tokens that a config can choose from."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from data.flat_tokens import TokenizerId
from data.huggingface import HuggingFaceConfig
from data.loader import Batches, BatchSpec, FlatTokensConfig
from data.tokenizer import difference, extends, open_tokenizer, problem_of_start
from runtime.checkpoint import Checkpoint, newest
from runtime.config import Section, flat, plain
from runtime.run import say
from shardlib.errors import UserError


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class DataConfig(Section):
    """The sources of tokens. A config sets one of them and leaves the others null. To add a source,
    add a field here whose section has the methods `open`, which returns Batches, and
    `tokenizer_used`."""

    flat_tokens: FlatTokensConfig | None
    hf_dataset: HuggingFaceConfig | None
    other_tokenizer: bool = False  # lets a run start from a model with another one

    def source(self) -> Any:
        """Returns the section of the source that is set. Raises UserError unless exactly one is."""
        sections = [section for key in SOURCES if (section := getattr(self, key))]
        if len(sections) != 1:
            raise UserError(f"set one of these, and leave the others null: {', '.join(SOURCES)}")
        return sections[0]

    def check_tokenizer(self, checkpoint: Checkpoint) -> None:
        """Raises UserError if the model that a run starts from has another tokenizer than the run's
        dataset, unless the config allows that."""
        if not self.other_tokenizer:
            used = self.source().tokenizer_used(remote=True)
            check_same_tokenizer(checkpoint, used, "other_tokenizer=true")


SOURCES = [x.name for x in dataclasses.fields(DataConfig) if x.name != "other_tokenizer"]


def kept_by_import(checkpoint: Checkpoint, lost: Callable[[str], Any] = str) -> str | None:
    """Returns the folder in which tools.huggingface_weights kept an imported model's tokenizer and
    settings, if a checkpoint is that model or was trained from it, in any number of runs. Returns
    None otherwise, or if one of these runs allowed another tokenizer. Calls `lost` with a note if
    one of the checkpoints is gone or damaged."""
    seen, start = set[str](), checkpoint.start
    try:
        while checkpoint.path not in seen:
            seen.add(checkpoint.path)
            kept = os.path.join(os.path.dirname(checkpoint.path), "huggingface")
            if os.path.isfile(f"{kept}/config.json"):
                if checkpoint.start > start:
                    raise UserError("it was imported after the run began")
                return kept
            settings = flat(checkpoint.settings)
            cloned = str(settings.get("paths.clone_from") or "://")
            # A remote path that only a checkpoint names is never opened.
            if settings.get("other_tokenizer") or "://" in cloned:
                return None
            start, checkpoint = min(start, checkpoint.start), newest(cloned)
    except (UserError, OSError) as error:
        unknown = "If the run began as an import, that model's settings and tokenizer aren't known"
        lost(f"note: {checkpoint.path}: {error}. {unknown}")
    return None


def has_tokenizer(folder: str | pathlib.Path) -> bool:
    """Returns whether a Hugging Face folder has a tokenizer beside its config.json."""
    return any(pathlib.Path(folder).glob("tokenizer*"))


def made_of_flat_tokens(checkpoint: Checkpoint) -> Any:
    """Returns the `Batches.made_of` that a checkpoint of a run on flat tokens records, or {} for a
    stream, an import or an earlier version."""
    position = checkpoint.metadata["positions"][0]
    return position if isinstance(position, dict) and "tokens" in position else {}


def tokenizer_of_model(checkpoint: Checkpoint) -> TokenizerId | None:
    """Returns the tokenizer that an import kept or, if there is none or the dataset's extends it,
    the dataset's: as the checkpoint records it or, failing that, as the dataset does now. Returns
    None if neither is known."""
    found: TokenizerId | None = None
    with contextlib.suppress(UserError):
        made = made_of_flat_tokens(checkpoint)
        name = made.get("tokenizer")
        if name and (os.path.exists(name) or not os.path.isabs(name)):
            found = TokenizerId(str(name), made.get("vocabulary", ""))
        else:
            data = checkpoint.config(DataConfig, defaults=dict.fromkeys(SOURCES))
            found = data.source().tokenizer_used()
            if found and not found.vocabulary:  # a stream records it with its position
                position = checkpoint.metadata["positions"][0] or {}
                found = found._replace(vocabulary=position.get("vocabulary", ""))
    if (kept := kept_by_import(checkpoint)) and has_tokenizer(kept):
        local = found and os.path.exists(found.name)
        return found if found and local and extends(found, TokenizerId(kept)) else TokenizerId(kept)
    return found


def check_same_tokenizer(checkpoint: Checkpoint, used: TokenizerId | None, cure: str) -> None:
    """Raises UserError if the tokenizer `used` for a dataset differs from the one of a checkpoint's
    model. `cure` is the setting that allows it."""
    ours = tokenizer_of_model(checkpoint)
    if ours and used and (problem := difference(ours, used)):
        both = f"in {checkpoint.path} is {ours.name}, the dataset's is {used.name}: {problem}"
        cure = f"Tokenize the dataset with the model's, or accept that with {cure}"
        raise UserError(f"the tokenizer of the model {both}. {cure}")


# Prefixes of a source's settings that don't determine a step's rows. A dataset may have moved: its
# tokenizer, and its files or tokens, are compared instead of its path.
NOT_ROWS = ("filespec", "other_rows", "path", "tokenizer", "num_workers", "validation", "skip_not")


def check_same_rows(config: Any, checkpoint: Checkpoint, data: Batches) -> None:
    """Raises UserError if a run that resumes the checkpoint has settings with which the past steps
    would have had other rows: some rows would come again, or never. A step's rows follow from the
    source, its settings except NOT_ROWS, training.tokens and training.skip_steps. A stream
    continues after the last used token, whatever training.tokens is. Prints a note instead if
    flat_tokens.other_rows allows it."""
    cure = ", accept that with flat_tokens.other_rows=true" if config.flat_tokens else ""

    def rows(settings: Any) -> dict[str, Any]:
        source, training = next(filter(settings.get, SOURCES), ""), settings["training"]
        given = (settings.get(source) or {}).items()
        chosen = {key: x for key, x in given if not key.startswith(NOT_ROWS)}
        weights = [Fraction(str(dataset["weight"])) for dataset in chosen.get("mixture") or ()]
        chosen["mixture"] = [float(weight / sum(weights)) for weight in weights]
        # The skipped batches before the next step's: each moved the later ones up by one.
        numbers = enumerate(sorted({*training.get("skip_steps", ())}))
        skipped = [number for i, number in numbers if number - i < checkpoint.step]
        tokens = {} if source == "hf_dataset" else training["tokens"]
        chosen = {source: chosen, "training.tokens": tokens, "training.skip_steps": skipped}
        return {"the dataset": source} | flat(chosen)

    before, now = rows(checkpoint.settings), rows(plain(config.to_yaml()))
    made_of = made_of_flat_tokens(checkpoint) if data.made_of else {}
    for name, there in made_of.get("validation", {}).items():
        here = data.made_of.get("validation", {}).get(name, there)
        if any(here[part] != there.get(part, here[part]) for part in ("tokens", "samples")):
            which = f"set {name}" if name else "split"
            say(f"note: the validation {which} has changed: earlier losses can't be compared")
    for part in filter(made_of.get, ("tokens", "samples")):  # earlier versions had no samples
        key = f"the datasets' {part}"
        before[key], now[key] = made_of[part], data.made_of[part]
    for key in before:  # the user's settings come before the tokens
        if key in now and before[key] != now[key]:
            what = "flat_tokens.mixture's weights" if key == "flat_tokens.mixture" else key
            both = f"was written with {what}={before[key]}, now {now[key]}"
            if config.flat_tokens and config.flat_tokens.other_rows:
                said = both if len(both) < 200 else f"was written with other values of {what}"
                say(f"note: {checkpoint.path} {said}")
                continue
            problem = "in this epoch some rows would be used twice, or never"
            keep = "datasets" if key.startswith("the datasets'") else "value"
            clone = "clone the run's weights into a new one"
            clone += ", with another flat_tokens.seed" if config.flat_tokens else ""
            cure = f"Keep the earlier {keep}{cure}, or {clone}"
            raise UserError(f"{checkpoint.path} {both}: {problem}. {cure}")


def say_problem_of_start(name: str, start: int) -> None:
    """Prints a note if a dataset's tokenizer starts texts with another token than the model. Opens
    only a tokenizer that is on this machine, and stops no run."""
    with contextlib.suppress(Exception):  # of many types, if the tokenizer can't be opened
        if name != "bytes_utf8" and not os.path.exists(name):
            from huggingface_hub import snapshot_download

            name = snapshot_download(name, local_files_only=True)
        if problem := problem_of_start(open_tokenizer(name), start):
            say(f"note: {problem}")


def open_batches(config: Any, sizes: dict[str, int]) -> tuple[Batches, dict[str, Batches]]:
    """Returns the batches to train on and, if the run validates, each validation set's batches by
    name, for the mesh in context. The config needs the sections model, training and io besides a
    source; `sizes` has the lengths of the dimensions B, L and V."""
    rows, length, vocab = (sizes[dimension] for dimension in "BLV")
    source, training, threads = config.source(), config.training, config.io.max_io_threads
    spec = BatchSpec(rows, length, vocab, config.model.start_token, io_threads=threads)
    train = source.open(dataclasses.replace(spec, skip=training.skip_steps), "train")
    used = source.tokenizer_used(remote=True)
    say_problem_of_start(used.name if used else "", spec.start_token)
    if not (training.validation_interval or training.validation_at_start):
        return train, {}
    # The validation sets that flat tokens name, or a single one without a name.
    named = getattr(source, "validation", {}).items()
    alone = {name: dataclasses.replace(source, filespec=x, mixture=()) for name, x in named}
    sets = {n: each.open(spec, "validation") for n, each in (alone or {"": source}).items()}
    taken = training.validation_batches * rows
    if train.made_of:
        train.made_of["validation"] = {name: data.made_of for name, data in sets.items()}
    for name, data in sets.items():
        if both := train.files & data.files:
            raise UserError(f"{min(both)} is in both splits: leave it out of one")
        if data.count and taken > 1.01 * data.count:
            there = f"{name or 'the split'} has {data.count:,}, so some come again"
            cure = "lower training.validation_batches"
            say(f"note: a validation takes {taken:,} rows, and {there}: {cure}")
    return train, sets
