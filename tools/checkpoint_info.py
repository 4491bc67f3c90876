"""What is in a checkpoint, by what it was written, and whether it is whole.

    python -m tools.checkpoint_info runs/synthetic/checkpoints
    python -m tools.checkpoint_info runs/synthetic/checkpoints/00000050.1795192492123

Reads all of each one, and names each array that is damaged. The arrays and the config are shown of
the last one.
"""

import argparse
import datetime
import math
import re
import sys
from collections.abc import Iterator

import jax.numpy as jnp

from runtime import storage
from runtime.checkpoint import NAME, Checkpoint, show_entry
from runtime.errors import user_errors
from runtime.storage import DamageError
from shardlib.errors import UserError


def found(path: str) -> Iterator[tuple[str, int, int]]:
    """The path, step and start of one checkpoint, or of each in a folder of them."""
    path = path.rstrip("/")
    folder, _, last = path.rpartition("/")
    one = re.fullmatch(NAME, last)
    for name in [last] if one else sorted(storage.names(path)):
        if re.fullmatch(NAME, name):
            step, start = map(int, name.split("."))
            yield f"{folder if one else path}/{name}", step, start


def describe(path: str, step: int, start: int) -> tuple[str, Checkpoint | None]:
    """A line, and the checkpoint if it is whole."""
    when = datetime.datetime.fromtimestamp(start / 1000).isoformat(" ", "seconds")
    line = f"{path}: step {step:,}, by the run started {when}"
    try:
        attributes = storage.attributes(path)
    except DamageError as error:
        return f"{line}; DAMAGED: {error}", None
    if attributes is None:
        return f"{line}; not complete: it has no attributes", None
    if reason := attributes.get("write_failed"):
        return f"{line}; not complete: {reason}", None
    if attributes.get("write_completed") is not True:
        return f"{line}; not complete", None
    try:
        checkpoint = Checkpoint(path, step)
    except DamageError as error:
        return f"{line}; DAMAGED: {error}", None
    damage = list(checkpoint.damage())
    return f"{line}; " + ("DAMAGED: " + "; ".join(damage) if damage else "whole"), checkpoint


def show(checkpoint: Checkpoint) -> None:
    about = checkpoint.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    total = 0
    for name, entry in about["arrays"].items():
        size = math.prod(entry["shape"]) * jnp.dtype(entry["dtype"]).itemsize
        total += size
        print(f"  {name:32} {show_entry(entry):44} {size:15,} bytes in {entry['chunks']:,} chunks")
    print(f"  {total:,} bytes, written by {about['hosts']} hosts with {versions}\n")
    print(about["config"].rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoint_info",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="a folder or bucket of checkpoints, or one of them")
    path, last, whole = parser.parse_args().path, None, True
    with user_errors():
        for each in found(path):
            line, checkpoint = describe(*each)
            print(line)
            last, whole = checkpoint or last, whole and "DAMAGED" not in line
        if not last and whole:
            raise UserError(f"{path} has no complete checkpoint")
    if last:
        show(last)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
