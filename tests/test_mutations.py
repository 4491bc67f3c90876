import builtins
import dis
import re
import types

import pytest

import train
from checks import preflight
from runtime.config import ROOT
from tests import bugs, edits, mutations
from tests.helpers import SMALL, compose_config
from tests.processes import python

# Edits that pass the probe. As `make mutations` has checked, the first two give the same numbers,
# and the others are refused for their numbers.
PASSES = re.compile(
    r" (save_for_backward deleted|(einsum_unreduced|reduce_max|all_gather) by jnp)$"
)


def test_a_sample_of_the_edits_is_refused():
    config = compose_config("local_test_synthetic", *SMALL, "paths.model_name=x", "mesh.d=2")
    calls, _ = mutations.calls_in(lambda: preflight.probe(train, config))
    made = [edit for edit in mutations.mutations(calls) if edit.file == "train.py"]
    assert len({edit.source for edit in made}) > 1000
    passed = [edit for edit in made[::99] if not mutations.probe(edit.source, config)[0]]
    assert len(passed) < 4 and all(PASSES.search(edit.name) for edit in passed)


def test_each_listed_edit_can_be_made():
    lists = [each for part in mutations.PARTS.values() for each in part.lists.values()]
    sources = [edits.edited_source(edit) for each in lists for edit in each.values()]
    unedited = {(ROOT / edit.file).read_text() for each in lists for edit in each.values()}
    assert len({*sources} - unedited) == len(sources) == 88 + 50
    assert not set().union(*map(undefined, sources))
    text = (ROOT / "docs/checks.md").read_text()
    wrong, right = re.search(r"and (\d+) wrong and (\d+) right\s+experiments of", text).groups()
    assert int(wrong) == len(edits.WRONG | edits.WRONG_AFTER | edits.WRONG_WITH_VARIANTS)
    of_variants = edits.RIGHT_WITH_VARIANTS | edits.RIGHT_WITH_BROADCAST
    assert int(right) == len(edits.RIGHT | edits.RIGHT_IN_TRAINING | of_variants)


def undefined(source):
    """The global names that a module's functions use and the module doesn't define."""
    codes = [compile(source, "edited", "exec")]
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    used = [x for code in codes for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"]
    defined = [x for x in dis.get_instructions(codes[0]) if x.opname == "STORE_NAME"]
    return {x.argval for x in used} - {x.argval for x in defined} - {*dir(builtins)}


def test_each_bug_is_a_row_of_the_page_that_says_what_refuses_it():
    page = (ROOT / "docs/bugs.md").read_text()
    for name in bugs.BUGS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [{name}](https://")]
        refused_by = row.removesuffix(" |").rpartition(" | ")[2]
        expected = {"nothing"} if name in bugs.NOT_PROMISED else mutations.REFUSALS
        assert refused_by in expected, name
    assert mutations.stale_rows({"Megatron-LM #3769": "passes"}) == ["Megatron-LM #3769"]


@pytest.mark.slow
def test_listed_edits_are_refused_or_accepted():
    expected = {"lamb": "part", "seed_by_mesh": "numbers", "gelu": "passes"}
    only = "--only", f": ({'|'.join(expected)})$"
    result = python("-m", "tests.mutations", "dense", *only, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    for name, verdict in expected.items():
        assert re.search(rf"(wrong|right) +{verdict} +{name}\b", result.stdout), result.stdout
