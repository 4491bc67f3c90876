"""Tests attention against one that holds all scores: the plain twin, and the TPU's
as Pallas interprets it on a CPU. tests/test_gpu.py compares cuDNN's with the twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from checks.jaxprs import equations
from kernels import attention, flash_attention
from shardlib import ops, types
from shardlib.errors import ShardTypeError
from shardlib.types import bf16, f32, i32, typed_shard_map
from tests import golden
from tests.helpers import assert_close, mesh

SIGNATURE = "B/s L/c Q K/t D, B/s L K/t D, B/s L K/t D, B/s L/c, B/s L/c, B/s L -> B/s L/c Q K/t D"


@pytest.mark.parametrize("length, parts", [(12, 1), (12, 2), (48, 4), (30, 3)])
def test_each_part_of_a_row_has_the_same_work(length, parts):
    order = attention.balanced(length, parts)
    assert sorted(order) == [*range(length)]
    keys_seen = (order + 1).reshape(parts, -1).sum(axis=1)
    assert len({*keys_seen}) == 1


def random_arrays(length):
    """q[4, L, 3, 2, 8], k and v[4, L, 2, 8], document[4, L], and a weight for each result."""
    rng = np.random.default_rng(0)
    rows, queries, keys, size = 4, 3, 2, 8
    q, weight = rng.normal(size=(2, rows, length, queries, keys, size))
    k, v = rng.normal(size=(2, rows, length, keys, size))
    document = np.cumsum(rng.random((rows, length)) < 3 / length, axis=1).astype(np.int32)
    return q, k, v, document, weight


def dense(q, k, v, document, weight, window=10**6):
    """The result and the gradients of the sum of weight * result, in f64."""

    def attend(q, k, v):
        scores = jnp.einsum("blqkd,bskd->bqkls", q, k) / np.sqrt(q.shape[-1])
        shares = jax.nn.softmax(jnp.where(sees[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bqkls,bskd->blqkd", shares, v)

    age = np.subtract.outer(*2 * [np.arange(q.shape[1])])
    sees = (document[:, :, None] == document[:, None]) & (age >= 0) & (age < window)
    with jax.enable_x64(True):
        out, pull = jax.vjp(attend, *map(jnp.float64, (q, k, v)))
        return jax.device_get((out, pull(jnp.float64(weight))))


def run(kind, arrays, on, window=10**6):
    """The result, and the gradients with respect to q, k and v. Where the mesh splits L, positions
    are in the order that gives each device an early and a late piece of a row."""
    queries, keys, places = kind["B/s L/c Q K/t D"], kind["B/s L/c K/t D"], i32["B/s L/c"]

    @jax.jit
    @typed_shard_map
    def both(
        q: queries, k: keys, v: keys, start: places, position: places, weight: queries
    ) -> tuple[queries, tuple[queries, keys, keys]]:
        def attend(q, k, v):
            k, v = (ops.all_gather("B/s L/c K/t D -> B/s L K/t D", x) for x in (k, v))
            key_position = ops.all_gather("B/s L/c -> B/s L", position)
            return attention.attention(SIGNATURE, q, k, v, start, position, key_position)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(weight)

    q, k, v, document, weight = arrays
    position = np.broadcast_to(np.arange(q.shape[1]), document.shape)
    starts = np.diff(document, axis=1, prepend=-1) > 0
    start = np.maximum.accumulate(np.where(starts, position, 0), axis=1)
    start = np.maximum(start, position + 1 - window)
    order = attention.balanced(q.shape[1], on.shape["c"])
    q, k, v, start, position, weight = (x[:, order] for x in (q, k, v, start, position, weight))
    with jax.set_mesh(on):
        floats = (jnp.asarray(x, kind.dtype) for x in (q, k, v))
        places = (jnp.asarray(x, jnp.int32) for x in (start, position))
        out = both(*floats, *places, jnp.asarray(weight, kind.dtype))
    return jax.tree.map(lambda x: np.asarray(x, np.float64)[:, np.argsort(order)], out)


# One block; two; two of 50; one, as the length is a prime; four, as the row is long.
ONE_OR_MORE = (24, 512, 512, (4, 2)), (128, 64, 128, (2, 1, 1, 2))
ONE_OR_MORE += (100, 64, 100, (1, 1)), (97, 64, 97, (1, 1)), (128, 64, 64, (4, 2))


@pytest.mark.parametrize("length, block, long, axes", ONE_OR_MORE)
def test_attention_and_its_gradients(length, block, long, axes, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(attention, "LONG", long)
    arrays = random_arrays(length)
    assert_close(run(f32, arrays, mesh(*axes)), dense(*arrays), 1e-5)


def test_the_scores_in_memory_do_not_grow_with_the_row():
    """Traces the forward and the backward pass at two lengths."""

    def largest(length, queries=1024):
        shapes = [(1, queries, 2, 2, 64), *2 * [(1, length, 2, 64)]]
        shapes += [(1, queries), (1, queries), (1, length)]
        args = [jax.ShapeDtypeStruct(s, "f4" if len(s) > 2 else "i4") for s in shapes]

        def gradients(q, k, v, *positions):
            def total(q, k, v):
                return attention.plain_attention(q, k, v, *positions).sum()

            return jax.grad(total, (0, 1, 2))(q, k, v)

        traced = jax.make_jaxpr(gradients)(*args)
        arrays = (v.aval for e in equations(traced.jaxpr) for v in e.eqn.outvars)
        return max(x.size for x in arrays if length in x.shape and x.shape[-1] == length)

    assert largest(8192) == largest(131072) == 2 * 2 * 512 * 8192
    assert largest(12288) == 2 * 2 * 256 * 12288, "341 would fit"
    assert largest(12000, 1000) == 2 * 2 * 250 * 12000
    assert largest(98304) == 2 * 2 * 32 * 98304


@pytest.fixture
def on_tpu(monkeypatch):
    """The op runs the TPU's kernel, interpreted, and not for bf16 arrays alone."""

    monkeypatch.setattr(attention, "plain_attention", attention.tpu_attention)
    with pltpu.force_tpu_interpret_mode():
        yield


