import gzip
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo
from shardlib.ops import scope_name
from tests.helpers import ROOT, SMALL, train_here

pytestmark = pytest.mark.usefixtures("own_metadata")


def test_an_op_name_for_short():
    path = "jit(training_step)/shard_map"
    cases = {
        f"{path}/jvp(all_gather(V|t M|d -> V|t M))/all_gather": (
            "all_gather(V/t M/d -> V/t M): all_gather"
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
    found = {hlo.describe(name) for name in hlo.op_names(text).values()}
    assert "einsum_unreduced(M/t, M/t -> {U:t}): dot_general" in found
    assert any(name.startswith("elementwise: ") for name in found)


def test_a_profile_says_the_type_string_of_each_op(tmp_path, capsys, monkeypatch):
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
    assert len(ops) > 30
    names = [event["name"] for event in timed]
    for name, signature in ops:
        op = {"gather": "all_gather"}.get(name, name)  # handed to train.py's layers
        assert any(name.startswith(f"{op}({signature})") for name in names), (op, signature)
    steps = [e["args"]["step_num"] for e in timed if e["name"] == "train"]
    assert [int(step) for step in steps] == [2, 3]

    # Rows are as without a profile: the time it takes is none of a step's.
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]

    dot = tmp_path / "run/step.dot"
    assert dot.read_text().startswith("digraph") and "all_gather(V/t M/d" in dot.read_text()
    if shutil.which("dot"):
        assert f"drew {dot.with_suffix('.svg')}\n" in out
        assert "all_gather(V/t M/d" in dot.with_suffix(".svg").read_text()
    else:
        assert f"drew {dot}; no svg, as Graphviz's `dot` is not installed\n" in out
