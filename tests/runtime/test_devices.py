"""Tests meshes, the probe mesh, and simulated devices, which need a process each."""

import jax
import pytest

from runtime import devices
from shardlib.errors import UserError
from tests import golden
from tests.processes import python


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
    with golden.raises("functions.txt", "slices without replicas", UserError):
        devices.mesh_over({"r": 1, "s": 8}, chips)
    hosts = [FakeDevice(i, i // 4, "NVIDIA H100") for i in range(8)]
    assert devices.mesh_over({"r": 1, "s": 8}, hosts).devices.ravel().tolist() == hosts


SCRIPT = """
import os, pathlib
before = dict(os.environ)
from runtime.devices import simulate_cpu_devices
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
def test_simulated_devices_have_threads_and_leave_the_users_flags_alone(flags, count, monkeypatch):
    for name in "JAX_PLATFORMS", "NPROC":
        monkeypatch.delenv(name, raising=False)
    done = python("-c", SCRIPT, XLA_FLAGS=flags)
    assert done.stdout.split() == [str(count), "True", "True"], done.stderr


KEY = """
import runtime.devices, jax
print(repr(jax.random.uniform(jax.random.key(5), 3)), jax.config.jax_default_matmul_precision)
"""


def test_a_key_is_the_same_whatever_the_environment():
    settings = {"JAX_ENABLE_X64": "1", "JAX_RANDOM_SEED_OFFSET": "7"}
    settings |= {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0"}
    settings |= {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_TRANSFER_GUARD": "disallow"}
    settings |= {"JAX_NO_TRACING": "1", "JAX_DISABLE_JIT": "1"}
    settings |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    done = python("-c", KEY, **settings)
    assert done.stdout == f"{jax.random.uniform(jax.random.key(5), 3)!r} None\n", done.stderr


def test_a_plugin_that_finds_no_gpu_does_not_fall_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "CUDA_PLUGINS", ("jax",))
    assert devices.make_mesh({"d": 1}).size == 1, "JAX_PLATFORMS=cpu"
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(UserError, match="GPU plugin is installed, but JAX found no GPU"):
            devices.make_mesh({"d": 1})
    finally:
        jax.config.update("jax_platforms", "cpu")


def test_a_run_does_not_fall_back_to_the_cpu_of_a_machine_with_an_accelerator(monkeypatch):
    monkeypatch.setattr(devices, "ACCELERATORS", ("/dev/nul[k-m]",))
    assert devices.make_mesh({"d": 1}, trains=True).size == 1, "JAX_PLATFORMS=cpu"
    jax.config.update("jax_platforms", None)
    try:
        assert devices.make_mesh({"d": 1}).size == 1, "tools may"
        with pytest.raises(UserError, match="this machine has an accelerator, but JAX found none"):
            devices.make_mesh({"d": 1}, trains=True)
    finally:
        jax.config.update("jax_platforms", "cpu")


def test_a_jax_that_is_too_old_for_gpus(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert devices.make_mesh({"d": 1}).size == 1, "on CPUs it isn't"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="is too old for GPUs: install "):
        devices.make_mesh({"d": 1})
