"""Which activations the forward pass keeps for the backward pass: those that say so.

    @explicit_activation_checkpointing
    def block(x, layer):
        h = save_for_backward(ops.einsum_unreduced("B/d L M, M F/t -> B/d L F/t", x, w_up))
        ...

Kept per call of `block`: its arguments and `h`. All else is computed again in the backward pass,
collectives included.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SAVED, OFFLOADED = "save_for_backward", "save_for_backward(offload)"
F = TypeVar("F", bound=Callable[..., Any])


def save_for_backward(x: jax.Array, offload: bool = False) -> jax.Array:
    """Marks `x` to be kept by the `explicit_activation_checkpointing` around it: in the device's
    memory, or, offloaded, in pinned memory of its host until the backward pass. Returns it."""
    return checkpoint_name(x, OFFLOADED if offload else SAVED)


def explicit_activation_checkpointing(fn: F) -> F:
    """`fn`, keeping for its backward pass only its arguments and what `save_for_backward` marks.

    Meant for the body of a `lax.scan`: outside a loop the compiler may find that what is computed
    again equals what was computed before, and keep it after all.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SAVED],
        names_which_can_be_offloaded=[OFFLOADED],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)  # type: ignore[return-value]


def sum_over_chunks(
    fn: Callable[..., jax.Array], chunks: int, shared: Any, x: jax.Array, *others: jax.Array
) -> jax.Array:
    """The sum of `fn(shared, part of x, parts of others)`, a scalar, over parts of dimension 1.

    The gradient is taken with the value, part by part, so that all that is kept for the backward
    pass is gradients: of the arrays in `shared`, summed in f32, and of `x`. `others` have none.
    """

    def split(array: jax.Array) -> jax.Array:
        return rearrange(array, "B (chunks L) ... -> chunks B L ...", chunks=chunks)

    @jax.custom_vjp
    def total(shared: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda _, part: ((), fn(shared, *part)), (), (x, *parts))[1].sum()

    def forward(shared: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def add(so_far: Any, part: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            def of_part(shared: Any, here: jax.Array) -> jax.Array:
                return fn(shared, here, *part[1:])

            value, (found, by_x) = jax.value_and_grad(of_part, argnums=(0, 1))(shared, part[0])
            return jax.tree.map(jnp.add, so_far, found), (value, by_x)

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), shared)
        by_shared, (values, by_x) = lax.scan(add, zeros, (x, *parts))
        return values.sum(), (by_shared, by_x)

    def backward(grads: Any, scale: jax.Array) -> Any:
        return jax.tree.map(lambda g, like: (g * scale).astype(like.dtype), grads, (shared, x))

    total.defvjp(forward, backward)
    parts = [split(array) for array in others]
    return total(shared, split(x))
