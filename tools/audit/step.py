"""Audits the training step of a config: its ledger and its peak memory."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import train
from checks import layout, preflight
from configs.sizes import dimensions, share_seen
from kernels.attention import share_computed
from kernels.dropless import least_shares
from runtime import chips
from shardlib.mesh import abstract_mesh
from shardlib.types import bf16, bool_, f32, i32, u32
from tools.audit import memory
from tools.audit.ledger import Product, ledger

DTYPES = {kind.dtype.name: kind.name for kind in (f32, bf16, i32, u32, bool_)}
Shape = tuple[int, ...]
Row = dict[str, Any]


class Probed(NamedTuple):
    """The shapes of saved arrays at probe sizes, from which their types are read."""

    axes: dict[str, int]
    sizes: dict[str, int]
    saved: list[Shape]  # in the ledger's order, without statistics

    def type_string(self, config: train.Config, dtype: str, shape: Shape, probed: Shape) -> str:
        """Returns the type of an array of this shape, which has the shape `probed` at probe sizes:
        `bf16["B/d L F/t"]`, or `bf16["B/d/2 L F/t"]` in a loop over halves. Shows plain lengths if
        the dimensions are ambiguous."""
        axes, sizes = config.mesh.axes, dimensions(config)
        names = []
        for length, at_probe in zip(shape, probed, strict=False):
            dims = layout.dims_of(at_probe, self.axes, self.sizes)
            held = math.prod(sizes[d.name] // math.prod(axes[a] for a in d.over) for d in dims)
            parts, rest = divmod(held, length)
            if dims and not rest:
                names.append("*".join(map(str, dims)) + (f"/{parts}" if parts > 1 else ""))
            elif length == at_probe:
                names.append(str(length))
        known = len(names) == len(shape) == len(probed)
        return f'{DTYPES.get(dtype, dtype)}["{" ".join(names if known else map(str, shape))}"]'


def probe(config: train.Config) -> Probed:
    """Traces the step at probe sizes. Raises UserError if the types in train.py don't hold."""
    mesh, sizes = layout.probe_mesh(config.mesh.axes, dimensions(config))
    jaxpr, axes = preflight.check_types(train, config)[0][0], dict(mesh.shape)
    saved = [array.shape for array in ledger(jaxpr, axes).saved if not array.statistics]
    return Probed(axes, sizes, saved)


def audit_step(config: train.Config, probed: Probed | None, chip: chips.Chip | None) -> Row:
    """Returns the ledger and the predicted memory, ready for JSON. Without `probed`, saved arrays
    have no types. Raises UserError if a dimension doesn't split evenly over the mesh."""
    axes, kind = config.mesh.axes, chip.kind if chip else ""
    jaxpr = preflight.trace_step(train, config, abstract_mesh(axes))
    costs = ledger(jaxpr, axes)
    held = memory.held(config, jaxpr, costs, kind)

    at_probe, shape, saved = iter(probed.saved if probed else ()), Shape(), []
    for array in costs.saved:
        row = array._asdict() | {"total": array.bytes}
        if probed:
            shape = shape[:-1] if array.statistics else next(at_probe)
            row["type"] = probed.type_string(config, array.dtype, array.shape, shape)
        saved.append(row)
    return {
        "chip": kind,
        "mesh": axes,
        "sizes": dimensions(config),
        "held": held,
        "peak": sum(held.values()),
        "host": sum(a.bytes for a in costs.saved if a.memory == "host"),
        "saved": saved,
        "transfers": merged((row._asdict() for row in costs.transfers), "bytes"),
        "products": merged(_products(config, costs.products, kind), "flops"),
        "kernel_bytes": costs.kernel_bytes,
        "model_flops": sum(train.step_flops(config)),
    }


def _products(config: train.Config, products: Iterable[Product], kind: str) -> Iterator[Row]:
    """Yields rows of matmuls, with the shares of their FLOPs and bytes that a kind of chip needs at
    least, as its kernels leave some out."""
    mesh, size = config.mesh, dimensions(config)
    of_attention = share_computed(kind, float(share_seen(config)), mesh.c)
    of_experts = 1.0, 1.0
    if each := config.model.experts:
        tokens = size["B"] * size["L"] // (mesh.d * mesh.c * config.training.microbatches)
        of_experts = least_shares(kind, tokens, each.per_token, each.count // mesh.t, each.count)
    for row in products:
        flops, moved = of_experts if row.op.startswith("experts(") else (1, 1)
        if row.in_kernel:  # its bytes are the ledger's `kernel_bytes`
            flops, moved = of_attention, 0
        yield row._asdict() | {"flops_share": flops, "bytes_share": moved}


def merged(rows: Iterable[Row], amount: str) -> list[Row]:
    """Merges rows that differ only in how often they run. `total` is `times` times the row's
    `amount`, the key "bytes" or "flops". `bound` is "at most" if a compiler may run the row less
    often, "at least" in a while_loop, which counts as one iteration, else ""."""
    found: dict[Any, Row] = {}
    for row in rows:
        alike = row | {"times": 0, "at_least": 0}
        into = found.setdefault(tuple(alike.items()), alike)
        into["times"] += row["times"]
        into["at_least"] += row["at_least"]
    for row in found.values():
        row["bound"] = "at most" if row["at_least"] < row["times"] else ""
        if row["times"] == math.inf:
            row |= {"times": max(row["at_least"], 1), "bound": "at least"}
        row["total"] = row["times"] * row[amount]
    return list(found.values())


def check_rates(config: train.Config) -> None:
    """Raises UserError unless the dtype is bf16, the only one whose rates are known."""
    config.require(config.dtype == "bf16", "dtype", "rates of chips are known in bf16 alone")
