"""Tests that only marked activations are kept for the backward pass."""

import jax
import jax.numpy as jnp
import pytest

from checks import jaxprs
from shardlib import activations
from shardlib.activations import explicit_activation_checkpointing, save_for_backward
from shardlib.errors import ShardTypeError


def stacked_residuals(marked, offload=False):
    """Shape and memory of the residuals that a scan over 5 layers keeps."""

    @explicit_activation_checkpointing
    def layer(x, w):
        h = jnp.sin(x @ w["up"])  # [3, 11]
        h = save_for_backward(h, offload) if marked else h
        return jnp.cos(h @ w["down"]), ()

    def loss(w, x):
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w = {"up": jnp.ones((5, 7, 11)), "down": jnp.ones((5, 11, 7))}
    jaxpr = jax.make_jaxpr(jax.grad(loss))(w, jnp.ones((3, 7)))
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = [out.aval for out in forward.outvars if out.aval.shape[:1] == (5,)]
    return sorted((aval.shape, "host" if jaxprs.on_host(aval) else "device") for aval in kept)


@pytest.mark.parametrize("marked", [False, True])
def test_only_arguments_and_marked_activations_are_kept(marked):
    kept = [((5, 3, 7), "device"), ((5, 3, 11), "device")]
    assert stacked_residuals(marked) == kept[: 1 + marked]


def test_what_is_offloaded_is_kept_by_the_host():
    assert stacked_residuals(True, offload=True) == [((5, 3, 7), "device"), ((5, 3, 11), "host")]


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
