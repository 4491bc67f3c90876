"""Checks the prediction's rules on functions small enough to count by hand. `make test-tpu` checks
them against a compiler, on training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib import devices, ops
from shardlib.types import Stacked, bf16, f32, make_shapes, pytree_dataclass, typed_shard_map
from tools import memory

SIZES = {"B": 64, "M": 32, "layers": 4}
X, W = 64 * 32 * 4, 32 * 32 * 4  # bytes of x and of w


@pytree_dataclass
class Inputs:
    x: f32["B M"]
    w: f32["M M"]


@pytree_dataclass
class Deep:
    x: bf16["B M"]
    layers: Stacked["layers", f32["M M"]]


def predicted(fn, hint, axes=None, chip=None):
    axes = axes or {"d": 1, "t": 1}
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh(axes)):
        traced = jax.jit(typed_shard_map(fn)).trace(make_shapes(hint, SIZES))
    return memory.predict(traced.jaxpr.jaxpr, axes, chip)


def square(i: Inputs) -> f32["B M"]:
    return jnp.exp(i.x) * 2 + 1


def twice(i: Inputs) -> f32["B M"]:
    return jnp.exp(i.x @ i.w) @ i.w


def reduced(i: Inputs) -> f32["B"]:
    return jnp.sum(jnp.exp(i.x), axis=1)


def once_for_two(i: Inputs) -> f32["B M"]:
    a = jnp.exp(i.x @ i.w)
    return (a @ i.w) * (a @ i.w.T)


def kept_for_two(i: Inputs) -> f32["B M"]:
    a, b, c = i.x @ i.w, (2 * i.x) @ i.w, (3 * i.x) @ i.w
    mixed = a * b * c
    return (mixed @ i.w) * (mixed @ i.w.T)


def written_over(i: Inputs) -> f32["B M"]:
    return (i.x @ i.w).at[3].set(0.0)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (square, 0),  # fused into the result
        (twice, 2 * X),  # the exponential is part of the second product
        (reduced, 64 * 4),
        (once_for_two, 3 * X),  # one matmul, and the two that use its exponential
        (kept_for_two, 3 * X),  # three matmuls; their product overwrites one; then the last two
        (written_over, X),
    ],
)
def test_what_is_written_to_memory(fn, expected):
    memory = predicted(fn, Inputs)
    assert memory.temporary == expected
    assert memory.arguments == (X if fn in (square, reduced) else X + W), "only used arguments"
    assert sum(array.bytes for array in memory.buffers) == expected


def test_stacked_weights_are_cast_before_the_loop():
    def run(deep: Deep) -> bf16["B M"]:
        def layer(x, w):
            return x @ w.astype(bf16.dtype), ()

        return lax.scan(layer, deep.x, deep.layers)[0]

    result = predicted(run, Deep)
    # The cast stack, the carry, and the next carry.
    assert result.temporary == 4 * W // 2 + 2 * (X // 2)
    assert result.buffers[0].dtype == "bfloat16" and result.buffers[0].shape == (4, 32, 32)


def test_a_loop_stacks_its_outputs():
    def run(i: Inputs) -> f32["layers B M"]:
        def turn(x, _):
            return x @ i.w, jnp.exp(x)

        return lax.scan(turn, i.x, length=4)[1]

    # The stack, the carry, and the next carry.
    assert predicted(run, Inputs).temporary == 4 * X + 2 * X


def test_other_loops_and_branches():
    def run(i: Inputs) -> f32["B M"]:
        x = lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: (x @ i.w) @ i.w, i.x)
        return lax.cond(jnp.sum(x) > 0, lambda x: x @ i.w, jnp.sin, x)

    def nothing(i: Inputs) -> f32["B M"]:
        return lax.scan(lambda x, _: (x, ()), i.x, length=3)[0]

    # The result of the first loop, and both matmuls of an iteration.
    assert 3 * X <= predicted(run, Inputs).temporary < 3 * X + 100
    assert predicted(nothing, Inputs).temporary == 0


def test_a_gathered_array_takes_memory_except_on_one_device():
    def run(x: f32["B M/t"]) -> f32["B M/t"]:
        return x / jnp.sum(ops.all_gather("B M/t -> B M", x), axis=1, keepdims=True)

    split = predicted(run, f32["B M/t"], {"d": 1, "t": 4})
    assert (split.temporary, split.arguments) == (X + 64 * 4, X // 4)
    assert predicted(run, f32["B M/t"]).temporary == 64 * 4


def test_only_v5e_recomputes_for_each_matmul_that_uses_a_result():
    @jax.checkpoint
    def block(i):
        return jnp.sin(jnp.exp(i.x @ i.w) @ i.w)

    def run(i: Inputs) -> Inputs:
        return jax.grad(lambda i: jnp.sum(block(i)))(i)

    v5e, v6e = (predicted(run, Inputs, chip=devices.CHIPS[name]) for name in ("v5e", "v6e"))
    assert "exp" not in [array.op for array in v5e.buffers]
    assert "exp" in [array.op for array in v6e.buffers]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64,), "float32", 512),
        ((64, 8), "float32", 4096),  # transposed
        ((2, 1024), "uint32", 8192),
        ((2, 1024), "bool", 4096),  # four to a word
        ((3, 200), "float32", 4 * 256 * 4),
        ((8, 64, 1, 8, 128), "float32", 8 * 64 * 8 * 128 * 4),
        ((0, 7), "float32", 0),
    ],
)
def test_bytes_of_a_tiled_array(shape, dtype, expected):
    """Expects the sizes that the TPU compiler gave these arrays."""
    aval = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    assert memory.size_of(aval, "TPU v5 lite") == expected
    assert memory.size_of(aval, "A100") == np.prod(shape) * np.dtype(dtype).itemsize
