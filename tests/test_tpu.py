"""Compiles steps with the TPU compiler, on a machine without TPUs: make test-tpu."""

import collections
import functools
import re

import jax
import numpy as np
import pytest

from checks import preflight
from runtime import chips
from shardlib.mesh import abstract_mesh
from tests import compiled, tpu_programs
from tests.processes import python
from tools.audit import memory
from tools.audit.ledger import ledger
from tools.compile import cycles
from tools.compile.__main__ import topology_mesh

pytestmark = pytest.mark.tpu
PROGRAMS = [
    *(*tpu_programs.STEPS, *tpu_programs.WITH_LONGER_ROWS),
    *(*tpu_programs.LAYOUTS, *tpu_programs.WITH_LARGE_VOCABULARY, *tpu_programs.WITH_EXPERTS),
    *tpu_programs.WITH_UNROLLED_LAYERS,
]


@functools.cache
def built(program):
    """The mesh, the jaxpr, the compiler's bytes, and its program's text."""
    config, module = program.build()
    axes = config.mesh.axes
    on = topology_mesh(program.topology, axes, program.slices)
    options = chips.compiler_options(on.devices.flat[0].device_kind)
    with jax.set_mesh(on):
        step = module.lower_step(config).compile(compiler_options=options)
    jaxpr = preflight.trace_step(module, config, abstract_mesh(axes))
    return axes, jaxpr, step.memory_analysis(), step.as_text()


def chip_of(program):
    return chips.CHIPS[program.topology.split(":")[0]]


def predicted(program):
    """The bytes of a device, by term."""
    axes, jaxpr, *_ = built(program)
    (config, _), kind = program.build(), chip_of(program).kind
    return memory.held(config, jaxpr, ledger(jaxpr, axes), kind)


def peak_of(program):
    """The bytes by which the compiler decides whether a program fits."""
    return built(program)[2].peak_memory_in_bytes


def error_of(program):
    return sum(predicted(program).values()) / peak_of(program) - 1


@pytest.mark.parametrize("program", PROGRAMS, ids=str, scope="module")
def test_the_arguments_are_as_predicted(program):
    """TPUs pad arrays: a row of 4,096 gains takes as much memory as eight."""
    terms, stats = predicted(program), built(program)[2]
    arguments = sum(terms[name] for name in memory.ARGUMENTS)
    assert 0.999 < arguments / stats.argument_size_in_bytes <= 1


@pytest.mark.parametrize("program", PROGRAMS, ids=str, scope="module")
def test_no_prediction_is_more_than_a_tenth_too_low(program):
    assert error_of(program) > -0.1


def test_predictions_are_within_8_percent_on_average():
    errors = {program: error_of(program) for program in PROGRAMS}
    for program, error in errors.items():
        print(f"{program!s:75} {peak_of(program) / 1e9:6.2f} GB, {error:+6.1%}")
    for name, edited in ("as it is", False), ("less saved", True):
        part = [x for program, x in errors.items() if any(map(callable, program.edits)) == edited]
        mean = sum(map(abs, part)) / len(part)
        print(f"{name}: mean {mean:.1%}, lowest {min(part):+.1%}, highest {max(part):+.1%}")
    assert sum(map(abs, errors.values())) / len(errors) <= 0.08


def collectives_of(program):
    """The ledger's rows, the compiled program's collectives, and the mesh axes."""
    axes, jaxpr, _, text = built(program)
    file = "train_edited.py" if program.edits else "train.py"
    actual = compiled.collectives(text, axes, file)
    # The kernel of TPUs knows the positions of the keys by their order.
    unused = "all_gather(B/d L/c -> B/d L)"
    transfers = [row for row in ledger(jaxpr, axes).transfers if row.op != unused]
    if program in tpu_programs.WITH_UNROLLED_LAYERS:  # only chunks of the loss are in a loop
        of_chunks = "loss", "unembed", "against_largest"
        looped = [row for row in transfers if row.line.endswith(of_chunks)]
        others = [[row._replace(times=1)] * row.times for row in transfers if row not in looped]
        transfers = sum(others, looped)
    if program.slices > 1:  # a sum over r and s is one over s, and then one over r
        transfers = [row for row in transfers if "r" not in row.axes]
        actual = [row for row in actual if row.kind != "all-reduce" or row.elements > 128]
    return transfers, actual, axes


@pytest.mark.parametrize("program", PROGRAMS, ids=str, scope="module")
def test_the_collectives_are_those_of_the_ledger(program):
    transfers, actual, axes = collectives_of(program)
    assert len(actual) > 30
    assert compiled.unexplained_on_tpu(transfers, actual, axes) == ({}, {})


@pytest.mark.parametrize("program", tpu_programs.LAYOUTS[-2:], ids=str)
def test_replicas_send_between_slices_what_the_ledger_says(program):
    axes, jaxpr, _, text = built(program)
    rows = [row for row in ledger(jaxpr, axes).transfers if "r" in row.axes]
    wanted = collections.Counter(row.kind for row in rows if row.elements > compiled.LARGE)
    assert compiled.between_slices(text) == wanted


@pytest.mark.parametrize(("program", "least"), [(PROGRAMS[0], 30), (PROGRAMS[14], 99)], ids=str)
def test_all_that_is_sent_is_found_and_much_of_it_is_overlapped(program, least):
    """Compares two parsers that share no code."""
    axes, _, _, text = built(program)
    rows = {c.chain or i: c for i, c in enumerate(compiled.collectives(text, axes))}
    wanted = sum(c.elements for c in rows.values() if c.axes and c.kind != "permute")
    _, sent = cycles.estimate(text, chip_of(program), None)
    assert sum(row.elements for row in sent if row.devices) == wanted
    share = re.search(r"(\d+)% of it overlapped with compute", cycles.share_overlapped(sent))
    assert least <= int(share[1]) <= 100


