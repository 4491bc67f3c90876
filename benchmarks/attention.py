"""Times ways to compute a config's attention on one GPU, and compares each with the way that
training runs, cuDNN with a mask.

    python -m benchmarks.attention --config-name=c4_a100x1_84m document=500 spread=1

Computes one microbatch. Documents have `document` tokens, or that many on average, with lengths
whose logarithms have the standard deviation `spread`. The rows printed are:

    mask           as in training: a mask of queries by keys, which sees no later key
    causal         no mask. Exact only if each row is one document; else a bound
    packed         cuDNN with offsets of documents or, if a row has more than `most`, the mask.
                   most=0: as many as the fullest row; 2 with attention=packed. No windows
    tokamax        tokamax's kernels, given each query's first key: pip install tokamax
    tokamax_mask   the same, given the mask of documents

The error is the norm of the difference from `mask`, over the norm of `mask`: the largest of the
result's and the gradients'. The memory is the compiled program's besides arguments and
results, with cuDNN's workspaces. attention=NAME times the config's whole step with one of these
instead, and prints the table of tools.benchmark. Writes no files.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import train
from kernels import attention
from runtime.program import program
from runtime.values import NonNegativeInt, PositiveInt, one_of
from shardlib.activations import save_for_backward
from tools import benchmark
from tools.arguments import NOT_USED

REPEATS = 10


@dataclasses.dataclass(unsafe_hash=True)
class AttentionConfig(train.Config):
    document: PositiveInt = 500
    spread: float = 0.0
    most: NonNegativeInt = 0
    attention: Annotated[str, one_of("none mask causal packed tokamax tokamax_mask")] = "none"


# --- Ways to compute it ---------------------------------------------------------------------------
# Each has the arguments and the result of `attention.cudnn_attention`, which is "mask".


def causal(q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array) -> jax.Array:
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = jax.nn.dot_product_attention(heads, k, v, is_causal=True, implementation="cudnn")
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])


def documents(start: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the lengths, i32[B, most], of each row's documents, the offsets, i32[B, most + 1], of
    their first tokens, both -1 where there is no document, and whether no row has more than `most`.
    `start` [B, L] is where each token's document starts."""
    length = start.shape[1]
    number = jnp.cumsum(start == jnp.arange(length), axis=1)  # of a token's document, from 1
    before = number[:, :, None] <= jnp.arange(most + 1)  # [b, l, j]: in one of the first j
    offsets = before.sum(axis=1, dtype=jnp.int32)
    lengths = jnp.diff(offsets)
    fits = (number[:, -1] <= most).all()
    return jnp.where(lengths, lengths, -1), jnp.where(offsets < length, offsets, -1), fits


def by_offsets(
    heads: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Attention within documents by cuDNN, on Hopper and newer GPUs; not public in JAX."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(
        heads, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        scale=1 / math.sqrt(k.shape[-1]), mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip


def packed(
    q: jax.Array, k: jax.Array, v: jax.Array,
    start: jax.Array, position: jax.Array, key_position: jax.Array, most: int,
) -> jax.Array:  # fmt: skip
    lengths, offsets, fits = documents(start, most)

    def by_documents(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        heads = rearrange(q, "B L Q K D -> B L (K Q) D")
        mixed = by_offsets(heads, k, v, lengths, offsets)
        return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])

    def by_mask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.cudnn_attention(q, k, v, start, position, key_position)

    return lax.cond(fits, by_documents, by_mask, q, k, v)


def unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: makes a JAX primitive of `fn`, whose kernels shard_map's checks refuse. Results
    vary over the same axes as the first argument."""
    operation = Primitive(fn.__name__)
    operation.multiple_results = True

    def whole(arrays: Any) -> list[Any]:
        return [jax.core.ShapedArray(array.shape, array.dtype) for array in arrays]

    def unsharded() -> Any:
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))

    def types(*arrays: Any) -> list[Any]:
        with unsharded():
            results = jax.eval_shape(fn, *whole(arrays))
        where = arrays[0].sharding.update(spec=jax.sharding.PartitionSpec())
        kind: Any = {"sharding": where, "manual_axis_type": arrays[0].manual_axis_type}
        return [jax.core.ShapedArray(x.shape, x.dtype, **kind) for x in results]

    def lower(context: Any, *arrays: Any) -> Any:
        with unsharded():
            made = mlir.lower_fun(fn, multiple_results=True)
            return made(context.replace(avals_in=whole(context.avals_in)), *arrays)

    operation.def_abstract_eval(types)
    mlir.register_lowering(operation, lower)
    return operation.bind


@functools.cache
def tokamax_operation() -> tuple[Any, Any]:
    """Returns tokamax's operation, which is private, and its class of masks."""
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu  # type: ignore[import-not-found]

    return pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(), base.Mask


def tokamax_mask(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, *_: jax.Array
) -> jax.Array:
    run, mask = tokamax_operation()
    seen = start[:, None, :, None] <= jnp.arange(k.shape[1])
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = run(heads, k, v, mask=mask(seen, is_causal=True))
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])


@unchecked
def tokamax_forward(q: Any, k: Any, v: Any, start: Any) -> tuple[jax.Array, ...]:
    run, mask = tokamax_operation()
    seen = mask(k_start=start[:, None], is_causal=True)
    mixed, statistics = run(q, k, v, mask=seen, return_residuals=True)
    return mixed, *statistics


