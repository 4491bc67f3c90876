"""Compares error texts with files in tests/golden, so that a changed text shows in a diff."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

FOLDER = pathlib.Path(__file__).parent / "golden"


def check(file: str, case: str, text: str) -> None:
    """Compares a text with the one stored under `case`; with UPDATE_GOLDEN=1, stores it."""
    text = re.sub(r"\.py:\d+(:\d+)?", ".py:LINE", text)
    text = re.sub(r"\b(\d{8})\.\d{13}\b", r"\1.START", text)  # the time in a checkpoint's name
    path = FOLDER / file
    blocks = path.read_text().split("=== ")[1:] if path.exists() else []
    known = dict(block.split("\n", 1) for block in blocks)
    if os.environ.get("UPDATE_GOLDEN"):
        known[case] = text + "\n\n"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"=== {name}\n{known[name]}" for name in sorted(known)))
    elif known.get(case, "").rstrip() != text.rstrip():
        pytest.fail(
            f"{case} in tests/golden/{file} is\n{known.get(case)}\nbut the text is now\n{text}\n"
            "If readers are better off with it: UPDATE_GOLDEN=1 python -m pytest -n 0, and commit",
            pytrace=False,
        )


@contextlib.contextmanager
def raises(file: str, case: str, kind: type | tuple, replaced=("", "")) -> Iterator[None]:
    """Expects an error of this kind, and compares its text, in which a path may be replaced."""
    with pytest.raises(kind) as error:
        yield
    check(file, case, str(error.value).replace(*replaced))
