import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib.audit import COLLECTIVES, axes_of, line_of, made_at, on_host, op_of, phase
from shardlib.devices import Chip

# What an equation is, by its primitive's name: the first pattern that fits.
KINDS = {
    "same": "reshape|squeeze|transpose|optimization_barrier|name|pcast|pvary|reduce_precision|copy",
    "loop": "scan|while|cond",
    "product": "dot_general|conv_general_dilated|gather|sort|cumsum|random_bits",
    "scatter": "scatter.*|dynamic_update_slice",
    "reduce": "reduce.*|argmax|argmin",
}
KEYED = {*COLLECTIVES, "add_any"}  # whatever kind they are
V5E, V5P = "TPU v5 lite", "TPU v5"


class Buffer(NamedTuple):
    """An array in memory at the worst moment. `key`, if it has one, finds it in `shapes`."""

    line: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    key: tuple[int, ...]


class Memory(NamedTuple):
    arguments: int  # bytes; the results overwrite what is donated of them
    temporary: int  # bytes of all else, at the worst moment
    buffers: list[Buffer]  # at that moment, the largest first


def predict(jaxpr: Any, axes: dict[str, int], chip: Chip | None = None) -> Memory:
    """What a function under `typed_shard_map` needs on each device of a mesh of these axes, from
    the jaxpr of its `jax.jit`. Its results are taken to be those of its donated arguments."""
    return _worst(_body(jaxpr, axes), chip.kind if chip else "")


