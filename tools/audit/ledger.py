"""Lists what a traced function sends, computes and saves for the backward pass."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from checks.jaxprs import COLLECTIVES, axes_of, equations, line_of, makers, on_host, op_of
from kernels.attention import KERNEL
from runtime.hlo import phase

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


class Transfer(NamedTuple):
    """A collective, and what each device receives each time it runs."""

    line: str
    op: str  # with its type string; outside of ops, the primitive
    kind: str
    axes: tuple[str, ...]
    phase: str
    times: float  # at most; see `Runs`
    at_least: int
    elements: int  # of its largest operand or result on a device
    bytes: float  # received with a ring: see `share_received`


class Product(NamedTuple):
    """A matmul or convolution, and each device's FLOPs each time it runs."""

    line: str
    op: str
    phase: str
    times: float  # at most; see `Runs`
    at_least: int
    flops: int
    bytes: int  # of operands and result
    in_kernel: bool  # if so, not all of these bytes go through memory


class Saved(NamedTuple):
    """An array that each device saves in the forward pass for the backward pass. Weights that are
    gathered before the layers aren't listed."""

    line: str
    times: int  # number of such arrays: a loop stacks one per iteration
    shape: tuple[int, ...]  # of one of them
    dtype: str
    bytes: int  # of all of them
    memory: str  # "device" or "host"
    statistics: bool = False  # True for softmax statistics, which only a fused kernel saves


class Ledger(NamedTuple):
    transfers: list[Transfer]
    products: list[Product]
    saved: list[Saved]
    kernel_bytes: int  # the least that ops with a kernel read and write


def ledger(jaxpr: Any, axes: dict[str, int]) -> Ledger:
    """Lists what each device of a mesh with these axes receives, computes and, if there is a
    gradient, saves in a function under `typed_shard_map`, given its jaxpr by `layout.traced`. Where
    TPUs and GPUs run a fused kernel, lists the matmuls of its plain twin."""
    transfers, products = [], []
    renamed, first = dict[int, int](), dict[Any, Any]()  # variables by identity; collectives
    for eqn, path, line, runs, _ in equations(jaxpr):
        name, op = eqn.primitive.name, op_of(eqn, path)
        arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        given = [renamed.get(id(v), id(v)) for v in eqn.invars]
        if name == "name":
            renamed[id(eqn.outvars[0])] = given[0]
        over = axes_of(eqn) if name in COLLECTIVES else ()
        if over := tuple(axis for axis in axes if axis in over and axes[axis] > 1):
            n = math.prod(axes[axis] for axis in over)
            kind = COLLECTIVES[name]
            elements = max(array.size for array in arrays)
            size = elements * arrays[0].dtype.itemsize * share_received(kind, n)
            # Compilers merge collectives of the same array: a tied embedding's two gathers.
            same = name, str(eqn.params), *given
            at_least = runs.at_least if first.setdefault(same, eqn) is eqn else 0
            row = (line, op, kind, over, phase(path), runs.times, at_least, elements, size)
            transfers.append(Transfer(*row))
        if name in PRODUCTS:
            flops = _flops(eqn, [array.shape for array in arrays])
            size, in_kernel = sum(map(nbytes, arrays)), KERNEL in path
            products.append(Product(line, op, phase(path), *runs, flops, size, in_kernel))
    bodies = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    saved = [array for body in bodies for array in _saved(body)]
    return Ledger(transfers, products, saved, _kernel_bytes(jaxpr))


def share_received(kind: str, count: int) -> float:
    """Returns the share of a collective's largest array that each of `count` devices receives, with
    a ring: the other devices' parts, twice in an all-reduce; all of it in a permute."""
    others = (count - 1) / count
    return {"all-reduce": 2 * others, "permute": 1, "collective-permute": 1}.get(kind, others)


def nbytes(array: Any) -> int:
    """Returns the bytes of an array with this shape and dtype."""
    return int(array.size * array.dtype.itemsize)


def _flops(eqn: JaxprEqn, shapes: list[tuple[int, ...]]) -> int:
    """Returns the FLOPs of a matmul or convolution, including those on zeros that pad or dilate the
    convolution's operand. Assumes that the groups of a ragged_dot cover all rows."""
    params = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(shapes[2]) * math.prod(shapes[1]) // features
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    (_, summed), (_, batch) = numbers
    matched = {*summed, *batch, *(ragged.rhs_group_dimensions if ragged else ())}
    return 2 * math.prod((*shapes[0], *(n for i, n in enumerate(shapes[1]) if i not in matched)))


def _kernel_bytes(jaxpr: Any) -> int:
    """Returns the least bytes that ops with a kernel read and write in one run of a jaxpr: those of
    arrays that other equations also use."""
    touched: list[set[Any]] = [{*jaxpr.invars}, set()]
    touched[0].update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    size = 0
    for eqn in jaxpr.eqns:
        in_kernel = KERNEL in str(eqn.source_info.name_stack)
        variables = (*eqn.invars, *eqn.outvars)
        touched[in_kernel].update(v for v in variables if not isinstance(v, Literal))
        apart = in_kernel or eqn.primitive.name == "cond"
        for inner in () if apart else jaxprs_in_params(eqn.params):
            size += eqn.params.get("length", 1) * _kernel_bytes(inner)
    return size + sum(nbytes(v.aval) for v in set.intersection(*touched))


def _saved(body: Any) -> Iterator[Saved]:
    """Yields the arrays that the forward pass saves for the backward pass; of a loop, those that it
    stacks. A loop over microbatches has both passes in its body, so it saves what one iteration
    saves. An attention kernel also saves the logarithm of the softmax's denominator for each query
    and head."""
    made_by: dict[Any, Any] = {}
    for eqn in body.eqns:
        name, path = eqn.primitive.name, str(eqn.source_info.name_stack)
        when = phase(path)
        if name == "scan" and when == "update":
            (inner,) = jaxprs_in_params(eqn.params)
            yield from _saved(inner)
        if when in ("backward", "recomputed"):
            for var in eqn.invars:
                if not isinstance(var, Literal) and (maker := made_by.pop(var, None)):
                    array, times, shape = var.aval, 1, var.aval.shape
                    index = maker.outvars.index(var)
                    if maker.primitive.name == "scan":
                        (inner,) = jaxprs_in_params(maker.params)
                        if inner.outvars[index].aval.shape != shape:
                            times, shape = maker.params["length"], shape[1:]
                    chain = makers(maker, index)
                    line = next(filter(None, map(line_of, chain)), "")
                    memory = "host" if on_host(array) else "device"
                    yield Saved(line, times, shape, array.dtype.name, nbytes(array), memory)
                    if KERNEL in str(chain[0].source_info.name_stack):
                        shape, size = shape[:-1], 4 * array.size // shape[-1]
                        yield Saved(line, times, shape, "float32", size, memory, statistics=True)
        elif when == "forward":
            gathered = op_of(eqn, path).startswith("all_gather(")
            of_weights = gathered and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
            made_by |= dict.fromkeys(() if of_weights else eqn.outvars, eqn)
