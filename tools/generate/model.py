"""The model of a checkpoint, and its tokenizer."""

import contextlib
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from hydra import compose, initialize_config_dir

import train
from data import flat_tokens
from data.flat_tokens import TokenizerId
from data.sources import kept_by_import, tokenizer_of_model
from data.tokenizer import Tokenizer
from runtime.checkpoint import Checkpoints, newest
from runtime.config import ROOT
from runtime.devices import have_cpu_devices, make_mesh
from runtime.run import MeshConfig, all_finite
from shardlib.errors import UserError
from shardlib.types import computing_in, make_shapes, named
from tools.generate.steps import lay_out

ENDS_IN = "generation_config.json", "config.json"


class Text(Tokenizer):
    """A model's tokenizer, which here parses the names of special tokens. The ids that end a text
    are the tokenizer's, and those in the config.json and generation_config.json of its folder, or
    of the folder `imported`. Raises UserError or OSError if it can't be opened."""

    splits_special = False

    def __init__(self, name: str, imported: str | None = None):
        super().__init__(name)
        self.ids, ends = range(1, 257), [getattr(self.slow, "eos_token_id", None)]
        if self.slow is not None:
            self.ids = range(1 + max(self.slow.get_vocab().values()))
        for folder, file in itertools.product((name, imported or name), ENDS_IN):
            with contextlib.suppress(OSError, ValueError):
                said = json.loads(pathlib.Path(folder, file).read_text()).get("eos_token_id")
                ends += said if isinstance(said, list) else [said]
        self.ends = tuple(dict.fromkeys(i for i in ends if isinstance(i, int)))

    def encode(self, text: str, config: train.Config) -> list[int]:
        """Returns the ids of a text. Raises UserError if it isn't UTF-8, or if the model lacks an
        id."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # Python keeps invalid bytes as surrogates
            near = text[max(0, error.start - 20) : error.start + 20]
            raise UserError(f"a text is not UTF-8: {near!r}") from None
        ids, _ = flat_tokens.decode(self([text])[0])
        check_ids(f"the text {text[:40]!r}", int(ids.max(initial=0)), config.model)
        return ids.tolist()

    def prompt(self, text: str, config: train.Config) -> list[int]:
        """Returns the start token and a text's ids, unless these begin with it as a special one."""
        ids, start = self.encode(text, config), config.model.start_token
        named = self.slow is not None and start in self.slow.added_tokens_decoder
        return ids if named and ids[:1] == [start] else [start, *ids]

    def count_bytes(self, ids: np.ndarray, is_start: np.ndarray) -> int:
        """Counts the UTF-8 bytes of the decoded documents, without special tokens. If tokens aren't
        bytes, a character cut off at either end counts as the three bytes of a replacement
        character."""
        if self.slow is None:
            return len(ids)
        documents = np.split(ids, np.flatnonzero(is_start))
        return sum(len(self.decode(ids, without_special=True).encode()) for ids in documents)


def check_ids(name: str, largest: int, model: train.ModelConfig) -> None:
    """Raises UserError if an id is beyond the model's vocabulary."""
    if largest > (last := model.vocab - 1):
        problem = f"{name} has ids up to {largest}, but the model's vocabulary ends at {last}"
        raise UserError(f"{problem}: they are from another tokenizer")


def open_checkpoint(path: str) -> tuple[Checkpoints, train.Config]:
    """Returns the checkpoints and the newest one's config. Raises CheckpointError, or UserError if
    the model doesn't split over the mesh."""
    # Defaults for keys that the checkpoint of an older version or of an import lacks.
    none = ["paths.model_name=none", "flat_tokens.filespec=none"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        defaults = compose("local_test_synthetic", none)
    config = newest(path).config(train.Config, defaults=defaults)
    hint, sizes = train.state_type(config), train.dimensions(config)
    make_shapes(hint.weights, sizes, train.DIMENSIONS)  # raises if a dimension doesn't split
    return Checkpoints(path, hint, sizes, config.to_yaml(), 32, key="folder"), config


class Model:
    """The model of a checkpoint, on a mesh of its own. Raises CheckpointError, or UserError if the
    model doesn't split over the mesh."""

    def __init__(self, path: str, d: int = 1, t: int = 1, dtype: str | None = None):
        with contextlib.suppress(RuntimeError):  # JAX already has its devices
            have_cpu_devices(d * t)
        # Devices along d are replicas, so that generating gathers no weights over d.
        self.mesh = make_mesh(MeshConfig(d, t, r=d).axes)
        with jax.set_mesh(self.mesh):
            self.checkpoints, self.config = open_checkpoint(path)
        self.dtype = dtype or self.config.dtype

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), computing_in(self.dtype):
            yield

    @functools.cached_property
    def weights(self) -> Any:
        """Raises UserError unless all are finite."""
        with self.computing():
            weights = lay_out(self.checkpoints.restore("weights"))
        if bad := [name for name, finite in named(all_finite(weights)).items() if not finite]:
            which = f"{self.checkpoints.newest.path} has NaN or infinite weights"
            raise UserError(f"{which}, such as {bad[0]}: name another checkpoint")
        return weights

    def tokenizer(self, named: str | None) -> Text:
        """Opens the tokenizer of this name, else the model's. Raises UserError if there is none."""
        checkpoint = self.checkpoints.newest
        if not (recorded := TokenizerId(named) if named else tokenizer_of_model(checkpoint)):
            problem = (
                "no tokenizer is known: the checkpoint, or a dataset on this machine, names none"
            )
            choices = "bytes_utf8, a tokenizers JSON file, or what transformers loads"
            raise UserError(f"{problem}; set --tokenizer to {choices}")
        kept = kept_by_import(checkpoint, functools.partial(print, file=sys.stderr))
        return Text(recorded.name, kept).check_unchanged(recorded)
