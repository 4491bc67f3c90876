"""Array types that name each dimension, the mesh axes it is split over, and the sums still owed.

    f32["B/d L M/t"]       B is split over axis d, L is whole, M is split over axis t
    f32["M/t/d"]           M is split over t first, then each part over d
    f32["B/d L M {U:t}"]   each device along t holds a partial sum; the value is their total
    f32[""]                a scalar

An *axis* belongs to the mesh, a *dimension* to an array. The grammar:

    spec  := item* [ "{U:" axis ("," axis)* "}" ]
    item  := dim | "[" dim "]"                 brackets: the dimension `ops.index_unreduced` looks up
    dim   := (name | integer) ("/" axis)*

The axes of one dimension stand in the reverse of the mesh's order, so on a mesh `d, t` always
`M/t/d`, never `M/d/t`: the two have the same shapes and hold different parts.

Sizes are bound to names within a scope. Each call of a function decorated with `typechecked` or
`typed_shard_map` opens a fresh one.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

F = typing.TypeVar("F", bound=Callable[..., Any])


class ShardTypeError(TypeError):
    """A value that isn't what its type says, or an op that can't do what its string says."""


class SpecError(ShardTypeError):
    """A type string that can't be read."""


# --- Parsing: text to specs, no arrays ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of an array: `M/t/d`. A name of digits is a literal size."""

    name: str
    axes: tuple[str, ...] = ()
    indexed: bool = False

    def __str__(self) -> str:
        text = "/".join((self.name, *self.axes))
        return f"[{text}]" if self.indexed else text


@dataclasses.dataclass(frozen=True)
class Spec:
    """The layout of an array: its dimensions, and the axes over which a sum is owed."""

    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...] = ()

    def __str__(self) -> str:
        owed = [f"{{U:{','.join(self.unreduced)}}}"] if self.unreduced else []
        return " ".join([*map(str, self.dims), *owed])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the dimensions are split over."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def partition_spec(self) -> PartitionSpec:
        entries = [d.axes[0] if len(d.axes) == 1 else d.axes or None for d in self.dims]
        return PartitionSpec(*entries)


class _Parser:
    """Recursive descent over the tokens of one string; an error points at the bad part."""

    def __init__(self, text: str):
        self.text, self.next = text, 0
        self.tokens = [(m[0], m.start()) for m in re.finditer(r"->|\{U:|\w+|\S", text)]
        self.tokens.append(("", len(text)))

    @property
    def token(self) -> str:
        return self.tokens[self.next][0]

    def fail(self, message: str) -> typing.NoReturn:
        caret = " " * self.tokens[self.next][1] + "^"
        raise SpecError(f"{message}\n    {self.text}\n    {caret}")

    def skip(self, token: str) -> bool:
        found = self.token == token
        self.next += found
        return found

    def expect(self, token: str) -> None:
        if not self.skip(token):
            self.fail(f'expected "{token}"')

    def axis(self, seen: list[str]) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.token):
            self.fail("expected the name of a mesh axis")
        if self.token in seen:
            self.fail(f"axis {self.token} stands twice in one array")
        seen.append(self.token)
        self.next += 1
        return seen[-1]

    def dim(self, seen: list[str]) -> Dim:
        if not re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", self.token):
            self.fail("expected a dimension: a name or an integer, with axes as in M/t")
        name, axes = self.token, []
        self.next += 1
        while self.skip("/"):
            axes.append(self.axis(seen))
        return Dim(name, tuple(axes))

    def spec(self) -> Spec:
        dims: list[Dim] = []
        owed: list[str] = []
        seen: list[str] = []
        while self.token not in ("", ",", "->", "{U:"):
            indexed = self.skip("[")
            dims.append(dataclasses.replace(self.dim(seen), indexed=indexed))
            if indexed:
                self.expect("]")
        if self.skip("{U:"):
            owed.append(self.axis(seen))
            while self.skip(","):
                owed.append(self.axis(seen))
            self.expect("}")
        return Spec(tuple(dims), tuple(owed))

    def end(self) -> None:
        if self.token:
            self.fail("expected nothing more")


@functools.cache
def parse_spec(text: str) -> Spec:
    """`"B/d L M/t"` as a Spec. Raises SpecError with a caret under the bad part."""
    parser = _Parser(text)
    spec = parser.spec()
    parser.end()
    return spec


@functools.cache
def parse_signature(text: str) -> tuple[tuple[Spec, ...], Spec]:
    """`"B/d L M, M F/t -> B/d L F/t"` as the operands' specs and the result's."""
    parser = _Parser(text)
    operands = [parser.spec()]
    while parser.skip(","):
        operands.append(parser.spec())
    parser.expect("->")
    result = parser.spec()
    parser.end()
    return tuple(operands), result


