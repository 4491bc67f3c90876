"""Compiling a step for the local devices; tests/test_tpu.py compiles for TPUs."""

import re

from tests import golden
from tests.helpers import SMALL, train_here
from tools import compile as compiler

CONFIG = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]


def test_the_report(capsys, monkeypatch):
    out, message = train_here(capsys, monkeypatch, *CONFIG, program=compiler.main)
    title, seconds, _, _, arguments, *_ = out.splitlines()
    assert not message
    assert title == "4 x cpu, d=2, t=2" and re.fullmatch(r"compiled in \d+ s", seconds)
    name, given, predicted, error = re.split("  +", arguments)
    assert (name, given, error) == ("arguments", predicted, "+0.0%")


def test_a_topology_that_is_unavailable(capsys, monkeypatch):
    """Acts like a machine without libtpu."""

    def refuse(*_, **__):
        raise RuntimeError("JAX TPU support not installed\nand more")

    monkeypatch.setattr(compiler.topologies, "get_topology_desc", refuse)
    option = "topology=v5e:2x2"
    out, message = train_here(capsys, monkeypatch, *CONFIG, option, program=compiler.main)
    assert not out
    golden.check("wrong_inputs.txt", f"compile: {option}", message)


SCHEDULED = """
%carried (x: bf16[4,8]) -> bf16[8,8] {
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

%body (p: (bf16[4,8])) -> (bf16[4,8]) {
  %async-collective-start.7 = (bf16[4,8], bf16[8,8]) fusion(%a), kind=kCustom, calls=%carried
  %fusion.1 = bf16[8,8] fusion(%b), calls=%dots, backend_config={"estimated_cycles":"900"}
  %fusion.2 = bf16[8,8] fusion(%b), calls=%dots, backend_config={"estimated_cycles":"200"}
  %async-collective-done.7 = bf16[8,8] fusion(%async-collective-start.7), kind=kCustom
  %reduce-scatter.2 = bf16[4,8]{1,0} reduce-scatter(%c), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (q: f32[3]) -> f32[3] {
  %g.call-start = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%g
  %fusion.3 = f32[3] fusion(%q), calls=%dots, backend_config={"estimated_cycles":"5000"}
  %all-reduce.3.call-start = (f32[3]) call-start(%q), to_apply=%sum
  %fusion.4 = f32[3] fusion(%q), calls=%dots, backend_config={"estimated_cycles":"5000"}
  %all-reduce.3.call-update = f32[3] call-update(%all-reduce.3.call-start, %fusion.4)
  %fusion.5 = f32[3] fusion(%q), calls=%dots, backend_config={"estimated_cycles":"700"}
  %all-reduce.3.call-done = f32[3] call-done(%all-reduce.3.call-update)
  %while.1 = (bf16[4,8]) while(%t), condition=%c, body=%body
  %all-reduce.9 = f32[3] all-reduce(%q), replica_groups=mesh['d'=4,'t'=1] {'t'}, to_apply=%add
}

%sum (x: f32[3]) -> f32[3] {
  ROOT %all-reduce.4 = f32[3] all-reduce(%x), replica_groups=mesh['d'=4,'t'=1] {'d'}, to_apply=%add
}
"""


def test_what_a_scheduled_program_overlaps_with_compute():
    """A gather spans 1,100 cycles of compute and a scatter none; the operands of one sum come late;
    another is over an axis of one device, and sends nothing."""
    assert sorted(compiler.sent(SCHEDULED)) == [
        (3, 2 * 3 * 4, False, False),
        (64, 128, True, False),
        (64, 128, True, True),
    ]
