"""Checks checkpoints for damage, and prints the arrays and the config of the last one.

    python -m tools.checkpoint_info runs/synthetic/checkpoints
    python -m tools.checkpoint_info runs/synthetic/checkpoints/00000050.1795192492123

Reads every checkpoint completely, and names each damaged array. Exits with 1 if there is damage or
no complete checkpoint.
"""

import datetime
import math
import sys
from collections.abc import Iterator

import jax.numpy as jnp

from runtime import storage
from runtime.checkpoint import Checkpoint, list_checkpoints, show_entry
from runtime.errors import user_errors
from runtime.storage import DamageError
from shardlib.errors import UserError
from tools import arguments


def damage(checkpoint: Checkpoint) -> Iterator[str]:
    """Reads a whole checkpoint. Yields the first problem of each damaged array."""
    for name in checkpoint.metadata["arrays"]:
        try:
            storage.check(checkpoint.array(name))
        except DamageError as error:
            yield str(error)


def describe(checkpoint: Checkpoint) -> tuple[str, bool]:
    """Returns a line on a checkpoint, and whether it is complete with readable attributes."""
    when = datetime.datetime.fromtimestamp(checkpoint.start / 1000).isoformat(" ", "seconds")
    line = f"{checkpoint.path}: step {checkpoint.step:,}, written by the run started {when}"
    if not checkpoint.may_be_complete:
        attributes = checkpoint.attributes or {"write_failed": "it has no attributes"}
        reason = f": {attributes['write_failed']}" if "write_failed" in attributes else ""
        return f"{line}; incomplete{reason}", False
    try:
        problems = list(damage(checkpoint))
    except DamageError as error:
        return f"{line}; DAMAGED: {error}", False
    return f"{line}; " + ("DAMAGED: " + "; ".join(problems) if problems else "intact"), True


def show(checkpoint: Checkpoint) -> None:
    """Prints the arrays and the config of a checkpoint."""
    metadata = checkpoint.metadata
    versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    total = 0
    for name, entry in metadata["arrays"].items():
        size = math.prod(entry["shape"]) * jnp.dtype(entry["dtype"]).itemsize
        total += size
        print(f"  {name:32} {show_entry(entry):44} {size:15,} bytes in {entry['chunks']:,} chunks")
    print(f"  {total:,} bytes in total, written by {metadata['hosts']} host(s) with {versions}\n")
    print(metadata["config"].rstrip())


def main() -> None:
    parser = arguments.parser("tools.checkpoint_info", __doc__)
    parser.add_argument("path", help="a folder or bucket of checkpoints, or one checkpoint")
    with user_errors():
        path, last, intact = parser.parse_args().path, None, True
        for checkpoint in list_checkpoints(path):
            line, complete = describe(checkpoint)
            print(line)
            last, intact = checkpoint if complete else last, intact and "DAMAGED" not in line
        if not last and intact:
            raise UserError(f"{path} has no complete checkpoint")
        if last:
            show(last)
        sys.exit(0 if intact else 1)


if __name__ == "__main__":
    main()
