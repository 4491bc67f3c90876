import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from checks import layout, preflight
from runtime import devices
from shardlib import ops, types
from shardlib.errors import ShardTypeError
from shardlib.mesh import abstract_mesh
from shardlib.types import f32, typed_shard_map
from tests import compiled, golden
from tests.helpers import config_of, edited, placed_shapes
from tools.audit.ledger import ledger

LINE = "hidden = hidden.astype(compute.dtype)"


def probe(*edits, mesh="{d: 2, t: 2}"):
    module = edited("train.py", *edits)
    preflight.probe(module, config_of(module, f"mesh={mesh}"))


def test_a_part_that_is_numbered_from_0_is_found():
    with golden.raises("by_hand.txt", "indices", ShardTypeError):
        probe((LINE, "hidden = gate * up * (jnp.arange(up.shape[2]) < 50257)"))
    by_op = 'ops.indices("B/d L/c F/t -> F/t", up) < 50257'
    probe((LINE, f"hidden = gate * up * ({by_op})"))


PART_FOR_WHOLE = {  # of rows, or of the sequence
    "random_bits over B/d": "jax.random.bernoulli(jax.random.key(0), 0.9, up.shape)",
    "random_split over B/d": "jax.random.split(jax.random.PRNGKey(0), len(up))[0, 0]",
    "rev over B/d": "up[::-1]",
    "gather over L/c": "jnp.take_along_axis(up, jnp.int32(h[:, :, :1] > 0), axis=1)",
    "reduce_window_sum over L/c": "lax.reduce_window(up, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "
    "[(0, 0), (2, 0), (0, 0)])",
    "conv_general_dilated over L/c": "lax.conv_general_dilated(up, w_down[None, :3], (1,), "
    "[(2, 0)], dimension_numbers=('NWC', 'IWO', 'NWC'), feature_group_count=up.shape[2])",
    "conv_general_dilated over F/t": "lax.conv_general_dilated(up, w_down[:1, None], (1,), "
    "[(0, 0)], dimension_numbers=('NWC', 'OWI', 'NWC'))",
    "fft over F/t": "jnp.fft.fft(up.astype(f32.dtype)).real",
    "ragged_dot_general over F/t": "lax.ragged_dot(up[0], w_down.swapaxes(0, 1)[None], "
    "jnp.int32([up.shape[1]]))[:, :1]",
    "approx_top_k over F/t": "lax.approx_max_k(up.astype(f32.dtype), 1)[0]",
}


@pytest.mark.parametrize("what", PART_FOR_WHOLE)
def test_a_part_that_is_taken_for_the_whole_is_found(what):
    """A step may look up other positions if the mesh doesn't split L."""
    edit = LINE, f"hidden = (gate * {PART_FOR_WHOLE[what]}).astype(gate.dtype)"
    with pytest.raises(ShardTypeError, match=f", in swiglu: {what}, of which each device has only"):
        probe(edit, mesh="{d: 2, c: 2, t: 2}")
    if "L/c" in what:
        probe(edit)


def test_each_device_may_have_another_part():
    """In a loop over rows, or over a dimension that isn't split."""
    probe((LINE, "hidden = gate * lax.map(lambda row: row / 2, up)"))
    one = "jax.random.uniform(jax.random.key(0), (3,))[1].astype(up.dtype)"
    probe((LINE, f"hidden = gate * {one}"))


@pytest.mark.parametrize("case", ["lax.psum(up, 't')", "(1 + lax.axis_index('t'))"])
def test_what_only_an_op_may_do_is_found_outside_of_ops(case):
    with golden.raises("by_hand.txt", case, ShardTypeError):
        probe((LINE, f"hidden = gate * {case}"))


FORWARD = "x, routed = forward(weights, batch, config.model, unroll)"


@pytest.mark.parametrize("setting", ["process_id", "num_hosts", "paths.model_name"])
def test_a_step_can_not_ask_for_what_a_host_or_a_run_is(setting):
    with pytest.raises(ShardTypeError, match=rf"config.{setting.partition('.')[0]} depends on"):
        probe((FORWARD, f"{FORWARD}\n    if config.{setting}: x = 2 * x"))


