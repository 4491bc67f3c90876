"""Config files and overrides -> a typed config; a mistake in them -> one message."""

import dataclasses
import difflib
import functools
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
            raise UserError(f"choose a config by --config-name=: {_names(folder)}")
        merged = OmegaConf.merge(OmegaConf.structured(schema), preset or {}, composed)
        return cast(C, OmegaConf.to_object(merged))

    def decorate(function: Callable[[C], int | None]) -> Callable[[], None]:
        @functools.wraps(function)
        def main() -> None:
            found: list[tuple[DictConfig, Any]] = []  # configs, each with what Hydra was given
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else it prints errors and exits
            sys.argv = [f"++{a}" if re.split("[.=]", a)[0] in added else a for a in sys.argv]

            @hydra.main(config_path=str(ROOT / folder), config_name="base", version_base="1.3")
            def compose(composed: DictConfig) -> None:
                found.append((composed, HydraConfig.get()))

            with user_errors():
                configs: list[C] = []
                try:
                    compose()
                    configs.extend(typed(*each) for each in found)
                except Exception as error:  # Hydra's, OmegaConf's, or of whatever they are made of
                    job = f"job {len(configs)}: " if len(found) > 1 else ""
                    raise UserError(job + _message(error, schema, folder)) from error
                if not found:  # with --help
                    return
                if found[0][1].mode != RunMode.MULTIRUN:
                    if code := function(configs[0]):
                        sys.exit(code)
                    return
                module = sys.modules["__main__"].__spec__
                here = function.__module__
                jobs = []
                for number, (composed, given) in enumerate(found):
                    jobs.append([f"--config-name={given.job.config_name}", *given.overrides.task])
                    if names:
                        jobs[-1].append(f"{names}='{OmegaConf.select(composed, names)}/{number}'")
                _sweep(module.name if module and here == "__main__" else here, jobs)

        return main

    return decorate


def _sweep(module: str, jobs: list[list[str]]) -> None:
    """Runs a program with the arguments of each job. One that is stopped stops the sweep; one that
    fails doesn't."""
    failed = []
    for number, arguments in enumerate(jobs):
        print(f"job {number}: {' '.join(arguments)}", flush=True)
        with subprocess.Popen([sys.executable, "-m", module, *arguments]) as process:
            signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C comes to both processes
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            sys.exit(code)
        if code:
            failed.append(str(number))
    if failed:
        raise UserError(f"of {len(jobs)} jobs, these failed: {', '.join(failed)}")


def _names(folder: str) -> str:
    files = (ROOT / folder).glob("*.yaml")
    return ", ".join(sorted(file.stem for file in files if file.stem != "base"))


def _keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """The schema's keys with dots, those of its sections included."""
    for name, hint in typing.get_type_hints(schema).items():
        yield prefix + name
        for kind in (hint, *typing.get_args(hint)):  # a section, or one that may be null
            if dataclasses.is_dataclass(kind):
                yield from _keys(kind, f"{prefix}{name}.")


def _message(error: Exception, schema: Any, folder: str) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name = str(error.missing_cfg_file)
        there = ", ".join(error.options) if error.options else _names(folder)
        close = difflib.get_close_matches(name.rpartition("/")[2], there.split(", "))
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        return f"no config {name}; {hint}there are {there}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is missing: add {key}=..."
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        section, _, last = str(key).rpartition(".")
        sections = {known: known.rpartition(".")[0] for known in _keys(schema)}
        names = {known: known.rpartition(".")[2] for known in sections}
        if key in sections:
            return f"{key}: in this config {section} is null"
        siblings = [known for known in sections if sections[known] == section]
        if not siblings and section in sections:
            return f"unknown key {key}; to add it to {section}, write +{key}=..."
        for known in [k for k in names if names[k] == last], siblings, list(names):
            close = difflib.get_close_matches(last, [names[name] for name in known])
            if meant := [name for name in known if names[name] in close]:
                return f"unknown key {key}; did you mean {' or '.join(meant)}?"
        return f"unknown key {key}; there are {', '.join(siblings)}"
    if isinstance(error, OverrideParseException):
        return (
            f"can't read {error.override}; an override is KEY=VALUE without spaces around the =, "
            "and a value with special signs is in quotes within the shell's quotes"
        )
    if group := re.match(r"Could not override '([^']*)'. No match", str(error)):
        return f"this config isn't made of parts, so {group[1]}= has nothing to choose"
    if "Config group override must be" in str(error):
        for part in (argument.partition("=")[0] for argument in sys.argv[1:]):
            if part and (ROOT / folder / part).is_dir():
                return f"{part}= chooses a file in {folder}/{part}; its keys are {part}.KEY=..."
    problem = str(cause).split("\n    ")[0]
    if re.search(r"not Optional|'None'|NoneType", problem):
        return f"{key} can't be null"
    if kind := re.search(r"is not a subclass of (\w+)", problem):  # it may name nothing else
        hints = typing.get_type_hints(schema).items()
        key = key or next((name for name, hint in hints if kind[1] in str(hint)), None)
    if key and re.search(r"is not a (subclass|ListConfig)|Cannot merge", problem):
        inner = any(known.startswith(f"{key}.") for known in _keys(schema))
        return f"{key} is a " + (f"section: set {key}.KEY=..." if inner else f"list: {key}=[...]")
    return f"{key}: {problem}" if key else problem