# --- Array types and what they check --------------------------------------------------------------


class ArrayType(type):
    """The class of the classes that `f32["B/d L"]` and its like make."""

    element: "DType"
    dtype: np.dtype
    spec: Spec

    def __instancecheck__(cls, value: object) -> bool:
        return _bindings(value, cls, "isinstance")[1] is None

    def __repr__(cls) -> str:
        return cls.__name__


class DType:
    """An element type; subscripted with a type string it gives an array type."""

    def __init__(self, name: str, dtype: Any):
        self.name, self.dtype = name, np.dtype(dtype)

    def __getitem__(self, text: str) -> ArrayType:
        return array_type(self, parse_spec(text))


@functools.cache
def array_type(dtype: DType, spec: Spec) -> ArrayType:
    if indexed := [str(dim) for dim in spec.dims if dim.indexed]:
        raise SpecError(f"{indexed[0]} has a place in a signature of ops.index_unreduced only")
    members = {"dtype": dtype.dtype, "spec": spec, "element": dtype}
    return ArrayType(f'{dtype.name}["{spec}"]', (), members)


f32 = DType("f32", jnp.float32)
bf16 = DType("bf16", jnp.bfloat16)
i32 = DType("i32", jnp.int32)
u32 = DType("u32", jnp.uint32)
bool_ = DType("bool_", jnp.bool_)

# Dimension name -> (global size, where it was bound), for the innermost open scope.
_sizes: contextvars.ContextVar[dict[str, tuple[int, str]] | None] = contextvars.ContextVar(
    "sizes", default=None
)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Opens a fresh table of dimension sizes."""
    token = _sizes.set({})
    try:
        yield
    finally:
        _sizes.reset(token)


def mesh_shape() -> dict[str, int]:
    """Axis name -> size of the mesh in context, in the mesh's order."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def inside_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def bound_sizes() -> dict[str, int]:
    """The global sizes that the open scope has bound so far."""
    return {name: size for name, (size, _) in (_sizes.get() or {}).items()}


def check_axes(spec: Spec) -> str | None:
    """What is wrong with the spec's axes on the mesh in context, or None."""
    mesh = mesh_shape()
    order = list(reversed(mesh))
    shown = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) or "no axes: none is set"
    for axis in (*spec.axes, *spec.unreduced):
        if axis not in mesh:
            return f"axis {axis} is not in the mesh, which has {shown}"
    for dim in spec.dims:
        ordered = tuple(sorted(dim.axes, key=order.index))
        if dim.axes != ordered:
            return f"axes stand in the order {', '.join(order)}: write {Dim(dim.name, ordered)}"
    return None


def check(value: object, expected: ArrayType | Spec, where: str) -> None:
    """Raises ShardTypeError unless `value` is of the type (or, given a Spec, of the layout).

    Binds the sizes of named dimensions in the open scope, or compares them with those bound. Within
    a shard_map it also compares the sums owed; outside, the layout of a concrete array.
    """
    bindings, problem = _bindings(value, expected, where)
    if problem is not None:
        declared = expected.__name__ if isinstance(expected, ArrayType) else str(expected) or "(a scalar)"
        raise ShardTypeError(
            f"{where} does not fit its type\n"
            f"    declared: {declared}\n"
            f"    found:    {describe(value)}\n"
            f"    {problem}"
        )
    sizes = _sizes.get()
    if sizes is not None:
        sizes.update(bindings)


def describe(value: object) -> str:
    """A value's type as an error shows it: `bfloat16[2,64]{V:d} on each device of d=4, t=2`."""
    try:
        text = str(jax.typeof(value))
    except TypeError:
        return f"a {type(value).__name__}"
    if inside_shard_map():
        mesh = ", ".join(f"{axis}={size}" for axis, size in mesh_shape().items())
        return f"{text} on each device of {mesh}"
    return text


