"""The devices of a run, simulated ones of CPUs included."""

import functools
import glob
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shardlib.errors import UserError
from shardlib.mesh import show_axes

CUDA_PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"
ACCELERATORS = "/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*"  # the last two: TPUs
OLDEST_ON_GPUS = 0, 11, 1  # the version of jax that GPUs need at least: see requirements-gpu.txt
COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA_FLAGS for CPU programs that take longer to optimize than to run.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # From jax 0.11 on there is no such flag.
    + (" --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else "")
)

# JAX would take these from the environment: numbers or stopping could change, or steps be refused.
SETTINGS = {
    "check_tracer_leaks": False,
    "default_matmul_precision": None,
    "default_prng_impl": "threefry2x32",
    "disable_jit": False,
    "enable_preemption_service": True,
    "enable_x64": False,
    "no_tracing": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "random_seed_offset": 0,
    "threefry_partitionable": True,
    "transfer_guard": "allow",
}
for name, value in SETTINGS.items():
    jax.config.update(f"jax_{name}", value)


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX run on `count` simulated CPU devices, unless JAX_PLATFORMS or XLA_FLAGS say
    otherwise. Call it before JAX initializes its devices."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    have_cpu_devices(count)


def have_cpu_devices(count: int) -> None:
    """Sets how many CPU devices JAX simulates if it runs on CPUs, unless XLA_FLAGS does. Call it
    before JAX initializes its devices."""
    if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)
    have_threads(count)


def have_threads(count: int) -> None:
    """Lets XLA use enough threads for `count` simulated CPU devices. Call it before JAX initializes
    its devices."""
    # A collective blocks a thread until all its devices arrive. By default XLA has one thread per
    # device, but it runs a loop and the collectives around it at once, and our loops are nested.
    # If all threads are blocked, some devices never arrive, and XLA aborts after 40 seconds.
    os.environ["NPROC"] = str(max(4 * count, os.cpu_count() or 1))


def mesh_over(axes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """A mesh over these devices, whose neighbors have fast links. Slices of TPUs split the
    outermost axis. Raises UserError if they don't divide it."""
    # GPUs have a slice_index too, the number of their host, but a replica may span several hosts.
    slices = len({getattr(d, "slice_index", 0) for d in devices if "TPU" in d.device_kind}) or 1
    (name, outer), *inner = axes.items()
    if outer % slices:
        raise UserError(f"mesh.{name}={outer}: it must be a multiple of the {slices} slices")
    make: Callable[..., Any] = mesh_utils.create_device_mesh
    if slices > 1:
        over = [slices, *(1 for _ in inner)]
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=over)
    within = [outer // slices, *(size for _, size in inner)]
    arranged = make(within, devices=devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_mesh(axes: dict[str, int], trains: bool = False) -> Mesh:
    """A mesh over the first devices. The first axis is the outermost, over the slowest links.

    Raises UserError if there are too few devices or, with several hosts, too many, or if JAX fell
    back to CPUs despite a GPU plugin or, in a run that `trains`, an accelerator in this machine.
    """
    needed, count, mesh = math.prod(axes.values()), jax.device_count(), show_axes(axes)
    fell_back = jax.default_backend() == "cpu" and not jax.config.jax_platforms  # type: ignore[attr-defined]
    plugin = any(map(importlib.util.find_spec, CUDA_PLUGINS))
    if fell_back and (plugin or (trains and any(map(glob.glob, ACCELERATORS)))):
        problem = "JAX's GPU plugin is installed, but JAX found no GPU"
        cure = "what it printed above says why"
        if not plugin:
            problem = "this machine has an accelerator, but JAX found none"
            cure = "install requirements-gpu.txt or -tpu.txt, or end the process that holds it"
        raise UserError(f"{problem}; {cure}. JAX_PLATFORMS=cpu in the environment uses the CPU")
    if jax.default_backend() == "gpu" and jax.__version_info__ < OLDEST_ON_GPUS:
        wanted = ".".join(map(str, OLDEST_ON_GPUS))
        raise UserError(f"jax {jax.__version__} is too old for GPUs: install {wanted} or newer")
    if jax.process_count() > 1 and needed < count:
        raise UserError(f"the mesh {mesh} uses only {needed} of the {count} devices of all hosts")
    if needed > count:
        there = f"there are {count} ({jax.devices()[0].device_kind})"
        cure = "simulate_devices=true, which JAX_PLATFORMS or XLA_FLAGS may override"
        cure = f"choose a smaller mesh, or {cure}"
        raise UserError(f"the mesh {mesh} needs {needed} devices, but {there}: {cure}")
    return mesh_over(axes, jax.devices()[:needed])
