"""Defaults and the argument parser that several programs share."""

import argparse
import os
from typing import Any

# Values for the required keys of a run's folder and dataset, in programs that can do without.
NOT_USED = {
    "paths": {"model_name": "none"},
    "flat_tokens": {"filespec": "none"},
    "hf_dataset": {"path": "none"},
}


class Parser(argparse.ArgumentParser):
    """A parser that takes an argument without a type for a path, and expands its leading ~ to the
    home folder, since shells don't in --output=~/x."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", None, os.path.expanduser)


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help shows the program's docstring as it is in the source."""
    return Parser(prog=f"python -m {program}", description=doc)
