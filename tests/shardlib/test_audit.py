import collections
import functools
import math
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from runtime import checks
from shardlib import audit, devices, ops
from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.ops import define_op
from shardlib.types import (
    ShardTypeError,
    Stacked,
    f32,
    make_shapes,
    make_shardings,
    mesh_shape,
    pytree_dataclass,
    typed_shard_map,
)
from tests import compiled, golden
from tests.helpers import compose_config, edited
from tools.ledger import ledger

LINE = "hidden = hidden.astype(compute.dtype)"


def probe(*edits):
    module = edited("train.py", *edits)
    settings = "paths.model_name=x", "mesh={d: 2, t: 2}"
    checks.probe(compose_config("local_test_synthetic", *settings, schema=module.Config))


def test_a_part_that_is_numbered_from_0_is_found():
    position = "jnp.arange(up.shape[{}]) < 50257"
    with pytest.raises(ShardTypeError) as error:
        probe((LINE, f"hidden = gate * up * ({position.format(2)})"))
    golden.check("by_hand.txt", "indices", re.sub(r"\.py:\d+", ".py:LINE", str(error.value)))
    by_op = 'ops.indices("B/d L/c F/t -> F/t", up) < 50257'
    probe((LINE, f"hidden = gate * up * ({by_op})"))


def test_a_collective_outside_of_ops_is_found():
    case = "lax.psum(up, 't')"
    with pytest.raises(ShardTypeError) as error:
        probe((LINE, f"hidden = gate * {case}"))
    golden.check("by_hand.txt", case, re.sub(r"\.py:\d+", ".py:LINE", str(error.value)))


def ledger_of(function, axes, sizes, *hints):
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh(axes)):
        shapes = make_shapes(tuple[hints], sizes)
        traced = jax.jit(typed_shard_map(function)).trace(*shapes)
    return ledger(traced.jaxpr.jaxpr, axes)


@pytree_dataclass
class Weight:
    w: f32["M/d F/t"]


def test_the_ledger_of_a_function_that_can_be_counted_by_hand():
    """Two layers on 4 x 2, each gathering its weight over d and paying a sum over t."""

    def loss(stack: Stacked["layers", Weight], x: f32["B/d M"]) -> f32[""]:
        def layer(x, weight):
            w = ops.all_gather("M/d F/t -> M F/t", weight.w)
            h = save_for_backward(jnp.sin(ops.einsum_unreduced("B/d M, M F/t -> B/d F/t", x, w)))
            y = ops.einsum_unreduced("B/d F/t, M F/t -> B/d M {U:t}", h, w)
            return ops.psum("B/d M {U:t} -> B/d M", y), ()

        x, _ = lax.scan(explicit_activation_checkpointing(layer), x, stack)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", x))

    def gradient(stack: Stacked["layers", Weight], x: f32["B/d M"]) -> Stacked["layers", Weight]:
        return jax.grad(loss)(stack, x)

    sizes, hints = {"layers": 2, "B": 24, "M": 40, "F": 56}, (Stacked["layers", Weight],)
    counted = ledger_of(gradient, {"d": 4, "t": 2}, sizes, *hints, f32["B/d M"])
    weight, sums = 40 * 28 * 4, 6 * 40 * 4
    rows = {(r.kind, *r.axes, r.phase): (r.times, r.bytes) for r in counted.transfers}
    assert len(rows) == len(counted.transfers)
    assert rows == {
        ("all-gather", "d", "forward"): (2, weight * 3 / 4),
        ("all-gather", "d", "recomputed"): (2, weight * 3 / 4),
        ("reduce-scatter", "d", "backward"): (2, weight * 3 / 4),
        ("all-reduce", "t", "forward"): (2, 2 * sums / 2),
        ("all-reduce", "t", "backward"): (2, 2 * sums / 2),
    }
    products = collections.Counter()
    for row in counted.products:
        assert row.flops == 2 * 6 * 40 * 28
        products[row.phase] += row.times
    assert products == {"forward": 2 * 2, "recomputed": 2, "backward": 2 * 4}
    saved = sorted((row.shape, row.times, row.bytes) for row in counted.saved)
    assert saved == [((6, 28), 2, 2 * 6 * 28 * 4), ((6, 40), 2, 2 * sums)]


def test_a_result_may_be_a_number():
    @jax.jit
    @typed_shard_map
    def counted(x: f32["B"], _: None) -> tuple[f32[""], f32[""]]:
        return lax.cond(x[0] > 0, lambda: 0.0, lambda: 1.0), jnp.float32(3)

    def trace(mesh, sizes):
        with jax.sharding.use_abstract_mesh(mesh):
            return audit.traced(counted, make_shapes(f32["B"], sizes), None)

    assert audit.probe(trace, "dt", "B").eqns


