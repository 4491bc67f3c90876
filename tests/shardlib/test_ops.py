"""Tests each op against plain jnp on unsharded arrays, forward and backward, and the error for each
misuse."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from checks.jaxprs import equations
from checks.layout import probe_mesh
from runtime.devices import make_mesh
from shardlib import ops, types
from shardlib.errors import ShardTypeError
from shardlib.types import bf16, f32, i32, pytree_dataclass, typed_shard_map, u32
from tests import golden
from tests.helpers import assert_close

MESHES = [{"d": 4, "t": 2}, {"d": 8, "t": 1}, {"r": 2, "d": 2, "t": 2}]
SIZES = {"B": 8, "L": 3, "M": 16, "F": 8, "V": 24, "2": 2}


def gather_two_axes(x: f32["B/d M/t"], w: f32["M/t/d"]) -> f32["B/d M/t"]:
    w = ops.all_gather("M/t/d -> M/t", w)
    return ops.einsum_unreduced("B/d M/t, M/t -> B/d M/t", x, w)


def gather_two_dimensions(x: f32["B/d M/t"], w: f32["M/t F/d"]) -> f32["B/d F/t"]:
    w = ops.all_gather("M/t F/d -> M F", w)
    y = ops.einsum_unreduced("B/d M, M F -> B/d F", ops.all_gather("B/d M/t -> B/d M", x), w)
    # Every device along t has all of F; halved, they are partial sums that can be scattered.
    y = lax.pcast(y / lax.axis_size("t"), types.several("t"), to="unreduced")
    return ops.psum_scatter("B/d F {U:t} -> B/d F/t", y)


def tensor_parallel(x: f32["B/d L M/t"], up: f32["M F/t"], down: f32["M F/t"]) -> f32["B/d L M/t"]:
    x = ops.all_gather("B/d L M/t -> B/d L M", x)
    h = jnp.sin(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, up))
    y = ops.einsum_unreduced("B/d L F/t, M F/t -> B/d L M {U:t}", h, down)
    return ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)


def einsum_of_three(x: f32["B/d M"], w: f32["M F/t"], v: f32["F/t 2"]) -> f32["B/d 2"]:
    y = ops.einsum_unreduced("B/d M, M F/t, F/t 2 -> B/d 2 {U:t}", x, w, v)
    return ops.psum("B/d 2 {U:t} -> B/d 2", y)


def scatter_one_sum_of_two(x: f32["B/d F/t M"]) -> f32["M/t"]:
    y = ops.reduce_sum("B/d F/t M -> M {U:d,t}", x)
    y = ops.psum_scatter("M {U:d,t} -> M/t {U:d}", y)
    return ops.psum("M/t {U:d} -> M/t", y)


def scatter_over_two_axes(x: f32["B/d F/t M"]) -> f32["M/t/d"]:
    y = ops.reduce_sum("B/d F/t M -> M {U:d,t}", x)
    return ops.psum_scatter("M {U:d,t} -> M/t/d", y)


def scatter_onto_a_split(x: f32["B/d M/t"]) -> f32["M/t/d"]:
    return ops.psum_scatter("M/t {U:d} -> M/t/d", ops.reduce_sum("B/d M/t -> M/t {U:d}", x))


def sums_in_two_steps(x: f32["B/d L F/t"]) -> f32[""]:
    y = ops.reduce_sum("B/d L F/t -> B/d {U:t}", x)
    return ops.psum("{U:d,t} -> ", ops.reduce_sum("B/d {U:t} -> {U:d,t}", y))


def normalize(x: f32["B/d V/t"]) -> f32["B/d V/t"]:
    peak = ops.reduce_max("B/d V/t -> B/d", lax.stop_gradient(x))
    x = jnp.exp(x - peak[:, None])
    total = ops.psum("B/d {U:t} -> B/d", ops.reduce_sum("B/d V/t -> B/d {U:t}", x))
    return x / total[:, None]


def look_up_rows(table: f32["V/t M"], x: f32["B/d L"]) -> f32["B/d L M/t"]:
    ids = lax.stop_gradient(jnp.abs(x * 10).astype(jnp.int32))
    y = ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", table, ids)
    return ops.psum_scatter("B/d L M {U:t} -> B/d L M/t", y)


def look_up_in_each_row(table: f32["B/d L V/t"]) -> f32["B/d L"]:
    ids = jnp.arange(3)[None, :] * jnp.ones_like(table[:, :, 0], jnp.int32) * 7
    y = ops.index_unreduced("B/d L [V/t], B/d L -> B/d L {U:t}", table, ids)
    return ops.psum("B/d L {U:t} -> B/d L", y)


def look_up_across_both_axes(table: f32["V/t/d M"], x: f32["B L"]) -> f32["B L M"]:
    ids = lax.stop_gradient(jnp.abs(x * 10).astype(jnp.int32))
    y = ops.index_unreduced("[V/t/d] M, B L -> B L M {U:t,d}", table, ids)
    return ops.psum("B L M {U:t,d} -> B L M", y)


def plain_indices():
    return jnp.arange(16) + jnp.arange(8)[:, None]


def plain_ids(x):
    return jnp.abs(x * 10).astype(jnp.int32)


def split_and_scaled(x: f32["B/d M"], w: f32["M/t"]) -> f32["B/d M/t"]:
    return 3 * w * ops.split("B/d M -> B/d M/t", x)


def split_over_two_axes(x: f32["M"]) -> f32["M/t/d"]:
    return ops.split("M -> M/t/d", jnp.sin(x))


def split_what_was_gathered(x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    x = ops.all_gather("B/d M/t -> B/d M", x)
    return ops.split("B/d M -> B/d M/t", x * jnp.cumsum(x, axis=1))


def weighted_by_index(x: f32["B/d M/t"], w: f32["V/t/d"]) -> f32["B/d M/t"]:
    w = ops.all_gather("V/t/d -> V", w * ops.indices("V/t/d -> V/t/d", w))
    by = ops.indices("B/d M/t -> M/t", x) + ops.indices("B/d M/t -> B/d", x)[:, None]
    return x * by * w.sum()


def replicated_weights(x: f32["B/d M/t"], gain: f32["B"], by: f32[""]) -> f32["B/d M/t"]:
    gain = ops.broadcast("B -> B", gain)
    return x * jnp.sum(gain * jnp.arange(8.0)) + ops.broadcast(" -> ", by)


VALUES = [
    (gather_two_axes, lambda x, w: x * w),
    (gather_two_dimensions, lambda x, w: x @ w),
    (tensor_parallel, lambda x, up, down: jnp.sin(x @ up) @ down.T),
    (einsum_of_three, lambda x, w, v: x @ w @ v),
    (scatter_one_sum_of_two, lambda x: x.sum((0, 1))),
    (scatter_over_two_axes, lambda x: x.sum((0, 1))),
    (scatter_onto_a_split, lambda x: x.sum(0)),
    (sums_in_two_steps, lambda x: x.sum()),
    (normalize, jax.nn.softmax),
    (look_up_rows, lambda table, x: table[plain_ids(x)]),
    (look_up_in_each_row, lambda table: table[:, [0, 1, 2], [0, 7, 14]]),
    (look_up_across_both_axes, lambda table, x: table[plain_ids(x)]),
    (split_and_scaled, lambda x, w: 3 * x * w),
    (split_over_two_axes, jnp.sin),
    (split_what_was_gathered, lambda x: x * jnp.cumsum(x, axis=1)),
    (weighted_by_index, lambda x, w: x * plain_indices() * (w @ jnp.arange(24.0))),
    (replicated_weights, lambda x, gain, by: x * (gain @ jnp.arange(8.0)) + by),
]


CASES = [
    pytest.param(typed, plain, axes, id=f"{typed.__name__}-{axes}")
    for typed, plain in VALUES
    for axes in MESHES
    # Nothing is split over r there, so a replicated weight's gradient isn't summed over it.
    if not ("r" in axes and typed is replicated_weights)
]


@pytest.mark.parametrize("typed, plain, axes", CASES)
def test_values_and_gradients(typed, plain, axes):
    rng = np.random.default_rng(0)
    kinds = [types.type_tree(p.annotation) for p in inspect.signature(typed).parameters.values()]
    sizes = [[SIZES[dim.name] for dim in kind.spec.dims] for kind in kinds]
    arrays = [rng.normal(size=size).astype("f") for size in sizes]

    def value_and_grads(fn):
        def objective(*xs):
            y = fn(*xs)
            return jnp.sum(jnp.cos(y) * (1 + jnp.arange(y.size).reshape(y.shape))), y

        grad = jax.value_and_grad(objective, range(len(arrays)), has_aux=True)
        return jax.device_get(jax.jit(grad)(*arrays))

    with jax.set_mesh(make_mesh(axes)):
        actual = value_and_grads(typed_shard_map(typed))
    assert_close(actual, value_and_grads(plain), 1e-5)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_gathers_and_scatters_of_bf16_along_the_last_dimension(axes):
    """Compares exactly, with numbers so small that bf16 holds them: on CPUs they have a form of
    their own."""
    factors = 1 + np.arange(16) % 4

    @typed_shard_map
    def added(x: bf16["L M/t/d"]) -> bf16["L M/t/d"]:
        y = ops.all_gather("L M/t/d -> L M", x) * factors.astype(bf16.dtype)
        y = lax.pcast(y, types.several(("d", "t")), to="unreduced")
        return ops.psum_scatter("L M {U:d,t} -> L M/t/d", y)

    x = np.random.default_rng(0).integers(-3, 4, (3, 16)).astype(bf16.dtype)
    weights = (1 + np.arange(48) % 5).reshape(3, 16).astype(bf16.dtype)
    with jax.set_mesh(make_mesh(axes)):
        y, pull = jax.vjp(jax.jit(added), x)
        (grad,) = pull(jax.device_put(weights, y.sharding))
    by = axes["d"] * axes["t"] * factors
    np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32) * by)
    np.testing.assert_array_equal(grad.astype(np.float32), weights.astype(np.float32) * by)


FOUR = [{"r": 2, "s": 2, "c": 1, "t": 2}, {"r": 1, "s": 2, "c": 2, "t": 2}]
MOVES = [("N M/c/s/r F/t", "N/t/c/s/r M F"), ("N M/c/s/r F/t", "N/c/s/r M F/t")]
MOVES += [("N/t M/c/s/r F", "N/t/c/s/r M F"), ("N M/t/c/s/r F", "N/s/r M/t/c F")]
MOVES += [("N/t/c/s/r M F", "N M/t/c F/s/r")]


@pytest.mark.parametrize("axes", FOUR, ids=str)
@pytest.mark.parametrize("given, wanted", MOVES)
def test_all_to_all_changes_the_layout_and_nothing_else(axes, given, wanted):
    @typed_shard_map
    def moved(x: f32[given]) -> f32[wanted]:
        return ops.all_to_all(f"{given} -> {wanted}", x)

    @typed_shard_map
    def back(x: f32[wanted]) -> f32[given]:
        return ops.all_to_all(f"{wanted} -> {given}", x)

    x = np.random.default_rng(0).normal(size=(16, 24, 8)).astype("f")
    weights = np.cos(np.arange(x.size)).reshape(x.shape)
    with jax.set_mesh(make_mesh(axes)):
        np.testing.assert_array_equal(moved(x), x)
        np.testing.assert_array_equal(back(x), x)
        grad = jax.jit(jax.grad(lambda x: jnp.sum(weights * jnp.sin(moved(x)))))(x)
    assert_close(jax.device_get(grad), weights * np.cos(x), 1e-5)


@pytest.mark.parametrize("integer", [i32, u32])
def test_indices_out_of_range_give_zeros(integer):
    @typed_shard_map
    def look_up(table: f32["V/t M"], ids: integer["B/d"]) -> f32["B/d M"]:
        y = ops.index_unreduced("[V/t] M, B/d -> B/d M {U:t}", table, ids)
        return ops.psum("B/d M {U:t} -> B/d M", y)

    table = np.arange(24 * 2, dtype=np.float32).reshape(24, 2) + 1
    ids = np.array([0, 11, 12, 23, 24, 25, 2**31 - 1, -1 % 2**32]).astype(integer.dtype)
    with jax.set_mesh(make_mesh({"d": 4, "t": 2})):
        actual = jax.jit(look_up)(table, ids)
    np.testing.assert_array_equal(actual[:4], table[[0, 11, 12, 23]])
    np.testing.assert_array_equal(actual[4:], 0)


def test_gradients_of_an_entry_looked_up_often_are_summed_in_f32():
    """Would fail in bf16, where 256 + 1 is 256."""

    @typed_shard_map
    def look_up(table: bf16["V/t M"], ids: i32["B/d L"]) -> f32[""]:
        y = ops.index_unreduced("[V/t] M, B/d L -> B/d L M {U:t}", table, ids)
        y = ops.psum("B/d L M {U:t} -> B/d L M", y).astype(jnp.float32)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d L M -> {U:d}", y))

    with jax.set_mesh(make_mesh({"d": 4, "t": 2})):
        table, ids = jnp.zeros((4, 2), jnp.bfloat16), jnp.zeros((8, 1000), jnp.int32)
        grad = jax.jit(jax.grad(look_up))(table, ids.at[:, 0].set(3))
    np.testing.assert_allclose(grad.astype(jnp.float32)[:, 0], [7992, 0, 0, 8], rtol=1e-2)


@typed_shard_map
def logits(x: bf16["B/d M"], w: bf16["V/t M"]) -> f32["B/d V/t"]:
    return ops.einsum_unreduced("B/d M, V/t M -> B/d V/t", x, w, dtype=f32)


@typed_shard_map
def rounded_logits(x: bf16["B/d M"], w: bf16["V/t M"]) -> bf16["B/d V/t"]:
    return ops.einsum_unreduced("B/d M, V/t M -> B/d V/t", x, w)


@typed_shard_map
def weighted_logits(x: bf16["B/d M"], w: bf16["V/t M"]) -> f32["B/d V/t"]:
    return ops.einsum_unreduced("B/d M, V/t M, B/d M -> B/d V/t", x, w, x, dtype=f32)


@typed_shard_map
def summed_logits(x: bf16["B/d M"], w: bf16["V/t M"]) -> bf16["B/d"]:
    y = ops.einsum_unreduced("B/d M, V/t M -> B/d {U:t}", x, w)
    return ops.psum("B/d {U:t} -> B/d", y)


EINSUMS = [
    (logits, lambda x, w: x @ w.T, 1e-5, 2e-2),
    (rounded_logits, lambda x, w: x @ w.T, 1e-2, 2e-2),
    (weighted_logits, lambda x, w: (x * x) @ w.T, 1e-2, 2e-2),
    (summed_logits, lambda x, w: (x @ w.T).sum(1), 1e-2, 3e-2),
]


@pytest.mark.parametrize("function, same, rtol, tolerance", EINSUMS)
def test_einsums_of_bf16_round_only_their_result_and_its_gradient(function, same, rtol, tolerance):
    """Compares with f32. Here, on CPUs, matmuls have f32 results: see ops.einsum."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((8, 16), (24, 16)))

    def grads_of(fn):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w).astype("float32") / 8)), (0, 1))

    with jax.set_mesh(make_mesh(MESHES[0])):
        x, w = jax.device_get((x, w))
        values = jax.device_get(jax.jit(function)(x, w)).astype(np.float32)
        grads = jax.device_get(jax.jit(grads_of(function))(x, w))
        jaxpr = jax.make_jaxpr(grads_of(function))(x, w)
    exact = [jnp.asarray(a, jnp.float32) for a in (x, w)]
    wanted = np.asarray(same(*exact))
    np.testing.assert_allclose(values, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())
    wanted_grads = jax.device_get(grads_of(same)(*exact))
    assert_close([g.astype(np.float32) for g in grads], wanted_grads, tolerance)
    products = [e for e, *_ in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    dtypes = [tuple(str(x.aval.dtype) for x in (*e.invars, *e.outvars)) for e in products]
    assert len(dtypes) >= 3 or function is summed_logits, "one forward, two backward"
    if function in (logits, rounded_logits):
        assert set(dtypes) == {("bfloat16", "bfloat16", "float32")}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sums_of_squares_have_each_number_once_and_are_by_layer_also_if_layers_are_split(axes):
    @pytree_dataclass
    class Tree:
        whole: f32["L"]
        layers: f32["layers M/d F/t"]
        split: f32["layers/t M/d"]
        half: bf16["V/t/d 1"]

    @typed_shard_map
    def squares(tree: Tree) -> tuple[f32[""], f32[""], f32["8"], f32["8"], f32[""]]:
        by_name = ops.sums_of_squares(Tree, tree, "layers")
        return ops.sum_of_squares(Tree, tree), *by_name.values()

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype("f") for size in ((3,), (8, 16, 8), (8, 16), (24, 1))]
    arrays[-1] = arrays[-1].astype(bf16.dtype)
    with jax.set_mesh(make_mesh(axes)):
        total, *actual = jax.jit(squares)(Tree(*arrays))
    wanted = [np.square(array.astype(np.float64)) for array in arrays]
    np.testing.assert_allclose(total, sum(map(np.sum, wanted)), rtol=1e-5)
    for sums, each in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(sums, each.reshape(*sums.shape, -1).sum(-1), rtol=1e-5)