@pytest.mark.parametrize(
    "entries, right",
    [("..., ::2", True), ("..., ::5", False), ("..., 0", False), (":, :, :2", False), ("0", False)],
)
def test_the_same_entries_of_each_part_are_those_of_the_whole_or_refused(entries, right):
    refused = pytest.raises(ShardTypeError, match=" of an array, but ")
    with nullcontext() if right else refused:
        probe((LINE, f"{LINE}\n    hidden = hidden.at[{entries}].multiply(0.5)"))


@pytest.mark.parametrize("times", [1, 2, 7, 8])
def test_a_multiple_of_a_part_is_known_as_one(times):
    on, sizes = layout.probe_mesh("dt", "BM", "d")  # d has one device, as in some configs
    part = times * sizes["B"] // 5
    assert layout.dims_of(part, dict(on.shape), sizes) == [types.Dim("B", ("t",))]
    numbers = 64, 1024, 10_000, 32_768, 50_257, 151_936
    assert not any(layout.dims_of(n, dict(on.shape), sizes) for n in numbers)


def check(function, *hints):
    """Checks a function of these arguments, at sizes that tell B and M apart."""
    on, sizes = layout.probe_mesh("dt", "BM")
    with jax.sharding.use_abstract_mesh(on):
        traced = jax.make_jaxpr(function)(*types.make_shapes(tuple[hints], sizes))
    layout.check(traced.jaxpr, dict(on.shape), sizes)


@ops.define_op
def rotate(call, x):
    (axis,), count = call.result.dims[0].axes, types.mesh_shape()["d"]
    return lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])


LARGEST = [(lambda x, _: jnp.max(x), True), (lambda x, _: lax.psum(jnp.max(x), "t"), True)]
LARGEST += [(lambda x, axis: lax.pmax(jnp.max(x), axis), False)]
LARGEST += [(lambda x, axis: jnp.max(lax.all_gather(x, axis)), False)]


@pytest.mark.parametrize("largest, refused", LARGEST)
def test_an_op_of_ones_own_takes_no_part_for_the_whole(largest, refused):
    @ops.define_op
    def longest(call, x):
        return largest(x, call.operands[0].axes)

    def scaled(x: f32["B/d"]) -> f32["B/d"]:
        return x / longest("B/d -> ", x)

    message = "longest.*its result depends on a part over d"
    with pytest.raises(ShardTypeError, match=message) if refused else nullcontext():
        check(typed_shard_map(scaled), f32["B/d"])


def test_a_permute_receives_a_part_once_and_so_does_its_gradient(own_metadata):
    def loss(x: f32["P/d M/t"]) -> f32[""]:
        y = jnp.sin(rotate("P/d M/t -> P/d M/t", jnp.sin(x)))
        return ops.psum("{U:d,t} -> ", ops.reduce_sum("P/d M/t -> {U:d,t}", y))

    def gradient(x: f32["P/d M/t"]) -> f32["P/d M/t"]:
        return jax.grad(loss)(x)

    axes, sizes = {"d": 4, "t": 2}, {"P": 4, "M": 40}
    with jax.sharding.use_abstract_mesh(abstract_mesh(axes)):
        shapes = types.make_shapes(f32["P/d M/t"], sizes)
        jaxpr = layout.traced(typed_shard_map(gradient), (shapes,))
    transfers = ledger(jaxpr, axes).transfers
    rows = [(r.kind, r.axes, r.phase, r.elements, r.bytes) for r in transfers]
    assert rows == [("permute", ("d",), phase, 20, 80) for phase in ("forward", "backward")]
    with jax.set_mesh(devices.make_mesh(axes)):
        placed = placed_shapes(f32["P/d M/t"], sizes)
        program = jax.jit(typed_shard_map(gradient)).lower(placed).compile()
    actual = compiled.collectives(program.as_text(), axes, "test_layout.py")
    assert compiled.unexplained(transfers, actual) == ([], [])


