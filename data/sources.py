"""The sources of tokens that a config can choose from."""

import dataclasses
from typing import Any

from data.huggingface import HuggingFaceConfig
from data.loader import Batches, BatchSpec, FlatTokensConfig
from runtime.config import Section
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