# By name, at sizes that tell all dimensions apart; run_misuse has the arrays.
MISUSES = """
all_gather of nothing: all_gather("B/d L M/t -> B/d L M/t", x)
all_gather with a wrong dimension: all_gather("M/d F/t -> M/d F", x[0])
all_gather along the wrong axis: all_gather("M/t F/t -> M F/t", w)
all_gather under another split: all_gather("M/t F/d -> M F/d", w)
all_gather that reorders: all_gather("M/d F/t -> F/t M", w)
all_gather of a pending sum: all_gather("B/d L M {U:t} -> B L M {U:t}", owed)
all_gather over an axis order: all_gather("M/d/t -> M", x[0, 0])
all_gather over an unknown axis: all_gather("M/x F/t -> M F/t", w)
all_gather of a list: all_gather("M/d -> M", [1.0])
all_gather with a bad string: all_gather("M/ F/t -> M F/t", w)
all_gather of two operands: all_gather("M/d F/t -> M F/t", w, w)
psum_scatter of what owes nothing: psum_scatter("B/d L M {U:t} -> B/d L M/t", whole)
psum_scatter that declares no sum: psum_scatter("B/d L M -> B/d L M/t", owed)
psum_scatter that scatters nothing: psum_scatter("B/d L M {U:t} -> B/d L M", owed)
psum_scatter of one axis, paying two: psum_scatter("L M {U:d,t} -> L M/t", twice_owed)
psum twice: psum("B/d L M {U:t} -> B/d L M", psum("B/d L M {U:t} -> B/d L M", owed))
psum that pays nothing: psum("B/d L M/t -> B/d L M/t", x)
psum that owes more: psum("L M {U:t} -> L M {U:d}", owed[0])
psum that changes a split: psum("B/d L M {U:t} -> B/d L M/t", owed)
reduce_sum that hides the sum: reduce_sum("B/d L M/t -> B/d L", x)
reduce_sum of nothing: reduce_sum("B/d L M/t -> B/d L M/t", x)
reduce_sum that reorders: reduce_sum("B/d L M/t -> L B/d {U:t}", x)
reduce_sum that forgets a debt: reduce_sum("B/d L M {U:t} -> B/d M", owed)
reduce_max of a pending sum: reduce_max("B/d L M {U:t} -> B/d L", owed)
einsum that hides the sum: einsum_unreduced("B/d L M/t, M/t -> B/d L", x, x[0, 0])
einsum of one name with two splits: einsum_unreduced("B/d L M/t, M/d F/t -> B/d L F/t", x, w)
einsum without the gather: einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, w)
einsum of two dtypes: einsum_unreduced("B/d L M/t, M/t -> B/d L M/t", x, x[0, 0].astype("bfloat16"))
einsum with a pending operand: einsum_unreduced("B/d L M {U:t}, L -> B/d M {U:t}", owed, x[0, :, 0])
einsum that takes a debt for a value: einsum_unreduced("B/d L M, L -> B/d M", owed, x[0, :, 0])
einsum with a new name on the right: einsum_unreduced("B/d L M/t -> B/d L M/t N", x)
index_unreduced without brackets: index_unreduced("M/d F/t, B/d L -> B/d L F/t", w, ids)
index_unreduced that hides the sum: index_unreduced("[F/t], B/d L -> B/d L", w[0], ids)
index_unreduced by floats: index_unreduced("[F/t], B/d -> B/d {U:t}", w[0], x[:, 0, 0])
index_unreduced sharing the second: index_unreduced("[M/t] L, B/d L -> B/d L {U:t}", x[0].T, ids)
einsum of two splits over one axis: einsum_unreduced("L M/t, L F/t -> L {U:t}", x[0], wide[0])
split of nothing: split("B/d L M/t -> B/d L M/t", x)
split of a sum: split("B/d L M {U:t} -> B/d L M/t", owed)
split that gathers: split("B/d L M/t -> B/d L M", x)
indices of a dimension that isn't there: indices("B/d L M/t -> M", x)
indices of two dimensions: indices("B/d L M/t -> L M/t", x)
broadcast that gathers: broadcast("B/d L M/t -> B/d L M", x)
all_to_all of nothing: all_to_all("M/d F/t -> M/d F/t", w)
all_to_all that gathers: all_to_all("M/d F/t -> M F", w)
all_to_all that reorders: all_to_all("M/d F/t -> F/d M/t", w)
all_to_all that exchanges: all_to_all("M/d F/t -> M/t F/d", w)
all_to_all of a sum: all_to_all("B/d L M {U:t} -> B L/d M {U:t}", owed)
all_gather of two arrays: all_gather("M/d, M/d -> M", w[:, 0], w[:, 0])
all_gather with the string last: all_gather(w, "M/d F/t -> M F/t")
sum_of_squares of what differs: sum_of_squares(f32["F/t"], w.sum(0))
sum_of_squares of a pending sum: sum_of_squares(f32["B/d L M {U:t}"], owed)
brackets in another op: all_gather("[M/d] F/t -> M F/t", w)
"""
MISUSES = dict(line.split(": ", 1) for line in MISUSES.strip().splitlines())


