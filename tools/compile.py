"""Compiles a config's training step ahead of time, and says whether it fits.

    python -m tools.compile --config-name=pretrain training.microbatches=2 topology=v5e:2x4
    python -m tools.compile --config-name=c4_h100x8_1b mesh.d=256 topology=v5p:8x8x4
    python -m tools.compile --config-name=local_test_synthetic

For a slice of TPUs, on a machine that has none but `libtpu`, from requirements-tpu.txt. Or, without
a topology, for the devices that are here. It may take some minutes.
"""

import collections
import dataclasses
import math
import os
import re
import statistics
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils, topologies

import train
from runtime import hlo
from runtime.program import program
from runtime.run import compile_step, make_mesh
from shardlib import devices
from shardlib.errors import UserError
from tools.audit import NOT_USED, audit_step, probe, show, table, worst_table


@dataclasses.dataclass(unsafe_hash=True)
class CompileConfig(train.Config):
    topology: str = ""  # a slice of TPUs, v5e:16x16; the local devices if there is none


def tpu_mesh(topology: str, axes: dict[str, int]) -> jax.sharding.Mesh:
    """Of the chips of a slice that isn't here. Raises UserError if libtpu isn't installed, or
    doesn't know the slice, or if it has another number of chips than the mesh."""
    # libtpu would look for its machine, of whatever type, and say at length that it finds none; and
    # as it uses no device, several may compile at a time.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    # A v4 chip's two cores work as one device, as those of later chips do anyway.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    sizes = tuple(axes.values())
    try:
        slice_ = topologies.get_topology_desc(topology, "tpu", **options).devices
        chips = mesh_utils.create_device_mesh(sizes, slice_, allow_split_physical_axes=True)
    except Exception as error:  # libtpu's or JAX's
        raise UserError(
            f"topology={topology} for the mesh {devices.show_axes(axes)}: "
            f"{str(error).splitlines()[0]}. Write it like v5e:2x4, with as many chips as the mesh; "
            "it needs the TPU's compiler: pip install -r requirements-tpu.txt"
        ) from None
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(chips, tuple(axes), axis_types=kinds)


# --- What is sent beside compute ------------------------------------------------------------------

CYCLES = 1000  # a microsecond, or somewhat less


class Sent(NamedTuple):
    """A collective of a TPU's scheduled program."""

    elements: int  # of the array, whole along the axes
    bytes: int  # of that; twice for an all-reduce
    in_loop: bool
    hidden: bool  # a microsecond or more of compute lies between its start and its end


def sent(text: str) -> list[Sent]:
    """What a TPU's program sends, by the order in which its compiler has scheduled it and the
    cycles that the compiler takes each instruction to need."""
    calls: dict[str, list[re.Match[str]]] = collections.defaultdict(list)
    computation = ""
    for line in text.splitlines():
        if match := hlo.COMPUTATION.match(line):
            computation = "" if line.startswith("ENTRY") else match[1]
        elif match := hlo.INSTRUCTION.match(line):
            calls[computation].append(match)

    def array(call: re.Match[str]) -> tuple[int, int] | None:
        """Elements and bytes of the collective that an instruction is, or that it calls."""
        _, shape, op, rest = call.groups()
        if op not in ("all-gather", "reduce-scatter", "all-reduce"):
            called = re.findall(r"(?:calls|to_apply)=%([\w.-]+)", rest)
            return next(filter(None, (array(c) for name in called for c in calls[name])), None)
        group, elements, size = group_size(rest), 0, 0
        for bits, dims in re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", shape):
            part = math.prod(int(d) for d in dims.split(",") if d)
            whole = part * group if op == "reduce-scatter" else part
            elements += whole
            size += whole * int(bits) // 8
        return (elements, 2 * size if op == "all-reduce" else size) if group > 1 else None

    found = []
    for body in ["", *re.findall(r"body=%([\w.-]+)", text)]:
        now, started = 0, dict[str, tuple[tuple[int, int], int]]()
        for call in calls[body]:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', call[4])
            # On v5e %async-collective-start.7, fusions that carry it on, %async-collective-done.7;
            # on a SparseCore %x.call-start, %x.call-update where operands come late, %x.call-done.
            step = re.fullmatch(r"(.*?)[.-](?:call-|collective-)?(start|update|done)(.*)", call[1])
            key = step[1] + step[3] if step else call[1]
            if step and step[2] == "done" and key in started:
                what, start = started.pop(key)
                found.append(Sent(*what, bool(body), now - start > CYCLES))
            elif step and step[2] == "update" and key in started:
                started[key] = started[key][0], now
            elif cycles:
                now += int(cycles[1])
            elif sends := array(call):
                if step:
                    started[key] = sends, now
                else:
                    found.append(Sent(*sends, bool(body), False))
    return found


