"""The sources of tokens that a config can choose from."""

import dataclasses
from typing import Any

from data.huggingface import HuggingFaceConfig
from data.loader import Batches, BatchSpec, FlatTokensConfig
from runtime.config import Section, flat, plain
from shardlib.errors import UserError


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class DataConfig(Section):
    """The sources of tokens. A config sets one of them and leaves the others null. To add a source,
    add a field here whose section has the methods `open` and `tokenizer_used`."""

    flat_tokens: FlatTokensConfig | None
    hf_dataset: HuggingFaceConfig | None

    def source(self) -> Any:
        """Returns the section of the source that is set. Raises UserError unless exactly one is."""
        keys = [field.name for field in dataclasses.fields(DataConfig)]
        sections = [section for key in keys if (section := getattr(self, key))]
        if len(sections) != 1:
            raise UserError(f"set one of these, and leave the others null: {', '.join(keys)}")
        return sections[0]


def check_same_rows(config: Any, saved: dict[str, Any], path: str) -> None:
    """Raises UserError if a run that goes on from the checkpoint at `path`, with the settings
    `saved`, would take other rows of flat tokens into its batches, unless the config allows it. A
    stream goes on after the last token that was used, whatever the batches."""
    if not config.flat_tokens or config.flat_tokens.other_rows:
        return

    def rows(settings: Any) -> dict[str, Any]:
        chosen = {**(settings.get("flat_tokens") or {})}
        for name in ("filespec", "other_rows"):  # a dataset may have moved
            chosen.pop(name, None)
        chosen["mixture"] = [dataset["weight"] for dataset in chosen.get("mixture") or ()]
        return flat({"flat_tokens": chosen, "training.tokens": settings["training"]["tokens"]})

    before, now = rows(saved), rows(plain(config.to_yaml()))
    for key in before.keys() & now.keys():
        if before[key] != now[key]:
            what = "flat_tokens.mixture's weights" if key == "flat_tokens.mixture" else key
            raise UserError(
                f"{path} was written with {what}={before[key]}, now {now[key]}: in this epoch rows "
                "that were used would come again, or others never. Keep the earlier value, or "
                "accept that with flat_tokens.other_rows=true"
            )


def open_batches(config: Any, sizes: dict[str, int]) -> tuple[Batches, Batches | None]:
    """Returns the batches of the training split and, if the run validates, of the validation split,
    for the mesh in context. The config needs the sections model, training and io besides a source;
    `sizes` has the lengths of the dimensions B, L and V."""
    spec = BatchSpec(
        rows=sizes["B"],
        length=sizes["L"],
        vocab=sizes["V"],
        start_token=config.model.start_token,
        io_threads=config.io.max_io_threads,
    )
    open_split, hyper = config.source().open, config.training
    validates = hyper.validation_interval or hyper.validation_at_start
    train = open_split(dataclasses.replace(spec, skip=hyper.skip_steps), "train")
    return train, open_split(spec, "validation") if validates else None
