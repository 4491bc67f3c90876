"""What an earlier start of the same program leaves to a later one: JAX's cache of what it compiled,
and which checks have passed."""

import hashlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
from omegaconf import OmegaConf

from runtime.config import flat


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
    values = flat(OmegaConf.structured(config))
    given = {key: value for key, value in values.items() if not key.startswith("paths.")}
    here = repr((given, version("jax"), sys.version)).encode()
    digest = hashlib.sha256(b"".join([here, *texts])).hexdigest()
    mark = cache_folder(root) / f"checked-{digest}"
    if not mark.exists():
        check()
        mark.touch()
