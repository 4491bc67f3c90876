"""Checks that only ops communicate, at sizes that tell all dimensions apart."""

import collections
import contextlib
import fractions
import inspect
import itertools
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import AbstractMesh

from checks.jaxprs import COLLECTIVES, SHAPING, axes_of, carried, constants, equations, live, op_of
from runtime.hlo import phase
from shardlib import ops
from shardlib.errors import ShardTypeError
from shardlib.mesh import abstract_mesh
from shardlib.ops import SCOPE
from shardlib.types import Dim, Spec, parse_signature

# --- Probe sizes ----------------------------------------------------------------------------------

# Sizes of the probe mesh's axes, in order, and the factors that tell dimensions apart.
PRIMES = [n for n in range(3, 1000) if all(n % k for k in range(2, n))]


def probe_total(axes: Collection[str]) -> int:
    """Returns a factor that all dimension sizes on a probe mesh with these axes have."""
    return 4 * math.prod(PRIMES[: len(axes)])


def probe_mesh(
    axes: Iterable[str], dims: Iterable[str], alone: Collection[str] = ()
) -> tuple[AbstractMesh, dict[str, int]]:
    """Returns a mesh without devices, and dimension sizes at which size checks are exact.

    On a mesh d=3, t=5 the sizes are 101 * 60, 103 * 60, .... As 60 = 3 * 5 * 4, a dimension splits
    evenly over d and t, and into two microbatches or loss chunks. The primes from 101 on tell
    dimensions apart: no dimension, or part of one, has the length of another, of another's part, or
    of a small constant. Axes in `alone` have one device.
    """
    axis_sizes = {axis: 1 if axis in alone else PRIMES[i] for i, axis in enumerate(axes)}
    above = [prime for prime in PRIMES if prime > 100]
    sizes = {dim: probe_total(axis_sizes) * above[i] for i, dim in enumerate(dims)}
    return abstract_mesh(axis_sizes), sizes


