"""A step compiled ahead of time, for the devices that are here; for others, tests/test_tpu.py."""

import importlib.util
import re

from tests import golden
from tests.helpers import SMALL, train_here
from tools import compile as compiler

CONFIG = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]


def test_what_it_says(capsys, monkeypatch):
    out, message = train_here(capsys, monkeypatch, *CONFIG, program=compiler.main)
    title, seconds, _, _, arguments, *_ = out.splitlines()
    assert not message
    assert title == "4 x cpu, d=2, t=2" and re.fullmatch(r"compiled in \d+ s", seconds)
    name, given, predicted, error = re.split("  +", arguments)
    assert (name, given, error) == ("arguments", predicted, "+0.0%")


def test_what_can_not_be_done_is_said_before_compiling(capsys, monkeypatch):
    option = "topology=v5e:0x8"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    out, message = train_here(capsys, monkeypatch, *CONFIG, option, program=compiler.main)
    assert not out
    golden.check("wrong_inputs.txt", f"compile: {option}", message)


def test_sums_that_the_source_does_not_say():
    name = 'metadata={op_name="jit(training_step)/shard_map/'
    lines = [
        f'  %a = f32[4]{{0}} all-reduce(%x), {name}jvp(psum({{U:d}} -> ))/unreduced_psum"}}',
        f'  %b = bf16[2,3]{{1,0}} all-reduce(%x), {name}jvp(all_gather(M|d -> M))/all_gather"}}',
        "  %c = (bf16[8]{0}, f32[4,4]{1,0}) all-reduce(%x, %y), to_apply=%add",
        f'  %d = f32[9]{{0}} all-gather(%x), {name}jvp(all_gather(M|d -> M))/all_gather"}}',
    ]
    assert list(compiler.summed_whole("\n".join(lines))) == [
        ("bf16[2,3] all_gather(M/d -> M): all_gather", 12),
        ("bf16[8] reduce_scatter", 16),
        ("f32[4,4] reduce_scatter", 64),
    ]


def test_without_libtpu(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, message = train_here(capsys, monkeypatch, *CONFIG, "topology=v5e:2x2", program=compiler.main)
    golden.check("wrong_inputs.txt", "compile: without libtpu", message)
