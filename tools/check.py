"""Checks train.py's types, and that the mesh doesn't change its numbers.

    python -m tools.check --config-name=c4_h100x8_1b

Runs the check that `python -m train` makes before its first step, even if it has passed before;
check=types checks types alone. It takes 10 to 20 seconds on two cores, up to two minutes with
experts. It needs only a CPU: what it computes is tiny, and at the config's sizes, on its mesh, it
only traces the step. Exits with status 1 and a message if the check fails or warns.
"""

import jax

import train
from checks import preflight
from runtime.program import program
from tools.arguments import NOT_USED


@program(train.Config, "configs", preset=NOT_USED)
def main(config: train.Config) -> int:
    config.require(config.check != "none", "check", "choose what to check: numbers or types")
    jax.config.update("jax_compilation_cache_dir", None)  # reuses no earlier result
    with preflight.begun(train, config) as wait_for_check:
        warning = wait_for_check()
    numbers = "" if config.check == "types" else ", and two meshes give the same numbers"
    print(f"types hold{numbers}")
    return 1 if warning else 0


if __name__ == "__main__":
    main()