def dims_of(length: int, axes: dict[str, int], sizes: dict[str, int]) -> list[Dim]:
    """Returns the dimensions that make up a length at the sizes of `probe_mesh`: one, several that
    were merged, or none if it is just a number.

    Each dimension's size is a prime of its own times `total`, which has each axis's size, also a
    prime, as a factor. A split over an axis removes that factor. Stacking, or merging with a
    dimension of up to 8, adds one.
    """
    total = probe_total(axes)
    names = [name for name, size in sizes.items() if length % (size // total) == 0]
    rest = length // math.prod(sizes[name] // total for name in names)
    whole = total ** len(names)
    if not rest or rest % 2 ** len(names) or rest // math.gcd(rest, whole) > 8:
        return []  # it has these factors by chance
    split = tuple(a for a in reversed(axes) if rest % axes[a] ** len(names))
    return [Dim(name, split) for name in names]


def name_lengths(message: str, axes: dict[str, int], sizes: dict[str, int]) -> str:
    """Rewrites the lengths in a message, at the sizes of `probe_mesh`, as dimensions,
    `(B/d, L/2, M)`. Adds a cure if two of them are one dimension, split differently."""
    mentioned: dict[Dim, None] = {}

    def name(number: re.Match[str]) -> str:
        length = int(number[0])
        dims = dims_of(length, axes, sizes)
        full = math.prod(sizes[d.name] // math.prod(axes[a] for a in d.over) for d in dims)
        if not dims or full not in (length, 2 * length):
            return number[0]
        mentioned.update(dict.fromkeys(dims))
        return "*".join(map(str, dims)) + ("/2" if full > length else "")

    told = list[str]()
    for line in message.split("\n"):
        mentioned.clear()
        told.append(re.sub(r"(?<![\w.:=])\d+(?!\w|[.:]\d)", name, line))  # line numbers stay
        if found := re.match(
            r" *dimension (\w+) is \1( on each device)? here, but .* in (.*)", told[-1]
        ):
            told.append(f"    here it is as declared: the one to change is {found[3]}")
        pairs = itertools.combinations(mentioned, 2)
        for a, b in pairs if re.search("for broadcasting| here, but ", line) else ():
            if a.name == b.name:
                told.append(
                    f"    {a} and {b} are the same dimension, split differently: gather one with "
                    "ops.all_gather, or split the other with ops.split, in its declaration, or, if "
                    "it is a partial sum, with ops.psum_scatter"
                )
    return "\n".join(told)


def refused(what: str) -> Callable[..., Any]:
    """Returns a function that raises ShardTypeError: a step may not read this."""

    def read(*_: Any, **__: Any) -> Any:
        raise ShardTypeError(
            f"{what} depends on the machine or the run: a step may read only config.model, "
            "training, mesh, dtype and metrics"
        )

    return read


# Functions of jax whose results differ between machines that train the same config.
MACHINE = (
    *("device_count", "local_device_count", "devices", "local_devices"),
    *("process_count", "process_index", "default_backend"),
)
REFUSED = {getattr(jax, name): refused(f"jax.{name}()") for name in MACHINE}
ROOMS = "train", "variants", "kernels"  # and edited copies of train.py


@contextlib.contextmanager
def on_any_machine() -> Iterator[None]:
    """Makes these functions raise, in jax and where the program has imported them."""
    with contextlib.ExitStack() as stack:
        for name, module in [*sys.modules.items()]:
            if module is jax or name.partition(".")[0].startswith(ROOMS):
                for key, x in [*vars(module).items()]:
                    if inspect.isroutine(x) and x in REFUSED:
                        stack.enter_context(mock.patch.object(module, key, REFUSED[x]))
        yield


def _marked(x: jax.Array, _: Spec, what: str) -> jax.Array:
    """Names the operands of an op, to tell them apart: its equations depend on the mesh. Integers
    stay: they may be indices, which are computed in other ways where an axis has one device."""
    named = what.startswith("operand") and jnp.issubdtype(x.dtype, jnp.floating)
    return checkpoint_name(x, what) if named else x


def traced(function: Any, shapes: tuple[Any, ...], *static: Any) -> Any:
    """The jaxpr of a function, without unused equations, given its arrays' shapes and its static
    arguments. Raises ShardTypeError if the function asks JAX about the machine, and JAX's
    error for a leaked tracer."""
    last = tuple(range(len(shapes), len(shapes) + len(static)))
    with on_any_machine(), ops.watching(_marked):
        made = jax.make_jaxpr(function, static_argnums=last)(*shapes, *static)
        jitted = function if hasattr(function, "trace") else jax.jit(function, static_argnums=last)
        closed = jitted.trace(*shapes, *static).jaxpr
    # JAX takes a leaked tracer for a constant until something reads it.
    jax.tree.map(jnp.copy, made.consts)
    keys = jax.dtypes.extended  # PRNG keys, which aren't numbers
    jaxpr = live(closed.jaxpr)
    constants[jaxpr] = [None if jnp.issubdtype(x.dtype, keys) else x for x in closed.consts]
    return jaxpr


# Prefixes of primitives allowed along a dimension that the config's mesh doesn't split, for example
# to look up other positions.
IN_ORDER = "rev", "gather", "dynamic_slice", "dynamic_update_slice", "conv_", "reduce_window"


def check(
    jaxpr: Any, axes: dict[str, int], sizes: dict[str, int], unused: Collection[str] = ()
) -> None:
    """Raises ShardTypeError if a jaxpr, traced at the sizes of `probe_mesh`, has an op whose result
    depends on a part that it neither gathers nor reduces over devices, or, outside of ops,

    - a collective, written there, or added by JAX for the gradient of a replicated value that is
      used with a varying one;
    - a device's index on the mesh;
    - in the forward pass, a reduction, sort, numbering, lookup or scatter along a split
      dimension, or along joined or padded parts; or a constant or random numbers as long as a
      device's part. Dimensions split only over `unused` axes may be reversed, indexed and
      convolved."""

    joined: dict[int, list[Dim]] = {}  # by its length, which no other dimension has

    def parts(length: int) -> list[Dim]:
        return [x for x in dims_of(length, axes, sizes) if x.over] or joined.get(length, [])

    problems = []
    indices = _indices(jaxpr, _variables(jaxpr.outvars), parts)
    for eqn, path, line, _, operands in equations(jaxpr):
        name, at = eqn.primitive.name, line.replace(" ", ", in ")
        if SCOPE.search(path) or name == "name":
            continue
        if name in ("concatenate", "pad"):
            shape = eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
            lengths = [getattr(v.aval, "shape", ()) for v in eqn.invars]
            for i, length in enumerate(shape):
                of = [dim for each in lengths if len(each) == len(shape) for dim in parts(each[i])]
                if of and not dims_of(length, axes, sizes):
                    joined[length] = [*dict.fromkeys(of)]
        taken: list[tuple[str, int]] = []
        known_indices = name == "iota" and eqn.outvars[0] in indices
        # `preflight.probe` compares a scatter at fixed indices with a trace on one device.
        known_indices |= name.startswith("scatter") and operands[1].fixed
        if not known_indices and "transpose(" not in path:
            taken += [(name, length) for length in _taken_whole(eqn)]
            at_index = _taken_by_index(eqn)
            if at_index and not all(x.fixed for x in operands[at_index.indices]):
                taken += [(name, length) for length in at_index.lengths]
            inner = [*jaxprs_in_params(eqn.params)]
            pairs: Any = [] if inner else zip(eqn.invars, operands, strict=True)
            taken += [("constant", n) for v, x in pairs if x.constant for n in v.aval.shape]
        for what, length in taken:
            for dim in parts(length):
                if what.startswith(IN_ORDER) and {*dim.over} <= {*unused}:
                    continue
                problems.append(
                    f"{at}: {what} over {dim}, of which each device has only a part: "
                    + CURES.get(f"{what} of {dim.name}", CURES.get(what, GATHER))
                )
        if name in COLLECTIVES or name == "axis_index":
            over = ", ".join(axes_of(eqn))
            cure = f": {CURES.get(name, 'use an op, whose type string shows it')}"
            if name == "psum_invariant" and "transpose(" in path:
                cure = _cure_of_gradient(eqn.invars[0].aval, axes, sizes)
            problems.append(f"{at}: {name} over {over} outside of any op{cure}")
    problems += _parts_in_ops(jaxpr, axes)
    if problems:
        raise ShardTypeError("\n".join(dict.fromkeys(problems)))


def _parts_in_ops(jaxpr: Any, axes: dict[str, int]) -> Iterator[str]:
    """Describes each op whose result varies along an axis that splits an operand but not the
    result, and over which the op doesn't communicate."""
    last, sent = {}, collections.defaultdict[str, set[str]](set)
    for eqn, path, line, *_ in equations(jaxpr):
        if "->" in (op := op_of(eqn, path)) and "transpose(" not in path and eqn.outvars:
            last[op] = eqn, line
            sent[op] |= {*axes_of(eqn)} if eqn.primitive.name in COLLECTIVES else set()
    for op, (eqn, line) in last.items():
        with jax.sharding.use_abstract_mesh(abstract_mesh(axes)):
            *operands, result = parse_signature(op.partition("(")[2].removesuffix(")"))
            split = {axis for spec in operands for axis in spec.axes} - {*result.axes}
        varying = eqn.outvars[0].aval.manual_axis_type.varying  # type: ignore[attr-defined]
        if lost := ", ".join(sorted(split & {*varying} - sent[op])):
            at, cure = line.replace(" ", ", in "), "use lax.psum or lax.pmax"
            yield f"{at}: {op}: its result depends on a part over {lost}: {cure}"


GATHER = "ops.all_gather it first"
DRAWN = "each device draws the same numbers; draw the whole array, and ops.split it"
CURES = {
    "reduce_sum": "use ops.reduce_sum or ops.reduce_mean",
    "dot_general": "use ops.einsum_unreduced or, for a norm of weights, ops.sum_of_squares",
    "reduce_max": "use ops.reduce_max",
    "iota": "use ops.indices",
    "iota of L": "use batch.position, as c changes the order of a row",
    "random_bits": DRAWN,
    "random_split": DRAWN,
    "axis_index": "use ops.indices, ops.split of a replicated value, or an op of your own",
    "constant": "use ops.indices, or ops.split of a constant as long as the whole",
}


REDUCTIONS = "reduce_", "arg", "cum", "sort", "top_k", "approx_top_k"


def _taken_whole(eqn: JaxprEqn) -> list[int]:
    """Returns the lengths of dimensions that an equation reduces, sorts, reverses, accumulates,
    mixes, numbers or fills with random numbers, or along which it scatters to entries that may
    coincide."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [getattr(operand.aval, "shape", ()) for operand in eqn.invars]
    if name == "iota":
        return [params["shape"][params["dimension"]]]
    if name in ("random_bits", "random_split"):
        return [*params["shape"]]
    if name.startswith("scatter"):
        numbers, (_, _, updates, *_) = params["dimension_numbers"], shapes
        of_indices = [n for i, n in enumerate(updates) if i not in numbers.update_window_dims]
        alone = numbers.scatter_indices_batching_dims
        return [n for i, n in enumerate(of_indices) if i not in alone]
    taken: Any = ()
    if name == "dot_general":
        taken = params["dimension_numbers"][0][0]
    elif name == "ragged_dot_general":
        taken = params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
    elif name == "conv_general_dilated":  # features of a group, and positions in a window
        left, right, _ = params["dimension_numbers"]
        taken = [i for i, k in zip(left[1:], right[1:], strict=True) if shapes[1][k] > 1]
    elif name == "fft":
        taken = range(-len(params["fft_lengths"]), 0)
    elif name.startswith("reduce_window"):
        taken = [i for i, n in enumerate(params["window_dimensions"]) if n > 1]
    elif name in ("reduce", "rev") or name.startswith(REDUCTIONS):
        keys = "axes", "axis", "dimension", "dimensions", "reduction_dimension"
        named = [params[key] for key in keys if key in params]
        taken = np.atleast_1d(*named or [-1]) if name != "reduce_precision" else ()
    return [shapes[0][i] for i in taken]


def _variables(values: Iterable[Any]) -> set[Any]:
    """Returns those operands of an equation, or results of a jaxpr, that aren't literals."""
    return {value for value in values if not isinstance(value, Literal)}


class Taken(NamedTuple):
    """The entries of its first operand that an equation reads or changes by index."""

    indices: slice  # which operands are indices
    lengths: tuple[int, ...]  # of the indexed dimensions
    share: fractions.Fraction  # of all entries


def _taken_by_index(eqn: JaxprEqn) -> Taken | None:
    name = eqn.primitive.name.partition("-")[0]
    if name not in ("slice", "dynamic_slice", "gather", "dynamic_update_slice", "scatter"):
        return None
    operands: list[Any] = [*eqn.outvars, *eqn.invars]
    entries, first = {"dynamic_update_slice": (2, 2), "scatter": (3, 1)}.get(name, (0, 1))
    ours, shape = operands[entries].aval.shape, operands[1].aval.shape
    if name in ("gather", "scatter"):
        into = "start_index_map" if name == "gather" else "scatter_dims_to_operand_dims"
        dims, last = getattr(eqn.params["dimension_numbers"], into), 2
    else:
        steps, last = eqn.params.get("strides") or [1] * len(shape), len(operands)
        dims = [i for i, length in enumerate(shape) if length != ours[i] or steps[i] > 1]
    share = fractions.Fraction(math.prod(ours), math.prod(shape))
    return Taken(slice(first, last), tuple(shape[i] for i in dims), share)


def _indices(jaxpr: Any, used: set[Any], parts: Callable[[int], Any]) -> set[Any]:
    """Returns the variables that are used only as indices along dimensions whose length satisfies
    `parts`, as in `x.at[..., ::2]`. `used` are the jaxpr's results that are used otherwise."""
    found: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        name, others = eqn.primitive.name, [*eqn.invars]
        taken, is_used = _taken_by_index(eqn), used.intersection(eqn.outvars)
        if taken and is_used:
            if all(map(parts, taken.lengths)):
                del others[taken.indices]
        elif not taken and (inner := [*jaxprs_in_params(eqn.params)]):
            same = len(inner) == 1 and len(inner[0].invars) == len(others)
            for body in inner:
                pairs = zip(eqn.outvars, body.outvars, strict=False)
                loop = name in ("scan", "while", "cond")
                wanted = _variables(b for a, b in pairs if loop or a in used)
                found |= (own := _indices(body, wanted, parts))
            others = [
                a for a, b in zip(others, body.invars, strict=False) if not same or b not in own
            ]
        elif not is_used:
            others = []
        used |= _variables(others)
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    return found | ({*jaxpr.invars, *made} - used)


class Computed(NamedTuple):
    """Describes an equation, to compare it with another trace's."""

    line: str = ""
    what: str = "nothing"
    entries: Taken | None = None  # if they don't depend on the arguments
    sources: Sequence[Any] = ()  # of its operands


def parting(
    jaxpr: Any, other: Any, numbers: bool = False, entries: bool = False
) -> tuple[str, str, str] | None:
    """Returns the line where two traces of a function first differ, and what each computes there;
    None if they agree. Compares the forward pass's ops, and the primitives between ops; outside of
    the backward pass also what computes these primitives' operands; with `numbers` also numbers
    that don't depend on the arguments; with `entries` also the lengths along which the forward pass
    reduces. Slices, gathers and scatters at fixed indices along a dimension that is split in
    `jaxpr` but not in `other` must then take the same share, 1/k, of an array's entries: `x[::2]`
    takes half of a part and of the whole, `x[:4]` doesn't."""
    both = [_computed(each, numbers, entries) for each in (jaxpr, other)]
    for here, there in itertools.zip_longest(*both, fillvalue=Computed()):
        line, part, whole = here.line or there.line, here.entries, there.entries
        texts = here.what, there.what
        if part and whole and not _same_share(part, whole):
            texts = (
                f"{here.what} of {part.share} of an array",
                f"{there.what} of {whole.share} of an array",
            )
        if texts[0] == texts[1] and here.sources != there.sources:
            texts = here.what, f"{there.what} of other values"
        if texts[0] != texts[1]:
            return line.replace(" ", ", in "), *texts
    return None


def _same_share(part: Taken, whole: Taken) -> bool:
    """Returns whether `part` takes the same share, 1/k, of its array's entries as `whole` does.
    True if no indexed dimension is split."""
    lengths = zip(part.lengths, whole.lengths, strict=False)
    split = any(n < m and not m % n for n, m in lengths)
    return not split or (part.share == whole.share and part.share.numerator == 1)


def moved(jaxpr: Any) -> set[tuple[str, tuple[int, ...]]]:
    """Returns the lines that transpose or reshape arrays, each with the lengths that are moved."""
    found = set()
    for eqn, _, line, *_ in equations(jaxpr):
        if eqn.primitive.name in ("transpose", "reshape"):
            shape = eqn.invars[0].aval.shape  # type: ignore[attr-defined]
            order = eqn.params.get("permutation", [None] * len(shape))
            found.add((line, tuple(n for i, n in enumerate(shape) if order[i] != i and n > 1)))
    return found


# Parameters that are numbers, such as those of top_k and integer_pow.
COUNTS = "k", "y"
# Primitives that compute nothing: names, and those that hold equations, which JAX adds or leaves
# empty while it differentiates a loop.
INERT = "jit", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "name"


def _shown(x: np.ndarray) -> str:
    return str(x) if x.size == 1 else f"numbers of checksum {zlib.crc32(x.tobytes())}"


def _computed(jaxpr: Any, with_numbers: bool, with_entries: bool) -> Iterator[Computed]:
    """Yields the ops of the forward pass, and the primitives between ops, `with_numbers` with
    numbers that don't depend on the arguments, `with_entries` with the entries taken at fixed
    indices. Skips primitives that only cast or shape arrays: JAX chooses others where an axis or a
    length is one."""
    indices = _indices(jaxpr, _variables(jaxpr.outvars), bool)  # JAX adds a length to negative ones
    op = ""
    for eqn, path, line, _, operands in equations(jaxpr):
        name = eqn.primitive.name
        if SCOPE.search(path):
            op, before = op_of(eqn, path), op
            if op != before and phase(path) == "forward":
                yield Computed(line, op)
            continue
        if name in (*SHAPING, *INERT):
            continue
        inner = [*jaxprs_in_params(eqn.params)]
        counts = with_numbers and not (inner or {*eqn.outvars} <= indices)
        # Rounds to the operands' dtypes, as the place of JAX's rounding depends on the mesh.
        given: Any = zip(operands, eqn.invars, strict=True) if counts else ()
        given = [(x.number, v.aval.dtype) for x, v in given if x.number is not None]
        numbers = [_shown(np.asarray(x).astype(dtype)) for x, dtype in given]
        numbers += [f"{key}={eqn.params[key]}" for key in COUNTS if counts and key in eqn.params]
        if with_numbers and name == "scan" and carried(eqn).stop == len(eqn.invars):
            numbers.append(f"length={eqn.params['length']}")
        if with_numbers and name == "pad":  # what is added at the end depends on lengths
            numbers += [f"{low} before" for low, *_ in eqn.params["padding_config"] if low]
        text = name + (f" with {', '.join(numbers)}" if numbers else "")
        if with_entries and "transpose(" not in path and not name.startswith(("iota", "scatter")):
            text += "".join(f" of {n} entries" for n in _taken_whole(eqn))
        taken = _taken_by_index(eqn) if with_entries else None
        always = taken and all(x.fixed for x in operands[taken.indices])
        # JAX chooses what a loop is given, and in which order.
        sources = [] if inner or "transpose(" in path else [x.source for x in operands]
        yield Computed(line, text, taken if always else None, sources)


def _cure_of_gradient(aval: Any, axes: dict[str, int], sizes: dict[str, int]) -> str:
    """Returns the end of the message that JAX sums a replicated array's gradient over axes."""
    dims = [dims_of(length, axes, sizes) or [length] for length in aval.shape if length > 1]
    layout = " ".join("*".join(map(str, each)) for each in dims)
    dtype = aval.str_short(short_dtypes=True).partition("[")[0]
    return (
        f' sums the gradient of a replicated {dtype}["{layout}"]: say so where it is used, with '
        f'ops.broadcast("{layout} -> {layout}", ...), or store it split and ops.all_gather it'
    )
