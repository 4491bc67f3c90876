"""Array types that name each dimension, the mesh axes it is split over, and any pending reduction.

    f32["B/d L M/t"]       B is split over axis d, L is not split, M is split over axis t
    f32["M/t/d"]           M is split over t first, then each part over d
    f32["B/d L M {U:t}"]   unreduced over t: each device along t holds a partial sum of the value
    f32[""]                a scalar
    f32["M", gain]         a weight and its initial values, which shardlib keeps but doesn't use
    floating["B L"]        any float type; integer["B L"] is any integer type
    compute["B L"]         the dtype of `computing_in`: bfloat16, or float32 for comparisons
    MLP | None             alternatives: a value or `choose` decides between them

An *axis* belongs to the mesh, a *dimension* to an array. The grammar:

    spec  := item* [ "{U:" axis ("," axis)* "}" ]
    item  := dim | "[" dim "]"              brackets: the dimension `ops.index_unreduced` indexes
    dim   := (name | integer) ("/" axis)*   an integer is a size; a name stands for one

On a mesh `d, t` write `M/t/d`: M is cut into t parts, and each of these into d. Gathering d then
yields a contiguous `M/t`. `M/d/t` would have the same shapes but other parts on each device, and is
an error. An `axis_group` names several axes, and is written like one axis.

Sizes are bound to names within a scope. Each call of a function decorated with `typechecked` or
`typed_shard_map` opens a fresh scope.

Inside a shard_map JAX itself knows, for each mesh axis, whether a value is invariant (the same on
all devices along it), varying (it may differ) or unreduced (partial sums), and prints it, as in
`bf16[2,64]{V:d, U:t}`; see "check_vma" in the documentation of `jax.shard_map`. Casting invariant
to varying is free; in the backward pass the cast is an all-reduce of the gradient. A value becomes
unreduced only where an op says so. If you sum over a split dimension with jnp instead, JAX sees
just another varying value. It can't pass as unreduced, nor as a replicated result of the shard_map.
checks/layout.py refuses such a sum in the forward pass; for the rest, checks/numbers.py compares
the numbers of two meshes.

Over an axis of size 1 nothing is split, varies or is unreduced, whatever the strings say: a value
is invariant there, and ops send nothing. So a forgotten sum shows only on a mesh where the axis is
larger, such as `checks.layout.probe_mesh`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlib.errors import ShardTypeError, SpecError, UserError
from shardlib.mesh import groups, show_axes

F = typing.TypeVar("F", bound=Callable[..., Any])


# --- Parsing: text to specs, no arrays ------------------------------------------------------------


def show_groups(axes: Iterable[str], mark: str = ",") -> str:
    """Joins axes by commas or, for a dimension, by "/". A whole group goes by its name."""
    text = mark.join(("", *axes, ""))
    for name, group in groups.items():
        whole = mark.join(("", *(group if mark == "," else reversed(group)), ""))
        text = text.replace(whole, f"{mark}{name}{mark}")
    return text.strip(mark)


def _written(names: Iterable[str]) -> tuple[str, ...]:
    """The axes that names stand for on the mesh in context, outermost first in each group."""
    here = {name: group for name, group in groups.items() if name not in mesh_shape()}
    return tuple(axis for name in names for axis in here.get(name, (name,)))


def several(names: Iterable[str]) -> tuple[str, ...]:
    """The axes that names stand for, without axes of size 1."""
    return tuple(axis for axis in _written(names) if mesh_shape().get(axis) != 1)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of an array: `M/t/d`."""

    name: str
    over: tuple[str, ...] = ()  # as written: axes and groups
    indexed: bool = False

    def __str__(self) -> str:
        text = "/".join(filter(None, (self.name, show_groups(self.over, "/"))))
        return f"[{text}]" if self.indexed else text

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh in context that the dimension is split over."""
        return several(self.over[::-1])[::-1]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The layout of an array: its dimensions, and the axes it is unreduced over."""

    dims: tuple[Dim, ...] = ()
    unreduced: tuple[str, ...] = ()  # as written: axes and groups

    def __str__(self) -> str:
        sums = [f"{{U:{show_groups(self.unreduced)}}}"] if self.unreduced else []
        return " ".join([*map(str, self.dims), *sums])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the dimensions are split over."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def expanded(self) -> "Spec":
        """The same layout, with groups written as their axes."""
        dims = (Dim(x.name, _written(x.over[::-1])[::-1], x.indexed) for x in self.dims)
        return Spec(tuple(dims), _written(self.unreduced))

    @property
    def unreduced_axes(self) -> tuple[str, ...]:
        """The axes of the mesh in context over which each device holds a partial sum."""
        return several(self.unreduced)


