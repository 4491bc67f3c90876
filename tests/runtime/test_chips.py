"""Tests the table of chips, and the compiler's options for them."""

import re

import jax
import jax.numpy as jnp
import pytest

from runtime import chips
from shardlib.errors import UserError
from tests.files import write_tokens
from tests.helpers import small_run

# The sizes of r, s and t. Of the third mesh, every third group is on two hosts.
LINKS = [((4, 4, 2), "ib nvlink nvlink"), ((1, 16, 2), "ib ib nvlink")]
LINKS += [((1, 8, 3), "ib ib ib"), ((1, 2, 3), "nvlink nvlink nvlink")]


@pytest.mark.parametrize("sizes, links", LINKS)
def test_axes_within_a_host_have_fast_links(sizes, links):
    actual = chips.CHIPS["h100"].links_of(dict(zip("rst", sizes, strict=True)))
    assert actual == dict(zip("rst", links.split(), strict=True))


# In the first, 8 parts enter each host, over 8 links; in the last, two of a group's three devices
# are on one host.
SHARES = [((1, 16, 1), "s", 8 / 15 / 8), ((1, 64, 1), "s", 56 / 63 / 8), ((2, 8, 1), "r", 1)]
SHARES += [((1, 16, 2), "s", 12 / 15 / 4), ((2, 4, 2), "rs", 4 / 7 / 4), ((1, 8, 3), "t", 1)]


@pytest.mark.parametrize("sizes, over, share", SHARES)
def test_what_a_group_receives_enters_a_host_once(sizes, over, share):
    axes, h100 = dict(zip("rst", sizes, strict=True)), chips.CHIPS["h100"]
    assert h100.share_from_afar("all-gather", tuple(over), axes) == pytest.approx(share)
    assert h100.share_from_afar("permute", tuple(over), axes) == 1


@pytest.mark.parametrize(
    "kind, peak",
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12),
     ("NVIDIA A100-SXM4-40GB", 312e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12),
     ("TPU v5p", 459e12), ("TPU v6 lite", 918e12), ("TPU v4", 275e12), ("cpu", None),
     ("NVIDIA A100-SXM4-80GB", 312e12), ("TPU v5e", 197e12), ("TPU v6e", 918e12),
     ("NVIDIA GeForce RTX 4090", None), ("NVIDIA H100 NVL", None), ("TPU v4 lite", None),
     ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H200 NVL", None), ("TPU7x", None),
     ("NVIDIA GH200 480GB", None), ("NVIDIA A100 80GB PCIe", None)],
)  # fmt: skip
def test_known_chips_and_unknown_ones(kind, peak):
    chip = chips.find_chip(kind)
    assert (chip and chip.flops) == peak


@pytest.mark.parametrize("written, share", [("0.9", 0.9), ("1", 1), ("", 0.75), (" 5e-1", 0.5)])
def test_the_part_of_a_gpus_memory_that_jax_takes(written, share, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", written)
    assert chips.CHIPS["h100"].usable == share * 84.9e9


@pytest.mark.parametrize("written", ["nan", "inf", "0", "-1", "75", "75%", "half", "1.01"])
def test_what_is_no_part_of_a_gpus_memory(written, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", written)
    with pytest.raises(UserError, match=rf"^XLA_CLIENT_MEM_FRACTION={re.escape(written)} in "):
        _ = chips.CHIPS["h100"].usable
    assert chips.CHIPS["v4"].usable == 30.75 * 2**30


def test_an_option_that_the_users_flags_name_is_left_to_them(monkeypatch):
    all_of_them = chips.compiler_options("TPU v5 lite")
    assert all_of_them == chips.COMPILER_OPTIONS["TPU v5 lite"]
    assert len(chips.compiler_options("TPU v5")) > len(all_of_them)
    assert chips.compiler_options("TPU v5e") == all_of_them
    assert chips.compiler_options("cpu") == chips.compiler_options("TPU v4") == {}
    on_gpus = chips.compiler_options("NVIDIA H100 80GB HBM3")
    assert jax.jit(jnp.sin).lower(0.0).compile(compiler_options=on_gpus)(0.0) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_enable_async_all_reduce=false")
    name = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
    assert chips.compiler_options("TPU v5 lite") == {name: True}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=true")
    assert chips.compiler_options("TPU v5 lite") == {}


def test_a_run_on_a_known_chip_prints_its_mfu(tmp_path, train_here, monkeypatch):
    """It says how much of its rows is padding, too."""
    monkeypatch.setitem(chips.CHIPS, "cpu", chips.Chip("cpu", 1e9, 1e9, 1e9, {}))
    path = write_tokens(tmp_path / "data.zarr", [[1, 2, 3]] * 8)
    source = f"flat_tokens={{filespec: {path}, sequence_packing: false}}"
    out, message = train_here(*small_run(tmp_path, "training.steps=2", source))
    assert not message
    assert "\nnote: 75.0% of the batch is padding, which counts in tokens/s and MFU\n" in out
    for line in r"^step 1/2 .*, MFU [\d.]+%  ", r"^done: 2 steps, .*, MFU [\d.]+%$":
        assert re.search(line, out, re.MULTILINE), out