def run_misuse(call):
    @pytree_dataclass
    class Arrays:
        x: f32["B/d L M/t"]
        w: f32["M/d F/t"]
        ids: i32["B/d L"]

    @typed_shard_map
    def fn(arrays: Arrays) -> f32[""]:
        whole = ops.all_gather("B/d L M/t -> B/d L M", arrays.x)
        products = whole[..., None] * arrays.w[0]
        owed = ops.reduce_sum("B/d L M F/t -> B/d L M {U:t}", products)
        made = {"whole": whole, "owed": owed, "wide": products[:, :, 0]}  # B/d L F/t
        made["twice_owed"] = ops.reduce_sum("B/d L M {U:t} -> L M {U:d,t}", owed)
        return eval(call, vars(ops) | vars(arrays) | made | {"f32": f32})

    mesh, sizes = probe_mesh("dt", "BLMF")
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(jax.jit(fn), types.make_shapes(Arrays, sizes))


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_raises_at_trace_time(case):
    with golden.raises("ops.txt", case, ShardTypeError):  # by the op itself, not by `fn`
        run_misuse(MISUSES[case])


def test_an_uneven_psum_scatter_is_an_error_of_jax():
    with pytest.raises(ValueError, match="size 7 must be divisible by"):
        run_misuse('psum_scatter("B/d 7 M {U:t} -> B/d 7/t M", owed[:, :7])')