@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[4], PROGRAMS[19]], ids=str)
def test_the_matmuls_of_the_estimate_are_those_of_the_ledger(program):
    """Checks trip counts, also with microbatches, and with weights split over two axes."""
    axes, jaxpr, _, text = built(program)
    rows, _ = cycles.estimate(text, chip_of(program), None)
    products = [row for row in ledger(jaxpr, axes).products if not row.in_kernel]
    needed = sum(row.flops * row.times for row in products)
    assert sum(row.flops for row in rows) == pytest.approx(needed, rel=1e-3)


@pytest.mark.parametrize("program", tpu_programs.WITH_EXPERTS, ids=str)
def test_each_product_of_the_experts_is_a_kernel(program):
    """Three forward, two of them again in the backward pass, and two gradients of each."""
    assert len({*re.findall(r"%(ragged-dot-none[.\d]*) = ", built(program)[3])}) == 3 + 2 + 6


@pytest.mark.parametrize("slice_", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("size", [(4096, 4096, 4096), (8192, 8192, 1024)])
def test_a_matmul_takes_about_what_its_flops_need_at_peak(slice_, size):
    on, chip = topology_mesh(slice_, {"d": 4}), chips.CHIPS[slice_.split(":")[0]]
    whole = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec())
    n, m, k = size
    a, b = (jax.ShapeDtypeStruct(s, "bfloat16", sharding=whole) for s in ((n, k), (k, m)))
    text = jax.jit(lambda a, b: a @ b).lower(a, b).compile().as_text()
    (row,), sent = cycles.estimate(text, chip, None)
    print(slice_, size, row.most / (2 * n * m * k / chip.flops))
    assert not sent and row.flops == 2 * n * m * k
    assert 1 <= row.most / (2 * n * m * k / chip.flops) < 1.2


KERNELS = """
import sys, jax, jax.numpy as jnp
from runtime import chips
from kernels.flash_attention import flash_attention
from tools.compile import cycles
from tools.compile.__main__ import topology_mesh

folder, slice_, (length, window) = cycles.dump_bundles(), sys.argv[1], map(int, sys.argv[2:])
mesh, chip = topology_mesh(slice_, {"d": 4}), chips.CHIPS[slice_.split(":")[0]]
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
last = jnp.broadcast_to(jnp.arange(length), (2, length))

def attention(q, k, v):
    first = jnp.maximum(last + 1 - window, 0)
    return flash_attention(q, k, v, first, last).astype(jnp.float32).sum()

def groups(x, w, load):
    return jnp.square(jax.lax.ragged_dot(x, w, load).astype(jnp.float32)).sum()

def cycles_of(function, *arrays):
    on_one = jax.shard_map(
        jax.grad(function, (0, 1)), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    placed = [jax.ShapeDtypeStruct(*array, sharding=whole) for array in arrays]
    text = jax.jit(on_one).lower(*placed).compile().as_text()
    rows, _ = cycles.estimate(text, chip, folder, window)
    return [row.most * chip.flops for row in rows if row.kind == "kernels"]

heads = [(shape, jnp.bfloat16) for shape in [(2, length, 1, 8, 128), *[(2, length, 8, 128)] * 2]]
matrices = [(shape, jnp.bfloat16) for shape in [(length, 1024), (8, 1024, 2048)]]
print(*cycles_of(attention, *heads))
print(*cycles_of(groups, *matrices, ((8,), jnp.int32)))
"""


@pytest.mark.parametrize("slice_", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1"])
def test_a_kernel_takes_at_least_what_its_flops_need_at_peak(slice_):
    """Attention computes two products of each block that is seen forward, and five backward; the
    product of groups has three kernels, each with as many FLOPs."""
    for length, window in (1024, 1024), (4096, 4096), (4096, 600):
        done = python("-c", KERNELS, slice_, length, window)
        assert not done.returncode, done.stderr
        attention, groups = ([*map(float, line.split())] for line in done.stdout.splitlines())
        assert len(attention) == 2 and len(groups) == 3
        first = np.arange(0, length, 512)
        blocks = sum((start // 512 - max(0, start + 1 - window) // 512 + 1) for start in first)
        ratio = sum(attention) / (7 * blocks * 16 * 2 * 512 * 512 * 128)
        rows = length + 7 * 128  # each of eight groups begins a tile of 128
        ratios = [each / (2 * rows * 1024 * 2048) for each in groups]
        print(slice_, length, ratio, ratios)
        assert 1 < ratio < 2 and min(ratios) > 1 and max(ratios) < 2.5


def test_a_long_sequence_fits():
    """The 1b model with 32,768 tokens, on a device of 80 GB."""
    program = tpu_programs.Program("v5p:1x1x1", "1b", 1, 1, 1, 32768, ("training.loss_chunks=32",))
    assert max(sum(predicted(program).values()), peak_of(program)) < 60e9


def test_what_is_offloaded_is_in_the_memory_of_the_host():
    """A device holds that much less, except for copies of other stacked activations that the
    compiler then makes between the two loops."""
    program = tpu_programs.Program("v5e:2x4", "270m", 8, 1, 64, 1024)
    offloading = program._replace(edits=(tpu_programs.feed_forward_offloaded,))
    less = peak_of(program) - peak_of(offloading)
    axes, jaxpr, stats, _ = built(offloading)
    saved = ledger(jaxpr, axes).saved
    offloaded = [row.bytes for row in saved if row.memory == "host"]
    copied = [row.bytes for row in saved if row.memory == "device" and row.times > 1]
    assert len(offloaded) == 2 and stats.host_temp_size_in_bytes >= sum(offloaded)
    assert 0 < sum(offloaded) - less < sum(copied)
