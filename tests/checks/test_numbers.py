"""Tests how the numbers of two meshes are compared, with a function of our own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from checks import numbers
from runtime.devices import make_mesh
from shardlib import ops
from shardlib.types import Stacked, compute, computing_in, f32, typed_shard_map

ONE, OTHER = {"d": 1, "t": 1}, {"d": 2, "t": 3}
STACK = Stacked["layers", f32["M/d F/t"]]


def step(edit):
    """Gradients of two products in each of some layers; `edit` stands between the two."""

    def loss(stack: STACK, x: f32["B/d M"]) -> f32[""]:
        def layer(x, stored):
            w = ops.all_gather("M/d F/t -> M F/t", stored)
            h = edit(ops.einsum_unreduced("B/d M, M F/t -> B/d F/t", x, w))
            y = ops.einsum_unreduced("B/d F/t, M F/t -> B/d M {U:t}", h, w)
            return jnp.sin(ops.psum("B/d M {U:t} -> B/d M", y)), None

        x, _ = lax.scan(jax.checkpoint(layer), x, stack)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", x))

    @jax.jit
    @typed_shard_map
    def gradients(stack: STACK, x: f32["B/d M"]) -> tuple[f32[""], STACK]:
        return jax.value_and_grad(loss)(stack, x)

    return gradients


RANDOM = np.random.default_rng(0)
W, X = (RANDOM.normal(size=size).astype(np.float32) for size in ((3, 18, 24), (12, 18)))
INPUTS = W / 5, X


def compared(edit):
    """The largest difference between the meshes, and the first values that differ."""
    results, events = [], []
    for axes in ONE, OTHER:
        with jax.set_mesh(make_mesh(axes)):
            with numbers.recording() as recorded:
                results.append(numbers.run(step(edit), INPUTS))
            events.append(recorded)
    pairs = zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True)
    return max(numbers.difference(a, b) for a, b in pairs), events


@jax.custom_vjp
def twice_the_gradient(x):
    return x


twice_the_gradient.defvjp(lambda x: (x, x.shape[-1]), lambda n, g: (g * (2 if n < 24 else 1),))


def test_what_is_right_agrees_and_each_value_is_recorded_with_its_gradient():
    apart, (one, other) = compared(jnp.sin)
    assert apart < 1e-5 and numbers.first_difference(one, other) is None
    assert [event[:3] for event in one] == [event[:3] for event in other] and len(one) > 20
    of_einsum = [event for event in one if "the result of ops.einsum" in event.what]
    (products,) = [event for event in of_einsum if "{U:t}" in event.what and event.backward]
    assert products.values.shape[1:] == (12, 18)
    # What is recorded of the last psum is what one computes by hand.
    x = INPUTS[1].astype(np.float64)
    for w in INPUTS[0].astype(np.float64):
        total = np.sin(x @ w) @ w.T
        x = np.sin(total)
    (psum,) = [e for e in other if 'result of ops.psum("B/d M' in e.what and not e.backward]
    np.testing.assert_allclose(psum.values[2], total, atol=1e-5)


def test_what_is_nothing_but_rounding_does_not_differ():
    """The gradient of a bias that a softmax cancels out is zero, up to rounding."""
    one, other = ({"biases/b": np.full(4, x), "biases/c": np.ones(4)} for x in (1e-8, -1e-8))
    assert not numbers.differences(one, other)
    alone = ({"nu/b": x["biases/b"], "biases/c": x["biases/c"]} for x in (one, other))
    assert numbers.differences(*alone) == ["nu/b by 2.0e+00"]


@pytest.mark.parametrize("edit", [lambda h: h * h.shape[-1], twice_the_gradient])
def test_the_first_difference_is_where_the_mistake_is(edit):
    backward, ends = (
        edit is twice_the_gradient,
        ["the result of ops.einsum", "operand 1 of ops.einsum"],
    )
    before, first = reversed(ends) if backward else ends
    apart, (one, other) = compared(edit)
    assert apart > 1e-3
    previous, event = numbers.first_difference(one, other)
    assert event.backward == backward and event.what.startswith(first)
    assert previous.what.startswith(before) and "test_numbers.py:" in event.what


def test_what_should_be_equal_on_devices_and_is_not_differs():
    @jax.jit
    @typed_shard_map
    def fn(x: f32["B/d M"]) -> f32[""]:
        part = lax.axis_index("t") * x  # of type B/d M, and another along t
        y = ops.reduce_sum("B/d M -> {U:d}", part)
        return ops.psum("{U:d,t} -> ", lax.pcast(y, "t", to="unreduced"))

    with jax.set_mesh(make_mesh(OTHER)), numbers.recording() as events:
        numbers.run(fn, INPUTS[1:])
    operand = next(event for event in events if event.what.startswith("operand 1 of ops.reduce"))
    assert np.isnan(operand.values).all()


def test_the_compute_dtype_is_that_of_the_context():
    """Checks that in f32 a matmul is exact, and that a function is traced for each dtype."""

    @jax.jit
    @typed_shard_map
    def fn(x: f32["B/d M"]) -> compute["B/d B"]:
        x = x.astype(compute.dtype)
        return jnp.einsum("am,bm->ab", x, ops.all_gather("B/d M -> B M", x))

    x = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
    with jax.set_mesh(make_mesh(OTHER)):
        narrow = numbers.run(fn, (x,))
        with computing_in("f32"):
            wide = numbers.run(fn, (x,))
        again = numbers.run(fn, (x,))
    assert (narrow.dtype, wide.dtype, again.dtype) == (jnp.bfloat16, np.float32, jnp.bfloat16)
    np.testing.assert_allclose(wide, x @ x.T, atol=1e-5)
    assert np.abs(narrow - x @ x.T).max() > 1e-3


def test_stirred_values_are_all_different_and_keep_their_sign():
    gain, w = np.ones((4, 5), np.float32), RANDOM.normal(size=(4, 5)).astype(np.float32)
    tree = {"gain": gain, "bias": 0 * gain, "w": w, "step": np.uint32(7)}
    stirred = numbers.stirred(tree)
    assert stirred["step"] == 7
    for name in "gain", "bias", "w":
        values = stirred[name]
        assert len(np.unique(values)) == 20 and values.dtype == np.float32
        assert (np.sign(values) == np.where(tree[name] < 0, -1, 1)).all()


def test_differences_are_relative_to_the_largest_entry():
    one = {"a/x": np.array([100.0, 1.0]), "b/x": np.array([1.0, 1.0]), "c": np.array([1.0])}
    other = {"a/x": np.array([100.0, 1.001]), "b/x": np.array([1.0, 1.1]), "c": np.array([np.nan])}
    assert numbers.differences(one, other) == ["c by inf", "b/x by 1.0e-01"]
    assert numbers.difference(np.zeros(3), np.zeros(2)) == np.inf
    assert numbers.difference(np.zeros(3), np.zeros(3)) == 0
    infinite = np.array([np.inf, 2])
    assert numbers.difference(infinite, infinite) == 0
    assert numbers.difference(infinite, np.array([np.inf, 4])) == 0.5
    assert numbers.difference(infinite, np.array([-np.inf, 2])) == np.inf
