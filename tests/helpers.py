"""Helpers shared by the tests: configs, meshes, weights, and edited copies of source files."""

import types
from typing import Any

import jax
import numpy as np
import pytest

import train
from data.flat_tokens import NO_TOKEN
from runtime.config import ROOT
from runtime.devices import make_mesh
from shardlib.types import make_shapes, make_shardings, named
from tests import mutations

# The product's folders. Each imports only from itself and from those before it.
ROOMS = "shardlib", "kernels", "runtime", "data", "variants", "configs", "checks", "tools"
MESHES = [(1, 1), (8, 1), (1, 8), (4, 2), (2, 4)]


def slow_but_for(quick: list, values: list) -> list:
    """Marks all values for pytest.mark.parametrize as slow, except the quick ones."""
    slow = pytest.mark.slow
    return [value if value in quick else pytest.param(value, marks=slow) for value in values]


def axes(d: int, t: int, r: int = 1, c: int = 1) -> dict[str, int]:
    return {"r": r, "s": d // r, "c": c, "t": t}


def mesh(*sizes: int) -> jax.sharding.Mesh:
    return make_mesh(axes(*sizes))


def compose_config(name, *overrides, folder="configs", schema=train.Config) -> "train.Config":
    return mutations.composed(schema, folder, name, *overrides)


def config_of(module: Any, *overrides: str, **options: Any) -> Any:
    """The config local_test_synthetic with overrides, for an edited train.py."""
    given = "paths.model_name=x", *overrides
    return compose_config("local_test_synthetic", *given, schema=module.Config, **options)


def starting_state(config: train.Config, checkpoints: Any) -> train.State:
    """The state with which train.py starts a run on flat tokens that has these checkpoints."""
    paths = config.paths
    clone = paths.clone_from, paths.clone_weights_only, paths.clone_other_model
    start = checkpoints.starting_point(*clone)
    return train.starting_state(config, *start, types.SimpleNamespace(made_of="flat tokens"))


# A tiny model whose vocabulary covers the synthetic dataset.
SMALL = [
    "model.d_model=32", "model.n_q_per_kv=2", "model.n_kv=8", "model.d_head=4", "model.layers=2",
    "model.vocab=128", "model.d_ff=40", "model.rope_max_timescale=100",
    "training.tokens={batch: 8, len: 12}", "training.learning_rate=1e-2",
    "check=types",  # numbers take a while, and tests/tools/test_check.py compares them
]  # fmt: skip


def token_batch(kind: Any, targets: Any, is_start: Any, start_token: int = 0) -> Any:
    """Returns a TokenBatch of class `kind` with targets[B, L], in which 0 is padding. The token
    before each row is 0."""
    ids = np.where(targets, targets, NO_TOKEN).astype(np.uint32)
    before = (0, 0), (1, 0)
    return kind.of(np.pad(ids, before), np.pad(is_start, before), start_token)


def starts_of(batch: Any) -> np.ndarray:
    """Marks the first token of each document in a batch, and of each row."""
    return np.asarray(batch.start == batch.position)


def small_config(*overrides: str) -> "train.Config":
    """The config of a tiny model whose dimensions all split over 8 devices."""
    name = "paths.model_name=test"
    return compose_config("local_test_synthetic", *SMALL, "model.vocab=48", name, *overrides)


def small_run(folder: Any, *more: str, name: str = "run") -> list[str]:
    """Arguments of train.py for a run of a tiny model in a folder."""
    places = f"paths.root_working_dir={folder}", f"paths.model_name={name}"
    return ["--config-name=local_test_synthetic", *SMALL, *places, *more]


def take_step(module: Any, state: Any, batch: Any, config: "train.Config") -> Any:
    """The next state and the metrics, by the module's training step."""
    hyper = module.hyper_at(int(state.step), config.training)
    return module.training_step(state, batch, hyper, config)


def random_weights(module: types.ModuleType, config: "train.Config") -> Any:
    """Returns random weights on the mesh in context. Zeros and ones would hide mistakes."""
    weights = module.init_state(config).weights
    keys = iter(jax.random.split(jax.random.key(1), 100))
    weights = jax.tree.map(lambda w: w + 0.1 * jax.random.normal(next(keys), w.shape), weights)
    return jax.device_put(weights, make_shardings(module.state_type(config).weights))


def placed_shapes(hint: Any, sizes: dict[str, int]) -> Any:
    """The shapes of typed arrays with their layout on the mesh in context, to compile for."""
    shapes, shardings = make_shapes(hint, sizes), make_shardings(hint)
    return jax.tree.map(lambda shape, on: shape.update(sharding=on), shapes, shardings)


def plain(tree: Any, norms_after: bool = False) -> dict[str, Any]:
    """Turns weights into the oracle's dict: arrays by last names, the layers' in a dict."""
    weights: dict[str, Any] = {}
    for name, value in named(tree).items():
        folder, *_, last = ["", *name.split("/")] if "/" not in name else name.split("/")
        if norms_after and last in ("attention_norm", "mlp_norm"):
            last = last.replace("_norm", "_post_norm")
        (weights.setdefault(folder, {}) if folder else weights)[last] = value
    return weights


def edited(path: str, *edits: tuple[str, str]) -> types.ModuleType:
    """Loads a source file as a module, with each `old` replaced by `new` throughout."""
    text = (ROOT / path).read_text()
    for old, new in edits:
        assert old in text, f"{path} does not contain {old!r}: update the edit in this test"
        text = text.replace(old, new)
    return mutations.load(text, path)


def assert_close(actual, expected, tolerance):
    """Checks each array's largest error, relative to its largest expected entry."""
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max() + 1e-12
        error = np.abs(a - b).max() / scale
        assert error < tolerance, f"{jax.tree_util.keystr(path)} differs by {error:.1e} of {scale}"
