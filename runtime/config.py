"""The base class of config sections, which check their own values."""

import argparse
import dataclasses
import difflib
import json
import operator
import pathlib
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from pydantic.config import ConfigDict

from shardlib.errors import UserError

C = TypeVar("C")
ROOT = pathlib.Path(__file__).parent.parent


def within(kind: type, low: float, high: float = 2**31 - 1) -> Callable[[str], Any]:
    """Returns an argparse type for numbers from `low` to `high`."""

    def number(written: str) -> Any:
        if not low <= (value := kind(written)) <= high:
            raise argparse.ArgumentTypeError(f"{written} is not between {low} and {high}")
        return value

    return number


UNKNOWN = "unexpected_keyword_argument"  # pydantic's name of this error


class Section:
    """Base of the dataclasses that make up a config. `key` is the section's place in the config.

    pydantic checks keys, types and bounds when a config is loaded. A section's __post_init__
    checks the rest.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    prefix = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls.prefix = f"{key}." if key else ""

    def require(self, condition: object, name: str, problem: str) -> None:
        """Raises UserError with the key, its value and `problem` unless the condition holds."""
        if not condition:
            value = operator.attrgetter(name)(self)
            raise UserError(f"{self.prefix}{name}={_shown(value)}: {problem}")

    def changed(self, values: dict[str, Any]) -> typing.Self:
        """Returns a copy with these values, by dotted key. Raises UserError for a bad one."""
        config = OmegaConf.create(self.values())
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
        return load(type(self), OmegaConf.to_container(config))

    def values(self) -> dict[str, Any]:
        """The section as plain values."""
        return dataclasses.asdict(typing.cast(Any, self))

    def to_yaml(self) -> str:
        """The section as YAML text."""
        return OmegaConf.to_yaml(OmegaConf.create(self.values()))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def load(schema: type[C], values: Any) -> C:
    """Returns plain values as the dataclass `schema`. Raises UserError that names the key and the
    problem."""
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as found:
        errors = found.errors()
    # Unknown keys first, as one may be a misspelled missing key; then wrong values; then missing
    # keys. In each kind, sections come before keys in one.
    error = min(errors, key=lambda x: (x["type"] != UNKNOWN, x["type"] == "missing", len(x["loc"])))
    names = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in error["loc"])
    key = getattr(schema, "prefix", "") + "".join(names).removeprefix(".")
    if error["type"] == UNKNOWN:
        raise UserError(unknown(schema, key))
    missing = [each["loc"] for each in errors if each["type"] == "missing"]
    lacking = [str(loc[-1]) for loc in missing if loc[:-1] == error["loc"][:-1]]
    if error["type"] == "missing" and len(lacking) > 1 and "[" not in key:
        section, cure = key.rpartition(".")[0], "add them, or choose a config that has them"
        cure = cure if section else "add them, or begin its file with `defaults: [base, _self_]`"
        raise UserError(f"{section or 'the config'} lacks {', '.join(lacking)}: {cure}")
    if error["type"] == "missing":
        raise UserError(f"{key} is missing" + ("" if "[" in key else f": add {key}=..."))
    if error["type"] == "dataclass_type" and "[" not in key:
        raise UserError(f"{key} is a section: set {key}.KEY=...")
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):
        raise cause
    problem = error["msg"].removeprefix("Value error, ").replace("tuple", "list in brackets")
    quoted = f"; quote text: '{key}=\"...\"'" if error["type"] == "string_type" else ""
    raise UserError(f"{key}={_shown(error['input'])}: {problem}{quoted}")


def unknown(schema: Any, key: str) -> str:
    """A message for a key that the schema lacks."""
    all_keys = keys(schema, getattr(schema, "prefix", ""))
    known = [name for name in all_keys if not key.startswith((f"{name}.", f"{name}["))]
    similar = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
    # All mesh axes for a wrong one: no name of one letter is more similar than the others.
    similar = similar or [name for name in known if name[:-1] == f"{key.rpartition('.')[0]}."]
    similar = similar or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if key in similar:
        return f"unknown key `{key}`: in a file, write each of its parts on a line, indented"
    return f"unknown key {key}" + (f"; did you mean {' or '.join(similar)}?" if similar else "")


def keys(schema: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Returns the schema's dotted keys, including those of its sections, and the types of their
    values."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, hint in typing.get_type_hints(schema).items():
        # A section, or an optional one. A list of sections has no keys.
        several = typing.get_origin(hint) in (tuple, dict)
        found[prefix + name] = kinds = () if several else (hint, *typing.get_args(hint))
        for kind in filter(dataclasses.is_dataclass, kinds):
            found |= keys(kind, f"{prefix}{name}.")
    return found


class _Plain(yaml.SafeLoader):
    """Reads YAML without aliases, with which a short text can expand to any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)


def plain(text: str) -> dict[str, Any]:
    """Returns the values of a config file that may be somebody else's: nothing in it is evaluated.
    Raises ValueError if it isn't a section of plain values."""
    try:
        values = yaml.load(text, _Plain)
        if not isinstance(values, dict) or "${" in json.dumps(values):
            raise ValueError("it isn't a section of plain values, or has ${...} in it")
    except Exception as error:  # of YAML, or a RecursionError
        raise ValueError(" ".join(str(error).split())) from None
    return values


def sources() -> list[pathlib.Path]:
    """The Python files of this repository."""
    return [file for folder in ("", "[!.]*/", "[!.]*/*/") for file in ROOT.glob(f"{folder}*.py")]


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a config to a dict with dotted keys."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        inner = hasattr(value, "items")
        values |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return values


def as_text(value: Any) -> str:
    """Returns a value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value)
