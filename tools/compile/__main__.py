"""Compiles a config's training step ahead of time, and reports whether it fits. For GPUs it also
reports which communication overlaps with compute; for TPUs it estimates the time of a step.

    python -m tools.compile --config-name=c4_h100x8_1b topology=h100:8
    python -m tools.compile --config-name=c4_h100x8x4_2b topology=h100:4x8
    python -m tools.compile --config-name=pretrain training.microbatches=2 topology=v5e:2x4
    python -m tools.compile --config-name=local_test_synthetic

    topology=KIND:SHAPE    the devices to compile for; without it, the local ones
    slices=COUNT           TPU slices of that topology, over which r splits the devices

Compiling for a topology needs no such chips, but may take some minutes. GPUs, of one host or
several (4x8: 4 hosts of 8), need requirements-gpu-compile.txt; TPUs need requirements-tpu.txt.
"""

import contextlib
import dataclasses
import os
import time
from typing import Any

import jax
from jax.experimental import topologies

import train
from checks import preflight
from runtime import chips
from runtime.devices import mesh_over
from runtime.program import program
from runtime.run import compile_step, make_mesh
from runtime.values import PositiveInt
from shardlib.errors import UserError
from shardlib.mesh import show_axes
from tools.arguments import NOT_USED
from tools.audit.memory import ARGUMENTS
from tools.audit.step import audit_step
from tools.audit.text import summary, terms_table
from tools.compile import cycles, gpus
from tools.tables import show, table


@dataclasses.dataclass(unsafe_hash=True)
class CompileConfig(train.Config):
    """See the top of this file."""

    topology: str = ""
    slices: PositiveInt = 1


# Keeps libtpu from looking for a TPU machine and warning that it finds none. Since it uses no
# device, several processes may load it at a time.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


GPU_CURE = "like h100:8, or h100:4x8 for 4 hosts of 8", "XLA's compiler", "gpu-compile"
TPU_CURE = "like v5e:2x4", "libtpu", "tpu"


def topology_mesh(topology: str, axes: dict[str, int], slices: int = 1) -> jax.sharding.Mesh:
    """Makes a mesh of GPUs or TPU chips, for compiling only; slices of TPUs split its outermost
    axis. Raises UserError if the compiler is missing or doesn't know the topology, or if the
    topology and the mesh differ in their number of chips."""
    jax.config.update("jax_platforms", "cpu")
    is_gpu = topology.partition(":")[0] in gpus.known()
    # The two cores of a v4 chip act as one device, as those of later chips do by default.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    try:
        if is_gpu:
            found = gpus.devices_of(topology)
        else:
            os.environ.update(WITHOUT_TPU | os.environ)
            slice_ = topologies.get_topology_desc(topology, "tpu", num_slices=slices, **options)
            found = slice_.devices
        return mesh_over(axes, found)
    except UserError:
        raise
    except Exception as error:  # libtpu's, the plugin's or JAX's
        form, compiler, requirements = GPU_CURE if is_gpu else TPU_CURE
        problem = f"topology={topology} for the mesh {show_axes(axes)}: {error}"
        cure = f"Write it {form}, with as many chips as the mesh; it needs {compiler}: install"
        file = f"requirements-{requirements}.txt in a venv of its own"
        raise UserError(f"{problem.splitlines()[0]}. {cure} {file}") from None


@program(CompileConfig, "configs", NOT_USED)
def main(config: CompileConfig) -> None:
    axes = config.mesh.axes
    preflight.check_types(train, config)
    bundles = cycles.dump_bundles()
    name = config.topology.partition(":")[0]
    names = [*gpus.known(), *(name for name, c in chips.CHIPS.items() if "TPU" in c.kind)]
    if config.topology and name not in names:
        raise UserError(f"topology={config.topology}: {name} is none of {', '.join(names)}")
    of_tpus = config.topology and name not in gpus.known()
    config.require(config.slices == 1 or of_tpus, "slices", "only a topology of TPUs has several")
    if config.topology:
        mesh = topology_mesh(config.topology, axes, config.slices)
    else:
        mesh = make_mesh(config, axes)
    kind = mesh.devices.flat[0].device_kind
    is_tpu, chip = kind.startswith("TPU"), chips.find_chip(kind)
    usable = chip.usable if chip else 0  # raises here, not after minutes of compiling
    predicted = audit_step(config, None, chip)
    held = predicted["peak"]

    as_there = gpus.cudnn_as_of if name in gpus.known() else contextlib.nullcontext
    with as_there(config.topology), jax.set_mesh(mesh):
        lowered = train.lower_step(config)
        unroll = config.layers_at_a_time(mesh.devices.flat[0].platform)
        layers = f", {unroll} layers at a time" if unroll > 1 else ""
        print(f"{mesh.size} x {kind}, {show_axes(axes)}{layers}")
        start = time.perf_counter()
        try:
            step = compile_step(config, lowered)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = f"it does not fit: {str(error).splitlines()[0]} (G means GiB)"
            audited = f"By the audit: {summary(predicted, chip)}\n\n{terms_table(predicted)}"
            raise UserError(f"{problem}\n{audited}") from None
        print(f"compiled in {time.perf_counter() - start:.0f} s\n")
    stats: Any = step.memory_analysis()
    arguments = stats.argument_size_in_bytes
    at_start = sum(predicted["held"][name] for name in ARGUMENTS)
    if is_tpu:
        peak = stats.peak_memory_in_bytes  # temp_size counts reused memory twice
    else:
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = arguments + results + stats.temp_size_in_bytes
    temporary = peak - arguments, held - at_start
    sizes = {"arguments": (arguments, at_start), "temporary": temporary, "total": (peak, held)}
    rows = [(name, show(a), show(b), f"{b / a - 1:+.1%}") for name, (a, b) in sizes.items()]
    print(table(("bytes per device", "compiled", "predicted", "error"), rows))
    if not chip:
        unknown = f"{kind} isn't in runtime/chips.py: its memory and its speed are unknown"
        print(f"\n{unknown}. The prediction is for GPUs.")
        return
    verdict = "fits" if peak < usable else "does not fit"
    share = "" if is_tpu else f", the {usable / chip.memory:.0%} that JAX takes"
    print(f"\nIt {verdict}: {show(peak)} of {show(usable)}{share}.")
    if config.dtype != "bf16":
        print("\nIts speed is known in bf16 alone.")
    elif is_tpu:
        takes, sent = cycles.estimate(
            str(step.as_text()), chip, bundles, config.model.sliding_window
        )
        print(f"\n{cycles.share_overlapped(sent)}")
        flops = sum(train.step_flops(config)) / mesh.size
        print(f"\n{cycles.report(takes, chip, flops)}")
    else:
        caveat = f"\n\n{gpus.CAVEAT}" if config.topology else ""
        print(f"\n{gpus.report(str(step.as_text()), chip)}{caveat}")


if __name__ == "__main__":
    main()