def shapes(jaxpr: Any, axes: dict[str, int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shape of each array that has a key, by that. On another mesh and at other sizes an array
    has the same key, as long as JAX makes the same products, sums and collectives of the source."""

    def walk(body: _Body) -> Iterator[_Array]:
        yield from body.arguments
        for step in body.steps:
            yield from (*step.taken, *step.made)
            for inner in step.bodies:
                yield from walk(inner)

    return {array.key: array.aval.shape for array in walk(_body(jaxpr, axes)) if array.key}


def size_of(aval: Any, chip: str) -> int:
    """Bytes on a kind of chip, none if its host holds it. A TPU's memory is tiled: of the two
    dimensions laid out last, those that waste least, one is filled up to a multiple of 128, the
    other to one of 8, or if short to a power of two that fills 32 bits."""
    shape, itemsize = aval.shape, aval.dtype.itemsize
    elements = 0 if on_host(aval) else math.prod(shape)
    if chip.startswith("TPU") and elements:
        if len(shape) < 2:
            return _filled(elements, 128) * itemsize
        elements = min(
            elements // (a * b) * _filled(a, 128) * _filled(b, min(8, max(4 // itemsize, power)))
            for a, b in itertools.permutations(shape, 2)
            for power in (1 << (b - 1).bit_length(),)
        )
    return elements * itemsize


def _filled(n: int, tile: int) -> int:
    return -(-n // tile) * tile


# --- A jaxpr as steps -----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Array:
    """An argument of a body, or what one of its steps makes."""

    aval: Any
    line: str = ""
    op: str = ""
    key: tuple[int, ...] = ()
    users: list["_Step"] = dataclasses.field(default_factory=list)
    # The arrays in memory that this one is computed from where it is used, or just itself if it is
    # in memory; then its bytes, and the steps that make it and need it last. `_worst` finds these.
    sources: set["_Array"] = dataclasses.field(default_factory=set)
    size: int = 0
    first: int = 0
    last: int = 0

    def cast(self) -> Any:
        """The narrower type, if any, that each step which takes the array makes of it."""
        dtype = self.users[0].made[0].aval.dtype if self.users else self.aval.dtype
        casts = all(step.name == "convert_element_type" for step in self.users)
        return dtype if casts and dtype.itemsize < self.aval.dtype.itemsize else None


class _Step(NamedTuple):
    name: str  # of its primitive
    kind: str
    phase: str
    line: str
    taken: list[_Array]
    made: list[_Array]
    over: list[_Array]  # what it may write its results over
    bodies: list["_Body"]  # of a loop


class _Body(NamedTuple):
    """A jaxpr as steps: what it calls is inlined, and what only gives another shape or name to an
    array is left out.

    Arguments have their number as a key. What isn't elementwise is counted, and its results and
    operands have that count: of elementwise equations JAX makes more or fewer as a length is 1, but
    for sums of gradients.
    """

    arguments: list[_Array]
    slices: dict[int, _Array]  # the arguments that are parts of what a loop runs over, by number
    steps: list[_Step]
    results: list[_Array]


def _body(jaxpr: Any, axes: dict[str, int]) -> _Body:
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    (outer,) = (eqn for eqn in live.eqns if eqn.primitive.name == "shard_map")
    return _read(next(jaxprs_in_params(outer.params)), axes)


def _read(
    jaxpr: Any, axes: dict[str, int], path: str = "", line: str = "",
    key: tuple[int, ...] = (), slices: int = 0,
) -> _Body:  # fmt: skip
    """A loop's body has the loop's path, line and key; `slices` is how many of its last arguments
    are parts of what the loop runs over."""
    steps: list[_Step] = []
    count = itertools.count()

    def inline(
        jaxpr: Any, given: list[_Array], path: str, line: str, in_library: bool
    ) -> list[_Array]:
        arrays = dict(zip(jaxpr.invars, given, strict=True))

        def array_of(var: Any) -> _Array:
            known = None if isinstance(var, Literal) else arrays.get(var)
            return known or _Array(var.aval)  # a constant, which isn't in memory

        for eqn in jaxpr.eqns:
            here = f"{path}/{eqn.source_info.name_stack}"
            at = line if in_library else line_of(eqn) or line
            name, kind, op = eqn.primitive.name, _kind(eqn, axes), op_of(eqn, here)
            taken = [array_of(var) for var in eqn.invars]
            made = [
                _Array(var.aval, made_at(eqn, i) or at, op) for i, var in enumerate(eqn.outvars)
            ]
            if kind not in ("same", "call", "fused") or name in KEYED:
                number = next(count)
                for i, array in enumerate((*made, *taken)):
                    array.key = array.key or (*key, number, i)
            if kind == "same":
                made = taken
            elif kind == "call":
                inner, *_ = jaxprs_in_params(eqn.params)
                made = inline(inner, taken, here, at, in_library or name == "jit")
            else:
                over = taken if kind in ("fused", "scatter") else []
                bodies = []
                if kind == "loop":
                    carried, count_sliced = _parts_of(eqn)
                    over = taken[carried]
                    inside = (here, at, made[0].key, count_sliced)
                    bodies = [_read(inner, axes, *inside) for inner in jaxprs_in_params(eqn.params)]
                steps.append(_Step(name, kind, phase(here), at, taken, made, over, bodies))
                for array in dict.fromkeys(taken):
                    array.users.append(steps[-1])
            arrays |= zip(eqn.outvars, made, strict=True)
        return [array_of(var) for var in jaxpr.outvars]

    arguments = [_Array(var.aval, key=(*key, -1, i)) for i, var in enumerate(jaxpr.invars)]
    for array in arguments:
        array.sources = {array}
    results = inline(jaxpr, arguments, path, line, False)
    sliced = range(len(arguments) - slices, len(arguments))
    return _Body(arguments, {i: arguments[i] for i in sliced}, steps, results)


def _kind(eqn: JaxprEqn, axes: dict[str, int]) -> str:
    name = eqn.primitive.name
    if name in COLLECTIVES:
        return "collective" if math.prod(axes[axis] for axis in axes_of(eqn)) > 1 else "same"
    for kind, names in KINDS.items():
        if re.fullmatch(names, name):
            return kind
    return "call" if next(jaxprs_in_params(eqn.params), None) else "fused"


def _parts_of(loop: JaxprEqn) -> tuple[slice, int]:
    """Of a scan's operands, those that it carries, and how many at the end it slices. (The slices
    have another shape in its body; its parameters have other names in each JAX.)"""
    if loop.primitive.name != "scan":
        return slice(0), 0
    (body,) = jaxprs_in_params(loop.params)
    stop = len(loop.invars) - (slices := _differ(loop.invars, body.invars))
    carried = len(loop.outvars) - _differ(loop.outvars, body.outvars)
    return slice(stop - carried, stop), slices


def _differ(outer: Any, inner: Any) -> int:
    return sum(a.aval.shape != b.aval.shape for a, b in zip(outer, inner, strict=True))


# --- The worst moment -----------------------------------------------------------------------------


def _put_off(body: _Body, chip: str) -> list[int]:
    """The steps of the backward pass that run at the body's end."""
    stay: set[_Array] = set()  # arrays that more than the results wait for
    for step in reversed(body.steps):
        if step.kind not in ("fused", "collective") or not stay.isdisjoint(step.made):
            stay.update(step.taken)

    def of(kind: str, phase: str) -> set[int]:
        steps = enumerate(body.steps)
        return {t for t, step in steps if (step.kind, step.phase) == (kind, phase)}

    sums, products = of("collective", "backward"), of("product", "backward")
    free = {t for t in sums | products if stay.isdisjoint(body.steps[t].made)}
    little_again = 4 * len(of("product", "recomputed")) < len(products)
    put_off = {V5E: False, V5P: sums <= free}.get(chip, little_again)
    return sorted(free if put_off else free & sums)[1:]


def _worst(body: _Body, chip: str) -> Memory:
    """The most that a body has in memory of what it makes, inside of its loops too."""
    late, end = _put_off(body, chip), len(body.steps)
    in_memory: list[_Array] = []
    over: dict[_Array, set[_Array]] = {}  # what an array may be written over
    inside: dict[int, Memory] = {}  # of a loop: its body's worst moment
    copies: dict[tuple[_Array, Any], _Array] = {}  # for a loop: an array, the copy's type
    parts = body.slices.values()
    cast_before = {made for a in parts if a.cast() for step in a.users for made in step.made}

    def write(array: _Array, t: int) -> None:
        array.first = array.last = t
        array.size = size_of(array.aval, chip)
        in_memory.append(array)

    def has_place(step: _Step, needed: set[_Array]) -> bool:
        """Whether a step that is no product, sum or the like writes its results to memory."""
        if step.name == "add_any" and needed == set(step.taken):
            return True
        users = [[user.kind for user in array.users] for array in step.made]
        sent = bool(needed) and any("collective" in kinds for kinds in users)
        return sent or (chip != V5E and any(kinds.count("product") > 1 for kinds in users))

    for t, step in enumerate(body.steps):
        needed = _sources(step.taken)
        if step.kind == "fused" and not has_place(step, needed):
            for array in step.made:
                array.sources = needed
            continue
        for array in needed:
            array.last = max(array.last, end if t in late else t)
        for array in step.made:
            array.sources = {array}
            if array not in cast_before:
                write(array, t)
                over[array] = _sources(step.over)
        if not step.bodies:
            continue
        inside[t] = max((_worst(b, chip) for b in step.bodies), key=lambda worst: worst.temporary)
        inner = step.bodies[0].slices
        copied = [(step.taken[i], part.cast()) for i, part in inner.items() if part.cast()]
        copied += [(part, part.aval.dtype) for part in parts if part in needed]
        for array, dtype in copied:
            if (array, dtype) not in copies:
                aval = array.aval.update(dtype=dtype)
                copies[array, dtype] = _Array(aval, step.line, "copy", array.key)
                write(copies[array, dtype], t)
            copies[array, dtype].last = t
    for array in _sources(body.results):
        array.last = end

    def alive(t: int) -> list[_Array]:
        """What is in memory at a step, but for what it writes its results over."""
        there = [array for array in in_memory if array.first <= t <= array.last]
        for made in [array for array in there if array.first == t]:
            for old in there:
                if old in over.get(made, ()) and old.last == t and old.size == made.size:
                    there.remove(old)
                    break
        return there

    def needed_at(t: int) -> int:
        return sum(array.size for array in alive(t)) + (inside[t].temporary if t in inside else 0)

    arguments = sum(size_of(array.aval, chip) for array in body.arguments)
    if not body.steps:
        return Memory(arguments, 0, [])
    worst = max(range(end), key=needed_at)
    buffers = inside[worst].buffers[:] if worst in inside else []
    for array in alive(worst):
        shape, dtype = array.aval.shape, array.aval.dtype.name
        buffers.append(Buffer(array.line, array.op, shape, dtype, array.size, array.key))
    return Memory(arguments, needed_at(worst), sorted(buffers, key=lambda buffer: -buffer.bytes))


def _sources(arrays: list[_Array]) -> set[_Array]:
    return set[_Array]().union(*(array.sources for array in arrays))
