"""Compiles a config's training step ahead of time, and says whether it fits.

    python -m tools.compile --config-name=c4_tpux8_270m topology=v5e:2x4
    python -m tools.compile --config-name=c4_a100x8_1b mesh.d=256 topology=v5p:8x8x4 output=step.zip
    python -m tools.compile --config-name=local_test_synthetic

For a slice of TPUs, on a machine that has none but `libtpu`, from requirements-tpu.txt. Or, without
a topology, for the devices that are here. It may take some minutes. `output` names a file for
`python -m train ... compiled_step=step.zip`, which then starts without compiling.
"""

import dataclasses
import importlib.util
import math
import os
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies

import train
from data import compiled, hlo
from data.config import program
from shardlib import devices
from tools import memory
from tools.audit import NOT_USED, show, table


@dataclasses.dataclass(unsafe_hash=True)
class CompileConfig(train.Config):
    topology: str = ""  # a slice of TPUs, v5e:16x16; the local devices if there is none
    output: str = ""  # a file to write the compiled step to


def tpu_mesh(topology: str, axes: dict[str, int]) -> jax.sharding.Mesh:
    """Of the chips of a slice that isn't here. Raises ValueError if libtpu isn't installed, or
    doesn't know the slice, or if it has another number of chips than the mesh."""
    if not importlib.util.find_spec("libtpu"):
        raise ValueError(
            f"topology={topology} needs the TPU's compiler: pip install -r requirements-tpu.txt"
        )
    # libtpu would look for its machine and say at length that it doesn't find it; and as it uses no
    # device, several may compile at a time.
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
        raise ValueError(f"topology={topology}: {str(error).splitlines()[0]}") from None
    needed, found = math.prod(axes.values()), len(slice_.devices)
    if needed != found:
        shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(f"topology={topology} has {found} chips, and the mesh {shown} {needed}")
    chips = mesh_utils.create_device_mesh(
        tuple(axes.values()), slice_.devices, allow_split_physical_axes=True
    )
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(chips, tuple(axes), axis_types=kinds)


def compile_step(config: CompileConfig, mesh: jax.sharding.Mesh) -> tuple[Any, float]:
    """The compiled step, or what the compiler says if it doesn't fit, and the seconds that it took.
    Writes `config.output`."""
    with jax.set_mesh(mesh):
        lowered = train.lower_step(config)
        start = time.perf_counter()
        try:
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return str(error).splitlines()[0], time.perf_counter() - start
        seconds = time.perf_counter() - start
        if config.output:
            compiled.save(config.output, step, lowered, config)
    return step, seconds


def summed_whole(text: str) -> list[tuple[str, int]]:
    """The all-reduces of a compiled program that the source doesn't say, and the bytes of their
    arrays: of narrow parts, TPUs sum whole arrays where the source gathers or scatters."""
    found = []
    for line in text.splitlines():
        match = hlo.INSTRUCTION.match(line)
        if match and match[3].startswith("all-reduce"):
            named = re.search(r'op_name="([^"]*)"', line)
            padded = "from-cross-replica-sharding" in line
            other = "a reduce-scatter, padded" if padded else "without a name"
            what = hlo.describe(named[1]) if named else other
            arrays = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", match[2])
            bits = (int(b) * math.prod(int(n) for n in dims.split(",") if n) for b, dims in arrays)
            if not re.search("psum|pmax|pmin", what.rpartition(":")[2]):
                found.append((what, sum(bits) // 8))
    return sorted(found, key=lambda row: -row[1])


@program(CompileConfig, "configs", NOT_USED)
def main(config: CompileConfig) -> None:
    axes = dataclasses.asdict(config.mesh)
    try:
        train.check_config(config)
        train.check_types(config)
        mesh = tpu_mesh(config.topology, axes) if config.topology else train.make_mesh(config)
        jaxpr = train.trace_step(config, devices.abstract_mesh(axes), train.dimensions(config))
    except ValueError as error:
        sys.exit(f"error: {error}")
    kind = mesh.devices.flat[0].device_kind
    chip = next((chip for chip in devices.CHIPS.values() if chip.kind in kind), None)
    predicted = memory.predict(jaxpr, axes, chip)
    held = predicted.arguments + predicted.temporary

    step, seconds = compile_step(config, mesh)
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    print(f"{mesh.size} x {kind}, {shown}, compiled in {seconds:.0f} s\n")
    if isinstance(step, str):
        most = (f"{show(b.bytes)} {b.op} {b.line}" for b in predicted.buffers[:8])
        sys.exit(
            f"error: it does not fit. {step}\nThe audit predicts {show(held)}. The largest arrays "
            "at the worst moment:\n  " + "\n  ".join(most)
        )
    stats = step.memory_analysis()
    arguments = stats.argument_size_in_bytes
    if chip and chip.kind.startswith("TPU"):
        peak = stats.peak_memory_in_bytes  # of temporaries the TPU's gives places, some used twice
    else:
        kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = arguments + kept + stats.temp_size_in_bytes
    rows = [
        ("arguments", arguments, predicted.arguments),
        ("temporary", peak - arguments, predicted.temporary),
        ("in all", peak, held),
    ]
    print(table(("bytes of a device", "the compiler's", "the audit's", "predicted"),
          [(name, show(a), show(b), f"{b / a - 1:+.1%}") for name, a, b in rows]))  # fmt: skip
    if chip:
        print(f"\nIt fits: {show(chip.memory - peak)} of {show(chip.memory)} are left.")
    if sums := [(what, show(size)) for what, size in summed_whole(step.as_text()) if size > 1e6]:
        print("\nWhere the source gathers or scatters these, the compiler sums them whole, which")
        print(f"takes up to twice the bytes:\n\n{table(('what', 'size'), sums)}")


if __name__ == "__main__":
    main()
