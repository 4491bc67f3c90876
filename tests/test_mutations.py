import re

from tests import mutations
from tests.helpers import SMALL, compose_config

# Edits that pass the probe and give the same numbers, as `make mutations` has checked.
HARMLESS = re.compile(r"save_for_backward deleted|einsum_unreduced by jnp")


def test_a_sample_of_the_edits_is_refused():
    edits = list(mutations.mutations(("d", "t")))
    assert len(edits) > 450 and len({edit.source for edit in edits}) > 450
    config = compose_config("local_test_synthetic", *SMALL, "paths.model_name=x", "mesh.d=2")
    passed = [edit for edit in edits[::11] if not mutations.probe(edit.source, config)[0]]
    assert len(passed) < 5 and all(HARMLESS.fullmatch(edit.what) for edit in passed)


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


def test_an_edit_that_changes_numbers_shows():
    config = compose_config("local_test_synthetic", *mutations.SETTINGS, "mesh.d=2")
    only = mutations.MESHES[:1]
    wanted = mutations.numbers(mutations.SOURCE, config, only)
    times_two = mutations.SOURCE.replace(
        "jnp.log(sum_exp) - target_logit)", "jnp.log(sum_exp) - 2 * target_logit)"
    )
    assert times_two != mutations.SOURCE
    assert not mutations.same(mutations.numbers(times_two, config, only), wanted)
