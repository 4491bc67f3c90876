"""Compiles steps with XLA's compiler for NVIDIA GPUs, on a machine without one: make
test-gpu-compile. Two of them are compiled by make test-all, too, if the compiler is installed."""

import collections
import functools
import importlib.util
import re
from typing import NamedTuple

import jax
import pytest

import train
from benchmarks import attention as ways
from checks import jaxprs, preflight
from kernels import attention
from runtime import chips
from runtime.run import compile_step
from shardlib.mesh import abstract_mesh
from tests import compiled
from tests.helpers import ROOT, compose_config
from tools.audit import memory
from tools.audit.ledger import PRODUCTS, ledger
from tools.compile import __main__ as compiler
from tools.compile import gpus

INSTALLED = bool(importlib.util.find_spec("jax_cuda13_plugin"))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs requirements-gpu-compile.txt")
# Each collective stays by itself, with its own line.
KINDS = "all_gather", "reduce_scatter", "all_reduce"
ALONE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in KINDS}


class Program(NamedTuple):
    topology: str
    config: str
    overrides: tuple[str, ...] = ()

    def __str__(self):
        return " ".join((self.topology, self.config, *self.overrides))


PAGE = (ROOT / "docs/gpus.md").read_text()
# The page's table names what to compile: a topology, a config and overrides.
NAMED = re.findall(r"^\| `(\S+:\S+) (\S+) ?(.*?)` \|", PAGE, re.MULTILINE)
PROGRAMS = [Program(*of, tuple(re.findall(r"\S+=(?:\{.*?\}|\S+)", more))) for *of, more in NAMED]
assert len(PROGRAMS) == 16, "as README.md and docs/checks.md say"
QUICK = PROGRAMS[1], PROGRAMS[12]  # the second one on two hosts
ALL = [
    pytest.param(p, id=str(p), marks=pytest.mark.slow if p in QUICK else pytest.mark.gpu_compile)
    for p in PROGRAMS
]


class Built(NamedTuple):
    config: train.Config
    jaxpr: object
    text: str
    used: int  # bytes of a device


@functools.cache
def built(program, **options):
    """The step, compiled as training compiles it, with a compiler's options in addition."""
    where = "hf_dataset.path=x" if "fineweb" in program.config else "flat_tokens.filespec=x"
    config = compose_config(program.config, "paths.model_name=x", where, *program.overrides)
    axes = config.mesh.axes
    mesh = compiler.topology_mesh(program.topology, axes)
    with gpus.cudnn_as_of(program.topology), jax.set_mesh(mesh):
        lowered = train.lower_step(config)
        step = lowered.compile(options) if options else compile_step(config, lowered)
    jaxpr = preflight.trace_step(train, config, abstract_mesh(axes))
    stats = step.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    used = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return Built(config, jaxpr, step.as_text(), used)


def chip_of(program):
    return chips.CHIPS[program.topology.partition(":")[0]]


@pytest.mark.parametrize("program", ALL)
def test_the_collectives_are_those_of_the_ledger(program):
    """Each is one of the ledger's, by kind, axes, elements, bytes, phase, line and number of runs,
    and none is missing. As the program runs, several are one instruction, which has one line."""
    for options, where in ((ALONE, ("phase", "line")), ({}, ())):
        config, jaxpr, text, _ = built(program, **options)
        axes = config.mesh.axes
        actual = compiled.collectives(text, axes)
        wanted = ledger(jaxpr, axes).transfers
        amounts = compiled.amounts(wanted, axes, *where)
        assert compiled.amounts(actual, axes, *where) == amounts
        large = [row for row in actual if row.kind == "reduce-scatter" and row.elements > 10**5]
        assert {row.itemsize for row in large} <= {2}
        # The tool's own reading of the program.
        sent, *_ = gpus.read(text, chip_of(program))
        received = sum(row.times * row.bytes for row in wanted)
        assert sum(row.times * row.bytes for row in sent) == pytest.approx(received)
    assert bool(amounts) == (len(axes) > 1 and not program.topology.endswith(":1"))


@functools.cache
def predicted(program):
    """The bytes of a device, by the audit's terms."""
    config, jaxpr, *_ = built(program)
    axes, kind = config.mesh.axes, chip_of(program).kind
    return sum(memory.held(config, jaxpr, ledger(jaxpr, axes), kind).values())


@functools.cache
def figures(program):
    """Returns the program's figures in docs/gpus.md, as text."""
    _, _, text, used = built(program)
    sent, *_ = gpus.read(text, chip_of(program))
    received = sum(row.times * row.bytes for row in sent)
    beside = sum(row.times * row.bytes for row in sent if row.beside > gpus.MICROSECOND)
    return {
        f"jax {jax.__version__}": f"{used / 1e9:.1f}",
        "predicted": f"{predicted(program) / 1e9:.1f}",
        "receives": f"{received / 1e9:,.1f}",
        f"beside kernels, {jax.__version__}": f"{beside / received:.0%}" if received else "-",
    }


