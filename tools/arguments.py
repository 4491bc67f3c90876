"""Parses the command lines of programs that take no config."""

import argparse


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the program's docstring as it is in the source."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
