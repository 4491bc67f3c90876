import gzip
import json
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo
from shardlib.ops import scope_name
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


def test_the_names_in_a_compiled_program():
    def function(x):
        with jax.named_scope(scope_name("einsum_unreduced", "M/t, M/t -> {U:t}")):
            product = x @ x
        with jax.named_scope("elementwise"):
            return jnp.sin(product) + jnp.exp(product) * 2

    text = jax.jit(function).lower(jnp.ones((64, 64))).compile().as_text()
    names = {hlo.describe(name) for name in hlo.op_names(text).values()}
    assert "einsum_unreduced(M/t, M/t -> {U:t}): dot_general" in names
    assert any(name.startswith("elementwise: ") for name in names)


@pytest.mark.slow
def test_a_profile_and_a_picture_have_the_type_string_of_each_op(tmp_path, capsys, monkeypatch):
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
    experts = slice(source.index("def mixture("), source.index("def decoder("))
    source = source.replace(source[experts], "")  # which this model lacks
    ops = re.findall(r"(\w+)\(\s*\"([^\"]*->[^\"]*)\"", source)
    ops = [op for op in ops if op != ("gather", "M/t/c/s -> M/t")]  # of norms that come after
    assert len(ops) > 30
    names = [event["name"] for event in timed]
    for name, signature in ops:
        op = {"gather": "all_gather"}.get(name, name)  # passed to train.py's layers as `gather`
        assert any(name.startswith(f"{op}({signature})") for name in names), (op, signature)
    steps = [e["args"]["step_num"] for e in timed if e["name"] == "train"]
    assert [int(step) for step in steps] == [2, 3]

    # Rows are the same as without a profile.
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]

    svg = tmp_path / "run/step.svg"
    assert f"drew {svg}\n" in out
    root = ElementTree.parse(svg).getroot()
    texts = [element.text or "" for element in root.iter(SVG + "text")]
    assert {"forward", "recomputed", "backward", "update", "block", "training_step"} <= set(texts)
    assert not {"lower_step", "<module>"} & set(texts), "the step's callers"
    shown = "\n".join(texts)
    for name, signature in ops:
        assert signature[:60] in shown, (name, signature)
    titles = "\n".join(element.text for element in root.iter(SVG + "title"))
    assert "all_gather(M/c/s F/t -> M F/t), backward: reduce_scatter" in titles
