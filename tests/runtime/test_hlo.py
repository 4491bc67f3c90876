import gzip
import json
import re
import shutil
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo
from tests.helpers import ROOT, SMALL, train_here

pytestmark = pytest.mark.usefixtures("own_metadata")


SVG = "{http://www.w3.org/2000/svg}"


def test_op_names_are_shortened():
    path = "jit(training_step)/shard_map"
    cases = {
        f"{path}/jvp(all_gather(V|t M|c|s -> V|t M))/all_gather": (
            "all_gather(V/t M/c/s -> V/t M): all_gather"
        ),
        f"{path}/transpose(jvp())/while/body/closed_call/checkpoint/"
        "all_gather(B|d L M|t -> B|d L M)/reduce_scatter": (
            "all_gather(B/d L M/t -> B/d L M), backward: reduce_scatter"
        ),
        f"{path}/transpose(jvp())/while/body/checkpoint/rematted_computation/jit(silu)/exp": (
            "jit(silu), recomputed: exp"
        ),
        f"{path}/transpose(jvp(index_unreduced([V|t] M, B|d L -> B|d L M {{U:t}})))/scatter-add": (
            "index_unreduced([V/t] M, B/d L -> B/d L M {U:t}), backward: scatter-add"
        ),
        f"{path}/transpose(jvp())/while/body/closed_call/checkpoint/mul": "mul, backward",
        f"{path}/sub": "sub",
        "state.step": "state.step",
    }
    assert {name: hlo.describe(name) for name in cases} == cases


@pytest.fixture
def without_dot(tmp_path_factory, monkeypatch):
    """Leaves only git of the machine's programs."""
    programs = tmp_path_factory.mktemp("programs")
    (programs / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.slow
def test_a_profile_and_a_picture_have_the_type_string_of_each_op(
    tmp_path, capsys, monkeypatch, without_dot
):
    out, message = train_here(
        capsys, monkeypatch, "--config-name=local_test_synthetic", *SMALL, "training.steps=4",
        "profile=true", "hlo_svg=true",
        f"paths.root_working_dir={tmp_path}", "paths.model_name=run",
    )  # fmt: skip
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
    steps = [e["args"]["step_num"] for e in timed if e["name"] == "train"]
    assert [int(step) for step in steps] == [2, 3]

    # Rows are the same as without a profile.
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]

    drawn = (tmp_path / "run/step.gv").read_text()
    cure = f"install graphviz, or dot -Tsvg {tmp_path}/run/step.gv"
    assert f"no dot to draw with: {cure}\n" in out
    for name in "block", "training_step", "loss":
        assert f"label={name}" in drawn
    assert not re.search("label=.?(lower_step|<module>)", drawn), "the step's callers"
    for name, signature in ops:
        assert signature[:60] in drawn, (name, signature)
    rows = (
        r"forward +\d+  1 all-gather\\lrecomputed +\d+  1 all-gather\\lbackward +\d+  1 reduce-sc"
    )
    gather = re.search(
        rf"w_up = ops.all_gather\(\\\"M/c/s F/t -> M F/t\\\", w.w_up\)\\l{rows}", drawn
    )
    assert gather, drawn


def graph(program, tmp_path):
    """The labels of a program's nodes by line of this file, and the pairs of lines with arrows."""
    hlo.draw(program.as_text(), tmp_path / "step.svg")
    drawn = (tmp_path / "step.gv").read_text()
    node = r"\"\('test_hlo.py', (\d+), 'function'\)\""
    labels = re.findall(rf'{node} \[label="((?:\\.|[^"])*)"', drawn)
    arrows = re.findall(rf"{node} -> {node} \[style=solid\]", drawn)
    first = min(int(line) for line, _ in labels)
    shown = {int(line) - first: label.split(r"\l")[:-1] for line, label in labels}
    return shown, {(int(start) - first, int(end) - first) for start, end in arrows}


def test_a_graph_of_the_lines(tmp_path, without_dot):
    def function(x, layers):
        product = x @ x
        for_loop = jnp.cos(product)
        last, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), for_loop, layers)
        other = jnp.exp(product)
        return jnp.sin(last) + other

    arguments = jnp.ones((64, 64)), jnp.ones((3, 64, 64))
    labels, arrows = graph(jax.jit(function).lower(*arguments).compile(), tmp_path)
    assert [label[0].split(" ", 1)[1][:8] for label in labels.values()] == [
        "product ", "for_loop", "last, _ ", "other = ", "return j",
    ]  # fmt: skip
    assert {line for line, (_, counts) in labels.items() if counts.endswith("  1 dot")} == {0, 2}
    assert arrows == {(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)}


@pytest.mark.skipif(not shutil.which("dot"), reason="needs the program dot")
def test_a_picture(tmp_path):
    def function(x):
        return x @ x

    text, path = jax.jit(function).lower(jnp.ones((64, 64))).compile().as_text(), tmp_path / "x.svg"
    assert hlo.draw(text, path) == f"drew {path}"
    assert [file.name for file in tmp_path.iterdir()] == ["x.svg"]
    texts = [element.text for element in ElementTree.parse(path).getroot().iter(SVG + "text")]
    assert [re.sub(r"\s+", " ", text) for text in texts][:1] == ["function"]
    assert any("return x @ x" in text for text in texts)
