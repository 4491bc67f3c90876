"""Initial weights. A weight declares its layout, then its initial values:

f32["D", gain]                        at 1
f32["", Initial(0.1)]                 at 0.1
compute["M/d F/t", matrix("M")]       normal, by its fan-in
"""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import UserError
from shardlib.types import make_shapes, named

ROLES = "gains", "biases", "embeddings"  # that training.no_decay may name


@dataclasses.dataclass(frozen=True)
class Initial:
    """The initial values of a weight: all `value`, or normal with standard deviation
    1/sqrt(fan-in), where the fan-in is the product of some dimensions."""

    value: float | None = None
    fan_in: str = ""  # dimensions
    into_residual: bool = False  # divides by the square root of the number of additions
    role: str = ""  # of ROLES
    learned: bool = True  # false: its gradient is zero, and isn't sent


gain = Initial(1.0, role="gains")
bias = Initial(0.0, role="biases")
# An embedding has the unembedding's deviation; with a larger one the loss fell more slowly.
embedding = Initial(fan_in="M", role="embeddings")


def matrix(fan_in: str) -> Initial:
    return Initial(fan_in=fan_in)


def into_residual(fan_in: str) -> Initial:
    """The initial values of a projection into the residual stream: GPT-2, section 2.3."""
    return Initial(fan_in=fan_in, into_residual=True)


def declared(kinds: Any) -> Any:
    """Returns the types of weights. Raises UserError if one doesn't say how it starts."""
    for name, kind in named(kinds).items():
        if not isinstance(kind.initial, Initial):
            raise UserError(
                f"the weight {name} doesn't say how it starts: declare it like "
                f'{kind.element.name}["...", gain], or with another value from '
                'runtime/initial.py, such as matrix("M") or Initial(0.1)'
            )
    return kinds


def initial_weights(kinds: Any, sizes: dict[str, int], seed: int) -> Any:
    """Makes weights of these types. A weight's values depend only on the seed, its declaration, its
    sizes and the shortest unique end of its path, so a new weight of another name doesn't change
    them."""
    key, paths = jax.random.key(seed), [name.split("/") for name in named(kinds)]

    def own_name(path: list[str]) -> str:
        ends = (path[i:] for i in reversed(range(len(path))))
        alone = (end for end in ends if sum(x[-len(end) :] == end for x in paths) == 1)
        return "/".join(next(alone, path))

    def leaf(path: Any, kind: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        initial = kind.initial
        if initial.value is not None:
            return jnp.full_like(shape, initial.value)
        name = own_name(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
        own = jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
        deviation = math.prod(sizes[name] for name in initial.fan_in.split()) ** -0.5
        if initial.into_residual:
            deviation *= (2 * sizes["layers"]) ** -0.5
        return jax.random.normal(own, shape.shape, shape.dtype) * deviation

    return jax.tree.map_with_path(leaf, kinds, make_shapes(kinds, sizes))