def group_size(rest: str) -> int:
    """Of `mesh['d'=64,'t'=4] {'t'}`, or, by jax 0.10, of `{{0,1},{2,3}}`."""
    if named := re.search(r"groups=mesh\[([^]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    listed = re.search(r"groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def share_hidden(text: str, transfers: list[dict[str, Any]]) -> str:
    """How much a TPU's program sends a step, and how much of it beside compute. How often a loop
    runs is not in its text, but in the ledger."""
    times = {(row["elements"], row["times"] > 1): row["times"] for row in transfers}
    often = statistics.mode(row["times"] for row in transfers if row["times"] > 1)
    total = hidden = 0
    for row in sent(text):
        size = row.bytes * times.get((row.elements, row.in_loop), often if row.in_loop else 1)
        total, hidden = total + size, hidden + size * row.hidden
    share = f", {hidden / total:.0%} of it beside compute" if total else ""
    return f"A step sends {show(total)}{share}, by the order of instructions."


# --- Program --------------------------------------------------------------------------------------


@program(CompileConfig, "configs", NOT_USED)
def main(config: CompileConfig) -> None:
    axes = dataclasses.asdict(config.mesh)
    probed = probe(config)
    mesh = tpu_mesh(config.topology, axes) if config.topology else make_mesh(config, axes)
    kind = mesh.devices.flat[0].device_kind
    is_tpu, chip = kind.startswith("TPU"), devices.find_chip(kind)
    predicted = audit_step(config, probed, chip)
    held = predicted["arguments"] + predicted["temporary"]

    with jax.set_mesh(mesh):
        lowered = train.lower_step(config)
        print(f"{mesh.size} x {kind}, {devices.show_axes(axes)}")
        start = time.perf_counter()
        try:
            step = compile_step(config, lowered)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            more = f", {show(held - chip.memory)} more than it has" if chip else ""
            raise UserError(
                f"it does not fit: {str(error).splitlines()[0]} (a G is 1.07 GB)\n"
                f"The audit predicts {show(held)}{more}. At the worst moment it holds weights, "
                f"moments, batch and:\n\n{worst_table(predicted)}"
            ) from None
        print(f"compiled in {time.perf_counter() - start:.0f} s\n")
    stats: Any = step.memory_analysis()
    arguments = stats.argument_size_in_bytes
    if is_tpu:
        peak = stats.peak_memory_in_bytes  # temp_size counts memory that is used twice twice
    else:
        kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = arguments + kept + stats.temp_size_in_bytes
    sizes = [
        ("arguments", arguments, predicted["arguments"]),
        ("temporary", peak - arguments, predicted["temporary"]),
        ("in all", peak, held),
    ]
    rows = [(name, show(a), show(b), f"{b / a - 1:+.1%}") for name, a, b in sizes]
    print(table(("bytes of a device", "the compiler's", "the audit's", "predicted"), rows))
    if chip:
        verdict = "fits" if peak < chip.memory else "does not fit"
        print(f"\nIt {verdict}: {show(peak)} of {show(chip.memory)}.")
    if is_tpu:
        print(f"\n{share_hidden(str(step.as_text()), predicted['transfers'])}")
    else:
        print("\nThe audit's rules are those of a TPU's compiler.")


if __name__ == "__main__":
    main()
