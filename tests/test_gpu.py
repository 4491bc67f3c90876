"""Tests that need a GPU: make test-gpu. They are skipped elsewhere."""

import functools
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from kernels import attention
from runtime.run import compile_step
from tests import compiled
from tests.helpers import mesh, small_config, small_run
from tests.processes import python
from tests.test_same_program import program, training
from tests.test_train import assert_agree, expected, loss_and_grads, random_rows

pytestmark = pytest.mark.gpu
SHAPES = [(2, 1024, 1, 8, 128), (1, 8192, 1, 2, 128), (2, 512, 4, 2, 64)]


def test_there_is_a_gpu():
    assert jax.devices()[0].platform == "gpu"


def test_loss_and_gradients_are_close_to_the_oracles():
    with jax.default_matmul_precision("highest"):
        wanted = expected()
    actual = loss_and_grads(train, small_config(), *random_rows(), mesh(1, 1))
    assert_agree(actual, wanted, 3e-3, 5e-2)


@pytest.mark.parametrize("rows, length, queries, keys, size", SHAPES)
@pytest.mark.parametrize(
    "documents, window, part",  # in a row, on average; `part` is the device's of its row
    [(4, None, None), (1, None, None), (100, None, None), (4, 200, None), (4, None, 0), (9, 90, 1)],
)
def test_the_kernel_is_its_twin(rows, length, queries, keys, size, documents, window, part):
    """Compares outputs and gradients, with documents some of which span blocks."""
    rng = np.random.default_rng(0)
    q, weight = rng.normal(size=(2, rows, length, queries, keys, size))
    k, v = rng.normal(size=(2, rows, length, keys, size))
    q, k, v, weight = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, weight))
    order = attention.balanced(length, 1 if part is None else 2)
    key_position = jnp.broadcast_to(jnp.asarray(order), (rows, length))
    begins = jnp.asarray(rng.random((rows, length)) < (documents - 1) / length)
    start = jax.lax.cummax(jnp.where(begins, jnp.arange(length), 0), axis=1)[:, order]
    if window:
        start = jnp.maximum(start, key_position - window + 1)
    k, v = k[:, order], v[:, order]
    own = slice(None) if part is None else slice(part * length // 2, (part + 1) * length // 2)
    q, weight, start, position = (x[:, own] for x in (q[:, order], weight, start, key_position))

    def twin(q, k, v):
        return attention.plain_attention(q, k, v, start, position, key_position)

    def kernel(q, k, v):
        return attention.cudnn_attention(q, k, v, start, position, key_position)

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend, q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(weight)

    actual, wanted = (
        [np.asarray(x, np.float64) for x in jax.tree.leaves(both(attend, q, k, v))]
        for attend in (kernel, twin)
    )
    for a, b in zip(actual, wanted, strict=True):
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)


def test_the_step_runs_the_kernel():
    """The kernel's types also pass the checks of typed_shard_map."""
    config = small_config("mesh={d: 1, t: 1}", "model.d_head=64", "training.tokens.len=128")
    with jax.set_mesh(mesh(1, 1)):
        assert "__cudnn$fmha" in compile_step(config, train.lower_step(config)).as_text()


def test_a_run_saves_resumes_and_is_profiled(tmp_path, train_here):
    settings = "mesh={d: 1, t: 1}", "simulate_devices=false", "training.steps_for_lr=100"
    run = small_run(tmp_path, *settings)
    train_here(*run, "training.steps=3")
    out, message = train_here(*run, "training.steps=8", "profile=true")
    assert not message and "\nresumed at step 3 " in out
    file = tmp_path / "run/profile/host_0/perfetto.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    matmul, lookup = "B/d L/c M, M F/t -> B/d L/c F/t)", "[V/t] M, B/d L/c"
    for op in f"einsum_unreduced({matmul}", f"index_unreduced({lookup}":
        assert any(name.startswith(op) for name in names), sorted(names)[:50]


def test_one_gpu_sends_nothing_and_holds_what_the_audit_says():
    step = training(small_config("mesh={d: 1, t: 1}"))
    transfers, actual, (predicted, held) = program(lambda: step)
    assert compiled.unexplained(transfers, actual) == ([], [])
    assert predicted == held


def test_the_benchmark_knows_the_chip_and_its_memory():
    settings = "flat_tokens.filespec=data/synthetic.zarr", "training.tokens.batch=32"
    done = python("-m", "tools.benchmark", "--config-name=c4_a100x1_84m", *settings)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^MFU, causal attention included +\d+\.\d%$", done.stdout, re.MULTILINE)
    assert re.search(r"^peak memory .* per device$", done.stdout, re.MULTILINE)
