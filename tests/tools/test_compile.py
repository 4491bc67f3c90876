"""Compiling a step for the local devices; tests/test_tpu.py compiles for TPUs."""

import re

import pytest

from tests import golden
from tests.helpers import SMALL
from tools.compile import __main__ as compiler

CONFIG = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]


@pytest.mark.slow
def test_the_report(train_here):
    out, message = train_here(*CONFIG, program=compiler.main)
    title, seconds, _, _, arguments, *_ = out.splitlines()
    assert not message
    assert title == "4 x cpu, d=2, t=2" and re.fullmatch(r"compiled in \d+ s", seconds)
    name, given, predicted, error = re.split("  +", arguments)
    assert (name, given, error) == ("arguments", predicted, "+0.0%")


def test_a_topology_that_is_unavailable(train_here, monkeypatch):
    """Acts like a machine without libtpu."""

    def refuse(*_, **__):
        raise RuntimeError("JAX TPU support not installed\nand more")

    monkeypatch.setattr(compiler.topologies, "get_topology_desc", refuse)
    option = "topology=v5e:2x2"
    out, message = train_here(*CONFIG, option, program=compiler.main)
    assert not out
    golden.check("wrong_inputs.txt", f"compile: {option}", message)
