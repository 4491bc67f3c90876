import gzip
import json
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo
from tests.files import rows
from tests.helpers import ROOT, small_run

pytestmark = pytest.mark.usefixtures("own_metadata")


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_a_profile_and_a_picture_have_the_type_string_of_each_op(tmp_path, train_here):
    run = small_run(tmp_path, "training.steps=4", "profile=true", "hlo_svg=true")
    out, message = train_here(*run)
    folder = tmp_path / "run/profile/host_0"
    assert not message and f"\nprofiled {folder}/perfetto.json.gz\n" in out
    assert list(folder.glob("plugins/profile/*/*.xplane.pb")), "XProf reads these"

    events = json.loads(gzip.decompress((folder / "perfetto.json.gz").read_bytes()))["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert all({"pid", "tid", "ts", "dur", "name"} <= set(event) for event in timed)
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    source = (ROOT / "train.py").read_text()
    ops = re.findall(r"(\w+)\(\s*\"([^\"]*->[^\"]*)\"", source)
    # Over c, which has size 1 here, nothing is gathered.
    ops = [op for op in ops if len({*op[1].replace("/c", "").split(" -> ")}) == 2]
    assert len(ops) > 30
    names = [event["name"] for event in timed]
    for name, signature in ops:
        op = f"{name}({signature})"
        assert any(name.startswith(op) for name in names), op
    for rest in ": all_gather", ", backward: reduce_scatter", ", recomputed: all_gather":
        assert f"all_gather(M/c/s F/t -> M F/t){rest}" in names, "as docs/runs.md says"
    assert {"div, recomputed", "sqrt"} <= {*names}, "outside of ops"
    assert [int(e["args"]["step_num"]) for e in timed if e["name"] == "train"] == [2, 3]

    # Rows are the same as without a profile.
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]

    assert f"drew {tmp_path}/run/step.svg\n" in out
    drawn = rows_of(tmp_path / "run/step.svg")
    titles = [row.split()[1] for row in drawn if row.endswith("update") or "unknown" in row]
    assert {"block", "training_step", "loss"} <= {*titles}
    assert not {"lower_step", "<module>"} & {*titles}, "the step's callers"
    for name, signature in ops:
        assert any(signature[:60] in row for row in drawn), (name, signature)
    counts = r"\d+: 1 all-gather +\d+: 1 all-gather +\d+: 1 reduce-scatter"
    gather = re.escape('w_up = ops.all_gather("M/c/s F/t -> M F/t", w.w_up)')
    assert any(re.search(f"{gather} +{counts}", row) for row in drawn), drawn


def rows_of(svg):
    texts = ElementTree.parse(svg).getroot().iter(SVG + "text")
    return ["".join(text.itertext()).rstrip() for text in texts]


def test_a_table_of_the_lines(tmp_path, monkeypatch):
    """Functions stand in the order of the source, with their lines' instructions by phase."""
    monkeypatch.setenv("PATH", "")  # no other program draws

    def function(x, layers):
        product = x @ x
        for_loop = jnp.cos(product)
        last, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), for_loop, layers)
        other = jnp.exp(product) < last
        return jnp.sin(last) + other

    arguments, path = (jnp.ones((64, 64)), jnp.ones((3, 64, 64))), tmp_path / "step.svg"
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert hlo.draw(text, path) == f"drew {path}"
    assert [file.name for file in tmp_path.iterdir()] == ["step.svg"]
    title, *lines = rows_of(path)
    assert title.split() == ["test_hlo.py:", "function", "update"]
    names = [line.split()[1] for line in lines]
    assert names == ["product", "for_loop", "last,", "other", "return"]
    assert [": 1 dot" in line for line in lines] == [True, False, True, False, False]
    assert "jnp.exp(product) < last" in lines[3] and re.search(r" \d+$", lines[3])
    root = ElementTree.parse(path).getroot()
    colored = [x.text for x in root.iter(SVG + "tspan") if "fill" in x.attrib["style"]]
    assert colored == ["1 dot"] * 2
    assert int(root.attrib["width"]) <= 1400, "it is read without scrolling sideways"
