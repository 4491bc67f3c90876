"""Tests meshes, the probe mesh, and simulated devices, which need a process each."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from shardlib import devices
from shardlib.devices import find_chip
from shardlib.errors import UserError
from tests import golden
from tests.helpers import ROOT


@pytest.mark.parametrize(
    "axes, links",
    [
        ({"r": 4, "s": 4, "t": 2}, ["ib", "nvlink", "nvlink"]),
        ({"r": 1, "s": 16, "t": 2}, ["ib", "ib", "nvlink"]),
        ({"r": 1, "s": 8, "t": 3}, ["ib", "ib", "ib"]),  # every third group is on two hosts
        ({"r": 1, "s": 2, "t": 3}, ["nvlink", "nvlink", "nvlink"]),
    ],
)
def test_axes_within_a_host_have_fast_links(axes, links):
    assert devices.CHIPS["h100"].links_of(axes) == dict(zip(axes, links, strict=True))


class FakeDevice:
    """A device of a slice, for the order in a mesh alone."""

    platform = "cpu"

    def __init__(self, number, slice_index, kind):
        self.id, self.process_index, self.slice_index = number, slice_index, slice_index
        self.device_kind = kind


def test_slices_split_the_outermost_axis():
    chips = [FakeDevice(i, i % 2, "TPU v5") for i in range(8)]
    mesh = devices.mesh_over({"r": 4, "s": 2, "t": 1}, chips)
    assert [chip.slice_index for chip in mesh.devices.ravel()] == [0] * 4 + [1] * 4
    with pytest.raises(UserError) as error:
        devices.mesh_over({"r": 1, "s": 8}, chips)
    golden.check("functions.txt", "slices without replicas", str(error.value))
    hosts = [FakeDevice(i, i // 4, "NVIDIA H100") for i in range(8)]
    assert devices.mesh_over({"r": 1, "s": 8}, hosts).devices.ravel().tolist() == hosts


@pytest.mark.parametrize(
    "kind, peak",
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12),
     ("NVIDIA A100-SXM4-40GB", 312e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12),
     ("TPU v5p", 459e12), ("TPU v6 lite", 918e12), ("TPU v4", 275e12), ("cpu", None),
     ("NVIDIA GeForce RTX 4090", None)],
)  # fmt: skip
def test_known_chips_and_unknown_ones(kind, peak):
    chip = find_chip(kind)
    assert (chip and chip.flops) == peak


SCRIPT = """
import os, pathlib
before = dict(os.environ)
from shardlib.devices import simulate_cpu_devices
simulate_cpu_devices(6)
import jax
print(jax.device_count())
print({k: v for k, v in os.environ.items() if k != "NPROC"} == before)
tasks = pathlib.Path("/proc/self/task").iterdir()
print(sum("XLAEigen" in (task / "comm").read_text() for task in tasks) >= 4 * 6)
"""


@pytest.mark.parametrize(
    "flags, count",
    [("--xla_cpu_enable_fast_math=false", 6), ("--xla_force_host_platform_device_count=3", 3)],
)
def test_simulated_devices_have_threads_and_leave_the_users_flags_alone(flags, count):
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "NPROC")}
    env["XLA_FLAGS"] = flags
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(count), "True", "True"], done.stderr


def test_an_option_that_the_users_flags_name_is_left_to_them(monkeypatch):
    all_of_them = devices.compiler_options("TPU v5 lite")
    assert all_of_them == devices.COMPILER_OPTIONS["TPU v5 lite"]
    assert len(devices.compiler_options("TPU v5")) > len(all_of_them)
    assert devices.compiler_options("cpu") == devices.compiler_options("TPU v4") == {}
    on_gpus = devices.compiler_options("NVIDIA H100 80GB HBM3")
    assert jax.jit(jnp.sin).lower(0.0).compile(compiler_options=on_gpus)(0.0) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_enable_async_all_reduce=false")
    name = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
    assert devices.compiler_options("TPU v5 lite") == {name: True}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=true")
    assert devices.compiler_options("TPU v5 lite") == {}


def test_a_plugin_that_finds_no_gpu_does_not_fall_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "CUDA_PLUGINS", ("jax",))
    assert devices.make_mesh({"d": 1}).size == 1, "JAX_PLATFORMS=cpu"
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(UserError, match="plugin for GPUs is installed, but JAX found none"):
            devices.make_mesh({"d": 1})
    finally:
        jax.config.update("jax_platforms", "cpu")
