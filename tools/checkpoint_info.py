"""What is in a checkpoint, by what it was written, and whether it is whole.

    python -m tools.checkpoint_info runs/synthetic/checkpoints
    python -m tools.checkpoint_info runs/synthetic/checkpoints/00000050.1795192492123

Reads all of each one, and names each array that is damaged. The arrays and the config are shown of
the last one.
"""

import argparse
import datetime
import math
import sys
from collections.abc import Iterator

import jax.numpy as jnp

from runtime import storage
from runtime.checkpoint import Checkpoint, listed, show_entry
from runtime.errors import user_errors
from runtime.storage import DamageError
from shardlib.errors import UserError


def damage(found: Checkpoint) -> Iterator[str]:
    """Reads all of a checkpoint; the first problem of each array that has one."""
    for name in found.about["arrays"]:
        try:
            storage.check(found.array(name))
        except DamageError as error:
            yield str(error)


def describe(found: Checkpoint) -> tuple[str, bool]:
    """A line, and whether it is complete: its attributes are there."""
    when = datetime.datetime.fromtimestamp(found.start / 1000).isoformat(" ", "seconds")
    line = f"{found.path}: step {found.step:,}, by the run started {when}"
    if not found.counts:
        about = found.attributes or {"write_failed": "it has no attributes"}
        reason = f": {about['write_failed']}" if "write_failed" in about else ""
        return f"{line}; not complete{reason}", False
    try:
        problems = list(damage(found))
    except DamageError as error:
        return f"{line}; DAMAGED: {error}", False
    return f"{line}; " + ("DAMAGED: " + "; ".join(problems) if problems else "whole"), True


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
        for each in listed(path):
            line, complete = describe(each)
            print(line)
            last, whole = each if complete else last, whole and "DAMAGED" not in line
        if not last and whole:
            raise UserError(f"{path} has no complete checkpoint")
    if last:
        show(last)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
