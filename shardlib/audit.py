"""Reads jaxprs: where each equation stands and how often it runs; and checks that only ops
communicate."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from shardlib.devices import probe_mesh, probe_total
from shardlib.errors import ShardTypeError, source_line
from shardlib.ops import SCOPE
from shardlib.types import Dim

# JAX's primitives that communicate -> the kind of collective.
COLLECTIVES = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "permute",
}
SHAPING = {
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "add_any"),
    # lax.pcast's, which leaves them out over no axis, by the names that JAX's versions give them,
    # and a weak number's cast before one of them.
    *("pvary", "preduced", "convert_element_type"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p", "reduced_vary_cast", "reduced_vary_cast_p"),
}


class Runs(NamedTuple):
    """Bounds on how often an equation runs. A compiler may compute before a loop
    what is the same in each iteration. Of a cond, one branch runs."""

    times: float = 1  # at most; infinity in a while_loop
    at_least: int = 1  # taking a while_loop to iterate


class Equation(NamedTuple):
    """An equation of a jaxpr, with its place in the source."""

    eqn: JaxprEqn
    path: str  # JAX's name stack
    line: str  # `train.py:253 block`
    runs: Runs


def equations(
    jaxpr: Any, outer: Equation | None = None, known: dict[Any, int] | None = None
) -> Iterator[Equation]:
    """Yields each equation, including those of inner jaxprs. `known` is for inner jaxprs: how often
    a variable's value changes, at least; once for those that it lacks.

    The body of a library's jitted function was traced where it was first called, so its equations
    get the line of the call at hand.
    """
    path, runs = (outer.path, outer.runs) if outer else ("", Runs())
    jitted = outer and outer.path and outer.eqn.primitive.name == "jit"
    changes = {} if known is None else known

    def changes_of(variables: Any) -> list[int]:
        return [1 if isinstance(v, Literal) else changes.get(v, 1) for v in variables]

    for eqn in jaxpr.eqns:
        line = outer.line if outer and jitted else line_of(eqn) or (outer.line if outer else "")
        at_least = min(runs.at_least, max(changes_of(eqn.invars), default=1))
        place = f"{path}/{eqn.source_info.name_stack}"
        yield (here := Equation(eqn, place, line, Runs(runs.times, at_least)))
        changes |= dict.fromkeys(eqn.outvars, at_least)
        name, length = eqn.primitive.name, eqn.params.get("length", 1)
        loop = name == "while" or length != 1
        times = math.inf if name == "while" else runs.times * length
        each = 0 if name == "cond" else at_least * length
        changing = len(eqn.invars) - carried(eqn).start if loop else 0
        for inner in jaxprs_in_params(eqn.params):
            same = changes_of(eqn.invars[-len(inner.invars) : len(eqn.invars) - changing])
            changes |= zip(inner.invars, same + [each] * changing, strict=False)
            yield from equations(inner, here._replace(runs=Runs(times, each)), changes)
            if not loop and name != "cond" and len(inner.outvars) == len(eqn.outvars):
                changes |= zip(eqn.outvars, changes_of(inner.outvars), strict=True)


def carried(eqn: JaxprEqn) -> slice:
    """The operands that a loop carries. Those before are the same in each iteration, those after
    are sliced. Tells them by their shapes in the body, as the names of a scan's parameters differ
    between JAX versions."""
    start = stop = len(eqn.invars)
    if eqn.primitive.name in ("scan", "while"):
        *_, body = jaxprs_in_params(eqn.params)
        stop -= _differ(eqn.invars, body.invars)
        start = stop - len(eqn.outvars) + _differ(eqn.outvars, body.outvars)
    return slice(start, stop)


def _differ(outer: Any, inner: Any) -> int:
    pairs = zip(reversed(outer), reversed(inner), strict=False)
    return sum(a.aval.shape != b.aval.shape for a, b in pairs)


def line_of(eqn: JaxprEqn) -> str:
    """The line that made an equation, with its function: `train.py:253 block`. A loop that JAX
    split in two has none, so the first line found in its body stands in."""
    if line := source_line(eqn.source_info.traceback):
        return line
    inner = (line_of(e) for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return next(filter(None, inner), "")


def makers(eqn: JaxprEqn, index: int) -> list[JaxprEqn]:
    """The equation that makes one of an equation's results, innermost first. For a loop's result,
    it is in its body, or in the body of a loop in there, looking through copies to the host."""
    if eqn.primitive.name != "scan":
        return [eqn]
    (inner,) = jaxprs_in_params(eqn.params)
    made_by: dict[Any, JaxprEqn] = {var: e for e in inner.eqns for var in e.outvars}
    var: Any = inner.outvars[index]
    while (maker := made_by.get(var)) and maker.primitive.name == "device_put":
        var = maker.invars[0]
    return [*(makers(maker, maker.outvars.index(var)) if maker else ()), eqn]


def made_at(eqn: JaxprEqn, index: int) -> str:
    """The line that makes one of an equation's results."""
    return next(filter(None, map(line_of, makers(eqn, index))), "")


