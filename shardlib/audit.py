"""What a traced function does, read off its jaxpr; and that it does nothing its source hides."""

import collections
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib.devices import probe_mesh, probe_total, turned
from shardlib.ops import SCOPE
from shardlib.types import Dim, ShardTypeError, own_line

# JAX's primitives that communicate, and what they are.
COLLECTIVES = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "permute",
}


class Equation(NamedTuple):
    """An equation of a jaxpr: what it is, under which names and at which line of the source it
    stands, and how often it runs."""

    eqn: JaxprEqn
    path: str
    line: str
    times: int


def equations(jaxpr: Any, outer: Equation | None = None) -> Iterator[Equation]:
    """Each equation, those of inner jaxprs too.

    What a library's jitted function holds was traced where it was first called: its line is that of
    the call at hand.
    """
    path, times = (outer.path, outer.times) if outer else ("", 1)
    jitted = outer and outer.path and outer.eqn.primitive.name == "jit"
    for eqn in jaxpr.eqns:
        line = outer.line if outer and jitted else line_of(eqn) or (outer.line if outer else "")
        here = Equation(eqn, f"{path}/{eqn.source_info.name_stack}", line, times)
        yield here
        inside = here._replace(times=times * eqn.params.get("length", 1))
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, inside)


def line_of(eqn: JaxprEqn) -> str:
    """`train.py:253`; of a loop that JAX took apart, that of its first equation which has one."""
    if line := own_line(eqn.source_info.traceback):
        return line
    inner = (line_of(e) for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return next(filter(None, inner), "")


def made_at(eqn: JaxprEqn, index: int) -> str:
    """The line that makes one of an equation's results; if a loop does, that in its body, from
    which it may be copied to the host."""
    if eqn.primitive.name == "scan":
        (inner,) = jaxprs_in_params(eqn.params)
        makers: dict[Any, JaxprEqn] = {made: e for e in inner.eqns for made in e.outvars}
        maker = makers.get(inner.outvars[index])
        while maker and maker.primitive.name == "device_put":
            maker = makers.get(maker.invars[0])
        if maker and (line := line_of(maker)):
            return line
    return line_of(eqn)


def on_host(aval: Any) -> bool:
    """Whether an array is in the host's memory rather than a device's."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective is over."""
    names = eqn.params.get("axis_name") or eqn.params["axes"]
    return (names,) if isinstance(names, str) else tuple(names)


def op_of(eqn: JaxprEqn, path: str) -> str:
    """The op that an equation is part of, with its type string; its primitive if there is none."""
    scope = SCOPE.search(path)
    return scope[0].replace("|", "/") if scope else eqn.primitive.name


def phase(path: str) -> str:
    """The part of a training step in which an equation, or a compiled instruction, runs."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "update"


def _lengths(eqn: JaxprEqn) -> Iterable[int]:
    """The lengths of the dimensions that an equation reduces, cuts, joins, indexes or orders: those
    that its result lacks, and those that its parameters name."""
    name, params = eqn.primitive.name, eqn.params
    numbers: Any = params.get("dimension_numbers")
    taken, made = ([getattr(v.aval, "shape", ()) for v in vs] for vs in (eqn.invars, eqn.outvars))
    shape = next(iter(taken or made), ())
    if name == "scan":
        return [params["length"]]
    if name == "reshape" or (next(jaxprs_in_params(params), None) and name[:6] != "reduce"):
        return []
    if name == "random_bits":
        return made[0]  # each device would draw the same
    if name == "dynamic_update_slice":
        return [n for n, part in zip(*taken[:2], strict=True) if n != part]
    if name == "gather":
        return [shape[i] for i in numbers.start_index_map]
    if name.startswith("scatter"):
        return [shape[i] for i in numbers.scatter_dims_to_operand_dims]
    if name == "conv_general_dilated":
        return [shape[i] for i in numbers.lhs_spec[1:]]
    if hasattr(jax.lax.linalg, name):
        return shape[-2:]
    if name == "fft":
        return shape[-len(params["fft_lengths"]) :]
    if "window_dimensions" in params:
        return [n for n, size in zip(shape, params["window_dimensions"], strict=True) if size > 1]
    named = params.get("axis", params.get("dimension", params.get("dimensions", ())))
    ordered = [shape[i] for i in (named if isinstance(named, tuple) else (named,))]
    kept = [collections.Counter(shape) for shape in made]
    counts = map(collections.Counter, taken)
    lost = [n for count in counts for n in count if all(count[n] > out[n] for out in kept)]
    return ordered + lost


def dims_of(length: int, axes: dict[str, int], sizes: dict[str, int]) -> list[Dim]:
    """The dimensions that a length at the sizes of `devices.probe_mesh` is made of: one, or several
    that were merged; none if it is just a number.

    Each dimension's size is a prime of its own times `devices.probe_total`, which has each axis's
    size, a prime, as a factor; a split over an axis takes one factor away.
    """
    total = probe_total(axes)
    names = [name for name, size in sizes.items() if length % (size // total) == 0]
    rest = length // math.prod(sizes[name] // total for name in names)
    if not rest or rest % 2 ** len(names) or total ** len(names) % rest:
        return []  # it only happens to have these factors
    split = tuple(a for a in reversed(axes) if rest % axes[a] ** len(names))
    return [Dim(name, split) for name in names]


def name_lengths(message: str, axes: dict[str, int], sizes: dict[str, int]) -> str:
    """The message with lengths at the sizes of `devices.probe_mesh` shown as what they are of,
    `(B/d, L/2, M)`, and with what brings two of one dimension together."""
    found: dict[Dim, None] = {}

    def name(number: re.Match[str]) -> str:
        length = int(number[0])
        dims = dims_of(length, axes, sizes)
        whole = math.prod(sizes[d.name] // math.prod(axes[a] for a in d.axes) for d in dims)
        if not dims or whole not in (length, 2 * length):
            return number[0]
        found.update(dict.fromkeys(dims))
        return "*".join(map(str, dims)) + "/2" * (whole > length)

    # Not line numbers, nor the sizes that ShardTypeError compares.
    text = re.sub(r"(?<![\w.:=])\d+(?!\w|[.:]\d| on each)", name, message)
    for a, b in itertools.combinations(found, 2) if "for broadcasting" in text else ():
        if a.name == b.name:
            text += (
                f"\n    {a} and {b} are one dimension, split differently: use ops.all_gather "
                "before they meet, or ops.psum_scatter for a sum"
            )
    return text


def traced(function: Any, *args: Any) -> Any:
    """The jaxpr of a `jax.jit` of arrays, their shapes here, and of a static argument, the last.
    Raises JAX's error for a tracer that leaked."""
    static = len(args) - 1
    # To JAX such a tracer is a constant, until somebody uses it.
    jax.tree.map(jnp.copy, jax.make_jaxpr(function, static_argnums=static)(*args).consts)
    return function.trace(*args).jaxpr.jaxpr


def probe(
    trace: Callable[[Any, dict[str, int]], Any], axes: Iterable[str], dims: Iterable[str]
) -> Any:
    """Checks a function at the sizes of `devices.probe_mesh`; `trace` gives its jaxpr on a mesh, at
    sizes of its dimensions. Returns the jaxpr. Raises ShardTypeError, and what the trace raises."""
    mesh, sizes = probe_mesh(axes, dims)
    axes_at_probe = dict(mesh.shape)
    try:
        jaxpr = trace(mesh, sizes)
    except Exception as error:
        error.args = tuple(name_lengths(str(arg), axes_at_probe, sizes) for arg in error.args)
        raise
    check(jaxpr, axes_at_probe, sizes)
    check_numbers(jaxpr, trace(turned(mesh), sizes))
    return jaxpr


def check(jaxpr: Any, axes: dict[str, int], sizes: dict[str, int]) -> None:
    """Raises ShardTypeError for what a function, traced at the sizes of `devices.probe_mesh`, does
    by hand along a split dimension, and for a collective that no op says.

    To JAX a device's part of an array looks like a whole one that differs between devices: only its
    lengths tell that a sum by jnp, say, is of a part. The backward pass does sum along split
    dimensions: those that an op has split forward, and in which the op pays the sum. It doesn't see
    a length that was cut so that its factors are lost.
    """
    problems = []
    for eqn, path, line, _ in equations(jaxpr):
        if SCOPE.search(path):
            continue
        name = eqn.primitive.name
        if name in COLLECTIVES or name == "axis_index":
            over = ", ".join(axes_of(eqn))
            backward = name == "psum_invariant" and "transpose(" in path
            cure = (
                f": the gradient of what is whole along {over} and meets what differs; let it "
                "differ before, by lax.pcast, and pay its sum by ops.psum"
            )
            problems.append(f"{line}: {name} over {over}, which no op says" + cure * backward)
        for length in _lengths(eqn) if "transpose(" not in path else ():
            dims = dims_of(length, axes, sizes)
            if any(dim.axes for dim in dims):
                problems.append(
                    f"{line}: {name} along {' '.join(map(str, dims))} by hand, where each device "
                    "has a part of it: use an op, or ops.all_gather first"
                )
    if problems:
        raise ShardTypeError("\n".join(dict.fromkeys(problems)))


def check_numbers(jaxpr: Any, other: Any) -> None:
    """Raises ShardTypeError for a number that a function takes from the length of a part, or of an
    axis: given its jaxprs on a probe mesh and on that mesh `devices.turned`, which has the same
    lengths in all, and other parts, the numbers in both must be the same."""
    problems = []
    for here, there in itertools.zip_longest(equations(jaxpr), equations(other)):
        if not here or not there or here.eqn.primitive != there.eqn.primitive:
            line = (here or there).line
            problems.append(f"{line}: what is computed from here on depends on the mesh")
            break
        if SCOPE.search(here.path):
            continue
        for a, b in zip(here.eqn.invars, there.eqn.invars, strict=True):
            if isinstance(a, Literal) and str(a.val) != str(getattr(b, "val", "")):  # NaN too
                problems.append(
                    f"{here.line}: {here.eqn.primitive.name} takes a number that depends on the "
                    "mesh, as the length of a device's part does: sum ones by an op, or take the "
                    "length from the config"
                )
    if problems:
        raise ShardTypeError("\n".join(dict.fromkeys(problems)))


# --- The ledger -----------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """A collective: what each device receives in one run of it."""

    line: str
    op: str  # with its type string, or the primitive that none says
    kind: str
    axes: tuple[str, ...]
    phase: str
    times: int
    elements: int  # of the array, whole along the axes
    bytes: float  # by a ring: of n devices, each gets what the other n - 1 have


class Product(NamedTuple):
    """A product of matrices: each device's FLOPs in one run of it."""

    line: str
    op: str
    phase: str
    times: int
    flops: int
    bytes: int  # of its operands and result


class Saved(NamedTuple):
    """An array that the forward pass keeps for the backward pass, on each device."""

    line: str
    times: int  # arrays, if a loop stacks them
    shape: tuple[int, ...]  # of one
    dtype: str
    bytes: int  # of all
    memory: str  # "device" or "host"


class Ledger(NamedTuple):
    transfers: list[Transfer]
    products: list[Product]
    saved: list[Saved]


def ledger(jaxpr: Any, axes: dict[str, int]) -> Ledger:
    """What a function under `typed_shard_map` does, from the jaxpr of its `jax.jit`, on a mesh of
    these axes: for each device, what it receives, computes and, if it takes a gradient, keeps."""
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    transfers, products = [], []
    for eqn, path, line, times in equations(live):
        name, op = eqn.primitive.name, op_of(eqn, path)
        arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        if name in COLLECTIVES:
            over = tuple(axis for axis in axes if axis in axes_of(eqn))
            n = math.prod(axes[axis] for axis in over)
            kind = COLLECTIVES[name]
            elements = max(array.size for array in arrays)
            size = elements * arrays[0].dtype.itemsize * (2 if kind == "all-reduce" else 1)
            row = (line, op, kind, over, phase(path), times, elements, size * (n - 1) / n)
            transfers.append(Transfer(*row))
        if name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            flops = 2 * math.prod(arrays[0].shape[i] for i in summed) * arrays[-1].size
            size = sum(array.size * array.dtype.itemsize for array in arrays)
            products.append(Product(line, op, phase(path), times, flops, size))
    bodies = [e.params["jaxpr"] for e in live.eqns if e.primitive.name == "shard_map"]
    return Ledger(transfers, products, [array for body in bodies for array in _saved(body)])


def _saved(body: Any) -> Iterator[Saved]:
    """What the backward pass takes from the forward pass: of a loop, the arrays it stacks. A loop
    that has both in its body, over microbatches, keeps what one turn keeps."""
    makers: dict[Any, Any] = {}
    for eqn in body.eqns:
        if eqn.primitive.name == "scan" and phase(str(eqn.source_info.name_stack)) == "update":
            yield from _saved(*jaxprs_in_params(eqn.params))
        if phase(str(eqn.source_info.name_stack)) in ("backward", "recomputed"):
            for var in eqn.invars:
                if not isinstance(var, Literal) and (maker := makers.pop(var, None)):
                    array, times, shape = var.aval, 1, var.aval.shape
                    index = maker.outvars.index(var)
                    if maker.primitive.name == "scan":
                        (inner,) = jaxprs_in_params(maker.params)
                        if inner.outvars[index].aval.shape != shape:
                            times, shape = maker.params["length"], shape[1:]
                    size = array.size * array.dtype.itemsize
                    row = (made_at(maker, index), times, shape, array.dtype.name, size)
                    yield Saved(*row, "host" if on_host(array) else "device")
        else:
            makers |= dict.fromkeys(eqn.outvars, eqn)
