"""Where a config's tokens come from."""

import dataclasses
from typing import Any

from data.huggingface import HuggingFaceConfig
from data.loader import Batches, BatchSpec, FlatTokensConfig
from runtime.config import Section
from shardlib.errors import UserError


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class DataConfig(Section):
    """The sources of tokens, of which a config has one, and null for the others. A new one is a
    field here; its section has `open` and `tokenizer_used`."""

    flat_tokens: FlatTokensConfig | None
    hf_dataset: HuggingFaceConfig | None

    def source(self) -> Any:
        """The section of the source that the config has."""
        keys = [field.name for field in dataclasses.fields(DataConfig)]
        given = [section for key in keys if (section := getattr(self, key))]
        if len(given) != 1:
            raise UserError(f"set one of {' and '.join(keys)}, and the other one to null")
        return given[0]


def open_batches(config: Any, sizes: dict[str, int]) -> tuple[Batches, Batches | None]:
    """Batches of the training and, if used, the validation split, for the mesh in context, from a
    config that has the sections model, training and io beside a source's, and its dimensions."""
    spec = BatchSpec(
        rows=sizes["B"],
        length=sizes["L"],
        vocab=sizes["V"],
        start_token=config.model.start_token,
        io_threads=config.io.max_io_threads,
    )
    open_split, used = config.source().open, config.training.validation_interval
    train = open_split(dataclasses.replace(spec, skip=config.training.skip_steps), "train")
    return train, open_split(spec, "validation") if used else None