def _bindings(
    value: object, expected: ArrayType | Spec, where: str
) -> tuple[dict[str, tuple[int, str]], str | None]:
    """The sizes that the value gives to the names, and what is wrong with it or None."""
    spec = expected.spec if isinstance(expected, ArrayType) else expected
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return {}, "it is not an array"
    value = typing.cast(jax.Array, value)
    if isinstance(expected, ArrayType) and value.dtype != expected.dtype:
        return {}, f"the dtype is {value.dtype}, not {expected.dtype}"
    if len(value.shape) != len(spec.dims):
        return {}, f"it has {len(value.shape)} dimensions, the type has {len(spec.dims)}"
    local = inside_shard_map()
    if (spec.axes or spec.unreduced) and (problem := check_axes(spec)):
        return {}, problem
    mesh = mesh_shape()
    known = dict(_sizes.get() or {})
    new: dict[str, tuple[int, str]] = {}
    here = f"{where} `{spec}` ({_caller()})"
    for dim, length in zip(spec.dims, value.shape, strict=True):
        parts = math.prod(mesh[axis] for axis in dim.axes)
        size = length * parts if local else length
        split = ", ".join(f"{axis}={mesh[axis]}" for axis in dim.axes)
        if size % parts:
            return {}, f"dimension {dim.name} of size {size} does not split evenly over {split}"
        bound, place = known.get(dim.name, (size, ""))
        if dim.name.isdigit():
            bound, place = int(dim.name), "the type string"
        if bound != size:
            how = f" ({length} on each of {split})" if local and dim.axes else ""
            problem = f"dimension {dim.name}: size {size}{how} here, size {bound} in {place}"
            return {}, problem + (_split_hint(dim, spec, length, bound) if local else "")
        known[dim.name] = new[dim.name] = known.get(dim.name, (size, here))
    if local:
        return new, _pending_problem(value, spec)
    return new, _layout_problem(value, spec)


def _split_hint(dim: Dim, spec: Spec, length: int, bound: int) -> str:
    """Names the split under which the length would fit, if there is one."""
    mesh = mesh_shape()
    order = list(reversed(mesh))
    free = [a for a in order if a not in spec.axes or a in dim.axes]
    for count in range(len(free) + 1):
        for axes in itertools.combinations(free, count):
            if axes != dim.axes and length * math.prod(mesh[a] for a in axes) == bound:
                return f"; as {Dim(dim.name, axes)} it would fit: gather, scatter or retype it"
    return ""


def _pending_problem(value: jax.Array, spec: Spec) -> str | None:
    kind = jax.typeof(value).manual_axis_type
    owed, declared = set(kind.unreduced), set(spec.unreduced)
    if undeclared := ",".join(a for a in mesh_shape() if a in owed - declared):
        return (
            f"it owes a sum over {undeclared}: pay it with ops.psum or ops.psum_scatter, "
            f"or declare {{U:{undeclared}}}"
        )
    if missing := ",".join(a for a in mesh_shape() if a in declared - owed):
        return f"it owes no sum over {missing}: it is summed already, or never was a partial sum"
    if not spec.dims and kind.varying:
        axes = ", ".join(a for a in mesh_shape() if a in kind.varying)
        return f"a scalar is the same on every device or owes a sum, and this one varies over {axes}"
    return None


def _layout_problem(value: jax.Array, spec: Spec) -> str | None:
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
        return None  # a tracer's layout is not known yet, a numpy array has none
    if not spec.axes and value.sharding.is_fully_replicated:
        return None
    mesh = jax.sharding.get_mesh()
    if mesh.empty or not value.sharding.is_equivalent_to(
        NamedSharding(mesh, spec.partition_spec), value.ndim
    ):
        return f"its layout is {value.sharding}"
    return None


def _caller() -> str:
    """file:line of the innermost frame that is neither ours nor JAX's."""
    ours = (os.path.dirname(__file__), os.path.dirname(jax.__file__), os.path.dirname(os.__file__))
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((*ours[:2], ours[2] + "/contextlib")):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# --- Trees of array types -------------------------------------------------------------------------


class Stacked:
    """`Stacked["layers", Layer]`: a Layer whose every array has a leading dimension `layers`."""

    def __init__(self, dim: Dim, inner: Any):
        self.dim, self.inner = dim, inner

    def __class_getitem__(cls, item: tuple[str, Any]) -> "Stacked":
        return cls(parse_spec(item[0]).dims[0], item[1])

    def stack(self, inner: ArrayType) -> ArrayType:
        spec = Spec((self.dim, *inner.spec.dims), inner.spec.unreduced)
        return array_type(inner.element, spec)


