"""Config files and overrides -> a typed config; a mistake in them -> one message."""

import dataclasses
import difflib
import functools
import operator
import os
import re
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from runtime.config import ROOT
from runtime.errors import user_errors
from shardlib.errors import UserError

C = TypeVar("C")


def program(
    schema: type[C], folder: str, preset: dict[str, Any] | None = None, names: str = ""
) -> Callable[[Callable[[C], int | None]], Callable[[], None]]:
    """Decorator: runs `main(config)` from the command line, with the config checked against
    `schema`, a dataclass. What the function returns is the exit code.

    --config-name= chooses a file in `folder`, in which base.yaml is what the others extend. Exits
    with a message where there is no such file, or the config doesn't have the schema's keys and
    types: Hydra would suggest to add a key that it doesn't know, and then not check it. `preset`
    has values for keys that the files leave to the user and this program has no use for.

    With --multirun each config has a process of its own, one after the other, as a process can
    simulate but one number of devices; its number is added to the value of the key `names`. All
    are checked before the first one starts.
    """

    # Hydra wants to be told of what is in no file: what has a default.
    fields = dataclasses.fields(cast(Any, schema))
    none = {dataclasses.MISSING}
    added = [f.name for f in fields if {f.default, f.default_factory} != none]

    def typed(composed: DictConfig, given: Any) -> C:
        if given.job.config_name == "base":
            raise UserError(f"choose a config by --config-name=: {', '.join(_names(folder))}")
        # Without its interpolations, which OmegaConf would take for any type.
        plain = OmegaConf.to_container(composed, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(schema), preset or {}, plain)
        return cast(C, OmegaConf.to_object(merged))

    def decorate(function: Callable[[C], int | None]) -> Callable[[], None]:
        @functools.wraps(function)
        def main() -> None:
            found: list[tuple[DictConfig, Any]] = []  # configs, each with what Hydra was given
            jobs: list[tuple[C, Any]] = []  # the same, checked
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else it prints errors and exits
            sys.argv = [f"++{a}" if re.split("[.=]", a)[0] in added else a for a in sys.argv]

            @hydra.main(config_path=str(ROOT / folder), config_name="base", version_base="1.3")
            def compose(composed: DictConfig) -> None:
                found.append((composed, HydraConfig.get()))

            with user_errors():
                try:
                    compose()
                    for composed, given in found:  # not in compose: Hydra prints what fails there
                        jobs.append((typed(composed, given), given))
                except Exception as error:  # Hydra's, OmegaConf's, or of whatever they are made of
                    raise UserError(_message(error, schema, folder)) from error
                if not jobs:  # with --help
                    return
                config, given = jobs[0]
                if given.mode == RunMode.MULTIRUN:
                    _sweep(jobs, names)
                elif code := function(config):
                    sys.exit(code)

        return main

    return decorate


def _sweep(jobs: list[tuple[C, Any]], names: str) -> None:
    """Runs this program for each config. A run that is stopped stops the sweep; one that fails
    doesn't."""
    program, failed = sys.orig_argv[: -len(sys.argv[1:])], []
    for number, (config, given) in enumerate(jobs):
        arguments = [f"--config-name={given.job.config_name}", *given.overrides.task]
        if names:
            arguments.append(f"{names}='{operator.attrgetter(names)(config)}/{number}'")
        print(f"job {number}: {' '.join(arguments)}", flush=True)
        with subprocess.Popen([*program, *arguments]) as process:
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C comes to both processes
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            sys.exit(code)
        if code:
            failed.append(str(number))
    if failed:
        raise UserError(f"of {len(jobs)} jobs, these failed: {', '.join(failed)}")


def _names(folder: str) -> list[str]:
    """The configs in a folder that a run may name."""
    files = (ROOT / folder).glob("*.yaml")
    return sorted(file.stem for file in files if file.stem != "base")


def _keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """The schema's keys with dots, those of its sections included."""
    for name, hint in typing.get_type_hints(schema).items():
        yield prefix + name
        for kind in (hint, *typing.get_args(hint)):  # a section, or one that may be null
            if dataclasses.is_dataclass(kind):
                yield from _keys(kind, f"{prefix}{name}.")


def _message(error: Exception, schema: Any, folder: str) -> str:
    """What is wrong with a config, in a line: the key, and what to write instead."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name, there = error.missing_cfg_file, error.options or _names(folder)
        return f"no config {name}; there are {', '.join(there)}"
    if isinstance(error, OverrideParseException):
        return f"can't read {error.override}: {' '.join(str(error).split())}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key, known = getattr(cause, "full_key", None) or "", list(_keys(schema))
    section, _, last = key.rpartition(".")
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is missing: add {key}=..."
    if any(name.startswith(f"{key}.") for name in known):
        return f"{key} is a section: set {key}.KEY=..."
    if key and isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if key in known and not section:  # base.yaml leaves it to the configs that extend it
            names = ", ".join(_names(folder))
            return f"{key} is not set in this config; choose another with --config-name=: {names}"
        if key in known:
            return f"{key}: {section} is null in this config"
        if section in known and not any(name.startswith(f"{section}.") for name in known):
            return f"unknown key {key}; to add it to {section}, write +{key}=..."
        meant = [name for name in known if name.rpartition(".")[2] == last]
        meant = meant or difflib.get_close_matches(key, known, n=1)
        return f"unknown key {key}" + (f"; did you mean {' or '.join(meant)}?" if meant else "")
    problem = " ".join(str(cause).split("\n    ")[0].split())
    # Where Hydra names no key, it is about a whole section or group.
    key = key or ", ".join(given for given in sys.argv[1:] if re.match(r"\w+=", given))
    return f"{key}: {problem}" if key else problem
