"""Explains gradients that aren't finite."""

from typing import Any

import jax
import jax.numpy as jnp

from configs.sizes import dimensions
from data.loader import TokenBatch, random_batch
from shardlib.types import make_shardings, named

# In one program, which allocates nothing of the array's size.
finite_square = jax.jit(lambda x: jnp.isfinite(jnp.square(x).sum()))


def explanation(gradients: Any, config: Any, weights: Any, batch: Any, origin: str) -> str:
    """Names a batch's gradients whose norm isn't finite, the batch's origin, and a cure. Recomputes
    them with `gradients(weights, batch, config)`. If those of random tokens aren't finite either,
    the weights are to blame."""

    def bad(batch: Any) -> str:
        grads = named(gradients(weights, batch, config))
        return ", ".join(name for name, grad in grads.items() if not finite_square(grad))

    tokens = random_batch(dimensions(config), config.model.start_token, config.mesh.c)
    cure = "Skip that batch with training.skip_steps, or raise training.max_skipped_updates"
    if bad(jax.device_put(tokens, make_shardings(TokenBatch))):
        cure = "Random tokens have such gradients, too: the weights diverged, or an edit divides "
        cure += "by zero. Correct it, or lower the learning rate, and remove checkpoints since then"
    names = bad(batch) or "none, with the current weights"
    return f"gradients whose norm is not finite: {names}; {origin}. {cure}"