@pytest.mark.parametrize("program", ALL)
def test_no_prediction_is_more_than_a_tenth_too_low(program):
    error = predicted(program) / built(program).used - 1
    print(f"{program!s:90} {error:+6.1%}")
    assert error > -0.1


@pytest.mark.gpu_compile
def test_predictions_are_within_8_percent_on_average():
    errors = [predicted(program) / built(program).used - 1 for program in PROGRAMS]
    print(f"mean {sum(map(abs, errors)) / len(errors):.1%}, largest {max(errors):+.1%}")
    assert sum(map(abs, errors)) / len(errors) <= 0.08


@pytest.mark.parametrize("program", ALL)
def test_the_page_has_the_figures(program):
    """Compares those for this version of JAX, and those for none."""
    print(program, figures(program))
    head, _, *rows = re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE)
    names = head.split(" | ")
    (row,) = (cells for cells in (row.split(" | ") for row in rows) if cells[0] == f"`{program}`")
    stated = dict(zip(names, map(str.strip, row), strict=True))
    has_version = f"jax {jax.__version__}" in names
    known = {name: x for name, x in figures(program).items() if has_version or name in stated}
    assert known.items() <= stated.items()


@pytest.mark.parametrize("program", ALL)
def test_the_matmuls_are_those_of_the_ledger_in_the_same_dtypes(program):
    config, jaxpr, text, _ = built(program)
    wanted = {
        eqn.invars[0].aval.dtype.name
        for eqn, path, *_ in jaxprs.equations(jaxpr)
        if eqn.primitive.name in PRODUCTS and attention.KERNEL not in path
    }
    products = [row for row in ledger(jaxpr, config.mesh.axes).products if not row.in_kernel]
    _, found, _ = gpus.read(text, chip_of(program))
    matmuls = [kernel for kernel in found if kernel.what == "matmul"]
    assert {kernel.dtype for kernel in matmuls} == {"bf16"} and wanted == {"bfloat16"}
    needed = sum(row.flops * row.times for row in products)
    assert sum(kernel.flops * kernel.times for kernel in matmuls) == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize("program", ALL)
def test_attention_runs_a_kernel_forward_and_one_backward_in_each_layer_unrolled_if_dense(program):
    config, _, text, _ = built(program)
    runs = collections.defaultdict(list)
    for kernel in gpus.read(text, chip_of(program))[1]:
        if kernel.what != "matmul":
            runs[kernel.what].append(kernel.times)
    layers, each = config.model.layers, config.training.microbatches
    forward = runs["attention forward"]
    assert forward == ([each * layers] if config.model.experts else [each] * layers)
    assert runs.keys() == {"attention forward", "attention backward"}
    assert sum(runs["attention backward"]) == each * layers


@pytest.mark.gpu_compile
def test_attention_in_packed_documents_saves_what_its_kernels_return(monkeypatch):
    """Both are in the program, and neither runs again in the backward pass."""
    monkeypatch.setitem(attention.KERNELS, "gpu", functools.partial(ways.packed, most=4))
    text = built(PROGRAMS[1]._replace(overrides=("model.layers=4", "training.unroll=1"))).text
    calls = collections.Counter(re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text))
    forward = {name: times for name, times in calls.items() if "Backward" not in name}
    assert forward == {"Softmax": 1, "ScaleBiasSoftmax": 1} and len(calls) == 4


@pytest.mark.gpu_compile
def test_no_result_of_a_deterministic_step_depends_on_the_order_of_additions():
    """A scatter adds in any order, unless its places differ."""
    scatters = {}
    for deterministic in False, True:
        program = PROGRAMS[1]
        overrides = *program.overrides, f"deterministic={deterministic}"
        text = built(program._replace(overrides=overrides)).text
        lines = [line for line in text.splitlines() if re.search(r"= f32\S* scatter\(", line)]
        scatters[deterministic] = ["unique_indices=true" in line for line in lines]
    assert scatters == {False: [False], True: [True]}


@pytest.mark.slow
def test_the_report(train_here, monkeypatch):
    command = ["--config-name=c4_h100x8_1b", "flat_tokens.filespec=x"]
    for share in "75", "30":
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", f".{share}")
        arguments = [*command, "topology=h100:8"]
        out, message = train_here(*arguments, program=compiler.main)
        verdict = "fits" if share == "75" else "does not fit"
        assert not message and f"\nIt {verdict}: 29." in out
        assert f"GB, the {share}% that JAX takes.\n" in out
    assert re.search(r"^all-gather +8 +\d+ +3\.52 GB +\d+%$", out, re.MULTILINE)
    assert re.search(r"^attention forward +cuDNN +bf16 +8 +1\.1 TFLOP", out, re.MULTILINE)


@pytest.mark.slow
def test_a_topology_that_is_another_than_the_mesh(train_here):
    command = ["--config-name=c4_h100x8_1b", "flat_tokens.filespec=x", "topology=h100:2x8"]
    out, message = train_here(*command, program=compiler.main)
    problem = "error: topology=h100:2x8 for the mesh d=8: Number of dev"
    assert not out and message.startswith(problem)
    assert ". Write it like h100:8, or h100:4x8 for 4 hosts of 8, with as many chips as" in message