def flops(function, *shapes):
    arrays = [jnp.ones(shape) for shape in shapes]
    jaxpr = jax.jit(function).trace(*arrays).jaxpr.jaxpr
    return [row.flops for row in ledger(jaxpr, {}).products]


def test_the_flops_of_convolutions_and_of_matmuls_by_group():
    def groups(left, right):
        sizes = jnp.array([2, 4])
        return jax.grad(lambda *x: jnp.sin(lax.ragged_dot(*x, sizes)).sum(), (0, 1))(left, right)

    assert flops(groups, (6, 4), (2, 4, 5)) == [2 * 6 * 4 * 5] * 3

    def convolution(x, kernel, **options):
        def loss(x, kernel):
            return jnp.sin(lax.conv_general_dilated(x, kernel, (2,), [(1, 0)], **options)).sum()

        return jax.grad(loss, (0, 1))(x, kernel)

    # A kernel of 3 has 4 places along 9, the first of them padded by one. For the gradient of x,
    # it has 9 along the result's gradient, whose stride of 2 is filled with zeros.
    pairs = 4 * 3, 9 * 3, 4 * 3
    each = [2 * 2 * 6 * 4 * n for n in pairs]
    assert sorted(flops(convolution, (2, 4, 9), (6, 4, 3))) == sorted(each)
    grouped = functools.partial(convolution, feature_group_count=2)
    assert sorted(flops(grouped, (2, 4, 9), (6, 2, 3))) == sorted(n // 2 for n in each)


def test_what_jnp_einsum_contracts_is_seen_where_it_is_differentiated():
    """JAX names it jvp(bm,bm->m) there, like an op."""

    def gradient(x: f32["B/d M"]) -> f32["B/d M"]:
        def loss(x: f32["B/d M"]) -> f32[""]:
            y = x * jnp.einsum("bm,bm->m", x, x)
            return ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", y))

        return jax.grad(loss)(x)

    with pytest.raises(ShardTypeError, match="dot_general over B/d, of which"):
        check(typed_shard_map(gradient), f32["B/d M"])


def test_calls_are_compared_by_what_is_in_them():
    """JAX may leave an empty call on one mesh alone."""

    def trace(function):
        return jax.make_jaxpr(lambda x: jnp.exp(function(x)))(1.0).jaxpr

    bare, called = trace(jnp.sin), trace(jax.jit(jnp.sin))
    assert [eqn.primitive.name for eqn in called.eqns] == ["jit", "exp"]
    assert not layout.parting(bare, called)
    _, *differ = layout.parting(bare, trace(jax.jit(jnp.cos)))
    assert differ == ["sin", "cos"]


def test_an_op_is_compared_by_its_operands():
    """Not by its equations, which depend on the mesh."""

    @ops.define_op
    def smallest(call: ops.Call, x: jax.Array) -> jax.Array:
        for _ in range(lax.axis_size("d")):
            x, _ = lax.sort((x, x), num_keys=1)
        return x

    def fn(x: f32["B/d M"]) -> f32["B/d M"]:
        return jnp.sin(smallest("B/d M -> B/d M", x))

    def trace(d):
        with jax.sharding.use_abstract_mesh(abstract_mesh({"d": d})):
            shapes = types.make_shapes(f32["B/d M"], {"B": 12, "M": 4})
            return jax.make_jaxpr(typed_shard_map(fn))(shapes).jaxpr

    assert not layout.parting(trace(3), trace(1))


def test_a_cast_that_becomes_an_all_reduce_backward_is_found():
    """The gradient of `scale`, which is replicated, sums over d, as the array that it multiplies
    varies along d."""

    def loss(scale: f32["M"], x: f32["B/d M"]) -> f32[""]:
        y = jnp.sin(x * scale)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", y))

    with golden.raises("by_hand.txt", "a replicated weight", ShardTypeError):
        check(jax.grad(typed_shard_map(loss)), f32["M"], f32["B/d M"])