@typing.dataclass_transform(frozen_default=True)
def pytree_dataclass(cls: type) -> type:
    """A frozen dataclass that JAX sees through; the fields' annotations are its layout.

        @pytree_dataclass
        class Layer:
            w_up: f32["M/d F/t"]
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@functools.cache
def type_tree(hint: Any) -> Any:
    """The annotation as a tree with an array type for each array; None if it has no arrays."""
    if isinstance(hint, ArrayType):
        return hint
    if isinstance(hint, Stacked):
        return jax.tree.map(hint.stack, type_tree(hint.inner))
    if dataclasses.is_dataclass(hint):
        fields = {name: type_tree(field) for name, field in typing.get_type_hints(hint).items()}
        return None if None in fields.values() else hint(**fields)
    if typing.get_origin(hint) is tuple:
        members = tuple(type_tree(member) for member in typing.get_args(hint))
        return None if None in members else members
    return None


def check_tree(value: Any, hint: Any, where: str) -> None:
    """`check` for each array of a tree against the annotation `hint`."""
    types = type_tree(hint)
    if jax.tree.structure(value) != jax.tree.structure(types):
        found = describe(value)
        raise ShardTypeError(f"{where} is {found}, not {getattr(hint, '__name__', hint)}")
    for (path, leaf_type), leaf in zip(
        jax.tree.leaves_with_path(types), jax.tree.leaves(value), strict=True
    ):
        check(leaf, leaf_type, where + jax.tree_util.keystr(path))


def make_partition_specs(hint: Any) -> Any:
    """A PartitionSpec for each array of the annotated type."""
    return jax.tree.map(lambda leaf: leaf.spec.partition_spec, type_tree(hint))


def make_shardings(hint: Any) -> Any:
    """A NamedSharding on the mesh in context for each array of the annotated type."""
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), make_partition_specs(hint))


def make_shapes(hint: Any, sizes: dict[str, int]) -> Any:
    """A ShapeDtypeStruct, of global shape, for each array of the annotated type.

    Raises ValueError where a dimension doesn't split evenly over its axes of the mesh in context.
    """
    mesh = mesh_shape()

    def shape(path: tuple[Any, ...], leaf: ArrayType) -> jax.ShapeDtypeStruct:
        for dim in leaf.spec.dims:
            if sizes[dim.name] % math.prod(mesh[axis] for axis in dim.axes):
                split = ", ".join(f"{axis}={mesh[axis]}" for axis in dim.axes)
                raise ValueError(
                    f"dimension {dim.name} of size {sizes[dim.name]} does not split evenly over "
                    f"{split}, as {leaf}{jax.tree_util.keystr(path)} must"
                )
        return jax.ShapeDtypeStruct([sizes[dim.name] for dim in leaf.spec.dims], leaf.dtype)

    return jax.tree_util.tree_map_with_path(shape, type_tree(hint))


# --- Checked functions ----------------------------------------------------------------------------


def typechecked(fn: F) -> F:
    """Checks the annotated arguments and result of each call, in a scope of their own.

        @typechecked
        def rms_norm(x: bf16["B/d L M"], gain: bf16["M"]) -> bf16["B/d L M"]: ...

    Annotations that hold no array types are left alone. Raises ShardTypeError.
    """
    signature, hints = inspect.signature(fn), typing.get_type_hints(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with scope():
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if type_tree(hints.get(name)) is not None:
                    check_tree(value, hints[name], f"argument `{name}` of {fn.__name__}")
            result = fn(*args, **kwargs)
            if type_tree(hints.get("return")) is not None:
                check_tree(result, hints["return"], f"the result of {fn.__name__}")
        return result

    return typing.cast(F, wrapper)


def typed_shard_map(fn: F) -> F:
    """`jax.shard_map` over the whole mesh in context, with its specs read from the annotations.

        @typed_shard_map
        def step(weights: Weights, batch: TokenBatch, config: Config) -> f32[""]: ...

    Takes and returns global arrays; `fn` sees each device's part. Arguments whose annotation holds
    no array types pass through as they are. A result that differs along an axis its type does not
    name, or that owes a sum, is a ShardTypeError, as is any argument that isn't of its type.
    """
    signature, hints = inspect.signature(fn), typing.get_type_hints(fn)
    arrays = [name for name in signature.parameters if type_tree(hints.get(name)) is not None]
    assert type_tree(hints.get("return")) is not None, f"{fn.__name__} has no typed result"

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        typed = {name: bound.arguments[name] for name in arrays}
        rest = {name: value for name, value in bound.arguments.items() if name not in typed}

        def local(typed: dict[str, Any]) -> Any:
            result = fn(**typed, **rest)
            check_tree(result, hints["return"], f"the result of {fn.__name__}")
            _check_whole(result, hints["return"], f"the result of {fn.__name__}")
            return result

        with scope():
            for name, value in typed.items():
                check_tree(value, hints[name], f"argument `{name}` of {fn.__name__}")
            in_specs = ({name: make_partition_specs(hints[name]) for name in arrays},)
            out_specs = make_partition_specs(hints["return"])
            return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs)(typed)

    return typing.cast(F, wrapper)


def _check_whole(result: Any, hint: Any, where: str) -> None:
    """A result must be the same along every axis that its type doesn't split it over."""
    types = jax.tree.leaves_with_path(type_tree(hint))
    for (path, leaf_type), leaf in zip(types, jax.tree.leaves(result), strict=True):
        kind = jax.typeof(leaf).manual_axis_type
        differs = [a for a in mesh_shape() if a in kind.varying and a not in leaf_type.spec.axes]
        if differs or kind.unreduced:
            raise ShardTypeError(
                f"{where}{jax.tree_util.keystr(path)} may differ along {', '.join(differs)}, though "
                f"{leaf_type} says it doesn't: return it split, or reduced by ops.psum"
            )
