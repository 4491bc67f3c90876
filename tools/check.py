"""Checks train.py's types, and that the mesh doesn't change its numbers.

    python -m tools.check --config-name=c4_h100x8_1b

This is what `python -m train` checks before its first step, even if it has passed before. It takes
some seconds, needs no devices but a CPU, and depends on the config's model and training settings,
not on its sizes. Exits with status 1 and a message if the check fails.
"""

import train
from runtime.program import program
from tools.audit import NOT_USED


@program(train.Config, "configs", preset=NOT_USED)
def main(config: train.Config) -> None:
    with train.checked(config) as wait_for_check:
        wait_for_check()
    print("types hold, and the numbers are the same on every mesh that was tried")


if __name__ == "__main__":
    main()
