"""Compiles a config's training step ahead of time, and reports whether it fits.

    python -m tools.compile --config-name=pretrain training.microbatches=2 topology=v5e:2x4
    python -m tools.compile --config-name=c4_h100x8_1b mesh.d=256 topology=v5p:8x8x4
    python -m tools.compile --config-name=local_test_synthetic

With a topology it compiles for a slice of TPUs, on a machine without TPUs, with `libtpu` from
requirements-tpu.txt. Otherwise it compiles for the local devices. It may take some minutes.
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
from runtime.program import program
from runtime.run import compile_step, make_mesh
from shardlib import devices
from shardlib.errors import UserError
from tools.audit import NOT_USED, audit_step, peak_table, probe, show, table


@dataclasses.dataclass(unsafe_hash=True)
class CompileConfig(train.Config):
    topology: str = ""  # a slice of TPUs, such as v5e:16x16; empty: the local devices


def tpu_mesh(topology: str, axes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh of the chips of a slice, for compiling only. Raises UserError if libtpu is missing or
    doesn't know the slice, or if the slice doesn't have as many chips as the mesh."""
    # Keeps libtpu from looking for a TPU machine and warning that it finds none. Since it uses no
    # device, several processes may load it at a time.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    # The two cores of a v4 chip act as one device, as those of later chips do by default.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    sizes = tuple(axes.values())
    try:
        slice_ = topologies.get_topology_desc(topology, "tpu", **options).devices
        chips = mesh_utils.create_device_mesh(sizes, slice_, allow_split_physical_axes=True)
    except Exception as error:  # libtpu's or JAX's
        raise UserError(
            f"topology={topology} for the mesh {devices.show_axes(axes)}: "
            f"{str(error).splitlines()[0]}. Write it like v5e:2x4, with as many chips as the mesh; "
            "it needs libtpu: install requirements-tpu.txt in a venv of its own"
        ) from None
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(chips, tuple(axes), axis_types=kinds)


# --- Communication overlapped with compute --------------------------------------------------------

COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{")
INSTRUCTION = re.compile(r" +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
CYCLES = 1000  # about a microsecond


class Sent(NamedTuple):
    """A collective of a TPU's scheduled program."""

    elements: int  # of the array gathered over the axes
    bytes: int  # of that array; for an all-reduce, twice as many
    in_loop: bool
    hidden: bool  # a microsecond or more of compute is scheduled between its start and its end


def sent(text: str) -> list[Sent]:
    """The collectives of a TPU's program. Which are hidden follows from the compiler's schedule,
    that is its order of instructions and its estimates of their cycles."""
    calls: dict[str, list[re.Match[str]]] = collections.defaultdict(list)
    computation = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            computation = "" if line.startswith("ENTRY") else match[1]
        elif match := INSTRUCTION.match(line):
            calls[computation].append(match)

    def array(call: re.Match[str]) -> tuple[int, int] | None:
        """Elements and bytes of the collective that an instruction is or calls."""
        _, shape, op, rest = call.groups()
        if op not in ("all-gather", "reduce-scatter", "all-reduce"):
            called = re.findall(r"(?:calls|to_apply)=%([\w.-]+)", rest)
            return next(filter(None, (array(c) for name in called for c in calls[name])), None)
        group, elements, size = group_size(rest), 0, 0
        for bits, dims in re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", shape):
            part = math.prod(int(d) for d in dims.split(",") if d)
            gathered = part * group if op == "reduce-scatter" else part
            elements += gathered
            size += gathered * int(bits) // 8
        return (elements, 2 * size if op == "all-reduce" else size) if group > 1 else None

    collectives = []
    for body in ["", *re.findall(r"body=%([\w.-]+)", text)]:
        now, started = 0, dict[str, tuple[tuple[int, int], int]]()
        for call in calls[body]:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', call[4])
            # On v5e: %async-collective-start.7, fusions that advance it, %async-collective-done.7.
            # On a SparseCore: %x.call-start, %x.call-update if operands come late, %x.call-done.
            step = re.fullmatch(r"(.*?)[.-](?:call-|collective-)?(start|update|done)(.*)", call[1])
            key = step[1] + step[3] if step else call[1]
            if step and step[2] == "done" and key in started:
                payload, start = started.pop(key)
                collectives.append(Sent(*payload, bool(body), now - start > CYCLES))
            elif step and step[2] == "update" and key in started:
                started[key] = started[key][0], now
            elif cycles:
                now += int(cycles[1])
            elif size := array(call):
                if step:
                    started[key] = size, now
                else:
                    collectives.append(Sent(*size, bool(body), False))
    return collectives


def group_size(rest: str) -> int:
    """Devices that communicate with each other, given an instruction's text with its
    `replica_groups`: `mesh['d'=64,'t'=4] {'t'}`, or `{{0,1},{2,3}}` with jax 0.10."""
    if named := re.search(r"groups=mesh\[([^]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    listed = re.search(r"groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def share_hidden(text: str, transfers: list[dict[str, Any]]) -> str:
    """A sentence on how much a TPU's program sends in a step, and how much of that is overlapped
    with compute. The program's text lacks its loops' trip counts, so the ledger gives them."""
    times = {(row["elements"], row["times"] > 1): row["times"] for row in transfers}
    often = statistics.mode(row["times"] for row in transfers if row["times"] > 1)
    total = hidden = 0
    for row in sent(text):
        size = row.bytes * times.get((row.elements, row.in_loop), often if row.in_loop else 1)
        total, hidden = total + size, hidden + size * row.hidden
    share = f", {hidden / total:.0%} of it overlapped with compute" if total else ""
    return f"A step sends {show(total)}{share} in the compiler's schedule."


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
            excess = f", {show(held - chip.memory)} more than a device has" if chip else ""
            raise UserError(
                f"it does not fit: {str(error).splitlines()[0]} (G means GiB)\n"
                f"The audit predicts {show(held)}{excess}. At its peak the step holds weights, "
                f"moments, batch and:\n\n{peak_table(predicted)}"
            ) from None
        print(f"compiled in {time.perf_counter() - start:.0f} s\n")
    stats: Any = step.memory_analysis()
    arguments = stats.argument_size_in_bytes
    if is_tpu:
        peak = stats.peak_memory_in_bytes  # temp_size counts reused memory twice
    else:
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = arguments + results + stats.temp_size_in_bytes
    sizes = [
        ("arguments", arguments, predicted["arguments"]),
        ("temporary", peak - arguments, predicted["temporary"]),
        ("total", peak, held),
    ]
    rows = [(name, show(a), show(b), f"{b / a - 1:+.1%}") for name, a, b in sizes]
    print(table(("bytes per device", "compiled", "predicted", "error"), rows))
    if chip:
        verdict = "fits" if peak < chip.memory else "does not fit"
        print(f"\nIt {verdict}: {show(peak)} of {show(chip.memory)}.")
    if is_tpu:
        print(f"\n{share_hidden(str(step.as_text()), predicted['transfers'])}")
    else:
        print("\nThe prediction follows the rules of TPU compilers; other compilers may differ.")


if __name__ == "__main__":
    main()
