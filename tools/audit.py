"""What a training step keeps, sends and computes on each device, without devices, data or weights.

    python -m tools.audit --config-name=c4_a100x8_1b
    python -m tools.audit --config-name=c4_a100x8_1b mesh.d=4 mesh.t=2 audit.json=audit.json

Traces the step that train.py runs, for the config's mesh, and prints the ledger of its jaxpr. Sizes
are decimal: a GB is 10^9 bytes.
"""

import collections
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

import train
from data.config import program
from data.loader import TokenBatch
from shardlib import audit, devices
from shardlib.types import bf16, bool_, f32, i32, make_shapes, type_tree, u32


@dataclasses.dataclass(unsafe_hash=True)
class AuditOptions:
    json: str = ""  # a file to write the ledger to


@dataclasses.dataclass(unsafe_hash=True)
class AuditConfig(train.Config):
    audit: AuditOptions = dataclasses.field(default_factory=AuditOptions)


DTYPES = {kind.dtype.name: kind.name for kind in (f32, bf16, i32, u32, bool_)}


def trace(config: train.Config, mesh: AbstractMesh, sizes: dict[str, int]) -> Any:
    """The jaxpr of the training step. Raises ValueError where a dimension doesn't split."""
    with jax.sharding.use_abstract_mesh(mesh):
        shapes = make_shapes(tuple[train.State, TokenBatch], sizes)
        return train.training_step.trace(*shapes, config).jaxpr.jaxpr


def show(amount: float, unit: str = "B") -> str:
    """`1.07 GB`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if amount < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} E{unit}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Columns as wide as they need to be, numbers to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(text[:1].isdigit() for text in column[1:]) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def bytes_per_device(hint: Any, axes: dict[str, int], sizes: dict[str, int]) -> int:
    """Of arrays typed by `hint`."""
    kinds, shapes = jax.tree.leaves(type_tree(hint)), jax.tree.leaves(make_shapes(hint, sizes))
    parts = [math.prod(axes[axis] for axis in kind.spec.axes) for kind in kinds]
    return sum(s.size * s.dtype.itemsize // part for s, part in zip(shapes, parts, strict=True))


def merged(rows: Iterable[Any]) -> list[Any]:
    """Rows that differ in `times` alone as one."""
    times: collections.Counter[Any] = collections.Counter()
    for row in rows:
        times[row._replace(times=0)] += row.times
    return [row._replace(times=count) for row, count in times.items()]


def sums(rows: Iterable[tuple[str, float]], unit: str) -> str:
    """`backward 2 GB, forward 1 GB`."""
    totals: dict[str, float] = {}
    for name, amount in rows:
        totals[name] = totals.get(name, 0) + amount
    return ", ".join(f"{name} {show(amount, unit)}" for name, amount in totals.items())


def type_strings(config: train.Config) -> list[str]:
    """The types of the arrays that are saved, `bf16["B/d L F/t"]`, as their lengths at probe sizes
    tell them."""
    mesh, sizes = devices.probe_mesh(dataclasses.asdict(config.mesh), train.dimensions(config))
    axes, types = dict(mesh.shape), []
    for array in audit.ledger(trace(config, mesh, sizes), axes).saved:
        dims = [(audit.dims_of(length, axes, sizes), length) for length in array.shape]
        names = ["*".join(map(str, made)) or str(length) for made, length in dims]
        types.append(f'{DTYPES.get(array.dtype, array.dtype)}["{" ".join(names)}"]')
    return types


def audit_step(config: train.Config) -> dict[str, Any]:
    """The ledger and what is held anyway, for JSON. Raises ValueError where a dimension doesn't
    split over the mesh."""
    axes, sizes = dataclasses.asdict(config.mesh), train.dimensions(config)
    kinds = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    ledger = audit.ledger(trace(config, mesh, sizes), axes)
    with jax.sharding.use_abstract_mesh(mesh):
        weights, batch = (
            bytes_per_device(hint, axes, sizes) for hint in (train.Weights, TokenBatch)
        )
    held = {"weights": weights, "Adam's moments": 2 * weights, "gradients": weights, "batch": batch}
    typed = zip(ledger.saved, type_strings(config), strict=True)
    return {
        "mesh": axes,
        "held": held,
        "saved": [array._asdict() | {"type": kind} for array, kind in typed],
        "transfers": [row._asdict() for row in merged(ledger.transfers)],
        "products": [row._asdict() for row in merged(ledger.products)],
        "model_flops": sum(train.step_flops(config)),
    }


def report(result: dict[str, Any]) -> str:
    """The same as tables. Rows of less than a thousandth of their sum are left out."""
    axes, saved = result["mesh"], result["saved"]
    kept = sum(row["bytes"] for row in saved)
    sent = [row | {"total": row["times"] * row["bytes"]} for row in result["transfers"]]
    received = sum(row["total"] for row in sent)
    products = [(row["phase"], row["times"] * row["flops"]) for row in result["products"]]
    count, computed = math.prod(axes.values()), sum(flops for _, flops in products)
    needed = result["model_flops"] / count
    saved_rows = (
        (r["line"], r["type"], show(r["bytes"] / r["times"]), str(r["times"]), show(r["bytes"]))
        for r in saved
        if r["bytes"] > kept / 1000
    )
    sent_rows = (
        (
            *(r["line"], r["op"], r["phase"], r["kind"], ",".join(r["axes"])),
            *(show(r["bytes"]), str(r["times"]), show(r["total"])),
        )
        for r in sent
        if r["total"] > received / 1000
    )
    held = [*result["held"].items(), ("saved for the backward pass", kept)]
    return "\n".join(
        [
            f"{count} devices: {', '.join(f'{axis}={size}' for axis, size in axes.items())}",
            f"\nMemory of a device: {sums(held, 'B')}; {show(sum(n for _, n in held))} in all.",
            "What lives for a moment only, as gathered weights do, comes on top.\n",
            table(("saved at", "type", "each", "times", "in all"), saved_rows),
            f"\nA device receives {show(received)} a step, by rings: "
            + sums(((f"over {','.join(r['axes'])}", r["total"]) for r in sent), "B")
            + "; "
            + sums(((r["phase"], r["total"]) for r in sent), "B")
            + ".\n",
            table(
                ("sent at", "op", "phase", "collective", "over", "each", "times", "in all"),
                sent_rows,
            ),
            f"\nA device multiplies {show(computed, 'FLOP')} a step: {sums(products, 'FLOP')}.",
            f"The model needs {show(needed, 'FLOP')} of it, causal attention counted half.",
        ]
    )


NOT_USED = {"paths": {"model_name": "none"}, "flat_tokens": {"filespec": "none"}}


@program(AuditConfig, "configs", NOT_USED)
def main(config: AuditConfig) -> None:
    try:
        train.check_config(config)
        result = audit_step(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(report(result))
    if config.audit.json:
        pathlib.Path(config.audit.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
