"""Remembers which checks an earlier start of the same program has passed."""

import hashlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from omegaconf import OmegaConf

from runtime.config import flat


def unless_passed_before(config: Any, check: Callable[[], object]) -> None:
    """Runs a check that depends only on the config and the source, unless it has passed before with
    the same config, source, JAX and Python. A passed check leaves a marker file in the cache.
    "Source" is every imported module that is not an installed package. Modules whose file doesn't
    exist, such as some of PyTorch's, are ignored."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    texts = [
        pathlib.Path(file).read_bytes()
        for file in sorted(files)
        if file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
    values = flat(OmegaConf.structured(config))
    relevant = {key: value for key, value in values.items() if not key.startswith("paths.")}
    versions = repr((relevant, version("jax"), sys.version)).encode()
    digest = hashlib.sha256(b"".join([versions, *texts])).hexdigest()
    root = pathlib.Path(config.paths.root_working_dir).expanduser()
    mark = root / f".compilation_cache/checked-{digest}"
    if not mark.exists():
        check()
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
