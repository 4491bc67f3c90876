"""Tests that only marked activations are kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import audit
from shardlib.activations import (
    explicit_activation_checkpointing,
    save_for_backward,
    sum_over_chunks,
)


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
    return sorted((aval.shape, "host" if audit.on_host(aval) else "device") for aval in kept)


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


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_sum_over_chunks_has_the_gradient_of_the_whole(chunks):
    """Includes a factor outside the sum, which the chunks' own gradients don't include."""
    keys = jax.random.split(jax.random.key(0), 4)
    w, x, bias = (
        jax.random.normal(k, s) for k, s in zip(keys, [(7, 5), (3, 8, 7), (5,)], strict=False)
    )
    scale = jax.random.normal(keys[3], (3, 8))

    def part(shared, x, scale):
        w, bias = shared
        return jnp.sum(jnp.sin(x @ w + bias) * scale[..., None]), {"x": jnp.sum(x, axis=(0, 1))}

    def whole(w, bias, x):
        value, others = part((w, bias), x, scale)
        return 3 * value**2, others

    def chunked(w, bias, x):
        value, others = sum_over_chunks(part, chunks, (w, bias), x, scale)
        return 3 * value**2, others

    actual = jax.value_and_grad(chunked, argnums=(0, 1, 2), has_aux=True)(w, bias, x)
    wanted = jax.value_and_grad(whole, argnums=(0, 1, 2), has_aux=True)(w, bias, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4)