_ITEM = re.compile(
    r"(?P<open>\[)?(?P<name>[A-Za-z_]\w*|\d+)(?P<axes>(/[A-Za-z_]\w*)*)(?(open)\])"
    r"|\{U:(?P<unreduced>[A-Za-z_]\w*(,[A-Za-z_]\w*)*)\}",
    re.ASCII,
)


def _parse(text: str) -> tuple[list[Spec], list[str]]:
    """Returns the specs, and the commas and arrows between them."""
    specs, marks = [Spec()], []
    for word in re.finditer(r"\{[^}]*\}?|,|->|((?!->)[^\s,{])+", text):
        if word[0] in (",", "->"):
            specs.append(Spec())
            marks.append(word[0])
            continue
        spec, item = specs[-1], _ITEM.fullmatch(word[0])
        if item is None:
            problem = "expected a dimension like M, M/t or [V/t], or unreduced axes like {U:d,t}"
        elif spec.unreduced:
            problem = "{U:...} comes once, at the end"
        else:
            if item["unreduced"]:
                spec = Spec(spec.dims, tuple(item["unreduced"].split(",")))
            else:
                over = tuple(item["axes"].split("/")[1:])
                spec = Spec((*spec.dims, Dim(item["name"], over, bool(item["open"]))))
            problem = _twice(spec) or ""
            specs[-1] = spec
        if problem:
            raise SpecError(f"{problem}\n    {text}\n    {' ' * word.start()}^")
    return specs, marks


def _twice(spec: Spec) -> str | None:
    written = [name for dim in spec.dims for name in dim.over] + [*spec.unreduced]
    for names in written, _written(written):
        if twice := [name for name in names if names.count(name) > 1]:
            within = [x for x in written if twice[0] in groups.get(x, ()) and twice[0] != x]
            group = "".join(f"; {x} is {', '.join(groups[x])}" for x in within[:1])
            return f"axis {twice[0]} appears twice in one array{group}"
    return None


@functools.cache
def parse_spec(text: str) -> Spec:
    """`"B/d L M/t"` as a Spec. Raises SpecError with a caret under the bad part."""
    specs, marks = _parse(text)
    if marks:
        raise SpecError(f"expected one array's type, found a {marks[0]!r} in\n    {text}")
    return specs[0]


@functools.cache
def parse_signature(text: str) -> tuple[Spec, ...]:
    """`"B/d L M, M F/t -> B/d L F/t"` as the specs of operands and result. Raises SpecError."""
    specs, marks = _parse(text)
    if "".join(marks) != "," * (len(marks) - 1) + "->":
        raise SpecError(f"expected operands, an arrow and a result: A, B -> C, not\n    {text}")
    return tuple(specs)


# --- Array types and what they check --------------------------------------------------------------


