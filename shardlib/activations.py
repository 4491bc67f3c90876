"""Explicit choice of the activations that the forward pass keeps for the backward pass.

    @explicit_activation_checkpointing
    def block(x, layer):
        h = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, w_up))
        ...

Each call of `block` keeps its arguments and `h`. The backward pass recomputes everything else,
collectives included.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from shardlib.errors import ShardTypeError

SAVED, OFFLOADED = "save_for_backward", "save_for_backward(offload)"
# JAX's name for cuDNN's attention. Both of its outputs are saved: the result, and the logarithm of
# the softmax's denominator for each query and head, which its backward pass reads.
CUDNN = "dot_product_attention_fwd_wrapper"
F = TypeVar("F", bound=Callable[..., Any])


def save_for_backward(x: jax.Array, offload: bool = False) -> jax.Array:
    """Returns `x`, marked to be kept by the enclosing `explicit_activation_checkpointing`: in the
    device's memory or, with `offload`, in pinned memory of its host."""
    return checkpoint_name(x, OFFLOADED if offload else SAVED)


def explicit_activation_checkpointing(fn: F, unrolled: bool = False, in_turn: bool = False) -> F:
    """Decorator: keeps for the backward pass only inputs, values that `save_for_backward` marks,
    and the outputs of cuDNN's attention.

    If `fn` is the body of an `unrolled` loop, the compiler would merge a recomputation with the
    original, and so keep the value after all: a barrier around the arguments of the backward pass
    prevents that.

    With `in_turn` the backward pass also finishes an unrolled call's gradients before it starts the
    previous call's. Otherwise the compiler may delay some, to the end or until other collectives
    run, and keep their inputs in memory. The price: reduce-scatters of weight gradients overlap
    with less compute.
    """
    marked = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SAVED],
        names_which_can_be_offloaded=[OFFLOADED],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name == CUDNN or marked(primitive, *args, **params)

    called = (lambda *args: fn(*_together(*args))) if unrolled and in_turn else fn
    return jax.checkpoint(called, policy=policy, prevent_cse=unrolled)  # type: ignore[return-value]


@jax.custom_vjp
def _together(*args: Any) -> Any:
    """Returns its arguments. The backward pass uses none of their gradients before all are
    computed."""
    return args


def _together_backward(_: None, grads: Any) -> Any:
    leaves, tree = jax.tree.flatten(grads)
    # With jax 0.10 a barrier makes each of its arrays vary along all axes along which one of them
    # varies. A few small weights vary along fewer axes than the others, so they stay outside.
    kinds = [jax.typeof(leaf).manual_axis_type for leaf in leaves]
    alike = [i for i, kind in enumerate(kinds) if kind == kinds[0]]
    made = lax.optimization_barrier([leaves[i] for i in alike])
    for i, leaf in zip(alike, made, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


_together.defvjp(lambda *args: (args, None), _together_backward)


def sum_over_chunks(
    fn: Callable[..., Any], chunks: int, shared: Any, x: jax.Array, *others: jax.Array
) -> tuple[jax.Array, Any]:
    """Sums the results of `fn(shared, x, *others)` over chunks of dimension 1 of `x` and `others`.
    `fn` returns a scalar, and a tree that has no gradient.

    Computes the gradient of each chunk right after its value. Keeps for the backward pass only the
    gradients of `shared`, summed in f32, and of `x`, which it then multiplies by the cotangent.
    `others` have no gradient.
    """

    def split(array: jax.Array) -> jax.Array:
        return rearrange(array, "B (chunks L) ... -> chunks B L ...", chunks=chunks)

    if {array.shape[1] for array in others} - {x.shape[1]}:
        lengths = ", ".join(str(array.shape[1]) for array in (x, *others))
        raise ShardTypeError(
            f"sum_over_chunks: dimension 1 has {lengths} entries on a device. If one array splits "
            "it over more axes than another, their chunks don't belong together"
        )
    other_chunks = [split(array) for array in others]

    @jax.custom_vjp
    def summed(shared: Any, x_chunks: jax.Array) -> Any:
        return total(lax.map(lambda chunk: fn(shared, *chunk), (x_chunks, *other_chunks)))

    def total(values: Any) -> Any:
        return jax.tree.map(lambda x: x.sum(0), values)

    def forward(*inputs: Any) -> tuple[Any, Any]:
        shared, x_chunks = jax.tree.map(lambda x: x.value, inputs)

        def add(grads_so_far: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            values_and_grads = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)
            values, (shared_grads, x_grad) = values_and_grads(shared, *chunk)
            return jax.tree.map(jnp.add, grads_so_far, shared_grads), (values, x_grad)

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), shared)
        shared_grads, (values, x_grads) = lax.scan(add, zeros, (x_chunks, *other_chunks))
        return total(values), (shared_grads, x_grads)

    def backward(grads: Any, cotangents: Any) -> Any:
        cotangent, others = cotangents
        if not all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(others)):
            raise ShardTypeError(
                "sum_over_chunks: only its first result has a gradient: add a term of the loss to "
                "the scalar that the function returns, or wrap the others in lax.stop_gradient"
            )
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, (shared, x))
        return jax.tree.map(lambda g, dtype: (g * cotangent).astype(dtype), grads, dtypes)

    summed.defvjp(forward, backward, symbolic_zeros=True)
    return summed(shared, split(x))
