"""Reads jaxprs: an equation's source line, its op, how often it runs, what makes its results."""

import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from runtime.source import source_line
from shardlib.ops import SCOPE


class Runs(NamedTuple):
    """Bounds on how often an equation runs. They differ because a compiler may move loop-invariant
    equations out of a loop, and because a cond runs one of its branches."""

    times: float = 1  # at most; infinity in a while_loop
    at_least: int = 1  # if each while_loop iterates


class Fact(NamedTuple):
    """Describes a variable, as far as it is known before the program runs."""

    changes: int = 1  # how often, at least
    number: Any = None  # its value, if known, or the one that a loop starts it with
    fixed: bool = False  # doesn't depend on the jaxpr's arguments
    constant: bool = False  # made outside of JAX
    source: Any = None  # in the forward pass, identifies what computes it; see `_source`


class Equation(NamedTuple):
    """An equation of a jaxpr, with its place in the source."""

    eqn: JaxprEqn
    path: str  # JAX's name stack
    line: str  # `train.py:253 block`
    runs: Runs
    operands: list[Fact]


# JAX's primitives that communicate -> the kind of collective.
COLLECTIVES = {
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "permute",
}


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which a collective communicates."""
    names = eqn.params.get("axis_name") or eqn.params["axes"]
    return (names,) if isinstance(names, str) else tuple(names)


# Primitives that shape or cast arrays, or add up gradients.
SHAPING = {
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "add_any"),
    # lax.pcast's primitives, as JAX's versions name them. Over no axis, pcast adds none.
    # Before it, convert_element_type casts a weakly typed number.
    *("pvary", "preduced", "convert_element_type"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p", "reduced_vary_cast", "reduced_vary_cast_p"),
}


# The values of a traced function's constants, which a jaxpr of jax 0.10 doesn't have.
constants = weakref.WeakKeyDictionary[Any, list[Any]]()


def equations(
    jaxpr: Any, outer: Equation | None = None, known: dict[Any, Fact] | None = None
) -> Iterator[Equation]:
    """Yields each equation, including those of inner jaxprs. `known` has the facts of an inner
    jaxpr's arguments.

    The body of a library's jitted function was traced at its first call, so its equations get the
    line of the current call.
    """
    path, runs = (outer.path, outer.runs) if outer else ("", Runs())
    jitted = outer and outer.path and outer.eqn.primitive.name == "jit"
    facts = known
    if facts is None:
        facts = {argument: Fact(source=i) for i, argument in enumerate(jaxpr.invars)}
    values = itertools.zip_longest(jaxpr.constvars, constants.get(jaxpr, ()))
    facts |= {variable: Fact(1, value, True, True) for variable, value in values}

    def facts_of(variables: Any) -> list[Fact]:
        return [
            Fact(1, v.val, True, True) if isinstance(v, Literal) else facts.get(v, Fact())
            for v in variables
        ]

    for eqn in jaxpr.eqns:
        line = outer.line if outer and jitted else line_of(eqn) or (outer.line if outer else "")
        operands, name = facts_of(eqn.invars), eqn.primitive.name
        at_least = min(runs.at_least, max((x.changes for x in operands), default=1))
        place = f"{path}/{eqn.source_info.name_stack}"
        yield (here := Equation(eqn, place, line, Runs(runs.times, at_least), operands))
        inner = [*jaxprs_in_params(eqn.params)]
        op = op_of(eqn, place) if SCOPE.search(place) else ""
        shapes = name in SHAPING and not op  # an op's numbers depend on the mesh
        fixed = not inner and all(x.fixed for x in operands)
        made = Fact(at_least, operands[0].number if shapes else None, fixed)
        source = None if "transpose(" in place else _source(eqn, op, operands)
        for i, v in enumerate(eqn.outvars):
            several = len(eqn.outvars) > 1 and isinstance(source, int)
            facts[v] = made._replace(source=hash((source, i)) if several else source)
        if not inner:
            continue
        length = eqn.params.get("length", 1)
        loop = name == "while" or length != 1
        times = math.inf if name == "while" else runs.times * length
        each = 0 if name == "cond" else at_least * length
        of_loop = carried(eqn)
        given = [
            x._replace(
                changes=each if loop and i >= of_loop.start else x.changes,
                fixed=x.fixed and not of_loop.start <= i < of_loop.stop,
            )
            for i, x in enumerate(operands)
        ]
        for body in inner:
            facts |= zip(reversed(body.invars), reversed(given), strict=False)
            yield from equations(body, here._replace(runs=Runs(times, each)), facts)
            if len(body.outvars) == len(eqn.outvars):
                for v, of_body in zip(eqn.outvars, facts_of(body.outvars), strict=True):
                    once = not loop and name != "cond"
                    facts[v] = of_body if once else facts[v]._replace(source=of_body.source)


def _source(eqn: JaxprEqn, op: str, operands: list[Fact]) -> Any:
    """Identifies what an equation computes, from the arguments on: by its primitive and operands,
    or, in an op, whose equations depend on the mesh, by the op and its operands."""
    if op:
        given = [x.source for x in operands if x.source is not None]
        inside = [isinstance(x, tuple) and x[0] == op for x in given]
        of_op = [x[1] if same else {hash(x)} for x, same in zip(given, inside, strict=True)]
        return op, frozenset[int]().union(*of_op)
    name = eqn.primitive.name
    if name in SHAPING or (name == "name" and operands[0].source is None):
        return operands[0].source
    return hash((name, eqn.params.get("name"), *(x.source for x in operands)))


def live(jaxpr: Any) -> Any:
    """Returns the jaxpr without equations whose results nothing uses. Keeps all its arguments."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def communicating(jaxpr: Any, kind: str) -> set[str]:
    """The axes over which a function has collectives of this kind."""
    found = (eqn for eqn, *_ in equations(jaxpr) if COLLECTIVES.get(eqn.primitive.name) == kind)
    return {axis for eqn in found for axis in axes_of(eqn)}


def carried(eqn: JaxprEqn) -> slice:
    """Returns the slice of a loop's operands that it carries. Operands before it are constant;
    operands after it are sliced, so their shapes differ in the body. (The names of scan's
    parameters aren't used, as they differ between JAX versions.)"""
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
    """Returns the source line of an equation, with its function: `train.py:253 block`. A loop that
    JAX split in two has none, so the first line found in its body stands in."""
    if line := source_line(eqn.source_info.traceback):
        return line
    inner = (line_of(e) for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return next(filter(None, inner), "")


def makers(eqn: JaxprEqn, index: int) -> list[JaxprEqn]:
    """Returns the equation that makes one of an equation's results, then the loops around it. Looks
    for it in the bodies of loops, and through copies to the host."""
    if eqn.primitive.name != "scan":
        return [eqn]
    (inner,) = jaxprs_in_params(eqn.params)
    made_by: dict[Any, JaxprEqn] = {var: e for e in inner.eqns for var in e.outvars}
    var: Any = inner.outvars[index]
    while (maker := made_by.get(var)) and maker.primitive.name == "device_put":
        var = maker.invars[0]
    return [*(makers(maker, maker.outvars.index(var)) if maker else ()), eqn]


def on_host(aval: Any) -> bool:
    """Returns whether an array is in the host's memory rather than a device's."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def op_of(eqn: JaxprEqn, path: str) -> str:
    """The op that an equation is part of, with its type string, or else its primitive."""
    scope = SCOPE.search(path)
    return scope[0].replace("|", "/") if scope else eqn.primitive.name