class ArrayType(type):
    """The metaclass of array types such as `f32["B/d L"]`."""

    element: "DType"
    spec: Spec
    initial: Any  # of a weight: its initial values, see runtime/initial.py

    @property
    def dtype(cls) -> Any:
        return cls.element.dtype

    def laid_out(cls, spec: Spec) -> "ArrayType":
        """This type with another layout."""
        return array_type(cls.element, spec, cls.initial)

    def __instancecheck__(cls, value: object) -> bool:
        return _mismatch(value, cls, "isinstance") is None

    def __repr__(cls) -> str:
        return cls.__name__


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type. Subscripted with a type string, it gives an array type."""

    name: str
    fixed: Any = None  # a NumPy dtype, or a class such as np.floating; None: the context's

    @property
    def dtype(self) -> Any:
        return _computing_in.value if self.fixed is None else self.fixed

    def __getitem__(self, item: str | tuple[str, Any]) -> ArrayType:
        text, initial = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        if not isinstance(text, str):
            raise SpecError(f'{self.name}[...] takes one string, like {self.name}["B/d L"]')
        return array_type(self, parse_spec(text), initial)


@functools.cache
def array_type(element: DType, spec: Spec, initial: Any = None) -> ArrayType:
    """The one class for this element type, layout and initial values."""
    if indexed := [str(dim) for dim in spec.dims if dim.indexed]:
        raise SpecError(f"{indexed[0]}: only the string of ops.index_unreduced takes brackets")
    fields = {"element": element, "spec": spec, "initial": initial}
    return ArrayType(f'{element.name}["{spec}"]', (), fields)


f32 = DType("f32", np.dtype(jnp.float32))
bf16 = DType("bf16", np.dtype(jnp.bfloat16))
i32 = DType("i32", np.dtype(jnp.int32))
u32 = DType("u32", np.dtype(jnp.uint32))
bool_ = DType("bool_", np.dtype(jnp.bool_))
floating = DType("floating", np.floating)  # any width; for arguments, not for stored arrays
integer = DType("integer", np.integer)
compute = DType("compute")

_computing_in = jax.make_user_context(np.dtype(jnp.bfloat16))  # a part of jit's cache keys


COMPUTE = {"bf16": bf16, "f32": f32}


@contextlib.contextmanager
def computing_in(name: str) -> Iterator[None]:
    """Sets the dtype of `compute[...]`: bf16, the default, or f32. In f32 no device rounds the
    operands of a matmul."""
    precise = jax.default_matmul_precision("highest") if name == "f32" else contextlib.nullcontext()
    with _computing_in(COMPUTE[name].dtype), precise:
        yield


# Dimension name -> (global size, where it was bound), for the innermost open scope.
Sizes = dict[str, tuple[int, str]]
_sizes: contextvars.ContextVar[Sizes | None] = contextvars.ContextVar("sizes", default=None)


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
    """Returns whether arrays are per-device parts at this point of the trace."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def axes_problem(spec: Spec) -> str | None:
    """Describes what is wrong with the spec's axes on the mesh in context; None if nothing is."""
    mesh = mesh_shape()
    for axis in (*spec.axes, *spec.unreduced_axes):
        if axis not in mesh:
            return f"axis {axis} is not in the mesh, which has {', '.join(mesh) or 'no axes'}"
    order = list(reversed(mesh))
    for dim in spec.expanded.dims:
        if dim.over != (right := tuple(sorted(dim.over, key=order.index))):
            return f"write axes in the order {', '.join(order)}: {Dim(dim.name, right)}, not {dim}"
    return _twice(spec)


def check(value: Any, expected: ArrayType | Spec, where: str) -> None:
    """Raises ShardTypeError unless `value` has the expected type, or the layout if given a Spec.

    Binds the sizes of named dimensions in the open scope, or compares them with the sizes bound
    there. Inside a shard_map it also compares the unreduced axes; outside, the sharding of a
    concrete array.
    """
    if problem := _mismatch(value, expected, where):
        raise ShardTypeError(
            f"{where} does not match its type\n"
            f"    declared: {str(expected) or 'a scalar'}\n"
            f"    found:    {describe(value)}\n"
            f"    {problem}"
        )


