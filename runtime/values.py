"""The types of a config's values, with their bounds, which pydantic checks."""

import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field


def one_of(names: str) -> AfterValidator:
    """Returns a validator of strings: `names` lists the valid ones."""

    def check(value: str) -> str:
        if value not in names.split():
            raise ValueError(f"choose from {', '.join(names.split())}")
        return value

    return AfterValidator(check)


def _plain_path(path: str) -> str:
    if scheme := re.match(r"(gs|s3|hf|abfs|https?|file):/(?!/)", path):
        raise ValueError(f"write {scheme[1]}://, else it is a local folder")
    path = os.path.expanduser(path)  # which only some of the libraries below do
    return path.rstrip("/") or path  # in a bucket `x//y` is another place than `x/y`


def _absolute(path: str) -> str:
    # bytes_utf8 is a tokenizer, even if a file has this name.
    return os.path.abspath(path) if os.path.exists(path) and path != "bytes_utf8" else path


def _normal(value: float) -> float:
    """Refuses values that f32 makes 0 or infinite, and denormals, which devices may round to 0."""
    low, high = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    if not low <= value <= high and value not in (0, float("inf")):
        raise ValueError(f"a step takes it in f32, which has 0 and {low:.2g} to {high:.2g}")
    return value


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("it takes a number")
    return value


NOT_EMPTY = Field(min_length=1)
NUMBER = BeforeValidator(_no_boolean)  # pydantic takes booleans for 0 and 1
PositiveInt = Annotated[int, Field(ge=1, lt=2**31), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31), NUMBER]
# Numbers that a step computes with.
F32OrInf = Annotated[float, AfterValidator(_normal), NUMBER]
F32 = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_normal), NUMBER]
BelowOne = Annotated[float, Field(ge=0, lt=1), AfterValidator(_normal), NUMBER]
Seconds = Annotated[float, Field(ge=0, lt=2**31), NUMBER]  # what a timer can wait for
Name = Annotated[str, NOT_EMPTY]
Path = Annotated[str, AfterValidator(_plain_path)]
# Made absolute if it exists, to be found from other folders.
Kept = Annotated[Path, AfterValidator(_absolute)]
