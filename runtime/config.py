"""The base class of config sections, which check their own values."""

import argparse
import dataclasses
import json
import math
import operator
import os
import pathlib
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardlib.errors import UserError

C = TypeVar("C")
ROOT = pathlib.Path(__file__).parent.parent


class Bound(NamedTuple):
    """Numbers from `low` to less than `below`. A NaN is out of bounds."""

    low: float
    below: float = 2**31


class OneOf(NamedTuple):
    """Strings out of a few, which `names` lists."""

    names: str


def within(kind: type, low: float, high: float = 2**31 - 1) -> Callable[[str], Any]:
    """Returns an argparse type for numbers from `low` to `high`."""

    def number(written: str) -> Any:
        if not low <= (value := kind(written)) <= high:
            raise argparse.ArgumentTypeError(f"{written} is not between {low} and {high}")
        return value

    return number


NOT_EMPTY, PATH, KEPT = "not empty", "path", "kept"
PositiveInt = Annotated[int, Bound(1)]
NonNegativeInt = Annotated[int, Bound(0)]
NonNegativeFloat = Annotated[float, Bound(0, below=math.inf)]
Seconds = Annotated[float, Bound(0)]  # what a timer can wait for
Fraction = Annotated[float, Bound(0, below=1)]
Name = Annotated[str, NOT_EMPTY]
Path = Annotated[str, PATH]  # ~ is expanded, which only some of the libraries below do
Kept = Annotated[Path, KEPT]  # of what is there, an absolute one, to be found from other folders


class Section:
    """Base of the dataclasses that make up a config. Values are checked on construction.

    `key` is the section's place in the config. OmegaConf checks types. This class raises UserError
    for a number out of the bounds of its type, for a string that isn't one of its names, and for an
    empty one. A section checks anything else in its own __post_init__, after calling this one.
    """

    prefix = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls.prefix = f"{key}." if key else ""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            key, value, parts = self.prefix + name, getattr(self, name), [*_parts(hint)]
            if value is None:  # an optional section
                continue
            if tuple in parts:
                setattr(self, name, tuple(value))  # OmegaConf has a list
            if NOT_EMPTY in parts and not value.strip():
                raise UserError(f"{key} must not be empty")
            if PATH in parts:
                value = os.path.expanduser(value)
                value = value.rstrip("/") or value  # in a bucket `x//y` is another place than `x/y`
                # bytes_utf8 is a tokenizer, whatever else is here.
                if KEPT in parts and os.path.exists(value) and value != "bytes_utf8":
                    value = os.path.abspath(value)
                setattr(self, name, value)
            values = value if tuple in parts else [value]
            for names in (part.names.split() for part in parts if isinstance(part, OneOf)):
                if not {*values} <= {*names}:
                    raise UserError(f"{key}={value}: choose from {', '.join(names)}")
            for low, below in (part for part in parts if isinstance(part, Bound)):
                for number in values:
                    if not (isinstance(number, int | float) and low <= number < below):
                        limit = f"below {below}" if below < math.inf else "finite"
                        raise UserError(f"{key}={value}: it must be at least {low} and {limit}")

    def require(self, condition: object, name: str, problem: str) -> None:
        """Raises UserError with the key, its value and `problem` unless the condition holds."""
        if not condition:
            value = operator.attrgetter(name)(self)
            raise UserError(f"{self.prefix}{name}={'null' if value is None else value}: {problem}")

    def changed(self, values: dict[str, Any]) -> typing.Self:
        """Returns a copy with these values, by dotted key. Raises UserError for a bad one."""
        config = OmegaConf.structured(self)
        for key, value in values.items():
            try:
                OmegaConf.update(config, key, value)
            except OmegaConfBaseException as error:
                raise UserError(f"{key}={value}: {str(error).splitlines()[0]}") from None
        return typing.cast(typing.Self, OmegaConf.to_object(config))

    def to_yaml(self) -> str:
        """The section as YAML text."""
        return OmegaConf.to_yaml(OmegaConf.structured(self))


def _parts(hint: Any) -> Iterator[Any]:
    """Yields a type hint and everything nested in it, down to `int` and bounds."""
    yield from (hint, typing.get_origin(hint))
    for part in typing.get_args(hint):
        yield from _parts(part)


class _Plain(yaml.SafeLoader):
    """Reads YAML without aliases, by which a short text can make a value of any size."""

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


def structured(schema: type[C], values: Any, section: str, defaults: Any) -> C:
    """Returns plain values, or the section of them with this dotted key, as the dataclass `schema`.
    Keys that it lacks are taken from `defaults`. Raises ValueError if it has other keys or types,
    except at the top: keys there that are no more don't matter."""
    for key in filter(None, section.split(".")):
        values = values.get(key, {}) if isinstance(values, dict) else {}
    if not section:
        known = {field.name for field in dataclasses.fields(typing.cast(Any, schema))}
        values = {key: value for key, value in values.items() if key in known}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), defaults or {}, values)
        return typing.cast(C, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a config to a dict with dotted keys."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        inner = hasattr(value, "items")
        values |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return values
