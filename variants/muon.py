"""Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

Muon updates the matrices of layers, and AdamW the rest. train.py calls `update` in a step,
`of_adamw` for the types of second moments, and `note` to log which weights AdamW updates.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib import ops
from shardlib.errors import UserError
from shardlib.types import compute, f32, mesh_shape, named, parse_spec, typechecked

# The layouts of weights that hold matrices. For each, the layout of N matrices as they are stored,
# and with some whole matrices on each device, to be orthogonalized. w_q is one matrix of M by
# Q*K*D, all heads at once, and each expert has three. AdamW updates weights of other layouts:
# embeddings, gains, biases and routers.
MATRICES = {
    "layers M/c/d Q K/t D": ("N M/c/d Q K/t D", "N/t/c/d M Q K D"),
    "layers M/c/d K/t D": ("N M/c/d K/t D", "N/t/c/d M K D"),
    "layers M/c/d F/t": ("N M/c/d F/t", "N/t/c/d M F"),
    "layers E/t M/c/d G": ("N/t M/c/d G", "N/t/c/d M G"),
}


def of_adamw(kinds: Any) -> Any:
    """Returns the types of the weights that AdamW updates, with None in place of the others."""
    return jax.tree.map(lambda kind: None if str(kind.spec) in MATRICES else kind, kinds)


def note(kinds: Any) -> str:
    """Names the weights that AdamW updates, as their layouts aren't in MATRICES. Raises UserError
    if these are all."""
    if len(others := named(of_adamw(kinds))) == len(named(kinds)):
        problem = "no weight has a layout in MATRICES of variants/muon.py: add matrix layouts"
        raise UserError(f"training.optimizer=muon: {problem}, or choose adamw")
    return f"AdamW updates {', '.join(others)}; Muon the rest"


def update(
    adamw: Callable[..., tuple[Any, Any, Any]], moved: Callable[..., jax.Array], kinds: Any,
    weights: Any, grads: Any, mu: Any, nu: Any, hyper: Any, config: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Updates weights of the types `kinds`: matrices by Muon, the others, of which `nu` has the
    second moments, by `adamw`. `moved` moves a weight and decays it.
    A matrix changes by Nesterov's momentum, bias-corrected like Adam's, orthogonalized and then
    scaled to the size of AdamW's changes, so that AdamW's rate and decay suit it: Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2. Returns the new weights and moments."""
    kind, w, g, m, v = (named(tree) for tree in (kinds, weights, grads, mu, nu))
    others = ({name: arrays[name] for name in v} for arrays in (kind, w, g, m))
    new_w, new_m, new_v = adamw(*others, v, hyper, config)
    momentum, nesterov = hyper.momentum, hyper.nesterov
    # Matrices of one layout are stacked, so that even few layers give many devices work.
    for layout in MATRICES:
        if names := [name for name in m if name not in v and str(kind[name].spec) == layout]:
            new_m |= {name: momentum.old * m[name] + momentum.new * g[name] for name in names}
            changes = [nesterov.old * new_m[name] + nesterov.new * g[name] for name in names]
            stack = jnp.stack([change.astype(compute.dtype) for change in changes])
            for name, change in zip(names, orthogonalize(layout, stack), strict=True):
                new_w[name] = moved(kind[name], w[name], change, hyper, config)

    def like(tree: Any, arrays: dict[str, Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in named(tree)])

    return like(weights, new_w), like(mu, new_m), like(nu, new_v)


@typechecked  # in a scope of its own, as each layout has another N
def orthogonalize(layout: str, stack: jax.Array) -> jax.Array:
    """Orthogonalizes a stack of arrays of this layout: each device gets some whole matrices,
    orthogonalizes them, and gives back their parts. Zero matrices pad the stack to a multiple of
    the number of devices."""
    stored, whole = MATRICES[layout]
    (number, *matrix), (spread, *_) = parse_spec(stored).dims, parse_spec(whole).dims
    rank, mesh = len(matrix), mesh_shape()
    # Experts come first, so that each device's part along t stays in one piece.
    x = jnp.moveaxis(stack, -rank - 1, 0)
    shape = x.shape
    devices = math.prod(mesh[axis] for axis in spread.axes if axis not in number.axes)
    padding = -math.prod(shape[:-rank]) % devices

    def padded(x: jax.Array, by: int) -> jax.Array:
        """Appends zero matrices, or drops the last ones if `by` is negative."""
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, by, 0), *[(0, 0, 0)] * rank])

    x = padded(x.reshape(-1, *shape[-rank:]), padding)
    x = ops.all_to_all(f"{stored} -> {whole}", x)
    scale = 0.2 * max(x.shape[1], math.prod(x.shape[2:])) ** 0.5
    x = ops.all_to_all(f"{whole} -> {stored}", newton_schulz(x))
    x = padded(x, -padding).reshape(shape).astype(f32.dtype)
    return scale * jnp.moveaxis(x, 0, -rank - 1)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Returns matrices with about the same singular vectors and singular values near 1, by five
    Newton-Schulz steps, with the coefficients of Muon's authors."""
    shape, x = x.shape, x.reshape(*x.shape[:2], -1)
    x = x.mT if (tall := x.shape[1] > x.shape[2]) else x
    squares = jnp.sum(jnp.square(x.astype(f32.dtype)), axis=(1, 2), keepdims=True)
    x = (x / (jnp.sqrt(squares) + 1e-8)).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).reshape(shape)
