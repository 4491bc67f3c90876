"""Tests that marks change no value, and which chunks are refused. tests/tools/test_memory.py counts
what is kept for the backward pass."""

import jax
import jax.numpy as jnp
import pytest

from shardlib import activations
from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.errors import ShardTypeError


def test_marks_change_no_value_and_no_gradient():
    def plain(x):
        return jnp.sin(jnp.sin(x))

    def marked(x):
        return jnp.sin(save_for_backward(jnp.sin(x)))

    @jax.jit
    @explicit_activation_checkpointing
    def offloaded(x):
        return jnp.sin(save_for_backward(jnp.sin(x), offload=True))

    x = jnp.arange(3.0)
    for fn in marked, explicit_activation_checkpointing(marked), offloaded:
        assert (fn(x) == plain(x)).all()
        assert (jax.vmap(jax.grad(fn))(x) == jax.vmap(jax.grad(plain))(x)).all()


def test_chunks_that_do_not_belong_together_are_refused():
    """Such as chunks of residuals that split a row over t, and of targets that don't."""
    with pytest.raises(ShardTypeError, match="has 4, 8 entries"):
        activations.sum_over_chunks(None, 2, None, jnp.ones((1, 4)), jnp.ones((1, 8)))


def test_a_gradient_of_what_has_none_is_refused():
    def loss(x, in_loss):
        total, more = activations.sum_over_chunks(
            lambda _, x: (x.sum(), {"squares": (x * x).sum()}), 2, jnp.ones(3), x
        )
        return total + (more["squares"] if in_loss else 0)

    x = jnp.ones((1, 4))
    assert (jax.grad(loss)(x, False) == 1).all()
    with pytest.raises(ShardTypeError, match="only its first result has a gradient"):
        jax.grad(loss)(x, True)