@unchecked
def tokamax_backward(
    q: Any, k: Any, v: Any, start: Any, mixed: Any, peak: Any, total: Any, grad: Any
) -> tuple[jax.Array, ...]:
    run, mask = tokamax_operation()
    bound = run.bind(q, k, v, mask=mask(k_start=start[:, None], is_causal=True))
    settings = {name: x for name, x in bound.kwargs.items() if name != "return_residuals"}
    grads = run.vjp((peak, total), mixed, grad, q, k, v, **settings)
    return grads["q"], grads["k"], grads["v"]


@jax.custom_vjp
def tokamax_heads(*inputs: jax.Array) -> jax.Array:
    return tokamax_forward(*inputs)[0]


def _forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    results = tuple(map(save_for_backward, tokamax_forward(*inputs)))
    return results[0], (*inputs, *results)


def _backward(saved: Any, grad: jax.Array) -> tuple[jax.Array | None, ...]:
    return *tokamax_backward(*saved, grad), None  # none for `start`


tokamax_heads.defvjp(_forward, _backward)


def tokamax(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, *_: jax.Array) -> jax.Array:
    heads = rearrange(q, "B L Q K D -> B L (K Q) D")
    mixed = tokamax_heads(heads, k, v, start.astype(jnp.int32))
    return rearrange(mixed, "B L (K Q) D -> B L Q K D", K=k.shape[2])


# --- Times ----------------------------------------------------------------------------------------


def random_start(config: AttentionConfig, rows: int, length: int) -> np.ndarray:
    """Draws documents end to end. Returns the position in its row, i32[rows, length], at which each
    token's document starts; a document that began in an earlier row starts at 0."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(0, config.spread, size=2 * rows * length // config.document + 2)
    lengths = np.maximum(1, np.round(lengths * config.document / lengths.mean())).astype(int)
    ends = np.cumsum(lengths)
    begins = np.zeros((rows, length), bool)
    begins.flat[ends[ends < begins.size]] = True
    begins[:, 0] = True
    return np.maximum.accumulate(begins * np.arange(length, dtype=np.int32), axis=1)


def ways(config: AttentionConfig, most: int) -> dict[str, Callable[..., jax.Array]]:
    return {
        "mask": attention.cudnn_attention,
        "causal": causal,
        "packed": functools.partial(packed, most=most),
        "tokamax": tokamax,
        "tokamax_mask": tokamax_mask,
    }


def seconds(program: Any, arrays: Any) -> float:
    """Returns the median time of a run."""
    times = []
    for _ in range(REPEATS + 2):
        since = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        times.append(time.perf_counter() - since)
    return statistics.median(times[2:])


def compare(config: AttentionConfig) -> None:
    """Prints a row for each way to compute attention, as soon as it is known."""
    size, training, rng = config.model, config.training, np.random.default_rng(0)
    rows = training.tokens.batch // config.mesh.d // training.microbatches
    heads = size.n_q_per_kv, size.n_kv, size.d_head
    length = training.tokens.len
    shapes = [(rows, length, *heads), *2 * [(rows, length, *heads[1:])], (rows, length, *heads)]
    q, k, v, grad = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    position = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    start = random_start(config, rows, length)
    fullest = int((start == position).sum(axis=1).max())
    start = np.maximum(start, position + 1 - (config.model.sliding_window or length))
    arrays = q, k, v, grad, jnp.asarray(start), jnp.asarray(position)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {rows} rows of {length:,}, "
        f"{heads[0]} x {heads[1]} heads of {heads[2]}, at most {fullest} documents in a row"
    )
    print(f"{'':14}{'error':>10}{'forward, ms':>14}{'both, ms':>10}{'memory, GB':>12}", flush=True)
    wanted = None
    for name, attend in ways(config, config.most or max(fullest, 2)).items():
        try:
            forward, both = compiled(attend, arrays)
            results = both(*arrays)
            wanted = wanted or results
            error = max(map(difference, results, wanted))
            times = 1e3 * seconds(forward, arrays), 1e3 * seconds(both, arrays)
            memory = both.memory_analysis().temp_size_in_bytes / 1e9
            shown = f"{error:10.1e}{times[0]:14.2f}{times[1]:10.2f}{memory:12.2f}"
        except Exception as problem:  # libraries refuse by exceptions of many types
            shown = f"  {type(problem).__name__}: {str(problem).strip().splitlines()[0][:200]}"
        print(f"{name:14}{shown}", flush=True)


def compiled(attend: Callable[..., jax.Array], arrays: Any) -> tuple[Any, Any]:
    """Compiles the forward pass alone, and the forward and backward pass together."""

    def forward(q: Any, k: Any, v: Any, _: Any, start: Any, position: Any) -> jax.Array:
        return attend(q, k, v, start, position, position)

    def both(q: Any, k: Any, v: Any, grad: Any, *places: Any) -> tuple[jax.Array, ...]:
        mixed, pull = jax.vjp(lambda q, k, v: forward(q, k, v, None, *places), q, k, v)
        return mixed, *pull(grad)

    return jax.jit(forward).lower(*arrays).compile(), jax.jit(both).lower(*arrays).compile()


@jax.jit
def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the norm of the difference over the norm of b."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


@program(AttentionConfig, "configs", NOT_USED)
def main(config: AttentionConfig) -> None:
    if config.attention == "none":
        return compare(config)
    attention.KERNELS["gpu"] = ways(config, config.most or 2)[config.attention]
    benchmark.main.__wrapped__(config)  # type: ignore[attr-defined]
    return None


if __name__ == "__main__":
    main()