# One block; four, all held at a time; two per device, which are an early and a late one, and of
# which the forward pass holds the keys and the backward pass the queries of one at a time.
@pytest.mark.parametrize(
    "length, block, held, axes, window",
    [
        (128, 512, 4096, (2, 2), 128),
        pytest.param(512, 128, 4096, (1, 1), 150, marks=pytest.mark.slow),
        pytest.param(512, 128, 256, (2, 1, 1, 2), 150, marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_and_its_gradients(length, block, held, axes, window, on_tpu, monkeypatch):
    """Leaves half of the process's eight devices free, as the interpreter's callbacks wait for
    threads that may all be busy with other callbacks."""
    monkeypatch.setattr(flash_attention, "BLOCK", block)
    monkeypatch.setattr(flash_attention, "KEYS", held)
    monkeypatch.setattr(flash_attention, "QUERIES", held)
    arrays = random_arrays(length)
    assert_close(run(f32, arrays, mesh(*axes), window), dense(*arrays, window), 1e-5)


def xla_for_cudnn(monkeypatch):
    """Makes XLA compute in cuDNN's place, from the same arguments."""
    attend = jax.nn.dot_product_attention

    def by_xla(*args, implementation, **options):
        assert implementation == "cudnn"
        return attend(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


@pytest.mark.parametrize("axes, window", [((4, 2), 9), ((2, 1, 1, 2), 9), ((1, 1, 1, 4), 99)])
def test_what_cudnn_is_told_to_attend_to(axes, window, monkeypatch):
    xla_for_cudnn(monkeypatch)
    monkeypatch.setattr(attention, "plain_attention", attention.cudnn_attention)
    arrays = random_arrays(32)
    assert_close(run(f32, arrays, mesh(*axes), window), dense(*arrays, window), 1e-5)


@pytest.mark.parametrize(
    "platform, sizes, parts, dtype, line",
    [
        ("cpu", (128, 1, 64), 1, "bf16", ""),
        ("gpu", (128, 32, 128), 1, "bf16", "attention: cudnn_attention"),
        ("gpu", (1024, 1, 8), 4, "bf16", "attention: cudnn_attention"),
        ("tpu", (512, 1, 64), 2, "bf16", "attention: tpu_attention"),
        ("tpu", (256, 1, 64), 2, "bf16", "a device's 128 tokens of a row aren't a multiple"),
        ("gpu", (100, 1, 64), 1, "bf16", "a device's 100 tokens of a row aren't a multiple"),
        ("gpu", (128, 1, 100), 1, "bf16", "the size of a head, 100, isn't"),
        ("gpu", (128, 1, 256), 1, "bf16", "the size of a head, 256, isn't"),
        ("gpu", (128, 33, 64), 1, "bf16", "more than 32 query heads share"),
        ("gpu", (128, 1, 64), 1, "f32", "kernels compute in bfloat16, not in float32"),
    ],
)
def test_the_line_that_names_the_kernel(platform, sizes, parts, dtype, line, monkeypatch):
    monkeypatch.setattr(attention, "platform", lambda: platform)
    wanted = line if line.startswith("attention") or not line else f"attention: plain, as {line}"
    with types.computing_in(dtype):
        actual = attention.note_of_kernel(dict(zip("LQD", sizes, strict=True)), parts)
    assert actual == wanted if wanted == line else actual.startswith(wanted), actual


@pytest.mark.slow
def test_blocks_that_no_query_sees_are_skipped(on_tpu, monkeypatch):
    """Keys and values that are NaN would spread into every block that is computed."""
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    q, k, v, _, weight = random_arrays(512)
    document = np.repeat([[0, 0, 1, 1]], 128, axis=1).repeat(len(q), axis=0).astype(np.int32)
    for hidden, others in (slice(384, 512), slice(0, 384)), (slice(0, 256), slice(256, 512)):
        nan = np.zeros_like(k)
        nan[:, hidden] = np.nan
        out, (by_q, _, _) = run(f32, (q, k + nan, v + nan, document, weight), mesh(1, 1))
        assert np.isfinite(out[:, others]).all() and np.isfinite(by_q[:, others]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["plain_attention", "on_tpu"])
def test_bf16_attention_adds_blocks_up_in_f32(kernel, monkeypatch, request):
    """The gradients of k and v are off by 0.0025 and 0.0018 in norm. Summed over the 16 blocks in
    bf16 they would be off by 0.0036 and 0.0033."""
    q, k, v, document, weight = (x[:1] for x in random_arrays(1024))
    q, k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, v))
    arrays = q, k, v, np.zeros_like(document), np.ones_like(weight)
    _, (_, *exact) = run(f32, arrays, mesh(1, 1))
    if kernel == "on_tpu":
        request.getfixturevalue("on_tpu")
    monkeypatch.setattr(attention, "BLOCK", 64)
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    _, (_, *actual) = run(bf16, arrays, mesh(1, 1))
    for a, b in zip(actual, exact, strict=True):
        assert np.linalg.norm(a - b) < 3e-3 * np.linalg.norm(b)


MISUSES = {
    "keys of other dimensions": SIGNATURE.replace("B/s L K/t D", "B/s L Q/t D"),
    "keys that are split like queries": SIGNATURE.replace("B/s L K/t D", "B/s L/c K/t D"),
    "a position per head": SIGNATURE.replace("B/s L/c,", "B/s L/c K/t,"),
    "positions of other rows": SIGNATURE.replace("B/s L ->", "B L ->"),
    "no queries per key": SIGNATURE.replace(" Q ", " "),
    "another result": SIGNATURE.replace("-> B/s L/c Q K/t", "-> B/s L/c K/t Q"),
}


def trace(op, signature, integers, sizes, on):
    """Traces an op on operands as its string says, of which those numbered `integers` are i32."""
    parts = [part.strip() for part in signature.split("->")[0].split(",")]
    kinds = tuple[*((i32 if i in integers else f32)[part] for i, part in enumerate(parts))]

    @typed_shard_map
    def fn(operands: kinds) -> f32[""]:
        op(signature, *operands)
        return jnp.float32(0)

    with jax.set_mesh(on):
        jax.eval_shape(fn, types.make_shapes(kinds, sizes))


@pytest.mark.parametrize("case", MISUSES)
def test_attention_refuses(case):
    sizes = {"B": 4, "L": 8, "Q": 2, "K": 2, "D": 4}
    with golden.raises("ops.txt", f"attention with {case}", ShardTypeError):
        trace(attention.attention, MISUSES[case], (3, 4, 5), sizes, mesh(2, 2, 1, 2))
