"""A table of accelerators: speeds, memory, links, and the compiler's options for them."""

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardlib.errors import UserError
from shardlib.types import compute

GIB = 2**30


class Chip(NamedTuple):
    kind: str  # JAX's `device.device_kind`, without the "NVIDIA" of GPUs
    flops: float  # FLOP/s, dense bf16
    memory: float  # bytes, as CUDA reports them, or as the TPU's compiler does
    bandwidth: float  # of the memory, bytes/s
    links: dict[str, float]  # kind of link -> bytes/s that a device receives over it; fastest first
    near: float = math.inf  # devices that the fastest links connect
    chosen: Mapping[str, str] = MappingProxyType({})  # kinds of links by mesh axis: see `links_of`
    rings: int = 1  # that XLA runs at once in a collective over all chips

    def with_rates(self, rates: dict[str, float]) -> "Chip":
        """Returns the chip with other rates of links, in bytes/s. Raises UserError if it has no
        such link, or if a rate isn't above 0 and finite."""
        for link, rate in rates.items():
            if link not in self.links or not 0 < rate < math.inf:
                links = ", ".join(f"{link}: {rate:.3g}" for link, rate in self.links.items())
                problem = f"the rate of {link} can't be {rate:.3g}"
                raise UserError(f"{problem}: {self.kind} has, in bytes/s, {links}")
        return self._replace(links=self.links | rates)

    @property
    def usable(self) -> float:
        """The bytes that JAX takes: on GPUs three quarters, or the share XLA_CLIENT_MEM_FRACTION,
        whose old name is XLA_PYTHON_CLIENT_MEM_FRACTION. Raises UserError if that isn't a share, or
        if both are set."""
        if "TPU" in self.kind:
            return self.memory
        names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
        given = {name: os.environ[name] for name in names if os.environ.get(name)}
        with contextlib.suppress(ValueError):
            share = float(next(iter(given.values()), "0.75"))
            if 0 < share <= 1 and len(given) < 2:  # JAX refuses two as well
                return share * self.memory
        written = " ".join(f"{name}={value}" for name, value in given.items())
        cure = f"set {names[0]} alone, to JAX's share of a GPU's memory: above 0, at most 1"
        raise UserError(f"{written} in the environment: {cure}")

    def links_of(self, axes: Mapping[str, int]) -> dict[str, str]:
        """Returns the kind of link that each mesh axis uses: the `chosen` one, else the fastest one
        if it and the axes inside it fit within a group of `near` devices, else the slowest one."""
        fast, *slow = self.links
        kinds, size, count = {}, 1, math.prod(axes.values())
        for axis in reversed([*axes]):
            size *= axes[axis]
            among_neighbors = size <= self.near and (count <= self.near or self.near % size == 0)
            kinds[axis] = fast if among_neighbors else slow[-1]
        return {**kinds, **self.chosen}

    def share_from_afar(self, kind: str, over: tuple[str, ...], axes: Mapping[str, int]) -> float:
        """Returns the share of a collective's bytes that a device receives over its own slow link.
        Bytes that all of a group's devices in a host need enter the host once, over all their
        links; only an all-to-all sends each device other bytes."""
        if {*over} & {*self.chosen} or kind == "permute":
            return 1
        count, here = _neighbors(self.near, over, tuple(axes.items()))
        from_afar = (count - here) / (count - 1)
        return from_afar if kind == "all-to-all" else from_afar / here


@functools.cache
def _neighbors(near: float, over: tuple[str, ...], axes: tuple[tuple[str, int], ...]) -> Any:
    """Returns how many devices communicate over these axes, and the fewest of them in one host."""
    names, sizes = zip(*axes, strict=True)
    host = np.arange(math.prod(sizes)).reshape(sizes) // near
    count = math.prod(size for name, size in axes if name in over)
    groups = np.moveaxis(host, [names.index(x) for x in over], range(-len(over), 0))
    counts = (np.unique(group, return_counts=True)[1] for group in groups.reshape(-1, count))
    return count, min(int(each.min()) for each in counts)


