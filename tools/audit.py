"""What a training step keeps, sends and computes on each device, without devices, data or weights.

    python -m tools.audit --config-name=c4_h100x8_1b
    python -m tools.audit --config-name=c4_h100x8_1b mesh.d=4 mesh.t=2 audit.json=audit.json
    python -m tools.audit --config-name=c4_h100x8_1b audit.chip=a100 audit.html=audit.html

Traces the step that train.py runs, for the config's mesh, and prints the ledger of its jaxpr. Sizes
are decimal: a GB is 10^9 bytes.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

import train
from data.loader import TokenBatch
from runtime.program import program
from shardlib import audit, devices
from shardlib.errors import UserError
from shardlib.types import bf16, bool_, f32, i32, make_shapes, type_tree, u32
from tools import memory
from tools.audit_page import page


@dataclasses.dataclass
class AuditOptions:
    json: str = ""  # a file to write the ledger to
    html: str = ""  # a file for a page of train.py with the ledger beside its lines
    chip: str = ""  # of devices.CHIPS, for a roofline
    links: dict[str, str] = dataclasses.field(default_factory=dict)  # axis -> the chip's link


@dataclasses.dataclass(unsafe_hash=True)
class AuditConfig(train.Config):
    audit: AuditOptions = dataclasses.field(default_factory=AuditOptions, hash=False)


DTYPES = {kind.dtype.name: kind.name for kind in (f32, bf16, i32, u32, bool_)}


def show(amount: float, unit: str = "B") -> str:
    """`1.07 GB`, `2.5 ms`."""
    for prefix in ("m", "u") if 0 < amount < 1 else ():
        amount *= 1000
        if amount >= 1:
            return f"{amount:.3g} {prefix}{unit}"
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
    return ", ".join(f"{name} {show(amount, unit)}" for name, amount in totals.items() if amount)


Shape = tuple[int, ...]


class Probed(NamedTuple):
    """Arrays' shapes at probe sizes, which tell their types."""

    axes: dict[str, int]
    sizes: dict[str, int]
    saved: list[Shape]  # in the ledger's order
    arrays: dict[tuple[int, ...], Shape]  # by the keys of tools.memory

    def type_string(self, config: train.Config, dtype: str, shape: Shape, probed: Shape) -> str:
        """`bf16["B/d L F/t"]`; `bf16["B/d/2 L F/t"]` of a loop over halves; lengths where they
        aren't those of that type."""
        real, sizes = dataclasses.asdict(config.mesh), train.dimensions(config)
        names = []
        for length, at_probe in zip(shape, probed, strict=False):
            dims = audit.dims_of(at_probe, self.axes, self.sizes)
            held = [sizes[dim.name] // math.prod(real[a] for a in dim.axes) for dim in dims]
            name, parts = "*".join(map(str, dims)) or str(at_probe), math.prod(held) / length
            if dims and parts.is_integer():
                names.append(f"{name}/{parts:.0f}" if parts > 1 else name)
            elif length == at_probe:
                names.append(name)
        known = len(names) == len(shape) == len(probed)
        return f'{DTYPES.get(dtype, dtype)}["{" ".join(names if known else map(str, shape))}"]'


def probe(config: train.Config) -> Probed:
    """Raises UserError where the types in train.py don't hold."""
    mesh, sizes = devices.probe_mesh(dataclasses.asdict(config.mesh), train.dimensions(config))
    jaxpr, axes = train.check_types(config), dict(mesh.shape)
    saved = [array.shape for array in audit.ledger(jaxpr, axes).saved]
    return Probed(axes, sizes, saved, memory.shapes(jaxpr, axes))


def audit_step(config: train.Config, probed: Probed, chip: devices.Chip | None) -> dict[str, Any]:
    """The ledger and the memory, for JSON. Raises UserError where a dimension doesn't split."""
    axes, sizes = dataclasses.asdict(config.mesh), train.dimensions(config)
    mesh = devices.abstract_mesh(axes)
    jaxpr = train.trace_step(config, mesh, sizes)
    ledger, worst = audit.ledger(jaxpr, axes), memory.predict(jaxpr, axes, chip)
    with jax.sharding.use_abstract_mesh(mesh):
        weights, batch = (
            bytes_per_device(hint, axes, sizes) for hint in (train.Weights, TokenBatch)
        )
    held = {"weights": weights, "Adam's moments": 2 * weights, "gradients": weights, "batch": batch}

    def named(array: audit.Saved | memory.Buffer, at_probe: Shape) -> str:
        return probed.type_string(config, array.dtype, array.shape, at_probe)

    alike = collections.Counter(
        (b.line, named(b, probed.arrays.get(b.key, ())), b.op, b.bytes) for b in worst.buffers
    )
    saved = zip(ledger.saved, probed.saved, strict=True)
    return {
        "mesh": axes,
        "held": held,
        "arguments": worst.arguments,
        "temporary": worst.temporary,
        "worst": [
            {"line": line, "type": kind, "op": op, "bytes": size, "times": times}
            for (line, kind, op, size), times in alike.items()
        ],
        "saved": [array._asdict() | {"type": named(array, shape)} for array, shape in saved],
        "transfers": [row._asdict() for row in merged(ledger.transfers)],
        "products": [row._asdict() for row in merged(ledger.products)],
        "model_flops": sum(train.step_flops(config)),
    }


def worst_table(result: dict[str, Any]) -> str:
    """The arrays at the worst moment that are more than a hundredth of them all."""
    rows = [row | {"total": row["times"] * row["bytes"]} for row in result["worst"]]
    shown = (
        (
            *(r["line"], r["type"], r["op"].split("(")[0]),
            *(show(r["bytes"]), str(r["times"]), show(r["total"])),
        )
        for r in sorted(rows, key=lambda r: -r["total"])
        if r["total"] > result["temporary"] / 100
    )
    return table(("made at", "type", "by", "each", "times", "in all"), shown)


def report(result: dict[str, Any], chip: devices.Chip | None = None) -> str:
    """The same as tables. Rows of less than a thousandth of their sum are left out."""
    axes, saved = result["mesh"], result["saved"]
    kept, on_host = (
        sum(row["bytes"] for row in saved if row["memory"] == where) for where in ("device", "host")
    )
    sent = [row | {"total": row["times"] * row["bytes"]} for row in result["transfers"]]
    received = sum(row["total"] for row in sent)
    products = [(row["phase"], row["times"] * row["flops"]) for row in result["products"]]
    count, computed = math.prod(axes.values()), sum(flops for _, flops in products)
    needed = result["model_flops"] / count
    saved_rows = (
        (
            *(r["line"], r["type"], r["memory"]),
            *(show(r["bytes"] / r["times"]), str(r["times"]), show(r["bytes"])),
        )
        for r in saved
        if r["bytes"] > (kept + on_host) / 1000
    )
    sent_rows = (
        (
            *(r["line"], r["op"], r["phase"], r["kind"], ",".join(r["axes"])),
            *(show(r["bytes"]), str(r["times"]), show(r["total"])),
        )
        for r in sent
        if r["total"] > received / 1000
    )
    by_axes = sums(((f"over {','.join(r['axes'])}", r["total"]) for r in sent), "B")
    by_phase = sums(((r["phase"], r["total"]) for r in sent), "B")
    by_axes_and_phase = f", by rings: {by_axes}; {by_phase}" if received else ""
    held = [*result["held"].items(), ("saved for the backward pass", kept)]
    held += [("and in the host's memory", on_host)]
    peak = result["arguments"] + result["temporary"]
    room, checked = ".", "on TPUs as a rule within 10%"
    if chip:
        gpu = not chip.kind.startswith("TPU")
        checked = "by rules checked on TPUs, but not on GPUs" if gpu else checked
        left = chip.memory - peak
        room = f": {show(abs(left))} {'less' if left > 0 else 'more'} than {chip.kind} has."
    return "\n".join(
        [
            f"{count} devices: {devices.show_axes(axes)}",
            f"\nMemory of a device: {sums(held, 'B')}.",
            f"At the worst moment of a step it holds {show(peak)}{room}",
            f"Predicted, {checked}; tools.compile asks the compiler itself.",
            "",
            table(("saved at", "type", "memory", "each", "times", "in all"), saved_rows),
            "\nAt the worst moment it holds weights, moments, batch and:\n",
            worst_table(result),
            f"\nA device receives {show(received)} a step{by_axes_and_phase}.\n",
            table(
                ("sent at", "op", "phase", "collective", "over", "each", "times", "in all"),
                sent_rows,
            ),
            f"\nA device multiplies {show(computed, 'FLOP')} a step: {sums(products, 'FLOP')}.",
            f"The model needs {show(needed, 'FLOP')} of it, causal attention counted half.",
        ]
    )


def least_seconds(
    result: dict[str, Any], chip: devices.Chip, links: dict[str, str]
) -> dict[str, float]:
    """The least time that a step takes of each resource. Of memory: what matrix products read
    and write, and the optimizer. A collective over several axes takes their slowest link."""
    moved = sum(row["times"] * row["bytes"] for row in result["products"])
    moved += 7 * result["held"]["weights"]  # 4 arrays read, 3 written
    seconds = {
        "compute": sum(row["times"] * row["flops"] for row in result["products"]) / chip.flops,
        "memory": moved / chip.bandwidth,
    }
    for row in result["transfers"]:
        if row["bytes"]:
            link = min((links[axis] for axis in row["axes"]), key=chip.links.__getitem__)
            spent = row["times"] * row["bytes"] / chip.links[link]
            seconds[link] = seconds.get(link, 0) + spent
    return seconds


def chip_of(config: AuditConfig) -> devices.Chip | None:
    """Raises UserError for one that isn't in the table, or hasn't the links."""
    name, links = config.audit.chip, config.audit.links
    if not name and not links:
        return None
    if name not in devices.CHIPS:
        key = f"audit.chip={name}" if name else "audit.links needs an audit.chip"
        raise UserError(f"{key}: the table has {', '.join(devices.CHIPS)}")
    chip, axes = devices.CHIPS[name], dataclasses.asdict(config.mesh)
    for axis, link in links.items():
        if axis not in axes or link not in chip.links:
            there = f"the axes are {', '.join(axes)}, the links {', '.join(chip.links)}"
            raise UserError(f"audit.links.{axis}={link}: {there}")
    return chip


def roofline(config: AuditConfig, probed: Probed, chip: devices.Chip) -> str:
    """A row for the config's mesh, and for each that has twice the devices along its first axis,
    up to 4096 devices, while the step splits over it."""
    axes = dataclasses.asdict(config.mesh)
    links = dict.fromkeys(axes, next(iter(chip.links))) | config.audit.links
    rows, outer, end = [], next(iter(axes)), ""
    while math.prod(axes.values()) <= 4096:
        try:
            here = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **axes))
            result = audit_step(here, probed, chip)
        except UserError as error:
            end = f"\n\nThe table ends here: {error}."
            break
        seconds = least_seconds(result, chip, links)
        longest = max(seconds, key=seconds.__getitem__)
        count = math.prod(axes.values())
        ceiling = result["model_flops"] / count / chip.flops / seconds[longest]
        shown = [show(seconds.get(name, 0), "s") for name in ("compute", "memory", *chip.links)]
        mesh = devices.show_axes(axes)
        holds = show(result["arguments"] + result["temporary"])
        rows.append((mesh, holds, *shown, longest, f"{ceiling:.0%}"))
        axes[outer] *= 2
    chosen = ", ".join(f"{axis} over {link}" for axis, link in links.items())
    head = ("mesh", "holds", "compute", "memory", *chip.links, "longest", "MFU at most")
    return (
        f"\n\nThe least time of a step on {chip.kind}, {chosen}, all else hidden behind the "
        f"longest:\n\n{table(head, rows)}{end}"
    )


NOT_USED = {
    "paths": {"model_name": "none"},
    "flat_tokens": {"filespec": "none"},
    "hf_dataset": {"path": "none"},
}


@program(AuditConfig, "configs", NOT_USED)
def main(config: AuditConfig) -> None:
    probed = probe(config)
    chip = chip_of(config)
    result = audit_step(config, probed, chip)
    text = report(result, chip) + (roofline(config, probed, chip) if chip else "")
    if config.audit.json:
        pathlib.Path(config.audit.json).write_text(json.dumps(result, indent=1))
    if config.audit.html:
        first = text.split("\n\nsaved at")[0].replace("\n\n", ". ").replace("\n", " ")
        pathlib.Path(config.audit.html).write_text(page(result, first, show))
    print(text)


if __name__ == "__main__":
    main()
