"""The mesh, simulated CPU devices, the probe mesh, and what chips can do."""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.errors import UserError

COUNT_FLAG = "--xla_force_host_platform_device_count"


GIB = 2**30


class Chip(NamedTuple):
    kind: str  # a part of JAX's `device.device_kind`
    flops: float  # FLOP/s, dense bf16
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    links: dict[str, float]  # bytes/s that a device receives over one kind of link


# The first whose kind fits a device is its. From NVIDIA's datasheets (those of Hopper quote twice
# the dense rate; nvlink is half of what they give for both directions; ib is the customary adapter
# per GPU, 200 Gb/s, then 400) and docs.cloud.google.com/tpu/docs (ici: a torus axis has two links);
# a TPU's memory is what its compiler says that it has for programs.
CHIPS = {
    "a100_40gb": Chip("A100-SXM4-40GB", 312e12, 40e9, 1.555e12, {"nvlink": 300e9, "ib": 25e9}),
    "a100": Chip("A100", 312e12, 80e9, 2.039e12, {"nvlink": 300e9, "ib": 25e9}),
    "h100pcie": Chip("H100 PCIe", 756e12, 80e9, 2e12, {"pcie": 64e9, "ib": 50e9}),
    "h100": Chip("H100", 989e12, 80e9, 3.35e12, {"nvlink": 450e9, "ib": 50e9}),
    "h200": Chip("H200", 989e12, 141e9, 4.8e12, {"nvlink": 450e9, "ib": 50e9}),
    "v4": Chip("TPU v4", 275e12, 30.75 * GIB, 1.2e12, {"ici": 100e9}),
    "v5e": Chip("TPU v5 lite", 197e12, 15.75 * GIB, 0.819e12, {"ici": 100e9}),
    "v5p": Chip("TPU v5", 459e12, 95.73 * GIB, 2.765e12, {"ici": 200e9}),
    "v6e": Chip("TPU v6 lite", 918e12, 31.24 * GIB, 1.638e12, {"ici": 200e9}),
}


# What a kind of chip's compiler is asked for beyond its defaults, so that more of what is sent is
# sent while something is computed: docs/performance.md has the shares before and after. The names
# are from https://github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, and
# https://github.com/openxla/xla, docs/flags_guidance.md.
COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    # All-reduces run beside compute, as gathers do by default. v5e alone has this.
    "TPU v5 lite": {
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_enable_async_all_reduce": True,
    },
    "TPU v5": {
        # The SparseCore carries collectives, and the other core goes on.
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
        # A reduce-scatter stays one where it would become an all-reduce, of twice the bytes.
        "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        # The scheduler takes them to be slower than it thinks, and starts them earlier.
        "xla_tpu_sparse_core_all_gather_latency_multiplier": "2",
        "xla_tpu_sparse_core_all_reduce_latency_multiplier": "4",
        "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": "4",
    },
}


def show_axes(axes: Mapping[str, int]) -> str:
    """`d=4, t=2`."""
    return ", ".join(f"{axis}={size}" for axis, size in axes.items())


def find_chip(kind: str) -> Chip | None:
    """By JAX's `device.device_kind`; None for one that isn't in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind in kind), None)


def mfu(kind: str, count: int, flops: float) -> str:
    """Model FLOPs utilization as text: the share of the peak of so many devices, by JAX's
    `device.device_kind`, that so many FLOP/s are."""
    chip = find_chip(kind)
    return f"{flops / chip.flops / count:.1%}" if chip else f"unknown on {kind}"


def compiler_options(kind: str) -> dict[str, bool | str]:
    """For `jax.stages.Lowered.compile`, by JAX's `device.device_kind`. What the user's flags say
    something about is left to them."""
    chip = find_chip(kind)
    users = os.environ.get("XLA_FLAGS", "") + " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    named = {flag.lstrip("-").partition("=")[0] for flag in users.split()}
    options = COMPILER_OPTIONS.get(chip.kind, {}) if chip else {}
    return {name: value for name, value in options.items() if name not in named}


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX run on `count` simulated CPU devices, unless the environment says otherwise.

    Call it before JAX looks for devices.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    have_cpu_devices(count)


def have_cpu_devices(count: int) -> None:
    """So many, should JAX find no other devices, and unless the environment says otherwise. Call it
    before JAX looks for devices."""
    if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(axes: dict[str, int]) -> Mesh:
    """A mesh over the first devices. Name first the axis whose neighbours are farthest apart.

    Raises UserError if there are too few devices, or, on several hosts, too many.
    """
    needed, found, shown = math.prod(axes.values()), jax.device_count(), show_axes(axes)
    if jax.process_count() > 1 and needed < found:
        raise UserError(f"the mesh {shown} leaves some of the {found} devices of all hosts idle")
    if needed > found:
        raise UserError(
            f"the mesh {shown} needs {needed} devices and there are {found} "
            f"({jax.devices()[0].device_kind}); to simulate them on a CPU: "
            f"XLA_FLAGS={COUNT_FLAG}={needed} JAX_PLATFORMS=cpu"
        )
    types = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[:needed]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, to trace on."""
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


# The sizes of a probe mesh's axes, in order, and the factors that tell its dimensions apart.
PRIMES = [n for n in range(3, 1000) if all(n % k for k in range(2, n))]


def probe_total(axes: Collection[str]) -> int:
    """What each dimension's size on a probe mesh of these axes is a multiple of."""
    return 4 * math.prod(PRIMES[: len(axes) + 1])


def probe_mesh(axes: Iterable[str], dims: Iterable[str]) -> tuple[AbstractMesh, dict[str, int]]:
    """A mesh without devices, and a size for each dimension, at which checks of sizes are exact.

    Each axis has a prime size of its own, each dimension a prime of its own times 4, all axes'
    sizes and the next prime, for `turned`. So it splits evenly over any axes, and a part into
    halves, of which each still tells where it is from; and no part or whole of one dimension is as
    long as any of another, as it may be at the sizes one trains with. The dimensions' primes are
    above 100, so that no part is as long as a small number that stands in a model.
    """
    axis_sizes = {axis: PRIMES[i] for i, axis in enumerate(axes)}
    above = [prime for prime in PRIMES if prime > 100]
    sizes = {dim: probe_total(axis_sizes) * above[i] for i, dim in enumerate(dims)}
    return abstract_mesh(axis_sizes), sizes


def turned(mesh: AbstractMesh) -> AbstractMesh:
    """The probe mesh with each axis as long as the next one was, and the last one longer: other
    parts of the same whole."""
    return abstract_mesh({axis: PRIMES[i + 1] for i, axis in enumerate(mesh.axis_names)})
