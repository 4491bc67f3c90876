"""Tests `python -m tools.check`: a copy of the source, edited, is refused with the op where the
numbers of two meshes part. tests/mutations.py has many more edits."""

import re
import shutil

import pytest

from tests import golden
from tests.helpers import ROOMS, ROOT, SMALL
from tests.processes import python
from tools import check as program

LINE = "hidden = hidden.astype(compute.dtype)"
MIXED = "hidden = jax.nn.silu(gate) * jnp.pad(up, ((0, 0), (1, 0), (0, 0)))[:, :-1]"
EDITS = {
    "the number of devices": (LINE, f"{LINE} * (1 + 1 / jax.sharding.get_abstract_mesh().size)"),
    "a mean of the means of microbatches": (
        "part = jax.tree.map(lax.optimization_barrier, value_and_grads(rows))",
        "part = jax.tree.map(lambda x: x / target_count(rows), value_and_grads(rows))",
    ),
    "positions mixed outside of attention": (LINE, MIXED),
    "a sublayer that is left out": (
        "return x + norm_after(output, w.mlp_norm, config), routed",
        "return x, routed",
    ),
    "positions of keys by their place, with c": (
        'key_position = ops.all_gather("B/d L/c -> B/d L", batch.position)',
        'key_position = ops.all_gather("B/d L/c -> B/d L", batch.position)\n'
        "    key_position = jnp.sort(key_position, axis=1)",
    ),
}


def check(folder, *settings, name="local_test_synthetic"):
    """Runs the program on the source in a folder. Returns its exit code and what it printed."""
    command = "-m", "tools.check", f"--config-name={name}", *settings
    result = python(*command, cwd=folder, timeout=300, XLA_FLAGS="")
    return result.returncode, result.stdout + result.stderr


EXPERTS = "training.routing.balance_cost=0.1", "mesh={d: 2, c: 2, t: 1, r: 2}"


@pytest.mark.parametrize("level", ["types", "none"])
def test_it_checks_what_the_config_says(level, train_here):
    start = "--config-name=local_test_synthetic", *SMALL, f"check={level}"
    out, message = train_here(*start, program=program.main)
    assert out.endswith("types hold\n" if level == "types" else "")
    if level == "none":
        golden.check("wrong_inputs.txt", "check: check=none", message)


@pytest.mark.slow
def test_the_source_as_it_is_passes():
    code, printed = check(ROOT, *EXPERTS, name="local_experts")
    assert code == 0, printed
    assert printed.splitlines()[-1] == "types hold, and two meshes give the same numbers"


@pytest.mark.slow
@pytest.mark.parametrize("case", EDITS)
def test_a_wrong_edit_is_refused_with_the_place(case, tmp_path):
    for name in ("train.py", *ROOMS):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    old, new = EDITS[case]
    text = (tmp_path / "train.py").read_text()
    assert text.count(old) == 1
    (tmp_path / "train.py").write_text(text.replace(old, new))
    parts = ["training.microbatches=2"] if "microbatches" in case else []
    mesh = ["mesh={d: 2, c: 2, t: 1}"] if "with c" in case else []
    code, printed = check(tmp_path, *parts, *mesh)
    assert code == 1, printed
    # The digits of a difference depend on the machine.
    printed = re.sub(r"\d\.\de[-+]\d+", "NUMBER", printed)
    printed = re.sub(r".*, relative", "    ..., relative", printed)
    printed = re.sub(r"comparing the numbers: .*\n", "", printed)  # how many come by time
    golden.check("numbers.txt", case, printed.strip())
