"""Checks checkpoints for damage, and prints the arrays and the config of the last one.

    python -m tools.checkpoint_info runs/synthetic
    python -m tools.checkpoint_info runs/synthetic/checkpoints/00000050.1795192492123

Reads every checkpoint completely, and names each damaged array. Exits with 1 if there is damage or
no complete checkpoint.
"""

import datetime
import sys
from collections.abc import Iterator

from runtime import storage
from runtime.checkpoint import Checkpoint, list_checkpoints, no_checkpoint
from runtime.errors import user_errors
from runtime.storage import DamageError
from tools import arguments


def damage(checkpoint: Checkpoint) -> Iterator[str]:
    """Reads a whole checkpoint. Yields the first problem of each damaged array."""
    for array in checkpoint.arrays.values():
        try:
            storage.check(array)
        except DamageError as error:
            yield str(error)


def describe(checkpoint: Checkpoint) -> tuple[str, bool, bool]:
    """Describes a checkpoint in a line. Also returns whether it is complete and its attributes are
    readable, and whether it is intact or incomplete."""
    when = datetime.datetime.fromtimestamp(checkpoint.start / 1000).isoformat(" ", "seconds")
    line = f"{checkpoint.path}: step {checkpoint.step:,}, written by the run started {when}"
    if not checkpoint.may_be_complete:
        return f"{line}; incomplete", False, True
    problem, readable = "", True
    try:
        problem = "; ".join(damage(checkpoint))
    except DamageError as error:
        problem, readable = str(error).partition(" is damaged: ")[2], False
    if not checkpoint.may_be_complete:
        return f"{line}; removed meanwhile", False, True
    return f"{line}; " + (f"DAMAGED: {problem}" if problem else "intact"), readable, not problem


def show(checkpoint: Checkpoint) -> None:
    """Prints the arrays and the config of a checkpoint."""
    arrays = checkpoint.arrays
    for name, array in arrays.items():
        sizes = f"{array.nbytes:15,.0f} bytes in {array.nchunks:,} chunks"
        print(f"  {name:32} {array.attrs['type']:44} {sizes}")
    total, hosts = sum(int(x.nbytes) for x in arrays.values()), checkpoint.metadata["positions"]
    print(f"  {total:,} bytes in total, written by {len(hosts)} host(s)\n")
    print(checkpoint.metadata["config"].rstrip())


def main() -> None:
    parser = arguments.parser("tools.checkpoint_info", __doc__)
    parser.add_argument("path", help="a folder or bucket of checkpoints, or one checkpoint")
    with user_errors():
        path, last, intact = parser.parse_args().path, None, True
        for checkpoint in list_checkpoints(path):
            line, complete, undamaged = describe(checkpoint)
            print(line)
            last, intact = checkpoint if complete else last, intact and undamaged
        if not last and intact:
            raise no_checkpoint(path)
        if last:
            show(last)
        sys.exit(0 if intact else 1)


if __name__ == "__main__":
    main()