def on_host(aval: Any) -> bool:
    """Returns whether an array is in the host's memory rather than a device's."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which a collective communicates."""
    names = eqn.params.get("axis_name") or eqn.params["axes"]
    return (names,) if isinstance(names, str) else tuple(names)


def communicating(jaxpr: Any, *kinds: str) -> set[str]:
    """The axes over which a function has collectives of these kinds, or of any."""
    collectives = ((COLLECTIVES.get(eqn.primitive.name), eqn) for eqn, *_ in equations(jaxpr))
    found = (eqn for kind, eqn in collectives if kind and kind in (kinds or (kind,)))
    return {axis for eqn in found for axis in axes_of(eqn)}


def op_of(eqn: JaxprEqn, path: str) -> str:
    """The op that an equation is part of, with its type string, or else its primitive."""
    scope = SCOPE.search(path)
    return scope[0].replace("|", "/") if scope else eqn.primitive.name


def phase(path: str) -> str:
    """The part of a training step in which an equation or a compiled instruction runs."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "update"


def dims_of(length: int, axes: dict[str, int], sizes: dict[str, int]) -> list[Dim]:
    """The dimensions that make up a length at the sizes of `devices.probe_mesh`: one, several that
    were merged, or none if it is just a number.

    Each dimension's size is a prime of its own times `devices.probe_total`, which has each axis's
    size, also a prime, as a factor. A split over an axis removes that factor.
    """
    total = probe_total(axes)
    names = [name for name, size in sizes.items() if length % (size // total) == 0]
    rest = length // math.prod(sizes[name] // total for name in names)
    if not rest or rest % 2 ** len(names) or total ** len(names) % rest:
        return []  # it has these factors by chance
    split = tuple(a for a in reversed(axes) if rest % axes[a] ** len(names))
    return [Dim(name, split) for name in names]


def name_lengths(message: str, axes: dict[str, int], sizes: dict[str, int]) -> str:
    """Rewrites lengths at the sizes of `devices.probe_mesh` in a message as dimensions,
    `(B/d, L/2, M)`, and adds a cure if two of them are parts of one dimension."""
    mentioned: dict[Dim, None] = {}

    def name(number: re.Match[str]) -> str:
        length = int(number[0])
        dims = dims_of(length, axes, sizes)
        full = math.prod(sizes[d.name] // math.prod(axes[a] for a in d.over) for d in dims)
        if not dims or full not in (length, 2 * length):
            return number[0]
        mentioned.update(dict.fromkeys(dims))
        return "*".join(map(str, dims)) + "/2" * (full > length)

    text = re.sub(r"(?<![\w.:=])\d+(?!\w|[.:]\d)", name, message)  # line numbers stay
    for a, b in itertools.combinations(mentioned, 2) if "for broadcasting" in text else ():
        if a.name == b.name:
            text += (
                f"\n    {a} and {b} are the same dimension, split differently: gather one with "
                "ops.all_gather, or split the other with ops.split or where it is declared; a "
                "partial sum with ops.psum_scatter"
            )
    return text


def _refused(name: str) -> Callable[..., Any]:
    def read(*_: Any, **__: Any) -> Any:
        raise ShardTypeError(f"jax.{name}() depends on the machine: use the config, as config.mesh")

    return read


# What differs between machines that train the same config.
MACHINE = (
    *("device_count", "local_device_count", "devices", "local_devices"),
    *("process_count", "process_index", "default_backend"),
)
REFUSED: dict[str, Any] = {name: _refused(name) for name in MACHINE}
# A context manager in which none of it can be asked for.
ON_ANY_MACHINE = mock.patch.multiple(jax, **REFUSED)


def traced(function: Any, *args: Any) -> Any:
    """The jaxpr of a jitted function, given the shapes of its arrays and its static last argument.
    Raises ShardTypeError if it asks JAX what it runs on, and JAX's error for a leaked tracer."""
    static = len(args) - 1
    with ON_ANY_MACHINE:
        made = jax.make_jaxpr(function, static_argnums=static)(*args)
        jaxpr = function.trace(*args).jaxpr.jaxpr
    # JAX takes a leaked tracer for a constant until something reads it.
    jax.tree.map(jnp.copy, made.consts)
    return jaxpr


