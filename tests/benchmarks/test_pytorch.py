"""Tests the PyTorch benchmark, for which all but one of them need PyTorch."""

import functools
import sys

import numpy as np
import pytest

from benchmarks import pytorch
from tests.files import rows
from tests.helpers import SMALL, small_config
from tools import benchmark, plot

CONFIG = ["--config-name=local_test_synthetic", *SMALL]
# transformers warns that this function is renamed; older releases lack the new name.
renamed = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")


@pytest.fixture
def run(train_here):
    return functools.partial(train_here, *CONFIG, program=pytorch.main)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_without_pytorch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes its import fail
    out, message = run()
    assert not out and message.count("\n") == 0
    assert message.startswith("error: this needs PyTorch (") and message.endswith("torch")


def test_the_table(torch, run, monkeypatch):
    monkeypatch.setattr(benchmark, "MIN_STEPS", 3)
    monkeypatch.setattr(benchmark, "MAX_STEPS", 4)
    out, message = run("compile=false", "training.microbatches=2")
    assert not message
    shown = {line[:32].strip(): line[33:] for line in out.splitlines()}
    attention = 2 * 32 * 16 * 4 + 2 * 32 * 8 * 4  # q and o have 16 heads of 4, k and v have 8
    weights = 2 * (attention + 3 * 32 * 40) + 128 * 32
    assert shown["parameters"] == f"{weights + 128 * 32 + (2 * 2 + 1) * 32:,}"
    assert shown["tokens per step"] == "96" and shown["device"].startswith("1 x cpu")
    assert shown["step"].endswith(" percentile of 4)") and "MFU, projections only" in shown
    assert f"torch {torch.__version__.split('+')[0]}" in shown["at"]


def test_a_width_that_llama_lacks(torch, run):
    says = "LlamaConfig needs model.d_model to be a multiple of the query heads"
    assert run("model.d_model=40") == ("", f"error: {says}")


@renamed
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_is_compiled_and_its_attention_takes_no_mask(torch, monkeypatch, checkpointing):
    """PyTorch has no fast kernel for attention with a mask."""
    graphs = []

    def backend(module, inputs):
        graphs.extend(part for part in module.modules() if hasattr(part, "graph"))
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *fn, **settings: compile_(*fn, **(settings | {"backend": backend}))
    )
    config = pytorch.TorchConfig(**vars(small_config()), checkpointing=checkpointing)
    model = pytorch.make_model(config)
    step = pytorch.make_step(config, model)
    before = [weight.clone() for weight in model.parameters()]
    step(None, torch.randint(48, (8, 12)))
    calls = [
        node for part in graphs for node in part.graph.nodes if "scaled_dot" in str(node.target)
    ]
    assert len(graphs) == (3 if checkpointing else 1) and len(calls) == 2
    assert all(node.kwargs["is_causal"] and node.kwargs["attn_mask"] is None for node in calls)
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


def test_the_curve_is_that_of_our_run(torch, run, train_here, tmp_path):
    """Ten steps in f32, with several documents in a row and a clipped gradient."""
    both = [
        "dtype=f32", "training.steps=10", "training.warmup_steps=3", "training.grad_clip=0.5",
        "training.learning_rate=1e-2", "training.microbatches=2", "training.validation_interval=5",
        "training.validation_batches=2", "flat_tokens.filespec=data/synthetic.zarr",
        "mesh={d: 1, t: 1}", "model.vocab=128", "training.tokens.len=96",
        f"paths.root_working_dir={tmp_path}",
    ]  # fmt: skip
    _, message = run(*both, "compile=false", "curve=true", "paths.model_name=torch")
    assert not message
    _, message = train_here(*CONFIG, *both, "paths.model_name=jax")
    assert not message
    theirs, ours = (rows(tmp_path / name) for name in ("torch", "jax"))
    for name in "loss", "validation_loss":
        pairs = [(a[name], b[name]) for a, b in zip(theirs, ours, strict=True) if name in b]
        assert len(pairs) == {"loss": 10, "validation_loss": 2}[name]
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-4)
    assert theirs[0]["loss"] > theirs[-1]["loss"] + 0.1
    picture = tmp_path / "both.svg"
    drawn = tmp_path / "torch", tmp_path / "jax", "--output", picture
    assert not train_here(*drawn, program=plot.main)[1] and picture.exists()