# A device that isn't named here exactly is unknown: an H100 NVL isn't an H100.
# The names of TPUs: https://github.com/jax-ml/jax, jax/_src/pallas/mosaic/tpu_info.py.
# GPUs: NVIDIA's datasheets. flops is the dense rate, half of the sparse one that they quote from
# Hopper on; nvlink is one direction, half of the quoted sum; ib is one adapter per GPU, 200 or 400
# Gb/s. memory: https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
# TPUs: docs.cloud.google.com/tpu/docs. ici is the two links of a torus axis. libtpu 0.0.50.1 runs a
# gather over all of 4x4x4 v4 or v5p chips in three rings; over 16, or over v5e or v6e, in one.
CHIPS = {
    "a100_40gb": Chip("A100-SXM4-40GB", 312e12, 42.3e9, 1.555e12, {"nvlink": 300e9, "ib": 25e9}, 8),
    "a100pcie_40gb": Chip(
        "A100-PCIE-40GB", 312e12, 42.3e9, 1.555e12, {"pcie": 32e9, "ib": 25e9}, 8
    ),
    "a100": Chip("A100", 312e12, 85.1e9, 2.039e12, {"nvlink": 300e9, "ib": 25e9}, 8),
    "h100pcie": Chip("H100 PCIe", 756e12, 84.9e9, 2e12, {"pcie": 64e9, "ib": 50e9}, 8),
    "h100": Chip("H100", 989e12, 84.9e9, 3.35e12, {"nvlink": 450e9, "ib": 50e9}, 8),
    "h200": Chip("H200", 989e12, 151e9, 4.8e12, {"nvlink": 450e9, "ib": 50e9}, 8),
    "b200": Chip("B200", 2250e12, 191e9, 7.7e12, {"nvlink": 900e9, "ib": 50e9}, 8),
    "v4": Chip("TPU v4", 275e12, 30.75 * GIB, 1.2e12, {"ici": 100e9}, rings=3),
    "v5e": Chip("TPU v5 lite", 197e12, 15.75 * GIB, 0.819e12, {"ici": 100e9}),
    "v5p": Chip("TPU v5", 459e12, 95.73 * GIB, 2.765e12, {"ici": 200e9}, rings=3),
    "v6e": Chip("TPU v6 lite", 918e12, 31.24 * GIB, 1.638e12, {"ici": 200e9}),
}
# What JAX calls a chip on some machines.
OTHER_NAMES = {
    "A100-SXM4-80GB": "A100",
    "H100 80GB HBM3": "H100",
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
}


# Compiler options by kind of chip, so that more communication overlaps with compute;
# docs/performance.md has the figures with and without them. The names come from
# https://github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, and
# https://github.com/openxla/xla, docs/flags_guidance.md. GPUs have none: the options tried there
# cost memory, and their gain can only be measured.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # Overlaps all-reduces with compute, as is the default for all-gathers. Only v5e has this.
    "TPU v5 lite": {
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_enable_async_all_reduce": True,
    },
    "TPU v5": {
        # The SparseCore carries out collectives while the TensorCore computes.
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
        # Keeps reduce-scatters that would otherwise become all-reduces, at twice the bytes.
        "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        # The scheduler assumes higher latencies, and so starts collectives earlier.
        "xla_tpu_sparse_core_all_gather_latency_multiplier": "2",
        "xla_tpu_sparse_core_all_reduce_latency_multiplier": "4",
        "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": "4",
    },
}

# For GPUs: no sums in the order in which threads finish, and no kernels chosen by their time, as
# Triton's for matmuls always are.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}

# For GPUs: no CUDA graphs, whose kernels a profile shows without their HLO instructions.
PROFILED = {"xla_gpu_enable_command_buffer": ""}


def find_chip(kind: str) -> Chip | None:
    """Finds a chip by JAX's `device.device_kind`; None if the table doesn't have it."""
    name = kind.removeprefix("NVIDIA ")
    return {chip.kind: chip for chip in CHIPS.values()}.get(OTHER_NAMES.get(name, name))


def mfu(kind: str, count: int, flops: float) -> str:
    """Model FLOPs utilization as text: `flops` per second on `count` devices, as a fraction of
    their peak in bf16. Empty if that isn't known, or if the step computes in f32. `kind` is JAX's
    `device.device_kind`."""
    chip = find_chip(kind)
    return f"{flops / chip.flops / count:.1%}" if chip and compute.dtype.itemsize == 2 else ""


def compiler_options(kind: str) -> dict[str, Any]:
    """Compiler options for `jax.stages.Lowered.compile` on a `device.device_kind`, without those
    that XLA_FLAGS or LIBTPU_INIT_ARGS set."""
    chip = find_chip(kind)
    flags = os.environ.get("XLA_FLAGS", "") + " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    set_by_user = {flag.lstrip("-").partition("=")[0] for flag in flags.split()}
    options = COMPILER_OPTIONS.get(chip.kind, {}) if chip else {}
    return {name: value for name, value in options.items() if name not in set_by_user}
