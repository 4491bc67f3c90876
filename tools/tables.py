"""Formats amounts and tables."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")


def show(amount: float, unit: str = "B") -> str:
    """Formats an amount to three digits: `1.07 GB`, `2.5 ms`."""
    amount = float(f"{amount:.3g}")
    thousands = math.floor(math.log10(abs(amount)) / 3) if amount else 0
    thousands = min(max(thousands, -2), 6)
    prefix = ("u", "m", "", "k", "M", "G", "T", "P", "E")[thousands + 2]
    return f"{amount / 1000**thousands:.3g} {prefix}{unit}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Formats aligned columns, numbers to the right. A cell may be empty."""
    columns = []
    for title, *texts in zip(head, *rows, strict=True):
        width = max(map(len, (title, *texts)))
        numbers = all(re.match(r"(at (mo|lea)st |[+-])?\d", text) for text in texts if text)
        justify = str.rjust if numbers else str.ljust
        columns.append([justify(text, width) for text in (title, *texts)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def texts(row: dict[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    """Returns values of a row as text, the items of a list separated by commas."""
    values = (row[key] for key in keys)
    return tuple(value if isinstance(value, str) else ",".join(value) for value in values)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Collects the items with the same key."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
