import re
import subprocess
import sys

import pytest

from runtime.config import ROOT
from tests import bugs, edits, mutations
from tests.helpers import SMALL, compose_config

# Edits that pass the probe. As `make mutations` has checked, the first two give the same numbers,
# and the others are refused for their numbers.
PASSES = re.compile(r"save_for_backward deleted|(einsum_unreduced|reduce_max|all_gather) by jnp")


def test_a_sample_of_the_edits_is_refused():
    for after in "false", "true":
        names = *SMALL, f"model.norms_after={after}", "paths.model_name=x", "mesh.d=2"
        config = compose_config("local_test_synthetic", *names)
        edits = list(mutations.mutations(parts=config.model.parts))
        assert len(edits) > 450 and len({edit.source for edit in edits}) > 450
        passed = [edit for edit in edits[::44] if not mutations.probe(edit.source, config)[0]]
        assert len(passed) < 4 and all(PASSES.fullmatch(edit.what) for edit in passed)


# In rms_norm and gather_replica, whose strings are made of others.
WRONG = {
    "a norm of each part": ('squares = ops.psum(f"{kept} {{U:t}} -> {kept}", squares)\n', "\n"),
    "a norm whose gradient isn't summed": (
        'squares = ops.broadcast(f"{kept} -> {kept}", squares)\n',
        'squares = ops.varying(squares, ("t",))\n',
    ),
    "a gain whose gradient isn't summed": ("ops.broadcast if stored", "(lambda _, w: w) if stored"),
    "a mean of a part's own size": (
        'squares = ops.reduce_mean(f"{spec} -> {kept} {{U:t}}", jnp.square(x32))\n',
        'squares = ops.reduce_sum(f"{spec} -> {kept} {{U:t}}", jnp.square(x32) / gain.size)\n',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_norms_and_gains_are_refused(case):
    parts = "model.norms_after=true", "model.qkv_bias=true", "model.qk_norm=all"
    names = *SMALL, *parts, "paths.model_name=x", "mesh={d: 2, t: 2}"
    old, new = WRONG[case]
    source = (ROOT / "train.py").read_text()
    assert source.count(old) == 1
    config = compose_config("local_test_synthetic", *names)
    assert not mutations.probe(source, config)[0]
    assert mutations.probe(source.replace(old, new), config)[0]


def test_the_strings_that_are_tried():
    text = "B/d L M {U:t} -> B/d L M/t"
    tried = {" ".join(t.split()) for _, t in mutations.other_strings(text, ("d", "t"))}
    assert tried >= {
        "B/t L M {U:t} -> B/d L M/t",
        "B/d L M {U:d} -> B/d L M/t",
        "B/d L M {U:t} -> B/d L M/d",
        "B/t L M {U:d} -> B/t L M/d",
        "B/d L M {U:t} -> B/d L/t M",
    }
    assert text not in tried


LISTED = {name: getattr(edits, name) for name in vars(edits) if name.isupper()}
LISTED = {name: listed for name, listed in LISTED.items() if isinstance(listed, dict)}


def test_each_listed_edit_can_be_made():
    sources = [edits.edited_source(edit) for listed in LISTED.values() for edit in listed.values()]
    sources += [edits.edited_source(bug) for bug in bugs.BUGS.values()]
    assert len({*sources}) == len(sources) > 400
    assert len(edits.WRONG) > 270 and len(edits.RIGHT) > 95


def test_each_bug_is_a_row_of_the_page_that_says_what_refuses_it():
    page = (ROOT / "docs/bugs.md").read_text()
    for name, bug in bugs.BUGS.items():
        (row,) = [line for line in page.splitlines() if f"| [{name}]({bug.link}) |" in line]
        refused_by = row.removesuffix(" |").rpartition(" | ")[2]
        expected = {"nothing"} if name in bugs.NOT_PROMISED else mutations.REFUSALS
        assert refused_by in expected, name
    assert mutations.stale_rows({"Megatron-LM #3769": "passes"}) == ["Megatron-LM #3769"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [("muon_of_the_part", "numbers"), ("few_heads", "structure"), ("gelu", "passes")],
)
def test_listed_edits_are_refused_or_accepted(name, expected):
    command = [sys.executable, "-m", "tests.mutations", "--only", name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = [line for line in result.stdout.splitlines() if f" {name} " in f"{line} "]
    assert line.split()[1] == expected
