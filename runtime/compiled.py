"""A compiled step in a file, so that a run starts without compiling; and JAX's own cache.

The file is a zip archive of two members: `description.json`, and `executable`, which JAX
serializes, by pickle: load only what you compiled yourself.
"""

import hashlib
import json
import os
import pathlib
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental import serialize_executable

from runtime.config import by_key
from shardlib.devices import show_axes
from shardlib.errors import UserError

FORMAT = 1
NOT_IN_STEP = (
    *(".steps", ".skip_steps", ".max_skipped_updates", ".seed"),
    *(".validation_interval", ".validation_batches"),
)


def cache_folder(root: str) -> pathlib.Path:
    folder = pathlib.Path(root).expanduser() / ".compilation_cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)  # JAX would only warn where it can't
    except OSError as error:
        raise OSError(
            f"paths.root_working_dir={root} can't be written: {error.strerror}; choose another"
        ) from None
    return folder


def use_cache(root: str) -> None:
    """Has JAX keep what it compiles in `<root>/.compilation_cache`, for the next start of the same
    program, unless the user has chosen a folder for that."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder(root).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        # Else an edit of a type string alone would find the program that has the old one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def unless_passed_before(root: str, config: Any, check: Callable[[], object]) -> None:
    """Runs a check whose outcome depends on the config and the source alone, unless a mark in the
    cache says that it has passed, for the same of both, and the same JAX and Python: the source of
    all modules that aren't installed packages, nor name a file that isn't there, as some of
    PyTorch's do."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    texts = [
        pathlib.Path(file).read_bytes()
        for file in sorted(files)
        if file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
    given = {key: value for key, value in by_key(config).items() if not key.startswith("paths.")}
    here = repr((given, version("jax"), sys.version)).encode()
    mark = cache_folder(root) / f"checked-{_digest(b''.join([here, *texts]))}"
    if not mark.exists():
        check()
        mark.touch()


class CompiledStepError(UserError):
    """A file that isn't a compiled step, or not that of this program."""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _description(lowered: jax.stages.Lowered, config: Any) -> dict[str, Any]:
    """What must be the same, but for the config: it is there to tell why the program isn't."""
    mesh = jax.sharding.get_mesh()
    return {
        "format": FORMAT,
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "device": mesh.devices.flat[0].device_kind,
        "mesh": show_axes(mesh.shape),
        "program": _digest(lowered.as_text().encode()),
        "config": by_key(config),
    }


def save(
    path: str, compiled: jax.stages.Compiled, lowered: jax.stages.Lowered, config: Any
) -> None:
    """Writes the step that was compiled from `lowered`, whose config is a dataclass."""
    executable = serialize_executable.serialize(compiled)[0]
    described = _description(lowered, config) | {"executable": _digest(executable)}
    part = pathlib.Path(f"{path}.part")
    with zipfile.ZipFile(part, "w") as archive:
        archive.writestr("description.json", json.dumps(described, indent=1))
        archive.writestr("executable", executable)
    part.rename(path)


def load(path: str, lowered: jax.stages.Lowered, config: Any) -> jax.stages.Compiled:
    """The step that `save` wrote, for the devices of the mesh in context. Raises CompiledStepError
    where this program, these devices or this JAX are others."""
    here = json.loads(json.dumps(_description(lowered, config)))  # as it comes from a file
    try:
        with zipfile.ZipFile(path) as archive:
            there = json.loads(archive.read("description.json"))
            executable = archive.read("executable")
        if not isinstance(there, dict) or {*here, "executable"} - {*there}:
            raise ValueError("its description is incomplete")
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise CompiledStepError(
            f"compiled_step={path}: no compiled step can be read: {error}; tools.compile writes one"
        ) from None
    for key in ("format", "jax", "jaxlib", "device", "mesh"):
        if there[key] != here[key]:
            other = f"{key} {there[key]}, and here it is {here[key]}"
            raise CompiledStepError(f"{path} was compiled for {other}")
    if there["program"] != here["program"]:
        other = ", ".join(
            f"{key}={there['config'].get(key)}, and here it is {value}"
            for key, value in here["config"].items()
            if key.startswith(("model.", "training.")) and there["config"].get(key) != value
            if not key.endswith(NOT_IN_STEP)
        )
        other = other or "another source: train.py, shardlib or a package has changed since"
        raise CompiledStepError(f"{path} was compiled for {other}")
    if there["executable"] != _digest(executable):
        raise CompiledStepError(f"{path} is damaged: compile it again by tools.compile")
    devices = list(jax.sharding.get_mesh().devices.flat)
    return serialize_executable.deserialize_and_load(
        executable, lowered.in_tree, lowered.out_tree, execution_devices=devices
    )