def describe(value: Any) -> str:
    """Describes an array by its dtype and shape, and inside a shard_map its unreduced axes and the
    mesh; any other value by its class."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return type(value).__name__
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if not inside_shard_map():
        return text
    unreduced = jax.typeof(value).manual_axis_type.unreduced
    if shown := show_groups(axis for axis in mesh_shape() if axis in unreduced):
        text += f" {{U:{shown}}}"
    return f"{text} on each device of {show_axes(mesh_shape())}"


def _mismatch(value: Any, expected: ArrayType | Spec, where: str) -> str | None:
    """Describes how the value differs from its type. If it matches, binds its sizes."""
    spec = expected.spec if isinstance(expected, ArrayType) else expected
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return "it is not an array"
    if isinstance(expected, ArrayType) and not jnp.issubdtype(value.dtype, expected.dtype):
        name, one = expected.element.name, isinstance(expected.dtype, np.dtype)
        cure = f": cast it, such as by .astype({name}.dtype)" if one else ""
        return f"the dtype is {value.dtype}, not {name}{cure}"
    if len(value.shape) != len(spec.dims):
        return f"it has {len(value.shape)} dimension(s), its type has {len(spec.dims)}"
    if problem := axes_problem(spec):
        return problem
    mesh, local = mesh_shape(), inside_shard_map()
    table = _sizes.get()
    sizes = dict(table or {})
    place = f"{where} `{spec}`"
    for dim, length in zip(spec.dims, value.shape, strict=True):
        parts = math.prod(mesh[axis] for axis in dim.axes)
        size = length * parts if local else length
        if size % parts:
            over = show_axes(mesh, dim.axes)
            return f"dimension {dim.name}={size} does not split evenly over {over}"
        literal = (int(dim.name), "the type string") if dim.name.isdigit() else (size, place)
        bound, first = sizes.setdefault(dim.name, literal)
        if bound != size:
            each = ""
            if local and not bound % parts:
                bound, size, each = bound // parts, length, " on each device"
            return f"dimension {dim.name} is {size}{each} here, but {bound} in {first}"
    problem = _unreduced_problem(value, spec) if local else _layout_problem(value, spec)
    if table is not None and not problem:
        table.update(sizes)
    return problem


def _unreduced_problem(value: Any, spec: Spec) -> str | None:
    kind = jax.typeof(value).manual_axis_type
    unreduced = [axis for axis in mesh_shape() if axis in kind.unreduced]
    if undeclared := show_groups(axis for axis in unreduced if axis not in spec.unreduced_axes):
        return (
            f"it is unreduced over {undeclared}, a partial sum on each device: reduce it with "
            f"ops.psum or ops.psum_scatter, or declare {{U:{undeclared}}}"
        )
    if reduced := show_groups(axis for axis in spec.unreduced_axes if axis not in unreduced):
        problem = f"it is not unreduced over {reduced}: it was reduced already, or never had to be"
        if any(axis in kind.varying for axis in spec.unreduced_axes):
            problem += (
                "\n    sum with ops.reduce_sum; results of jnp.sum and jnp.mean aren't unreduced"
            )
        return problem
    return None


def _layout_problem(value: Any, spec: Spec) -> str | None:
    if spec.unreduced:
        return "outside a shard_map no array is unreduced"
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array):
        return None  # a tracer's sharding is not known yet, and a NumPy array has none
    layout = value.sharding
    if layout.is_fully_replicated and not spec.axes:
        return None
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        wanted = NamedSharding(mesh, PartitionSpec(*(dim.axes or None for dim in spec.dims)))
        if layout.is_equivalent_to(wanted, value.ndim):
            return None
    return f"its sharding is {layout}"


# --- Trees of array types -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """The annotation `of` with other types: `change(types, value)` returns the new type tree."""

    of: Any
    change: Callable[[Any, Any], Any]


class Mapped:
    """`Mapped[function, Layer]`: a Layer with `function` applied to the type of each array."""

    def __class_getitem__(cls, item: tuple[Callable[[ArrayType], ArrayType], Any]) -> Any:
        function, hint = item
        return Derived(hint, lambda kinds, _: jax.tree.map(function, kinds))


class Stacked:
    """`Stacked["layers", Layer]`: a Layer each of whose arrays has a leading dimension `layers`."""

    def __class_getitem__(cls, item: tuple[str, Any]) -> Any:
        (dim, hint), spec = item, parse_spec(item[0])
        if len(spec.dims) != 1 or spec.unreduced:
            raise SpecError(f'Stacked takes one dimension, like "layers", not "{dim}"')

        def stack(kind: ArrayType) -> ArrayType:
            return kind.laid_out(parse_spec(f"{dim} {kind.spec}"))

        return Derived(hint, lambda kinds, _: jax.tree.map(stack, kinds))


class Subset:
    """`Subset[Layer]`: a Layer any of whose arrays may be None."""

    def __class_getitem__(cls, hint: Any) -> Any:
        def there(kinds: Any, value: Any) -> Any:
            return jax.tree.map(lambda kind, x: None if x is None else kind, kinds, value)

        return Derived(hint, there)


@typing.dataclass_transform(frozen_default=True)
def pytree_dataclass(cls: type) -> type:
    """Decorator: a frozen dataclass that is a pytree, whose annotations are its arrays' layouts.

    @pytree_dataclass
    class Layer:
        w_up: f32["M/d F/t"]
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


