"""The model of a checkpoint."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from hydra import compose, initialize_config_dir

import train
from data.sources import kept_by_import, tokenizer_of_model
from runtime.checkpoint import Checkpoints, newest
from runtime.config import ROOT
from runtime.run import MeshConfig, all_finite
from shardlib.devices import have_cpu_devices, make_mesh
from shardlib.errors import UserError
from shardlib.types import computing_in, make_shapes, named
from tools.generate.steps import lay_out
from tools.generate.text import Text


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
        # Devices along d are replicas: each holds whole weights, so generating gathers none.
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
        if not (named := named or tokenizer_of_model(checkpoint)):
            problem = (
                "no tokenizer is known: the checkpoint, or a dataset on this machine, names none"
            )
            choices = "bytes_utf8, a tokenizers JSON file, or what transformers loads"
            raise UserError(f"{problem}; set --tokenizer to {choices}")
        return Text(named, kept_by_import(checkpoint))
