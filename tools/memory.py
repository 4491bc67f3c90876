"""Predicts the peak memory that a traced function needs on each device.

The compiler decides that in the end. The prediction walks the equations in order and applies rules
that describe the buffers which XLA assigns in training steps for TPUs:

- Matmuls, reductions, collectives, lookups and loops write their results to memory. Other results
  are computed where they are used, once for each use, with three exceptions that are written too:
  operands of collectives, sums of two results, and, except on v5e, operands of several matmuls.
- A donated argument is overwritten. A result may also overwrite an operand of the same size that is
  not used any more.
- Stacked weights that a loop casts to a narrower type are cast before the loop, all layers at once.
  Slices of a loop's arrays that an inner loop takes are copied for it.
- Where an op has a kernel, the equations of its twin are one step. A matmul by a constant, such as
  RoPE's, counts as elementwise.
- Reductions of weight gradients over devices, except the first, are deferred to the end of the step
  or of the backward loop's body. So are the matmuls that make these gradients: on v5e never; on v5p
  if all collectives of the backward pass can be deferred; elsewhere if little is recomputed.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from shardlib.audit import COLLECTIVES, axes_of, carried, line_of, made_at, on_host, op_of, phase
from shardlib.devices import Chip
from shardlib.kernels import runs_kernel

# Kind -> pattern of its primitives' names. The first that matches counts.
KINDS = {
    "same": "reshape|squeeze|transpose|optimization_barrier|name|pcast|pvary|reduce_precision|copy",
    "loop": "scan|while|cond",
    "product": "dot_general|conv_general_dilated|gather|sort|cumsum|random_bits",
    "scatter": "scatter.*|dynamic_update_slice",
    "reduce": "reduce.*|argmax|argmin",
}
KEYED = {*COLLECTIVES, "add_any"}  # have a key, whatever their kind
V5E, V5P = "TPU v5 lite", "TPU v5"


class Buffer(NamedTuple):
    """An array in memory at the peak. If it has a key, `shapes` has its shape under that key."""

    line: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    key: tuple[int, ...]


class Memory(NamedTuple):
    arguments: int  # bytes, including results, which overwrite donated arguments
    temporary: int  # bytes of everything else at the peak
    buffers: list[Buffer]  # of `temporary`, largest first


def predict(jaxpr: Any, axes: dict[str, int], chip: Chip | None = None) -> Memory:
    """The memory that a function under `typed_shard_map` needs on each device of a mesh of these
    axes, given the jaxpr of its `jax.jit`. Assumes that its results overwrite donated arguments."""
    kind = chip.kind if chip else ""
    return _peak(_body(jaxpr, axes, kind), kind)


def shapes(jaxpr: Any, axes: dict[str, int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Key -> shape, for arrays that have a key. An array has the same key on another mesh and at
    other sizes, as long as JAX traces the same matmuls, sums and collectives."""

    def walk(body: _Body) -> Iterator[_Array]:
        yield from body.arguments
        for step in body.steps:
            yield from (*step.operands, *step.results)
            for inner in step.bodies:
                yield from walk(inner)

    return {array.key: array.aval.shape for array in walk(_body(jaxpr, axes)) if array.key}


def size_of(aval: Any, chip: str) -> int:
    """The bytes of an array on a kind of chip; 0 if it is in the host's memory. TPUs tile memory:
    one of the two innermost dimensions is padded to a multiple of 128, the other to a multiple of
    8, or if it is short to a power of two that fills 32 bits. The innermost dimensions are those
    that waste least."""
    shape, itemsize = aval.shape, aval.dtype.itemsize
    elements = 0 if on_host(aval) else math.prod(shape)
    if chip.startswith("TPU") and elements:
        if len(shape) < 2:
            return _padded(elements, 128) * itemsize
        elements = min(
            elements // (a * b) * _padded(a, 128) * _padded(b, min(8, max(4 // itemsize, power)))
            for a, b in itertools.permutations(shape, 2)
            for power in (1 << (b - 1).bit_length(),)
        )
    return elements * itemsize