UNKNOWN = object()  # no value given
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def has_arrays(hint: Any) -> bool:
    """Returns whether an annotation has array types. Raises SpecError if they can't be checked: if
    it mixes them with other types, or holds them in something other than a pytree_dataclass, a
    tuple, a dict or alternatives. `Any` marks a part that isn't checked."""
    if isinstance(hint, ArrayType):
        return True
    if isinstance(hint, Derived):
        return has_arrays(hint.of)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    checkable = origin in (tuple, dict, types.UnionType)
    if dataclasses.is_dataclass(hint):
        parts = tuple(_hints(hint).values())
    there = [
        has_arrays(x)
        for x in (parts[1:] if origin is dict else parts)
        if x not in (Any, type(None))
    ]
    if any(there) and dataclasses.is_dataclass(hint):
        like = typing.cast(Any, hint)(*parts)
        checkable = not jax.tree_util.all_leaves([like])  # it is registered as a pytree
    if any(there) and not (all(there) and checkable):
        raise SpecError(
            f"{hint} holds array types but can't be checked: use a pytree_dataclass, a tuple or a "
            "dict with nothing but array types in it"
        )
    return any(there)


def type_tree(hint: Any, value: Any = UNKNOWN) -> Any:
    """Returns an annotation as a tree of array types, and a tree of array types as it is.

    The value, a tree of arrays or of their types, decides between alternatives: `MLP | None` is MLP
    for an MLP, `f32[""] | f32["layers"]` goes by the number of dimensions, then by the dtype, and
    a dict has the value's keys. Raises TypeError or ValueError for a value of another structure,
    and SpecError for alternatives or a dict without a value.
    """
    if isinstance(hint, ArrayType) or hint in (Any, None, type(None)):
        return None if hint is type(None) else hint
    if isinstance(hint, Derived):
        return hint.change(type_tree(hint.of, value), value)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        values = (UNKNOWN,) * len(parts) if value is UNKNOWN else value
        return tuple(type_tree(*pair) for pair in zip(parts, values, strict=True))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if value is not UNKNOWN and not isinstance(value, hint):
            raise TypeError(f"it is a {type(value).__name__}")
        fields = {name: getattr(value, name, UNKNOWN) for name in _hints(hint)}
        return hint(**{name: type_tree(_hints(hint)[name], x) for name, x in fields.items()})
    if origin not in (dict, types.UnionType):
        return hint
    if value is UNKNOWN:
        raise SpecError(f"{hint}: choose one with types.choose")
    if origin is dict:
        return {name: type_tree(parts[1], x) for name, x in value.items()}
    n = len(value.spec.dims if isinstance(value, ArrayType) else getattr(value, "shape", ()))
    kinds = [x for x in parts if isinstance(x, ArrayType) and hasattr(value, "dtype")]
    # If none fits, `check_tree` says how the value differs from the nearest one.
    kinds.sort(key=lambda x: (abs(len(x.spec.dims) - n), not jnp.issubdtype(value.dtype, x.dtype)))
    fitting = [x for x in parts if not isinstance(x, ArrayType) and isinstance(value, x)] + kinds
    if not fitting:
        raise TypeError(f"{describe(value)} is none of {hint}")
    return type_tree(fitting[0], value)


def choose(cls: type, **fields: Any) -> Any:
    """The type tree of a pytree_dataclass. A field with alternatives needs a choice: True for the
    first one, a dataclass or type tree for another one, or anything false for None."""

    def chosen(name: str, hint: Any) -> Any:
        if typing.get_origin(hint) is types.UnionType and name not in fields:
            raise SpecError(
                f"{cls.__name__}.{name} is {hint}: say which, in types.choose({name}=...)"
            )
        choice = fields.get(name, UNKNOWN) or None
        return type_tree(typing.get_args(hint)[0] if choice is True else choice)

    return cls(**{name: type_tree(hint, chosen(name, hint)) for name, hint in _hints(cls).items()})


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, such as layers/w_q."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def check_tree(tree: Any, hint: Any, where: str) -> list[tuple[str, ArrayType, Any]]:
    """Checks each array of a tree, and returns (path, type, array) for each. Raises ShardTypeError
    if an array doesn't match its type, or the tree's structure doesn't match `hint`."""
    leaves: list[tuple[str, ArrayType, Any]] = []

    def add(path: tuple[Any, ...], kind: Any, value: Any) -> None:
        if kind is not Any:
            leaves.append((where + jax.tree_util.keystr(path), kind, value))

    try:
        jax.tree_util.tree_map_with_path(add, type_tree(hint, tree), tree)
    except (TypeError, ValueError):
        wanted, actual = getattr(hint, "__name__", hint), jax.tree.map(describe, tree)
        raise ShardTypeError(f"{where} is not of type {wanted}: it is {actual}") from None
    for path, kind, value in leaves:
        check(value, kind, path)
    return leaves