def probe(
    trace: Callable[[Any, dict[str, int]], Any], axes: Iterable[str], dims: Iterable[str]
) -> Any:
    """Checks a function at the sizes of `devices.probe_mesh` and returns its jaxpr there.
    `trace(mesh, sizes)` traces the function. Raises ShardTypeError, and whatever `trace` raises."""
    mesh, sizes = probe_mesh(axes, dims)
    axes_at_probe = dict(mesh.shape)
    try:
        jaxpr = trace(mesh, sizes)
    except Exception as error:
        error.args = tuple(name_lengths(str(arg), axes_at_probe, sizes) for arg in error.args)
        raise
    check(jaxpr, axes_at_probe, sizes)
    return jaxpr


def check(jaxpr: Any, axes: dict[str, int], sizes: dict[str, int]) -> None:
    """Raises ShardTypeError if a function, traced at the sizes of `devices.probe_mesh`, has outside
    of ops a collective, written with JAX or added by it where a value that all devices hold meets
    one that differs, for its gradient; what asks for a device's place on the mesh; or, in the
    forward pass, what takes the part of a dimension that a device holds for the whole: sums it,
    finds its largest entry, orders or numbers it."""

    def parts(length: int) -> list[Dim]:
        return [dim for dim in dims_of(length, axes, sizes) if dim.over]

    problems = []
    constants = {*jaxpr.constvars}
    indices = _indices(jaxpr, _variables(jaxpr.outvars), parts)
    for eqn, path, line, _ in equations(jaxpr):
        name, at = eqn.primitive.name, line.replace(" ", ", in ")
        inner = [*jaxprs_in_params(eqn.params)]
        for body in inner:
            pairs = zip(reversed(eqn.invars), reversed(body.invars), strict=False)
            constants |= {b for a, b in pairs if _variables([a]) & constants}
        if SCOPE.search(path):
            continue
        taken: list[tuple[str, int]] = []
        known_indices = name == "iota" and eqn.outvars[0] in indices
        if not inner and not known_indices and "transpose(" not in path:
            arrays: list[Any] = [v for v in eqn.invars if isinstance(v, Literal) or v in constants]
            taken += [(name, length) for length in _taken_whole(eqn)]
            taken += [("constant", length) for array in arrays for length in array.aval.shape]
        for what, length in taken:
            for dim in parts(length):
                problems.append(
                    f"{at}: {what} over {dim}, of which each device has only a part: "
                    + CURES.get(what, "ops.all_gather it before")
                )
        if name in COLLECTIVES or name == "axis_index":
            over = ", ".join(axes_of(eqn))
            cure = f": {CURES.get(name, 'use an op, whose type string shows it')}"
            if name == "psum_invariant" and "transpose(" in path:
                cure = _cure_of_gradient(eqn.invars[0].aval, over, axes, sizes)
            problems.append(f"{at}: {name} over {over} outside of any op{cure}")
    if problems:
        raise ShardTypeError("\n".join(dict.fromkeys(problems)))


CURES = {
    "reduce_sum": "use ops.reduce_sum or ops.reduce_mean",
    "reduce_max": "use ops.reduce_max",
    "iota": "use ops.indices",
    "axis_index": "use ops.indices, ops.split of what all devices hold, or an op of your own",
    "constant": "use ops.indices, or ops.split of what is as long as the whole",
}


def _taken_whole(eqn: JaxprEqn) -> list[int]:
    """The lengths of the dimensions that an equation reduces, orders, accumulates or numbers."""
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return [params["shape"][params["dimension"]]]
    if name == "dot_general":
        taken = params["dimension_numbers"][0][0]
    elif name.startswith(("reduce_", "arg", "cum", "sort", "top_k")):
        named = [params[key] for key in ("axes", "axis", "dimension") if key in params]
        taken = np.atleast_1d(*named or [-1]) if name != "reduce_precision" else ()
    else:
        taken = ()
    array: Any = eqn.invars[0].aval if eqn.invars else None
    return [array.shape[i] for i in taken]


