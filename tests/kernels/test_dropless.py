"""Tests the op that computes experts against NumPy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import dropless
from runtime.devices import make_mesh
from shardlib import ops
from shardlib.types import ShardTypeError, f32, i32, typed_shard_map
from tests import golden
from tests.helpers import assert_close, mesh
from tests.kernels.test_attention import trace

EXPERTS = "B/s S M, B/s S k, B/s S k, E/t M G, E/t M G, E/t M G -> B/s S M {U:t}"


# A platform's name chooses between in_groups and in_blocks; both run on CPUs.
@pytest.mark.parametrize("on", ["tpu", "cpu"])
@pytest.mark.parametrize("rows, axes", [(1, (2, 4)), (3, (1, 4)), (512, (2, 1))])
def test_experts_and_their_gradients(rows, axes, on, monkeypatch):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 4, 8, 6))
    w_gate, w_up, w_down = rng.normal(size=(3, 4, 6, 3))
    chosen = np.argsort(rng.normal(size=(4, 8, 4)), axis=-1)[:, :, :2]
    chosen[0] = [0, 1]  # so that a device may have all choices, or none
    score = rng.random((4, 8, 2))
    monkeypatch.setattr(dropless, "ROWS", rows)
    monkeypatch.setattr(dropless, "platform", lambda: on)

    def by_hand(x, score, w_gate, w_up, w_down):
        out = np.zeros_like(x)
        for row, token, i in np.ndindex(chosen.shape):
            e, h = chosen[row, token, i], x[row, token]
            gate, up = h @ w_gate[e], h @ w_up[e]
            hidden = gate / (1 + np.exp(-gate)) * up
            out[row, token] += score[row, token, i] * (w_down[e] @ hidden)
        return out

    tokens = f32["B/s S M"]
    kinds = tuple[tokens, f32["B/s S k"], *[f32["E/t M G"]] * 3]

    @jax.jit
    @typed_shard_map
    def both(arrays: kinds, chosen: i32["B/s S k"], weight: tokens) -> tuple[tokens, kinds]:
        def mix(x, score, *weights):
            x, score = (ops.varying(part, ("t",)) for part in (x, score))
            weights = (ops.varying(part, ("s",)) for part in weights)
            y = dropless.experts(EXPERTS, x, chosen, score, *weights)
            return ops.psum("B/s S M {U:t} -> B/s S M", y)

        out, pull = jax.vjp(mix, *arrays)
        return out, pull(weight)

    arrays = x, score, w_gate, w_up, w_down
    with jax.set_mesh(mesh(*axes)):
        placed = jax.tree.map(jnp.float32, arrays), jnp.int32(chosen), jnp.float32(weight)
        out, grads = jax.device_get(both(*placed))
    assert_close(out, by_hand(*arrays), 1e-5)
    for i, (array, grad) in enumerate(zip(arrays, grads, strict=True)):
        change = rng.normal(size=array.shape) * 1e-5
        ends = [by_hand(*arrays[:i], array + c, *arrays[i + 1 :]) for c in (change, -change)]
        slope = np.sum((ends[0] - ends[1]) / 2 * weight)
        np.testing.assert_allclose(np.sum(grad * change), slope, rtol=1e-4, atol=1e-9)


MISUSES = {
    "no sum owed": EXPERTS.replace(" {U:t}", ""),
    "weights that aren't gathered": EXPERTS.replace("E/t M G", "E/t M/s G"),
    "choices of other tokens": EXPERTS.replace("B/s S k", "B/s L k"),
    "an expert's other matrix": EXPERTS.replace("E/t M G ->", "E/t G M ->"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_experts_refuse(case):
    sizes = {"B": 4, "S": 8, "L": 8, "M": 8, "G": 4, "E": 4, "k": 2}
    with golden.raises("ops.txt", f"experts with {case}", ShardTypeError):
        trace(dropless.experts, MISUSES[case], (1,), sizes, mesh(2, 2))


def test_experts_may_be_split_over_a_group():
    string = "B S M, B S k, B S k, E/d M G, E/d M G, E/d M G -> B S M {U:d}"

    @typed_shard_map
    def mix(x: f32["B S M"], k: i32["B S k"], w: f32["E/d M G"]) -> f32["B S M"]:
        y = dropless.experts(string, x, k, k.astype(x.dtype), w, w, w)
        return ops.psum("B S M {U:d} -> B S M", y)

    with jax.set_mesh(make_mesh({"r": 2, "s": 2})):
        made = jax.eval_shape(
            mix, jnp.ones((2, 8, 6)), jnp.ones((2, 8, 1), "i4"), jnp.ones((4, 6, 3))
        )
    assert made.shape == (2, 8, 6)
