"""Casts to varying or unreduced, which send nothing; and for each platform the fastest form of
collectives (`gather`, `scatter`) and matmuls. In f32, which is for comparisons, all platforms run
the same one."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.mesh import platform
from shardlib.types import mesh_shape, several

# --- Casts ----------------------------------------------------------------------------------------


def varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts `x` to varying along `axes`; communicates nothing. See the docstring of types.py."""
    kind = jax.typeof(x).manual_axis_type
    missing = tuple(a for a in several(axes) if a not in kind.varying and a not in kind.unreduced)
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts each array to varying along all axes along which one of them varies."""
    axes = {axis for x in arrays for axis in jax.typeof(x).manual_axis_type.varying}
    return tuple(varying(x, tuple(axes)) for x in arrays)


def unreduced(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts `x`, partial sums over `axes`, to unreduced over them; communicates nothing."""
    axes = several(axes)
    return lax.pcast(varying(x, axes), axes, to="unreduced") if axes else x


# --- Forms ----------------------------------------------------------------------------------------


def narrow_on_cpu(x: jax.Array) -> bool:
    """Returns whether x is bf16 and traced for CPUs, where XLA needs other forms to be fast."""
    return x.dtype == jnp.bfloat16 and platform() == "cpu"


def gather(x: jax.Array, axes: tuple[str, ...], i: int) -> jax.Array:
    """Gathers dimension i over the axes."""
    if i and narrow_on_cpu(x):  # else XLA transposes x, entry by entry, before and after
        return lax.collapse(jnp.moveaxis(lax.all_gather(x, axes), 0, i), i, i + 2)
    return lax.all_gather(x, axes, axis=i, tiled=True)


def scatter(x: jax.Array, axes: tuple[str, ...], i: int) -> jax.Array:
    """Adds up partial sums over the axes, and splits dimension i of the total over them."""
    size, count = x.shape[i], math.prod(mesh_shape()[axis] for axis in axes)
    if i and narrow_on_cpu(x) and size % count == 0:  # as in `gather`
        parts = x.reshape(*x.shape[:i], count, size // count, *x.shape[i + 1 :])
        return lax.psum_scatter(jnp.moveaxis(parts, i, 0), axes)
    return lax.psum_scatter(x, axes, scatter_dimension=i, tiled=True)


def einsum(subscripts: str, *operands: jax.Array, dtype: Any = None) -> jax.Array:
    """`jnp.einsum` with a result dtype, by default the operands'. On CPUs it computes bf16 results
    in f32 and rounds, as XLA uses a CPU's bf16 instructions only for matmuls with f32 results."""
    narrow, (left, *others) = operands[0].dtype, subscripts.replace("->", ",").split(",")
    batch = {*left}.intersection(*others)
    # XLA has no such matmul if the left operand's batch dimensions come after another one.
    wide = narrow_on_cpu(operands[0]) and (not batch or left[0] in batch)
    if dtype in (None, narrow) and not wide:
        return jnp.einsum(subscripts, *operands)
    return widening_einsum(subscripts, dtype or narrow, *alike(*operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def widening_einsum(subscripts: str, dtype: Any, *operands: jax.Array) -> jax.Array:
    """`jnp.einsum` with a result of this dtype; for bf16 it accumulates in f32. The backward
    matmuls are in the operands' dtype."""
    wide = jnp.float32 if dtype == jnp.bfloat16 else dtype
    return jnp.einsum(subscripts, *operands, preferred_element_type=wide).astype(dtype)


def _widening_backward(subscripts: str, _: Any, operands: Any, gradient: jax.Array) -> Any:
    gradient = gradient.astype(operands[0].dtype)
    terms = subscripts.replace("->", ",").split(",")
    alone = any(sum(name in term for term in terms) == 1 for name in "".join(terms))
    if alone or not narrow_on_cpu(gradient):
        return jax.vjp(functools.partial(jnp.einsum, subscripts), *operands)[1](gradient)
    # The gradient of an operand is an einsum of the other operands and of the result's gradient.
    factors = [*zip(terms, (*operands, gradient), strict=True)]

    def product(i: int) -> jax.Array:
        others, arrays = zip(*factors[:i], *factors[i + 1 :], strict=True)
        return einsum(f"{','.join(others)}->{terms[i]}", *arrays)

    return tuple(map(product, range(len(operands))))


widening_einsum.defvjp(lambda *args: (widening_einsum(*args), args[2:]), _widening_backward)