def _padded(n: int, tile: int) -> int:
    return -(-n // tile) * tile


# --- A jaxpr as steps -----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Array:
    """An argument of a body, or a result of one of its steps."""

    aval: Any
    line: str = ""
    op: str = ""
    key: tuple[int, ...] = ()
    users: list["_Step"] = dataclasses.field(default_factory=list)
    # Set by `_peak`: the arrays in memory from which this one is computed where it is used, or just
    # itself if it is in memory; its bytes; and the steps that make it and that use it last.
    sources: set["_Array"] = dataclasses.field(default_factory=set)
    size: int = 0
    first: int = 0
    last: int = 0

    def cast(self) -> Any:
        """The narrower type to which every step that uses the array casts it, if there is one."""
        dtype = self.users[0].results[0].aval.dtype if self.users else self.aval.dtype
        casts = all(step.name == "convert_element_type" for step in self.users)
        return dtype if casts and dtype.itemsize < self.aval.dtype.itemsize else None


class _Step(NamedTuple):
    name: str  # of its primitive
    kind: str
    phase: str
    line: str
    in_kernel: bool  # one of the equations of a twin in whose place the device runs a kernel
    operands: list[_Array]
    results: list[_Array]
    overwrites: list[_Array]  # operands that its results may overwrite
    bodies: list["_Body"]  # of a loop
    fixed: list[_Array]  # operands of a scan that are the same in each iteration, its first ones


class _Body(NamedTuple):
    """A jaxpr as steps. Calls are inlined; equations that only reshape or rename are left out.

    The key of an argument is its number. Other keys count the equations that aren't elementwise,
    and number their results and operands. Elementwise equations don't count, except sums of
    gradients, as JAX makes more or fewer of them where a length is 1.
    """

    arguments: list[_Array]
    slices: dict[int, _Array]  # number -> argument that is a slice of an array a loop runs over
    steps: list[_Step]
    results: list[_Array]


def _body(jaxpr: Any, axes: dict[str, int], chip: str = "") -> _Body:
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    (outer,) = (eqn for eqn in live.eqns if eqn.primitive.name == "shard_map")
    return _read(next(jaxprs_in_params(outer.params)), axes, chip)


def _read(
    jaxpr: Any, axes: dict[str, int], chip: str, path: str = "", line: str = "",
    key: tuple[int, ...] = (), slices: int = 0,
) -> _Body:  # fmt: skip
    """Reads a jaxpr as steps. The body of a loop gets the loop's path, line and key; its last
    `slices` arguments are slices of the arrays that the loop runs over."""
    steps: list[_Step] = []
    count = itertools.count()

    def inline(
        jaxpr: Any, given: list[_Array], path: str, line: str, in_library: bool
    ) -> list[_Array]:
        arrays = dict(zip(jaxpr.invars, given, strict=True))

        def array_of(var: Any) -> _Array:
            known = None if isinstance(var, Literal) else arrays.get(var)
            return known or _Array(var.aval)  # a constant takes no memory

        for eqn in jaxpr.eqns:
            here = f"{path}/{eqn.source_info.name_stack}"
            at = line if in_library else line_of(eqn) or line
            name, kind, op = eqn.primitive.name, _kind(eqn, axes), op_of(eqn, here)
            operands = [array_of(var) for var in eqn.invars]
            results = [
                _Array(var.aval, made_at(eqn, i) or at, op) for i, var in enumerate(eqn.outvars)
            ]
            if kind not in ("same", "call", "fused") or name in KEYED:
                number = next(count)
                for i, array in enumerate((*results, *operands)):
                    array.key = array.key or (*key, number, i)
            if kind == "same":
                results = operands
            elif kind == "call":
                inner, *_ = jaxprs_in_params(eqn.params)
                results = inline(inner, operands, here, at, in_library or name == "jit")
            else:
                overwrites = operands if kind in ("fused", "scatter") else []
                bodies, fixed = [], operands[: carried(eqn).start] if name == "scan" else []
                if kind == "loop":
                    overwrites = operands[carried(eqn)]
                    inside = (here, at, results[0].key, len(operands) - carried(eqn).stop)
                    bodies = [
                        _read(inner, axes, chip, *inside) for inner in jaxprs_in_params(eqn.params)
                    ]
                of = (name, kind, phase(here), at, runs_kernel(here, chip))
                row = (*of, operands, results, overwrites, bodies, fixed)
                steps.append(_Step(*row))
                for array in dict.fromkeys(operands):
                    array.users.append(steps[-1])
            arrays |= zip(eqn.outvars, results, strict=True)
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


# --- The peak -------------------------------------------------------------------------------------


def _deferred(body: _Body, chip: str) -> list[int]:
    """The steps of the backward pass that run at the body's end."""
    needed: set[_Array] = set()  # by more than the body's results
    for step in reversed(body.steps):
        if step.kind not in ("fused", "collective") or not needed.isdisjoint(step.results):
            needed.update(step.operands)

    def steps_of(kind: str, phase: str) -> set[int]:
        steps = enumerate(body.steps)
        return {t for t, step in steps if (step.kind, step.phase) == (kind, phase)}

    sums, products = steps_of("collective", "backward"), steps_of("product", "backward")
    free = {t for t in sums | products if needed.isdisjoint(body.steps[t].results)}
    little_recomputed = 4 * len(steps_of("product", "recomputed")) < len(products)
    with_products = {V5E: False, V5P: sums <= free}.get(chip, little_recomputed)
    return sorted(free if with_products else free & sums)[1:]


def _peak(body: _Body, chip: str) -> Memory:
    """The peak memory of a body, including the bodies of its loops."""
    deferred, end = _deferred(body, chip), len(body.steps)
    in_memory: list[_Array] = []
    overwrites: dict[_Array, set[_Array]] = {}  # array -> those whose place it may take
    inside: dict[int, Memory] = {}  # step -> peak of the loop's body
    copies: dict[tuple[_Array, Any], _Array] = {}  # array and type -> its copy for a loop
    slices = body.slices.values()
    cast_before = {new for a in slices if a.cast() for step in a.users for new in step.results}

    def write(array: _Array, t: int) -> None:
        array.first = array.last = t
        array.size = size_of(array.aval, chip)
        in_memory.append(array)

    def is_written(step: _Step, needed: set[_Array]) -> bool:
        """Returns whether an elementwise step writes its results to memory."""
        if step.name == "add_any" and needed == set(step.operands):
            return True
        users = [[user.kind for user in array.users] for array in step.results]
        sent = any("collective" in kinds for kinds in users)
        several = chip != V5E and any(kinds.count("product") > 1 for kinds in users)
        return bool(needed) and (sent or several)

    for t, step in enumerate(body.steps):
        needed = _sources(step.operands)
        if step.in_kernel:
            written = [a for a in step.results if not all(u.in_kernel for u in a.users)]
        else:
            given = [a.aval.size for a in step.operands if a.sources]
            by_constant = step.name == "dot_general" and given == [step.results[0].aval.size]
            fused = (step.kind == "fused" or by_constant) and not is_written(step, needed)
            written = [] if fused else step.results
        for array in step.results:
            array.sources = {array} if array in written else needed
        if not written:
            continue
        for array in needed:
            array.last = max(array.last, end if t in deferred else t)
        for array in written:
            if array not in cast_before:
                write(array, t)
                overwrites[array] = _sources(step.overwrites)
        if not step.bodies or step.in_kernel:
            continue
        for argument, array in zip(step.bodies[0].arguments, step.fixed, strict=False):
            argument.sources &= {argument} if array.sources else set()  # a constant stays one
        inside[t] = max((_peak(b, chip) for b in step.bodies), key=lambda peak: peak.temporary)
        inner = step.bodies[0].slices
        copied = [(step.operands[i], part.cast()) for i, part in inner.items() if part.cast()]
        copied += [(part, part.aval.dtype) for part in slices if part in needed]
        for array, dtype in copied:
            if (array, dtype) not in copies:
                aval = array.aval.update(dtype=dtype)
                copies[array, dtype] = _Array(aval, step.line, "copy", array.key)
                write(copies[array, dtype], t)
            copies[array, dtype].last = t
    for array in _sources(body.results):
        array.last = end

    def alive(t: int) -> list[_Array]:
        """The arrays in memory at a step, except those that its results overwrite."""
        arrays = [array for array in in_memory if array.first <= t <= array.last]
        for new in [array for array in arrays if array.first == t]:
            for old in arrays:
                if old in overwrites.get(new, ()) and old.last == t and old.size == new.size:
                    arrays.remove(old)
                    break
        return arrays

    def needed_at(t: int) -> int:
        return sum(array.size for array in alive(t)) + (inside[t].temporary if t in inside else 0)

    arguments = sum(size_of(array.aval, chip) for array in body.arguments)
    if not body.steps:
        return Memory(arguments, 0, [])
    peak = max(range(end), key=needed_at)
    buffers = inside[peak].buffers[:] if peak in inside else []
    for array in alive(peak):
        shape, dtype = array.aval.shape, array.aval.dtype.name
        buffers.append(Buffer(array.line, array.op, shape, dtype, array.size, array.key))
    return Memory(arguments, needed_at(peak), sorted(buffers, key=lambda buffer: -buffer.bytes))


def _sources(arrays: list[_Array]) -> set[_Array]:
    return set[_Array]().union(*(array.sources for array in arrays))
