"""What the command lines of several programs have in common."""

import argparse
import os
from typing import Any

# Values of keys that a program of a config may leave out: of a run's folder and its dataset.
NOT_USED = {
    "paths": {"model_name": "none"},
    "flat_tokens": {"filespec": "none"},
    "hf_dataset": {"path": "none"},
}


class Parser(argparse.ArgumentParser):
    """A parser for which an argument without a type is a path, in which a leading ~ is the home
    folder: shells leave it as it is in --output=~/x."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", None, os.path.expanduser)


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the program's docstring as it is in the source."""
    return Parser(prog=f"python -m {program}", description=doc)
