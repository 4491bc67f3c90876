import re
import subprocess
import sys

import pytest

import variants
from runtime import checks
from runtime.config import ROOT
from tests import bugs, edits, mutations
from tests.helpers import SMALL, compose_config

# Edits that pass the probe. As `make mutations` has checked, the first two give the same numbers,
# and the others are refused for their numbers.
PASSES = re.compile(
    r" (save_for_backward deleted|(einsum_unreduced|reduce_max|all_gather) by jnp)$"
)


def test_a_sample_of_the_edits_is_refused():
    for after in "false", "true":
        names = *SMALL, f"model.norms_after={after}", "paths.model_name=x", "mesh.d=2"
        config = compose_config("local_test_synthetic", *names)
        calls, _ = mutations.calls_in(lambda config=config: checks.probe(config))
        made = list(mutations.mutations(calls))
        assert {"train.py"} < {edit.file for edit in made} and len(made) > 1000
        made = [edit for edit in made if edit.file == "train.py"]
        assert len({edit.source for edit in made}) > 1000
        passed = [edit for edit in made[::99] if not mutations.probe(edit.source, config)[0]]
        assert len(passed) < 4 and all(PASSES.search(edit.name) for edit in passed)


FAMILIES = "variants/families.py"
MEAN = 'ops.reduce_mean("{}", _squares({}))'
SUM = 'ops.reduce_sum("{}", _squares({})) / {}.size'
AFTER, ALL = "B/d L/c M/t -> B/d L/c {U:t}", "B/d L/c Q K/t D -> B/d L/c {U:t}"

# In the norms of families, and in gather_replica, whose strings are made of others.
WRONG = {
    "a norm of each part": (
        FAMILIES,
        'means = ops.psum("B/d L/c {U:t} -> B/d L/c", means)\n',
        "\n",
    ),
    "a norm whose gradient isn't summed": (
        FAMILIES,
        'return ops.broadcast("B/d L/c -> B/d L/c", means)\n',
        'return ops.varying(means, ("t",))\n',
    ),
    "a gain whose gradient isn't summed": (
        "train.py",
        "ops.broadcast if split == wanted.spec",
        "(lambda _, w: w) if split == wanted.spec",
    ),
    "a mean of a part's own size": (
        FAMILIES,
        MEAN.format(AFTER, "y"),
        SUM.format(AFTER, "y", "gain"),
    ),
    "a mean of a part's own size, over all heads": (
        FAMILIES,
        MEAN.format(ALL, "q"),
        SUM.format(ALL, "q", "self.all_q_norm"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_norms_and_gains_are_refused(case, monkeypatch):
    file, old, new = WRONG[case]
    parts = "model.norms_after=true", "model.qkv_bias=true", "model.qk_norm=all"
    names = *SMALL, *parts, "paths.model_name=x", "mesh={d: 2, t: 2}"
    source = (ROOT / file).read_text()
    assert source.count(old) == 1
    config = compose_config("local_test_synthetic", *names)
    assert not mutations.probe((ROOT / "train.py").read_text(), config)[0]
    edited = source.replace(old, new)
    if file == FAMILIES:
        module = mutations.load(edited, file)
        monkeypatch.setitem(sys.modules, "variants.families", module)
        monkeypatch.setattr(variants, "families", module)
        edited = (ROOT / "train.py").read_text()
    assert mutations.probe(edited, config)[0]


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


def test_each_listed_edit_can_be_made():
    lists = [each for part in mutations.PARTS.values() for each in part.lists.values()]
    sources = [edits.edited_source(edit) for each in lists for edit in each.values()]
    unedited = {(ROOT / edit.file).read_text() for each in lists for edit in each.values()}
    assert len({*sources} - unedited) == len(sources) == 78 + 48
    for source in sources:
        compile(source, "edited", "exec")


def test_an_anchor_is_found_in_any_format(tmp_path, monkeypatch):
    monkeypatch.setattr(edits, "ROOT", tmp_path)
    (tmp_path / "x.py").write_text("""
def outer(x):
    total = 1

    def inner(x):
        total = ops.psum(
            "B {U:t}"
            " -> B",
            x * 2)
        return total  # of all
    return inner(x) + total
""")
    changes = (
        edits.after("inner", "total", "total = 0\nx = 1"),
        edits.swap("inner", "x*2", "(x * 3)"),
        edits.before("inner", "B {U:t} -> B", "y = 2"),
        edits.instead("outer", "total", "total = 2"),
    )
    edited = edits.edited_source(edits.edit("x", *changes, file="x.py"))
    expected = """
def outer(x):
    total = 2

    def inner(x):
        y = 2
        total = ops.psum(
            "B {U:t}"
            " -> B",
            (x * 3))
        total = 0
        x = 1
        return total  # of all
    return inner(x) + total
"""
    assert edited == expected


def test_each_bug_is_a_row_of_the_page_that_says_what_refuses_it():
    page = (ROOT / "docs/bugs.md").read_text()
    for name in bugs.BUGS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [{name}](https://")]
        refused_by = row.removesuffix(" |").rpartition(" | ")[2]
        expected = {"nothing"} if name in bugs.NOT_PROMISED else mutations.REFUSALS
        assert refused_by in expected, name
    assert mutations.stale_rows({"Megatron-LM #3769": "passes"}) == ["Megatron-LM #3769"]


@pytest.mark.slow
def test_listed_edits_are_refused_or_accepted(tmp_path):
    expected = {"lamb": "part", "seed_by_mesh": "numbers", "convolved_keys": "generation"}
    expected["gelu"] = "passes"
    command = [sys.executable, "-m", "tests.mutations", "dense", f"--kept={tmp_path}/kept"]
    command += ["--only", f": ({'|'.join(expected)})$"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    for name, verdict in expected.items():
        assert re.search(rf"(wrong|right) +{verdict} +{name}\b", result.stdout), result.stdout
