"""Tests what the attention benchmark hands to GPUs' libraries. None of these runs here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import attention
from kernels import attention as op
from shardlib.types import bf16, f32, typed_shard_map
from tests.helpers import assert_close, mesh
from tests.kernels.test_attention import dense, random_arrays, run, xla_for_cudnn


def test_documents():
    rng = np.random.default_rng(0)
    for most in 1, 3, 8:
        rows, wanted = [], []
        for count in 1, 3, 8:
            ends = np.sort(rng.choice(np.arange(1, 50), size=count - 1, replace=False))
            bounds = [0, *ends, 50]
            rows.append([max(b for b in bounds if b <= token) for token in range(50)])
            pad = [-1] * (most + 1)
            wanted.append(([*np.diff(bounds), *pad][:most], [*bounds[:-1], *pad][: most + 1]))
        for count in 1, 2, 3:  # rows in the batch
            lengths, offsets, fits = attention.documents(jnp.asarray(rows[:count]), most)
            assert fits == (most >= (1, 3, 8)[count - 1])
            if fits:
                assert lengths.tolist() == [row[0] for row in wanted[:count]]
                assert offsets.tolist() == [row[1] for row in wanted[:count]]


def in_documents(heads, k, v, lengths, offsets):
    """Computes attention as JAX's documentation says that cuDNN does, given lengths and offsets."""
    token = jnp.arange(k.shape[1])
    inside = (offsets[:, :-1, None] <= token) & (token < (offsets[:, :-1] + lengths)[:, :, None])
    inside &= (lengths > 0)[:, :, None]
    same = jnp.einsum("bml,bms->bls", inside.astype(f32.dtype), inside.astype(f32.dtype)) > 0
    seen = same & (token <= token[:, None])
    return jax.nn.dot_product_attention(heads, k, v, mask=seen[:, None], implementation="cudnn")


# Rows have 3, 3, 2 and 2 documents: all fit; two don't, on the same device as the others, and on
# devices of their own.
@pytest.mark.parametrize("most, axes", [(20, (4, 2)), (2, (1, 1)), (2, (4, 1))])
def test_packed_attention_and_its_gradients(most, axes, monkeypatch):
    xla_for_cudnn(monkeypatch)
    monkeypatch.setattr(attention, "by_offsets", in_documents)
    monkeypatch.setattr(op, "plain_attention", functools.partial(attention.packed, most=most))
    arrays = random_arrays(32)
    assert (np.diff(arrays[3]) > 0).sum(axis=1).tolist() == [2, 2, 1, 1]
    assert_close(run(f32, arrays, mesh(*axes)), dense(*arrays), 1e-5)


def test_an_unchecked_operation_keeps_its_types():
    @attention.unchecked
    def doubled(x):
        return (2 * x, x.sum(axis=1).astype(bf16.dtype))

    @jax.jit
    @typed_shard_map
    def twice(x: f32["B/s M"]) -> tuple[f32["B/s M"], bf16["B/s"]]:
        assert lax.axis_size("s") == 4
        return tuple(doubled(x))

    x = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh(4, 2)):
        twofold, sums = twice(x)
    assert (twofold == 2 * x).all() and (sums == x.sum(axis=1)).all()


def test_a_way_that_fails_says_why(train_here, monkeypatch):
    arguments = ["--config-name=c4_a100x1_84m", "training.tokens={batch: 4, len: 64}"]
    monkeypatch.setattr(attention, "REPEATS", 1)
    monkeypatch.setattr(attention, "ways", lambda *_: {"plain": op.plain_attention, "no": 1})
    out, message = train_here(*arguments, program=attention.main)
    first, head, plain, no = out.splitlines()
    assert not message and "2 rows of 64, 1 x 8 heads of 128, at most 1 documents" in first
    assert plain.split()[:2] == ["plain", "0.0e+00"] and len(plain.split()) == 5
    assert no.split() == ["no", "TypeError:", "'int'", "object", "is", "not", "callable"], head
