"""What the compiler for TPUs says, on a machine without one: make test-tpu."""

import dataclasses
import functools

import jax
import pytest

from shardlib import devices
from tests import tpu_programs
from tools import memory
from tools.compile import tpu_mesh

pytestmark = pytest.mark.tpu
PROGRAMS = [*tpu_programs.LISTED, *tpu_programs.HELD_OUT]


@functools.cache
def bytes_of(program):
    """Of arguments, of temporaries and in all: what is predicted, and the compiler's."""
    config, module = program.build()
    axes = dataclasses.asdict(config.mesh)
    with jax.set_mesh(tpu_mesh(program.topology, axes)):
        stats = module.lower_step(config).compile().memory_analysis()
    chip = devices.CHIPS[program.topology.split(":")[0]]
    jaxpr = module.trace_step(config, devices.abstract_mesh(axes), module.dimensions(config))
    found = memory.predict(jaxpr, axes, chip)
    arguments, peak = stats.argument_size_in_bytes, stats.peak_memory_in_bytes
    return (
        (found.arguments, found.temporary, found.arguments + found.temporary),
        (arguments, peak - arguments, peak),
    )


def errors(program):
    """Of temporaries, and of all."""
    return [a / b - 1 for a, b in zip(*bytes_of(program), strict=True)][1:]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_memory_is_as_predicted(program):
    predicted, compiled = bytes_of(program)
    assert predicted[0] == compiled[0], "arguments are exact"
    assert all(abs(error) < 0.15 for error in errors(program)), errors(program)


@pytest.mark.parametrize("listed", [tpu_programs.LISTED, tpu_programs.HELD_OUT])
def test_most_predictions_are_within_a_tenth(listed):
    for program in listed:
        (_, a, b), (_, c, d) = bytes_of(program)
        temporary, total = errors(program)
        print(
            f"{program!s:55} {d / 1e9:6.2f} GB, predicted {b / 1e9:6.2f}, {total:+6.1%}  temporary "
            f"{c / 1e9:6.2f} GB, predicted {a / 1e9:6.2f}, {temporary:+6.1%}"
        )
    for each in zip(*map(errors, listed), strict=True):
        assert sum(abs(error) < 0.1 for error in each) >= 0.9 * len(listed)
