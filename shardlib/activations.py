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
from jax.ad_checkpoint import checkpoint_name

SAVED = "save_for_backward"
F = TypeVar("F", bound=Callable[..., Any])


def save_for_backward(x: jax.Array) -> jax.Array:
    """Marks `x` to be kept by the `explicit_activation_checkpointing` around it. Returns it."""
    return checkpoint_name(x, SAVED)


def explicit_activation_checkpointing(fn: F) -> F:
    """`fn`, keeping for its backward pass only its arguments and what `save_for_backward` marks.

    Meant for the body of a `lax.scan`: outside a loop the compiler may find that what is computed
    again equals what was computed before, and keep it after all.
    """
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)  # type: ignore[return-value]