def compiled_collectives(function, axes, sizes, *hints):
    with jax.set_mesh(devices.make_mesh(axes)):
        shapes, shardings = make_shapes(tuple[hints], sizes), make_shardings(tuple[hints])
        placed = jax.tree.map(lambda shape, on: shape.update(sharding=on), shapes, shardings)
        program = jax.jit(typed_shard_map(function)).lower(*placed).compile()
    return compiled.collectives(program.as_text(), axes, "test_audit.py")


@define_op
def rotate(call, x):
    (axis,), count = call.result.dims[0].axes, mesh_shape()["d"]
    return lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])


@pytest.mark.parametrize(
    "largest, refused",
    [
        (lambda x, _: jnp.max(x), True),
        (lambda x, axis: lax.psum(jnp.max(x), "t"), True),
        (lambda x, axis: lax.pmax(jnp.max(x), axis), False),
        (lambda x, axis: jnp.max(lax.all_gather(x, axis)), False),
    ],
)
def test_an_op_of_ones_own_takes_no_part_for_the_whole(largest, refused):
    @define_op
    def longest(call, x):
        return largest(x, call.operands[0].axes)

    def scaled(x: f32["B/d"]) -> f32["B/d"]:
        return x / longest("B/d -> ", x)

    mesh = devices.abstract_mesh({"d": 2, "t": 3})
    message = "it takes a part over d for the whole"
    expected = pytest.raises(ShardTypeError, match=message) if refused else nullcontext()
    with jax.sharding.use_abstract_mesh(mesh):
        shape = make_shapes(f32["B/d"], {"B": 8})
        with expected:
            jax.make_jaxpr(typed_shard_map(scaled))(shape)


def test_a_permute_receives_a_part_once_and_so_does_its_gradient(own_metadata):
    def loss(x: f32["P/d M/t"]) -> f32[""]:
        y = jnp.sin(rotate("P/d M/t -> P/d M/t", jnp.sin(x)))
        return ops.psum("{U:d,t} -> ", ops.reduce_sum("P/d M/t -> {U:d,t}", y))

    def gradient(x: f32["P/d M/t"]) -> f32["P/d M/t"]:
        return jax.grad(loss)(x)

    axes, sizes = {"d": 4, "t": 2}, {"P": 4, "M": 40}
    transfers = ledger_of(gradient, axes, sizes, f32["P/d M/t"]).transfers
    rows = [(r.kind, r.axes, r.phase, r.elements, r.bytes) for r in transfers]
    assert rows == [("permute", ("d",), phase, 20, 80) for phase in ("forward", "backward")]
    actual = compiled_collectives(gradient, axes, sizes, f32["P/d M/t"])
    assert compiled.unexplained(transfers, actual) == ([], [])


# The numbers beside gathers_in_loops: at most and, if it may be fewer, at least.
RUNS = [(3, 1), (3, 3), (15, 1), (15, 3), (15, 15), (3, 1), (3, 3), (3, 0), (math.inf, 1)]
RUNS += [(15, 5), (math.inf, 7)]
TWO_BY_FOUR = f32["two M/d"], f32["B/d M"]
SIZES = {"two": 2, "M": 4, "B": 6}


def gathers_in_loops(w: f32["two M/d"], x: f32["B/d M"]) -> f32["B/d M"]:
    @jax.jit
    def both(a, b):
        return jnp.sin(a), jnp.sin(b)

    def three(x, a):
        def five(x, b):
            x += ops.all_gather("M/d -> M", w[0])  # 15, 1
            x += ops.all_gather("M/d -> M", w[0] * a)  # 15, 3
            dead = ops.all_gather("M/d -> M", w[1] + b)
            return x + ops.all_gather("M/d -> M", w[0] * b), dead[0]  # 15

        def one(x, part):
            x += ops.all_gather("M/d -> M", part)  # 3, 1: a slice, but always the same
            return x + ops.all_gather("M/d -> M", part * x[0, 0]), ()  # 3

        def branch():
            return x + ops.all_gather("M/d -> M", w[1] * a)  # 3, 0

        def alone(total, b):
            return total + ops.all_gather("M/d -> M", w[1] * b), ()  # 15, 5: the loop is the same

        x += lax.scan(alone, lax.pcast(jnp.zeros(4), "d", to="varying"), jnp.arange(5.0))[0]
        same, other = both(w[0], w[0] * a)
        x += ops.all_gather("M/d -> M", same)  # 3, 1
        x += ops.all_gather("M/d -> M", other)  # 3
        x, _ = lax.scan(five, x, jnp.arange(5.0))
        x, () = lax.scan(one, x, w[1:])
        return lax.cond(a > 1, branch, lambda: 2 * x), ()

    def more(state):
        def seven(x, a):
            return x + ops.all_gather("M/d -> M", w[0] * a * i), ()  # 7 or more

        i, x = state
        x += ops.all_gather("M/d -> M", w[0] * i)  # 1 or more
        return i + 1, lax.scan(seven, x, jnp.arange(7.0))[0]

    x, () = lax.scan(three, x, jnp.arange(3.0))
    return lax.while_loop(lambda state: state[0] < 2, more, (0.0, x))[1]