def make_partition_specs(hint: Any) -> Any:
    """A PartitionSpec for each array of the annotated type.

    Raises SpecError if the mesh in context lacks an axis or has the axes in another order.
    """

    def partition_spec(kind: Any) -> PartitionSpec:
        if kind is Any:
            raise SpecError("Any has no layout; a typed_shard_map needs array types")
        if problem := axes_problem(kind.spec):
            raise SpecError(f"{kind}: {problem}")
        return PartitionSpec(*(dim.axes or None for dim in kind.spec.dims))

    return jax.tree.map(partition_spec, type_tree(hint))


def make_shardings(hint: Any) -> Any:
    """A NamedSharding on the mesh in context for each array of the annotated type."""
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), make_partition_specs(hint))


def make_shapes(hint: Any, sizes: dict[str, int], keys: dict[str, str] | None = None) -> Any:
    """A ShapeDtypeStruct, of global shape, for each array of the annotated type.

    Raises UserError if a dimension has no size, or doesn't split evenly over its axes of the mesh
    in context; `keys` gives the config key of each dimension, for the message.
    """
    mesh = mesh_shape()

    def shape(kind: ArrayType) -> jax.ShapeDtypeStruct:
        lengths = []
        for dim in kind.spec.dims:
            length = int(dim.name) if dim.name.isdigit() else sizes.get(dim.name)
            if length is None:
                raise UserError(
                    f"{kind}: dimension {dim.name} has no size; add it to DIMENSIONS, with its "
                    "key in the config"
                )
            if length % math.prod(mesh[axis] for axis in dim.axes):
                raise UserError(
                    f"dimension {dim.name}={length} does not split evenly over "
                    f"{show_axes(mesh, dim.axes)}, as {kind} needs"
                    + (f"; {dim.name} is {keys[dim.name]}" if keys and dim.name in keys else "")
                )
            lengths.append(length)
        return jax.ShapeDtypeStruct(lengths, kind.dtype)

    make_partition_specs(hint)  # raises if the mesh lacks an axis
    return jax.tree.map(shape, type_tree(hint))


# --- Checked functions ----------------------------------------------------------------------------


class _Signature:
    """Checks the annotated arguments and result of a function."""

    def __init__(self, fn: Callable[..., Any]):
        self.name, self.signature = fn.__name__, inspect.signature(fn)
        hints = typing.get_type_hints(fn)  # not cached: `fn` may hold a trace's arrays
        self.hints = {name: hint for name, hint in hints.items() if has_arrays(hint)}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Returns the call's arguments, and checks those that are annotated."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name in self.hints:
                check_tree(value, self.hints[name], f"argument `{name}` of {self.name}")
        return bound

    def check_result(self, result: Any) -> list[tuple[str, ArrayType, Any]]:
        hint = self.hints.get("return", Any)
        return check_tree(result, hint, f"the result of {self.name}")


