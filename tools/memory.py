"""How much memory a traced function needs on each device at its worst moment, predicted.

A compiler decides that in the end. This follows the equations in their order and does to them what
XLA does, as read from the buffers that it assigns in training steps for TPUs:

- Products, reductions, collectives, lookups and loops write their results to memory. What stands
  between them is computed where it is used, and again for each use, but for: operands of
  collectives; sums of two results; and, on chips other than v5e, what several products take.
- What is donated is overwritten, and a result may take the place of an operand of its size that is
  not used any more.
- Stacked weights that a loop casts to a narrower type are cast whole, before the loop. What an
  inner loop takes of a loop's slices is copied for it.
- The sums of weights' gradients over devices are put off to the end of the step, or of the backward
  loop's body, all but the first. So are the products that they sum: on v5p, if those have no other
  collective of the backward pass to run beside; on v5e, never; elsewhere, if little is computed
  again.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib.audit import COLLECTIVES, axes_of, line_of, made_at, on_host, op_of, phase
from shardlib.devices import Chip

# What an equation is, by its primitive's name; those of all reductions and scatters begin alike.
KINDS = {
    "same": {"reshape", "squeeze", "transpose", "optimization_barrier", "name", "pcast", "pvary"}
    | {"reduce_precision", "copy"},
    "loop": {"scan", "while", "cond"},
    "product": {"dot_general", "conv_general_dilated", "gather", "sort", "cumsum", "random_bits"},
    "scatter": {"dynamic_update_slice"},
    "reduce": {"argmax", "argmin"},
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
    body = _body(jaxpr, axes)
    kind = chip.kind if chip else ""
    arguments = sum(size_of(aval, kind) for aval in body.avals[: body.arguments])
    moment = _worst(body, kind, ())
    return Memory(arguments, moment.bytes, sorted(moment.buffers, key=lambda b: -b.bytes))


def shapes(jaxpr: Any, axes: dict[str, int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shape of each array that has a key, by that. On another mesh and at other sizes an array
    has the same key, as long as JAX makes the same products, sums and collectives of the source."""

    def walk(body: _Body, key: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
        yield from (((*key, *k), body.avals[value].shape) for value, k in body.keys.items())
        for step in body.steps:
            for inner in step.bodies(axes):
                yield from walk(inner, (*key, *body.keys[step.made[0]]))

    return dict(walk(_body(jaxpr, axes), ()))


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


class _Step(NamedTuple):
    eqn: JaxprEqn
    path: str
    line: str
    kind: str
    taken: list[int | None]  # numbers of values; None is a literal
    made: list[int]

    @property
    def phase(self) -> str:
        return phase(self.path)

    def bodies(self, axes: dict[str, int]) -> "Iterator[_Body]":
        """Of a loop."""
        if self.kind == "loop":
            for jaxpr in jaxprs_in_params(self.eqn.params):
                yield _Body(jaxpr, axes, self.path, self.line)


class _Body:
    """A jaxpr as a list of steps between numbered values: what it calls is inlined, and what only
    gives another shape or name to an array is left out.

    `keys` has arguments by their number. It counts what isn't elementwise, and has such steps'
    results and operands by that count: of elementwise equations JAX makes more or fewer as a length
    is 1, but for sums of gradients.
    """

    def __init__(self, jaxpr: Any, axes: dict[str, int], path: str, line: str):
        self.axes, self.path = axes, path
        self.avals: list[Any] = [var.aval for var in jaxpr.invars]
        self.arguments = len(self.avals)
        self.steps: list[_Step] = []
        self.keys: dict[int, tuple[int, ...]] = {i: (-1, i) for i in range(self.arguments)}
        self.count = 0
        numbers: list[int | None] = list(range(self.arguments))
        self.results = self._inline(jaxpr, numbers, path, line, False)
        self.users: dict[int, list[_Step]] = collections.defaultdict(list)
        for step in self.steps:
            for value in {value for value in step.taken if value is not None}:
                self.users[value].append(step)

    def _inline(
        self, jaxpr: Any, given: list[int | None], path: str, line: str, in_library: bool
    ) -> list[int | None]:
        numbers: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            here = f"{path}/{eqn.source_info.name_stack}"
            at = line if in_library else line_of(eqn) or line
            taken = [None if isinstance(v, Literal) else numbers.get(v) for v in eqn.invars]
            new = list(range(len(self.avals), len(self.avals) + len(eqn.outvars)))
            self.avals += [var.aval for var in eqn.outvars]
            kind = self._kind(eqn)
            if kind not in ("same", "call", "fused") or eqn.primitive.name in KEYED:
                for i, value in enumerate((*new, *taken)):
                    if value is not None:
                        self.keys.setdefault(value, (self.count, i))
                self.count += 1
            made: Sequence[int | None] = new
            if kind == "same":
                made = taken
            elif kind == "call":
                (inner, *_), jitted = jaxprs_in_params(eqn.params), eqn.primitive.name == "jit"
                made = self._inline(inner, taken, here, at, in_library or jitted)
            else:
                self.steps.append(_Step(eqn, here, at, kind, taken, new))
            numbers |= zip(eqn.outvars, made, strict=True)
        return [None if isinstance(v, Literal) else numbers.get(v) for v in jaxpr.outvars]

    def _kind(self, eqn: JaxprEqn) -> str:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            moves = math.prod(self.axes[axis] for axis in axes_of(eqn)) > 1
            return "collective" if moves else "same"
        for kind, names in KINDS.items():
            if name in names:
                return kind
        if name.startswith(("reduce", "scatter")):
            return "reduce" if name.startswith("reduce") else "scatter"
        return "call" if next(jaxprs_in_params(eqn.params), None) else "fused"


def _body(jaxpr: Any, axes: dict[str, int]) -> _Body:
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    (outer,) = (eqn for eqn in live.eqns if eqn.primitive.name == "shard_map")
    return _Body(next(jaxprs_in_params(outer.params)), axes, "", "")


def _put_off(body: _Body, chip: str) -> list[int]:
    """The steps of the backward pass that run at the body's end."""
    stay: set[int | None] = set()  # values that more than the results wait for
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


# --- The worst moment -----------------------------------------------------------------------------


class _Moment(NamedTuple):
    bytes: int
    buffers: list[Buffer]
    casts: dict[int, Any]  # arguments that a loop takes as cast before: to what


class _Places(NamedTuple):
    """When each value is in memory, by the numbers of values and of steps."""

    sizes: list[int]
    first: dict[int, int]  # of a value that has a place: the step that makes it
    last: dict[int, int]  # and the last one that needs it
    over: dict[int, set[int]]  # of a step: what it may write its results over
    inside: dict[int, _Moment]  # of a loop: its body's worst moment
    copies: dict[tuple[int, Any], int]  # for a loop: a value, the copy's type -> a new value


def _places(body: _Body, chip: str, key: tuple[int, ...], stacked: int) -> _Places:
    places = _Places([size_of(aval, chip) for aval in body.avals], {}, {}, {}, {}, {})
    sizes, first, last, over, inside, copies = places
    from_stacks = set(range(body.arguments - stacked, body.arguments))
    late = _put_off(body, chip)

    def has_place(value: int, made_of: set[int]) -> bool:
        """Whether a value that is no product, sum or the like has one."""
        kinds = [step.kind for step in body.users[value]]
        if "collective" in kinds:
            return bool(made_of)
        return chip != V5E and kinds.count("product") > 1

    sources: list[set[int]] = [{value} for value in range(len(sizes))]  # with places
    for t, step in enumerate(body.steps):
        taken = [sources[v] if v is not None else set() for v in step.taken]
        needed = set().union(*taken)
        adds = step.eqn.primitive.name == "add_any" and needed == set(step.taken)
        if step.kind == "fused" and not adds and not any(has_place(v, needed) for v in step.made):
            for value in step.made:
                sources[value] = needed
            continue
        first |= dict.fromkeys(step.made, t)
        end = len(body.steps) if t in late else t
        last |= {v: max(end, last.get(v, 0)) for v in needed}
        over[t] = {"fused": needed, "scatter": taken[0]}.get(step.kind, set())
        if step.kind == "loop":
            carried, slices = _parts_of(step.eqn)
            over[t] = set().union(*taken[carried])
            within = (*key, *body.keys[step.made[0]])
            moments = [_worst(b, chip, within, slices) for b in step.bodies(body.axes)]
            inside[t] = max(moments, key=lambda moment: moment.bytes)
            copied = [(step.taken[i], dtype) for i, dtype in inside[t].casts.items()]
            copied += [(value, body.avals[value].dtype) for value in needed & from_stacks]
            for source, dtype in copied:
                assert source is not None, "a literal has no slices"
                if (source, dtype) not in copies:
                    copies[source, dtype] = len(sizes)
                    first[len(sizes)] = t
                    wide = body.avals[source].dtype.itemsize
                    sizes.append(sizes[source] * dtype.itemsize // wide)
                last[copies[source, dtype]] = t
    for result in body.results:
        if result is not None:
            last |= dict.fromkeys(sources[result], len(body.steps))
    return places


def _worst(body: _Body, chip: str, key: tuple[int, ...], stacked: int = 0) -> _Moment:
    """The most bytes that a body has in memory of what it makes, inside of its loops too.
    `stacked` is how many of its last arguments are slices of what a loop runs over."""
    sizes, first, last, over, inside, copies = _places(body, chip, key, stacked)
    users, narrowed = body.users, {}
    for value in range(body.arguments - stacked, body.arguments):
        if users[value] and all(map(_narrows, users[value])):
            narrowed[value] = users[value][0].eqn.outvars[0].aval.dtype  # type: ignore
            for step in users[value]:
                first.pop(step.made[0], None)
    if not body.steps:
        return _Moment(0, [], narrowed)

    def alive(t: int) -> list[int]:
        """What is in memory at a step, but for what it writes its results over."""
        there = [v for v, start in first.items() if start <= t <= max(start, last.get(v, 0))]
        for made in body.steps[t].made:
            ends = (v for v in there if v in over.get(t, ()) and last[v] == t)
            alike = [v for v in ends if sizes[v] == sizes[made]]
            if made in first and alike:
                there.remove(alike[0])
        return there

    def needed_at(t: int) -> int:
        return sum(sizes[v] for v in alive(t)) + (inside[t].bytes if t in inside else 0)

    worst = max(range(len(body.steps)), key=needed_at)
    buffers = inside[worst].buffers[:] if worst in inside else []
    copied = {number: value_and_type for value_and_type, number in copies.items()}
    for number in alive(worst):
        step, copy = body.steps[first[number]], number in copied
        value, dtype = copied.get(number) or (number, body.avals[number].dtype)
        op = "copy" if copy else op_of(step.eqn, step.path)
        line = step.line if copy else made_at(step.eqn, step.made.index(number)) or step.line
        found = (*key, *body.keys[value]) if value in body.keys else ()
        shape = body.avals[value].shape
        buffers.append(Buffer(line, op, shape, dtype.name, sizes[number], found))
    return _Moment(needed_at(worst), buffers, narrowed)


def _narrows(step: _Step) -> bool:
    if step.eqn.primitive.name != "convert_element_type":
        return False
    (taken,), (made,) = step.eqn.invars, step.eqn.outvars
    return made.aval.dtype.itemsize < taken.aval.dtype.itemsize  # type: ignore


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
