"""Turns config files and overrides into a typed config, and mistakes in them into one message."""

import contextlib
import functools
import hashlib
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runtime.config import ROOT, flat, keys, load, unknown
from runtime.errors import user_errors
from runtime.supervise import STOPS, handled
from shardlib.errors import UserError

C = TypeVar("C")
PRINTS = r"-(?!(m|-multirun)$|-config|c[npd]\b)"  # Hydra's flags with which it may run no job
OVERRIDE = r"[+~]*[\w./@]+=|~"  # how one begins


def program(
    schema: type[C],
    folder: str,
    preset: dict[str, Any] | None = None,
    names: str = "",
    fixed: dict[str, Any] | None = None,
) -> Callable[[Callable[[C], int | None]], Callable[[], None]]:
    """Decorator: runs `main(config)` from the command line, with the config checked against
    `schema`, a dataclass. The function returns the exit code.

    --config-name= chooses a file in `folder`; the files there extend base.yaml. The program exits
    with a message if there is no such file, or if the config doesn't have the schema's keys and
    types. Hydra alone would suggest adding an unknown key with +, and then not check it. `preset`
    has values for required keys that this program doesn't use; `fixed` overrides the config.

    --help first prints the docstring of the function's module, which explains the program's own
    keys.

    With --multirun each config runs in a process of its own, one after the other, since a process
    can simulate only one number of devices. Overrides that not all jobs share are appended to the
    value of the key `names`. All configs are checked before the first job starts.
    """

    kinds = keys(schema)

    def typed(composed: DictConfig, hydra_config: Any) -> C:
        if (name := hydra_config.job.config_name) == "base":
            raise UserError(f"choose a config with --config-name=NAME: {', '.join(_names(folder))}")
        choices = [f"{group}/{choice}" for group, choice in hydra_config.runtime.choices.items()]
        given = (os.path.realpath(x.path) for x in hydra_config.runtime.config_sources)
        sources = [*dict.fromkeys(given)]
        for file in (f"{each}.yaml" for each in (name, "base", *_names(folder), *choices)):
            if len(found := [x for x in sources if os.path.isfile(f"{x}/{file}")]) > 1:
                raise UserError(f"{file} is in {' and in '.join(found)}: rename one of them")

        def resolved(fixed: Any) -> dict[str, Any]:
            merged = OmegaConf.merge(preset or {}, composed, fixed)
            values: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
            return values

        values, others = resolved(fixed or {}), jax.tree.map(lambda value: value + 1, fixed or {})
        before, after = flat(values), flat(resolved(others) if fixed else values)
        for key in before.keys() - flat(others).keys():
            if repr(before[key]) != repr(after[key]) and not key.startswith("paths."):
                raise UserError(f"{key} follows what this program chooses: give it a value")
        return load(schema, values)

    def decorate(function: Callable[[C], int | None]) -> Callable[[], None]:
        @functools.wraps(function)
        def main() -> None:
            composed: list[tuple[DictConfig, Any]] = []  # each config with Hydra's own
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise errors, don't print them
            # argparse wants all overrides together.
            sys.argv[1:] = sorted(sys.argv[1:], key=lambda a: bool(re.match(OVERRIDE, a)))
            sys.argv[1:] = [_as_typed(argument, kinds, folder) for argument in sys.argv[1:]]

            @hydra.main(config_path=str(ROOT / folder), config_name="base", version_base="1.3")
            def compose(config: DictConfig) -> None:
                composed.append((config, HydraConfig.get()))

            with user_errors():
                if {"-h", "--help"} & {*sys.argv}:
                    print(sys.modules[function.__module__].__doc__)
                try:
                    # Hydra makes folders for a sweep before its configs are checked.
                    with tempfile.TemporaryDirectory() as folders:
                        os.environ["SWEEP_FOLDERS"] = folders
                        compose()
                    # Checked here: in `compose` Hydra would print errors.
                    jobs = [(typed(config, of_hydra), of_hydra) for config, of_hydra in composed]
                except BrokenPipeError:
                    raise
                except Exception as error:  # Hydra, OmegaConf and their parsers have many classes
                    message = _message(error, schema, folder)
                    raise UserError(re.sub(r"\+\+(?=[\w.]+=)", "", message)) from error
                if not jobs:
                    if not any(re.match(PRINTS, argument) for argument in sys.argv[1:]):
                        cure = "give the sweep values, and leave out hydra/launcher"
                        raise UserError(f"there are no jobs to run, one after the other: {cure}")
                    return
                first, hydra_config = jobs[0]
                os.environ.update(hydra_config.job.env_set)
                if hydra_config.mode == RunMode.MULTIRUN:
                    _sweep(jobs, names)
                elif code := function(first):
                    sys.exit(code)

        return main

    return decorate


