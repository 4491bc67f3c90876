"""The rules of the prediction, on functions small enough to count by hand; `make test-tpu` holds
them against what a compiler does with training steps."""

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
class Layer:
    w: f32["M M"]


@pytree_dataclass
class Deep:
    x: bf16["B M"]
    layers: Stacked["layers", Layer]


@pytree_dataclass
class Split:
    x: f32["B M/t"]


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
        (square, 0),  # all in one, into the result
        (twice, 2 * X),  # the exponential is part of the second product
        (reduced, 64 * 4),
        (once_for_two, 3 * X),  # a product, and the two that take its exponential
        (kept_for_two, 3 * X),  # three; what is made of them, over one of them, and the last two
        (written_over, X),
    ],
)
def test_what_has_a_place_in_memory(fn, expected):
    found = predicted(fn, Inputs)
    assert found.temporary == expected
    assert found.arguments == (X if fn in (square, reduced) else X + W), "those that it uses"
    assert sum(array.bytes for array in found.buffers) == expected


def test_stacked_weights_are_cast_before_the_loop():
    def run(deep: Deep) -> bf16["B M"]:
        def layer(x, layer):
            return x @ layer.w.astype(bf16.dtype), ()

        return lax.scan(layer, deep.x, deep.layers)[0]

    found = predicted(run, Deep)
    # The cast stack, what is carried, and the next one.
    assert found.temporary == 4 * W // 2 + 2 * (X // 2)
    assert found.buffers[0].dtype == "bfloat16" and found.buffers[0].shape == (4, 32, 32)


def test_a_loop_stacks_what_it_gives():
    def run(i: Inputs) -> f32["layers B M"]:
        def turn(x, _):
            return x @ i.w, jnp.exp(x)

        return lax.scan(turn, i.x, length=4)[1]

    # The stack, what is carried, and the next one.
    assert predicted(run, Inputs).temporary == 4 * X + 2 * X


def test_other_loops_and_branches():
    def run(i: Inputs) -> f32["B M"]:
        x = lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: (x @ i.w) @ i.w, i.x)
        return lax.cond(jnp.sum(x) > 0, lambda x: x @ i.w, jnp.sin, x)

    def nothing(i: Inputs) -> f32["B M"]:
        return lax.scan(lambda x, _: (x, ()), i.x, length=3)[0]

    # What the first loop gives, and both products of a turn.
    assert 3 * X <= predicted(run, Inputs).temporary < 3 * X + 100
    assert predicted(nothing, Inputs).temporary == 0


def test_a_gathered_array_is_whole_and_on_one_device_the_same():
    def run(s: Split) -> f32["B M/t"]:
        return s.x / jnp.sum(ops.all_gather("B M/t -> B M", s.x), axis=1, keepdims=True)

    assert predicted(run, Split, {"d": 1, "t": 4}).temporary == X + 64 * 4
    assert predicted(run, Split, {"d": 1, "t": 4}).arguments == X // 4
    assert predicted(run, Split).temporary == 64 * 4


def test_only_v5e_makes_again_what_the_forward_pass_made_again():
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
        ((), "float32", 512),
        ((64,), "float32", 512),
        ((8, 64), "float32", 4096),
        ((64, 8), "float32", 4096),  # laid out the other way round
        ((2, 1024), "uint32", 8192),
        ((2, 1024), "bool", 4096),  # four to a word
        ((3, 200), "float32", 4 * 256 * 4),
        ((8, 64, 1, 8, 128), "float32", 8 * 64 * 8 * 128 * 4),
        ((0, 7), "float32", 0),
    ],
)
def test_bytes_of_a_tiled_array(shape, dtype, expected):
    """As the TPU's compiler gave them places."""
    aval = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    assert memory.size_of(aval, "TPU v5 lite") == expected
    assert memory.size_of(aval, "A100") == np.prod(shape) * np.dtype(dtype).itemsize
