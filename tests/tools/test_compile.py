"""Compiling a step for the local devices; tests/test_tpu.py compiles for TPUs."""

import re

import pytest

from runtime import chips
from tests import golden
from tests.helpers import SMALL
from tools.compile import __main__ as compiler
from tools.compile import gpus

CONFIG = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]


@pytest.mark.slow
def test_the_report(train_here):
    out, message = train_here(*CONFIG, program=compiler.main)
    title, seconds, _, _, arguments, *_ = out.splitlines()
    assert not message
    assert title == "4 x cpu, d=2, t=2" and re.fullmatch(r"compiled in \d+ s", seconds)
    name, given, predicted, error = re.split("  +", arguments)
    assert (name, given, error) == ("arguments", predicted, "+0.0%")


def test_slices_without_a_topology(train_here):
    _, message = train_here(*CONFIG, "slices=2", program=compiler.main)
    assert message == "error: slices=2: only a topology of TPUs has several"


def test_a_topology_that_is_unavailable(train_here, monkeypatch):
    """Acts like a machine without libtpu."""

    def refuse(*_, **__):
        raise RuntimeError("JAX TPU support not installed\nand more")

    monkeypatch.setattr(compiler.topologies, "get_topology_desc", refuse)
    option = "topology=v5e:2x2"
    out, message = train_here(*CONFIG, option, program=compiler.main)
    assert not out
    golden.check("wrong_inputs.txt", f"compile: {option}", message)


@pytest.mark.parametrize("keys, pairs", [(256, 256 * 256 // 2), (512, 256 * 512)])
def test_cudnn_computes_the_causal_half_of_a_row_and_all_of_a_split_one(keys, pairs):
    text = f"""
ENTRY %main (q: bf16[2,256,8,64], k: bf16[2,{keys},8,64]) -> bf16[2,8,256,64] {{
  %q = bf16[2,256,8,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,{keys},8,64]{{3,2,1,0}} parameter(1)
  ROOT %a = (bf16[2,8,256,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaScaleBiasSoftmax"
}}
"""
    _, (kernel,), _ = gpus.read(text, chips.CHIPS["h100"])
    assert kernel.flops == 2 * 2 * (2 * 8 * 64) * pairs, "two products of 2 rows, 8 heads of 64"