def _sweep(jobs: list[tuple[C, Any]], names: str) -> None:
    """Runs this program for each config. If a signal stops a run, or comes while it starts, the
    sweep stops too; if one fails, the sweep continues."""
    flags = [a for a in sys.argv[1:] if a not in ("-m", "--multirun") and not re.match(OVERRIDE, a)]
    program, failed = sys.orig_argv[: -len(sys.argv[1:])], []
    given = [hydra_config.overrides.task for _, hydra_config in jobs]
    overrides = [[argument.removeprefix("++") for argument in each] for each in given]
    if names and len({*map(tuple, overrides)}) < max(2, len(jobs)):  # they name its folders
        cure = "give a setting several values, or start a run instead"
        raise UserError(f"a sweep has several jobs, no two alike: {cure}")
    # Hydra's own, but no sweep, which a config may ask for.
    of_hydra = [a for a in jobs[0][1].overrides.hydra if "hydra.mode=" not in a]
    of_hydra.append("hydra.mode=RUN")
    process: subprocess.Popen[bytes] | None = None
    signals: list[int] = []

    def stop(number: int, _: Any) -> None:
        signals.append(number)
        if process and number != signal.SIGINT:  # Ctrl-C reaches both processes
            process.terminate()

    with handled(STOPS, stop):
        for number, (config, _) in enumerate(jobs):
            arguments = [*flags, *overrides[number]]
            if names:
                # Named by its overrides, so that a larger sweep resumes in the same folders.
                own = [a for a in overrides[number] if not all(a in others for others in overrides)]
                own = [a for a in own if not a.startswith(f"{names}=")]
                plain = (re.sub('="(.*)"$', r"=\1", argument) for argument in own)
                folder = quote(",".join(plain), safe="=,+~{}[]: ") or "0"
                if len(folder) > 255:  # which file systems refuse
                    folder = f"{folder[:238]}~{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
                name = f"{operator.attrgetter(names)(config)}/{folder}"
                arguments.append(f"{names}={_quoted(name)}")
            print(f"job {number}: {' '.join(arguments)}", flush=True)
            process = subprocess.Popen([*program, *of_hydra, *arguments])
            if signals:  # it came before the process was there
                process.terminate()
            code, seconds = None, 0
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(1)
                seconds += bool(signals)
                if code is None and signals == [signal.SIGINT] and seconds > 30:
                    stop(signal.SIGTERM, None)  # the interrupt wasn't a Ctrl-C
            if code - 128 in STOPS:
                signals.append(code - 128)
            if signals:
                sys.exit(128 + signals[0])
            if code:
                failed.append(str(number))
    if failed:
        raise UserError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")


def _quoted(text: str) -> str:
    """Quotes a text so that Hydra takes it literally, whatever is in it."""
    return QuotedString(text, Quote.double).with_quotes()


def _as_typed(argument: str, kinds: dict[str, tuple[Any, ...]], folder: str) -> str:
    """Quotes a text, or each text of a sweep: Hydra reads 1e3 as a number and refuses ~/x. Adds ++,
    with which Hydra takes any key; the schema then checks all keys alike."""
    key, equals, value = argument.partition("=")
    kind, sweep = kinds.get(key.lstrip("+"), ()), {"-m", "--multirun"} & {*sys.argv}
    # Hydra parses a value that begins like a list, a dict or a function, or has quotes.
    if str in kind and (sweep or "," not in value) and not re.search(r"[\"']|^([{[]|\w+\()", value):
        null = ["null"] if type(None) in kind else []
        texts = (x if x.lower() in null else _quoted(x) for x in value.split(","))
        value = ",".join(texts)
    is_value = "." in key or (key in kinds and not (ROOT / folder / key).is_dir())
    forced = equals and is_value and re.match(r"(?!hydra\.(searchpath|mode)$)\w", key)
    return ("++" if forced else "") + key + equals + value


def _names(folder: str) -> list[str]:
    """Names of the configs that a run may choose in a folder."""
    files = (ROOT / folder).glob("*.yaml")
    return sorted(file.stem for file in files if file.stem != "base")


def _message(error: Exception, schema: Any, folder: str) -> str:
    """A line that says what is wrong with a config: the key, and what to write instead."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name, options = error.missing_cfg_file, error.options or _names(folder)
        return f"no config {name}; choose from {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        problem = " ".join(str(error).split()).partition(" See https")[0]
        problem = re.sub("LexerNoViable.*", "it has a character that needs quotes", problem)
        key, equals, value = str(error.override).lstrip("+").partition("=")
        cure = f"; if it is text, quote it: {shlex.quote(f'{key}={_quoted(value)}')}"
        is_text = equals and str in keys(schema).get(key, (str,))
        return f"can't parse {error.override}: {problem}" + (cure if is_text else "")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None) or ""
    lacking = re.match("Interpolation key '(.*)' not found", str(cause))
    if lacking and lacking[1] in keys(schema):
        return f"{lacking[1]} is missing: add {lacking[1]}=..."
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is missing: add {key}=..."
    if key and isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown(schema, key)
    problem = " ".join(str(cause).split("\n    ")[0].split())
    if group := re.search(r"Could not override '([^']+)'", problem):
        cure = f"add one with +{group[1]}=..., or choose a config that has one with --config-name"
        return f"this config has no choice of {group[1]}; {cure}"
    if chosen := re.match(r"Multiple values for (.+?)\. .*'override \1: (.*)'", problem):
        return f"this config has chosen a {chosen[1]}: replace it with {chosen[1]}={chosen[2]}"
    if commas := re.match(r"Ambiguous value for argument '([^=]*)=(.*?)' 1\. ", problem):
        key, value = commas.groups()
        text = shlex.quote(f"{key.lstrip('+')}={_quoted(value)}")
        sweep = f"{key}={value}: add --multirun to sweep over these"
        return f"{sweep}, or write {key}=[...] for a list and {text} for a text"
    if "Config group override" in problem:
        key = ", ".join(arg for arg in sys.argv[1:] if (ROOT / folder / arg.split("=")[0]).is_dir())
    return f"{key}: {problem}" if key else problem
