"""Compares error texts with files in tests/golden, so that a changed text shows in a diff."""

import os
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parent / "golden"


def check(file: str, case: str, text: str) -> None:
    """Compares a text with the one stored under `case`; with UPDATE_GOLDEN=1, stores it."""
    text = re.sub(r"(test_\w+\.py):\d+", r"\1:LINE", text)
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