def test_ops_stand_inside_a_shard_map():
    refused = golden.raises("ops.txt", "outside a shard_map", ShardTypeError)
    with jax.set_mesh(make_mesh({"d": 4, "t": 2})), refused:
        ops.all_gather("M/d -> M", jnp.ones(8))


def test_an_einsum_of_bf16_with_a_batch_dimension_in_the_middle_runs():
    """XLA has no matmul with an f32 result there on CPUs."""
    x, w = (jnp.asarray(np.arange(n) % 7, jnp.bfloat16) for n in (2 * 4 * 3 * 8, 4 * 8 * 16))
    x, w = x.reshape(2, 4, 3, 8), w.reshape(4, 8, 16)
    run = jax.jit(jax.value_and_grad(lambda x, w: ops.einsum("bemd,edf->bemf", x, w).sum()))
    total, _ = run(x, w)
    wanted = np.einsum("bemd,edf->bemf", np.float64(x), np.float64(w)).sum()
    np.testing.assert_allclose(np.float64(total), wanted, rtol=1e-2)


def test_a_group_and_its_axes_are_the_same():
    @typed_shard_map
    def fn(x: f32["B/d L"], y: f32["B/s/r L"]) -> f32["L"]:
        products = ops.einsum_unreduced("B/d L, B/s/r L -> L {U:r,s}", x, y)
        return ops.psum("L {U:d} -> L", products + ops.reduce_sum("B/d L -> L {U:d}", y))

    x, y = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    with jax.set_mesh(make_mesh({"r": 2, "s": 2})):
        np.testing.assert_array_equal(jax.jit(fn)(x, y), (x * y + y).sum(0))


@pytest.mark.parametrize("axes", [{"d": 4, "t": 1}, {"d": 1, "t": 1}], ids=str)
@pytest.mark.parametrize("by_hand", [False, True])
def test_nothing_is_sent_over_an_axis_of_size_1(axes, by_hand):
    """JAX takes what lax.axis_index makes to vary along the axis; an op's result does not."""

    @typed_shard_map
    def fn(x: f32["B/d M/t"], w: f32["M/t"]) -> tuple[f32["B/d M/t"], f32[""]]:
        numbers = ops.indices("M/t -> M/t", w)
        if by_hand:
            numbers = lax.axis_index("t") * w.shape[0] + jnp.arange(w.shape[0])
        whole = ops.all_gather("B/d M/t -> B/d M", x * w * numbers)
        y = ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", whole))
        return ops.split("B/d M -> B/d M/t", whole), y

    x, w = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(6, dtype=np.float32)
    with jax.set_mesh(make_mesh(axes)):
        z, total = jax.jit(fn)(x, w)
        text = jax.jit(fn).lower(x, w).compile().as_text()
    np.testing.assert_array_equal(z, x * w * np.arange(6))
    assert total == np.sum(z)
    assert by_hand or text.count("replica_groups=") == (axes["d"] == 4)
