"""The mesh, simulated CPU devices, the probe mesh, and what chips can do."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

COUNT_FLAG = "--xla_force_host_platform_device_count"

# Peak dense bf16 FLOP/s of one device, by a part of `device.device_kind`; the first match counts.
PEAK_FLOPS = {
    "A100": 312e12,  # NVIDIA A100 datasheet, tensor core, without sparsity
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet, halved: it quotes the sparse figure
    "H100": 989e12,  # the same, SXM
    "H200": 989e12,  # NVIDIA H200 datasheet, halved
    "TPU v4": 275e12,  # cloud.google.com/tpu/docs/v4
    "TPU v5 lite": 197e12,  # cloud.google.com/tpu/docs/v5e
    "TPU v5": 459e12,  # cloud.google.com/tpu/docs/v5p
    "TPU v6 lite": 918e12,  # cloud.google.com/tpu/docs/v6e
}


def peak_flops(device: jax.Device) -> float | None:
    """Peak dense bf16 FLOP/s of the device, or None for one that isn't in the table."""
    return next((peak for kind, peak in PEAK_FLOPS.items() if kind in device.device_kind), None)


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX run on `count` simulated CPU devices, unless the environment says otherwise.

    Call it before JAX looks for devices.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(axes: dict[str, int]) -> Mesh:
    """A mesh over the first devices. Name first the axis whose neighbours are farthest apart.

    Raises ValueError if there are too few devices, or, on several hosts, too many.
    """
    needed, found = math.prod(axes.values()), jax.device_count()
    shown = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    if jax.process_count() > 1 and needed < found:
        raise ValueError(f"the mesh {shown} leaves some of the {found} devices of all hosts idle")
    if needed > found:
        raise ValueError(
            f"the mesh {shown} needs {needed} devices and there are {found} "
            f"({jax.devices()[0].device_kind}); to simulate them on a CPU: "
            f"XLA_FLAGS={COUNT_FLAG}={needed} JAX_PLATFORMS=cpu"
        )
    types = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[:needed]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def _primes() -> Iterator[int]:
    """The odd primes: 3, 5, 7, ..."""
    for n in itertools.count(3, 2):
        if all(n % k for k in range(3, math.isqrt(n) + 1, 2)):
            yield n


def probe_mesh(axes: Iterable[str], dims: Iterable[str]) -> tuple[AbstractMesh, dict[str, int]]:
    """A mesh without devices, and a size for each dimension, at which checks of sizes are exact.

    Each axis has a prime size of its own, each dimension a prime of its own times twice all axes'
    sizes: it splits evenly over any axes, and no part or whole of one dimension is as long as any
    part or whole of another, as it may be at the sizes one trains with. The dimensions' primes are
    above 100, so that no part is as long as a small number that stands in a model.
    """
    primes = _primes()
    axis_sizes = {axis: next(primes) for axis in axes}
    total = 2 * math.prod(axis_sizes.values())
    primes = itertools.dropwhile(lambda prime: prime < 100, primes)
    sizes = {dim: total * next(primes) for dim in dims}
    types = (AxisType.Auto,) * len(axis_sizes)
    return AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=types), sizes