def typechecked(fn: F) -> F:
    """Decorator: checks the annotated arguments and result of each call, in a fresh scope.

        @typechecked
        def rms_norm(x: bf16["B/d L M"], gain: bf16["M"]) -> bf16["B/d L M"]: ...

    Ignores annotations without array types. Calls raise ShardTypeError; decorating raises SpecError
    for an annotation that could not be checked.
    """
    signature = _Signature(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with scope():
            given = jax.tree.leaves(signature.bind(args, kwargs).arguments)
            result = fn(*args, **kwargs)
            for path, kind, leaf in signature.check_result(result):
                # A scalar that varies lacks a sum. But in a pytree_dataclass, or among the
                # arguments, it may be a weight, which ops.broadcast makes varying.
                sums = "." not in path and not any(leaf is x for x in given)
                if kind.spec == Spec() and sums and inside_shard_map():
                    check_replicated(path, kind, leaf)
        return result

    return typing.cast(F, wrapper)


shard_mapped = weakref.WeakSet[Any]()  # the functions under typed_shard_map


def typed_shard_map(fn: F) -> F:
    """Decorator: `jax.shard_map` over all axes of the mesh in context, its specs taken from the
    annotations.

        @typed_shard_map
        def step(weights: Weights, batch: TokenBatch, config: Config) -> f32[""]: ...

    Takes and returns global arrays; `fn` sees each device's part. Arguments without array types in
    their annotation pass through unchanged. Raises ShardTypeError for an argument or result that
    doesn't match its type, and for a result that varies along an axis its type isn't split over.
    """
    signature = _Signature(fn)
    if "return" not in signature.hints:
        raise SpecError(f"{fn.__name__} needs a result annotated with array types")
    shard_mapped.add(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.shape or mesh.manual_axes or set(mesh.axis_types) != {AxisType.Auto}:
            raise ShardTypeError(
                f"call {fn.__name__} under jax.set_mesh(mesh), whose axes are Auto, and not inside "
                "another shard_map"
            )
        with scope():
            bound = signature.bind(args, kwargs)
            arrays = {name: x for name, x in bound.arguments.items() if name in signature.hints}

            def local(arrays: dict[str, Any]) -> Any:
                bound.arguments.update(arrays)
                try:
                    result = fn(*bound.args, **bound.kwargs)
                except Exception as error:  # JAX uses several classes for this error
                    if "unreduced" not in str(error) or isinstance(error, ShardTypeError):
                        raise
                    raise ShardTypeError(
                        "an unreduced value, {U:...}, is used before its partial sums are added "
                        "up: reduce it with ops.psum or ops.psum_scatter first, and scale it then\n"
                        f"    JAX says: {str(error).partition('. Please file')[0]}"
                    ).with_traceback(error.__traceback__) from None
                for path, kind, leaf in signature.check_result(result):
                    check_replicated(path, kind, leaf)
                return result

            kinds = {name: type_tree(signature.hints[name], x) for name, x in arrays.items()}
            known = {signature.hints[name]: kind for name, kind in kinds.items()}
            in_specs = make_partition_specs(kinds)
            out_specs = _result_specs(signature.hints["return"], known)
            mapped = jax.shard_map(local, in_specs=(in_specs,), out_specs=out_specs)
            # JAX handles unreduced values only under jit, so a call outside jit gets its own.
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays))
            return (mapped if traced else jax.jit(mapped))(arrays)

    return typing.cast(F, wrapper)


def _result_specs(hint: Any, known: dict[Any, Any]) -> Any:
    """The PartitionSpecs of a result, before it is computed. A result with alternatives has the
    structure of the argument with the same annotation. The arrays of a dict aren't split."""
    if typing.get_origin(hint) is tuple:
        return tuple(_result_specs(part, known) for part in typing.get_args(hint))
    whole = typing.get_origin(hint) is dict
    return PartitionSpec() if whole else make_partition_specs(known.get(hint, hint))


CURE = (
    "declare it split, or reduce it with ops.reduce_sum and ops.psum or with ops.reduce_max, and "
    "do so before ops.all_gather: JAX treats a gathered value, and a replicated weight, as varying"
    " (compute with a weight where it is used)"
)


def check_replicated(path: str, kind: ArrayType, value: Any, cure: str = CURE) -> None:
    """Raises ShardTypeError unless an array is reduced, and the same on all devices along each axis
    that its type doesn't name."""
    if kind.spec.unreduced:
        raise ShardTypeError(f"{path}: {kind} is unreduced: reduce it first")
    varying = jax.typeof(value).manual_axis_type.varying
    if undeclared := [a for a in mesh_shape() if a in varying and a not in kind.spec.axes]:
        raise ShardTypeError(
            f"{path} varies along {', '.join(undeclared)}, but {kind} declares it replicated: "
            + cure
        )