def test_how_often_at_least_and_at_most_a_loop_communicates(own_metadata):
    """XLA moves gathers out of loops, within these bounds."""
    axes = {"d": 2}
    ledger = ledger_of(gathers_in_loops, axes, SIZES, *TWO_BY_FOUR)
    assert sorted((row.times, row.at_least) for row in ledger.transfers) == sorted(RUNS)
    actual = compiled_collectives(gathers_in_loops, axes, SIZES, *TWO_BY_FOUR)
    assert compiled.unexplained(ledger.transfers, actual) == ([], [])
    # It moves all as far as it can: out of both loops, the inner one, and an entire loop. The
    # program's text counts both branches of a cond, and two iterations of the while_loop.
    times = [1, 3, 1, 3, 15, 1, 3, 3, 5, 2, 14]
    assert sorted(row.times for row in actual) == sorted(times)


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


def test_a_cast_that_becomes_an_all_reduce_backward_is_found():
    """The gradient of `scale`, which is replicated, sums over d, as the array that it multiplies
    varies along d."""

    def loss(scale: f32["M"], x: f32["B/d M"]) -> f32[""]:
        y = jnp.sin(x * scale)
        return ops.psum("{U:d} -> ", ops.reduce_sum("B/d M -> {U:d}", y))

    on, sizes = devices.probe_mesh("dt", "BM")
    with jax.sharding.use_abstract_mesh(on):
        shapes = make_shapes(tuple[f32["M"], f32["B/d M"]], sizes)
        traced = jax.jit(jax.grad(typed_shard_map(loss))).trace(*shapes)
    with pytest.raises(ShardTypeError) as error:
        audit.check(traced.jaxpr, dict(on.shape), sizes)
    golden.check("by_hand.txt", "a replicated weight", str(error.value))


def test_a_length_tells_its_dimensions_and_splits():
    """Checks lengths alone and in products of two, and that full, half and neighboring lengths
    aren't taken for parts."""
    axes = "rdtx"
    on, sizes = devices.probe_mesh(axes, [f"dim{i}" for i in range(12)])
    shape = dict(on.shape)
    for name, size in sizes.items():
        for picked in range(2 ** len(axes)):
            split = [a for i, a in enumerate(reversed(axes)) if picked >> i & 1]
            length = size
            for axis in split:
                length //= shape[axis]
            assert length % 2 == 0, "RoPE halves"
            assert [str(d) for d in audit.dims_of(length, shape, sizes)] == [
                "/".join([name, *split])
            ]
            other = sizes["dim0" if name != "dim0" else "dim1"]
            both = audit.dims_of(length * other, shape, sizes)
            assert [dim.over for dim in both] == [tuple(split)] * 2
        for other in size // 2, size - 1, size + 1, 2 * size, 1, 2, 3, 14, 128:
            assert not any(dim.over for dim in audit.dims_of(other, shape, sizes))


def test_an_error_names_the_dimensions_whose_lengths_it_has():
    on, sizes = devices.probe_mesh("dt", "BLM")
    axes, (rows, length, model) = dict(on.shape), sizes.values()
    shape = rows // axes["d"], length // 2, model // axes["t"], rows * length
    numbers = f"128 {rows // 7} x.py:{rows} f{rows} {rows}.5"  # no lengths
    message = f"{shape} is f32[{model},0] of size {rows}. {numbers}"
    expected = f"(B/d, L/2, M/t, B*L) is f32[M,0] of size B. {numbers}"
    assert audit.name_lengths(message, axes, sizes) == expected


def test_an_error_without_lengths_keeps_its_text():
    def trace(mesh, sizes):
        raise KeyError("rows")

    with pytest.raises(KeyError, match=r"^'rows'$"):
        audit.probe(trace, "dt", "BLM")