def _variables(values: Iterable[Any]) -> set[Any]:
    """The operands of an equation, or the results of a jaxpr, without those that are numbers."""
    return {value for value in values if not isinstance(value, Literal)}


def _indices(jaxpr: Any, used: set[Any], parts: Callable[[int], Any]) -> set[Any]:
    """The variables that are nothing but indices into parts, as in `x.at[..., ::2]`. `used` are
    those of the results that are something else."""
    found: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        name, others = eqn.primitive.name, [*eqn.invars]
        if name.startswith(("gather", "scatter")):
            numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
            into = "start_index_map" if name == "gather" else "scatter_dims_to_operand_dims"
            if all(parts(shape[i]) for i in getattr(numbers, into)):
                del others[1]
        elif inner := [*jaxprs_in_params(eqn.params)]:
            same = len(inner) == 1 and len(inner[0].invars) == len(others)
            for body in inner:
                pairs = zip(eqn.outvars, body.outvars, strict=False)
                loop = name in ("scan", "while", "cond")
                wanted = _variables(b for a, b in pairs if loop or a in used)
                found |= (own := _indices(body, wanted, parts))
            others = [
                a for a, b in zip(others, body.invars, strict=False) if not same or b not in own
            ]
        elif not used.intersection(eqn.outvars):
            others = []
        used |= _variables(others)
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    return found | ({*jaxpr.invars, *made} - used)


def parting(jaxpr: Any, other: Any, numbers: bool = False) -> tuple[str, str, str] | None:
    """The place where two traces of a function first compute something else between ops, or call
    another op, and what each does there; None if they do the same, and, if `numbers` count, with
    the same ones."""
    both = _computed(jaxpr, numbers), _computed(other, numbers)
    pairs = itertools.zip_longest(*both, fillvalue=("", "nothing"))
    for (line, here), (other_line, there) in pairs:
        if here != there:
            return (line or other_line).replace(" ", ", in "), here, there
    return None


def _computed(jaxpr: Any, with_numbers: bool) -> Iterator[tuple[str, str]]:
    """Yields lines, and what they compute: an op in the forward pass, or between ops a primitive,
    if asked for with those of its operands that are numbers. What only casts or shapes arrays
    doesn't count, as JAX does that differently where an axis or a length is one."""
    indices = _indices(jaxpr, _variables(jaxpr.outvars), bool)  # JAX adds a length to them
    known: dict[Any, Any] = {}  # the numbers that variables stand for
    same: dict[Any, Any] = {}  # a call's result -> what it is in the call
    op = ""

    def number(x: Any) -> Any:
        while not isinstance(x, Literal) and x in same:
            x = same[x]
        return x.val if isinstance(x, Literal) else known.get(x)

    for eqn, path, line, _ in equations(jaxpr):
        name, operands = eqn.primitive.name, [number(x) for x in eqn.invars]
        inner = [*jaxprs_in_params(eqn.params)]
        for body in inner:
            known |= zip(body.invars[::-1], operands[::-1], strict=False)
            if name not in ("scan", "while", "cond"):
                same |= zip(eqn.outvars, body.outvars, strict=False)
        if SCOPE.search(path):
            op, before = op_of(eqn, path), op
            if op != before and phase(path) == "forward":
                yield line, op
            continue
        if name in SHAPING:
            known |= zip(eqn.outvars, operands, strict=False)
            continue
        counts = with_numbers and not (inner or {*eqn.outvars} <= indices)
        # As the operands' dtypes have them: where JAX rounds a number differs between meshes.
        given: Any = [(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True) if counts]
        numbers = [str(np.asarray(x).astype(a.dtype)) for x, a in given if x is not None]
        yield line, name + (f" with {', '.join(numbers)}" if numbers else "")


def _cure_of_gradient(aval: Any, over: str, axes: dict[str, int], sizes: dict[str, int]) -> str:
    """The end of the message that JAX sums the gradient of a replicated array over these axes."""
    dims = [dims_of(length, axes, sizes) or [length] for length in aval.shape if length > 1]
    layout = " ".join("*".join(map(str, each)) for each in dims)
    dtype = aval.str_short(short_dtypes=True).partition("[")[0]
    return (
        f' sums the gradient of a replicated {dtype}["{layout}"]: say so where it is used, with '
        f'ops.broadcast("{layout} -> {layout}", ...), or store it split and ops.all_gather it'
    )
