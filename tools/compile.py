"""Compiles a config's training step ahead of time, and says whether it fits.

    python -m tools.compile --config-name=pretrain training.microbatches=2 topology=v5e:2x4
    python -m tools.compile --config-name=c4_h100x8_1b mesh.d=256 topology=v5p:8x8x4
    python -m tools.compile --config-name=local_test_synthetic

For a slice of TPUs, on a machine that has none but `libtpu`, from requirements-tpu.txt. Or, without
a topology, for the devices that are here. It may take some minutes.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies

import train
from runtime import hlo
from runtime.program import program
from runtime.run import compile_step, make_mesh
from shardlib import devices
from shardlib.errors import UserError
from tools.audit import NOT_USED, audit_step, probe, show, table, worst_table
from tools.overlap import share_hidden


@dataclasses.dataclass(unsafe_hash=True)
class CompileConfig(train.Config):
    topology: str = ""  # a slice of TPUs, v5e:16x16; the local devices if there is none


def tpu_mesh(topology: str, axes: dict[str, int]) -> jax.sharding.Mesh:
    """Of the chips of a slice that isn't here. Raises UserError if libtpu isn't installed, or
    doesn't know the slice, or if it has another number of chips than the mesh."""
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            f"topology={topology} needs the TPU's compiler: pip install -r requirements-tpu.txt"
        )
    if not re.fullmatch(r"\w+:[1-9]\d*(x[1-9]\d*)*", topology):
        raise UserError(f"topology={topology}: write it like v5e:2x4 or v5p:2x2x2")
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
    try:
        slice_ = topologies.get_topology_desc(topology, "tpu", **options)
    except Exception as error:
        says = str(error).splitlines()[0]
        raise UserError(f"topology={topology}: there is no such slice. libtpu: {says}") from None
    needed, found = math.prod(axes.values()), len(slice_.devices)
    if needed != found:
        shown = devices.show_axes(axes)
        raise UserError(f"topology={topology} has {found} chips, and the mesh {shown} {needed}")
    chips = mesh_utils.create_device_mesh(
        tuple(axes.values()), slice_.devices, allow_split_physical_axes=True
    )
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(chips, tuple(axes), axis_types=kinds)


def summed_whole(text: str) -> Iterator[tuple[str, int]]:
    """The all-reduces of a compiled program that the source doesn't say, array by array, and bytes:
    of narrow parts, TPUs sum whole arrays where the source gathers or scatters."""
    for line in text.splitlines():
        match = hlo.INSTRUCTION.match(line)
        if match and match[3].startswith("all-reduce"):
            named = re.search(r'op_name="([^"]*)"', line)
            what = hlo.describe(named[1]) if named else "reduce_scatter"
            if re.search("psum|pmax|pmin", what.rpartition(":")[2]):
                continue
            for kind, bits, dims in re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", match[2]):
                elements = math.prod(int(n) for n in dims.split(",") if n)
                yield f"{kind}{bits}[{dims}] {what}", elements * int(bits) // 8


@program(CompileConfig, "configs", NOT_USED)
def main(config: CompileConfig) -> None:
    axes = dataclasses.asdict(config.mesh)
    probed = probe(config)
    mesh = tpu_mesh(config.topology, axes) if config.topology else make_mesh(config, axes)
    kind = mesh.devices.flat[0].device_kind
    chip = devices.find_chip(kind)
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
    if kind.startswith("TPU"):
        peak = stats.peak_memory_in_bytes  # temp_size counts memory that is used twice twice
    else:
        kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = arguments + kept + stats.temp_size_in_bytes
    rows = [
        ("arguments", arguments, predicted["arguments"]),
        ("temporary", peak - arguments, predicted["temporary"]),
        ("in all", peak, held),
    ]
    print(table(("bytes of a device", "the compiler's", "the audit's", "predicted"),
          [(name, show(a), show(b), f"{b / a - 1:+.1%}") for name, a, b in rows]))  # fmt: skip
    if not kind.startswith("TPU"):
        print("\nThe audit's rules are those of a TPU's compiler.")
    if chip:
        left = chip.memory - peak
        print(
            f"\nIt {'fits' if left > 0 else 'does not fit'}: {show(peak)} of {show(chip.memory)}."
        )
    text = str(step.as_text())
    if kind.startswith("TPU"):
        print(f"\n{share_hidden(text, predicted['transfers'])}")
    found = summed_whole(text)
    if sums := [(what, show(size)) for what, size in found if size > 1e6]:
        print("\nWhere the source gathers or scatters these, the compiler sums them whole, which")
        print(f"takes up to twice the bytes:\n\n{table(('array', 'size'), sums)}")


if __name__ == "__main__":
    main()
