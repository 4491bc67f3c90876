"""Checks the audit's collectives, read off the jaxpr, against those of the compiled program."""

import functools

import jax
import pytest

import train
from shardlib import audit, devices
from tests import compiled
from tests.helpers import compose_config, mesh, slow_but_for, small_config
from tools import memory

pytestmark = pytest.mark.usefixtures("own_metadata")

NAMES = ["paths.model_name=x", "flat_tokens.filespec=x"]
PROGRAMS = {
    "synthetic on 4 x 2": lambda: compose_config("local_test_synthetic", *NAMES),
    "stdlib on 4 x 2": lambda: compose_config("local_python_stdlib", *NAMES),
    "small on 8 x 1": lambda: small_config("mesh={d: 8, t: 1}"),
    "small on 1 x 8": lambda: small_config("mesh={d: 1, t: 8}"),
    "small on 2 x 4": lambda: small_config("mesh={d: 2, t: 4}"),
    "one layer on 4 x 2": lambda: small_config("model.layers=1"),
}


@functools.cache
def program(name):
    """The ledger's transfers, the compiled program's collectives, the mesh, and the arguments'
    bytes, as predicted and as compiled."""
    config = PROGRAMS[name]()
    axes = vars(config.mesh)
    with jax.set_mesh(mesh(**axes)):
        step = train.lower_step(config).compile()
    jaxpr = train.trace_step(config, devices.abstract_mesh(axes))
    actual = compiled.collectives(step.as_text(), axes)
    sizes = memory.predict(jaxpr, axes).arguments, step.memory_analysis().argument_size_in_bytes
    return audit.ledger(jaxpr, axes).transfers, actual, axes, sizes


QUICK = ["small on 2 x 4", "synthetic on 4 x 2", "one layer on 4 x 2"]


@pytest.mark.parametrize("name", slow_but_for(QUICK, list(PROGRAMS)))
def test_each_collective_of_the_program_is_a_row_of_the_ledger_and_each_row_one(name):
    transfers, actual, axes, (predicted, compiled_size) = program(name)
    assert predicted == compiled_size, "bytes of the arguments"
    assert len(actual) > 40 and all(row.line.startswith("train.py:") for row in actual)
    assert compiled.unexplained(transfers, actual, axes) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("rule", compiled.RULES)
def test_without_the_rule_some_program_is_not_explained(rule):
    rules = set(compiled.RULES) - {rule}
    shown_by = {
        "one": "small on 8 x 1",
        "merged": "synthetic on 4 x 2",
        "once": "one layer on 4 x 2",
    }
    assert compiled.unexplained(*program(shown_by[rule])[:3], rules) != ([], [])


def test_a_row_too_many_or_too_few_is_noticed():
    transfers, actual, axes, _ = program("synthetic on 4 x 2")
    for i in range(0, len(transfers), 5):
        if transfers[i].kind == "all-reduce":  # merged ones keep only one of their lines
            continue
        for wrong in (
            transfers[:i] + transfers[i + 1 :],
            [*transfers, transfers[i]],
            [*transfers[:i], transfers[i]._replace(times=9), *transfers[i + 1 :]],
            [*transfers[:i], transfers[i]._replace(line="train.py:1 block"), *transfers[i + 1 :]],
            [*transfers[:i], transfers[i]._replace(axes=("d", "x")), *transfers[i + 1 :]],
            [*transfers[:i], transfers[i]._replace(elements=3), *transfers[i + 1 :]],
        ):
            assert compiled.unexplained(wrong, actual, axes | {"x": 2}) != ([], [])
