"""Compiles for NVIDIA GPUs on a machine without one, and reads a GPU's program: its collectives,
the compute scheduled beside them, and the libraries that run its matmuls and attention."""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies
from omegaconf import OmegaConf

from runtime import chips
from runtime.hlo import Instruction, parse
from tools.audit.ledger import share_received
from tools.compile.cycles import group_size, in_order, inside, size
from tools.tables import grouped, show, table

CAVEAT = """\
Nothing has run. On a GPU XLA times each matmul with Triton and with cuBLAS, and takes the faster
one; here it could not. The memory leaves out cuDNN's workspaces and, outside the part that JAX
takes, NCCL's buffers and CUDA's context. A collective beside a kernel may still outlast it."""


@functools.cache
def known() -> dict[str, Any]:
    """Returns the compiler's description of each GPU, by its name in `chips.CHIPS`."""
    file = OmegaConf.load(pathlib.Path(__file__).with_name("gpus.yaml"))
    found: Any = OmegaConf.to_container(file)
    return {name: found[name] for name in chips.CHIPS if name in found}


def as_proto(fields: dict[str, Any]) -> str:
    """Formats fields in the text form of protocol buffers: as JSON, but for the quotes of names and
    of the enum's value."""
    return re.sub(r'"(\w+)"(?=:)|(?<=_extension": )"(\w+)"', r"\1\2", json.dumps(fields)[1:-1])


def devices_of(topology: str) -> list[Any]:
    """Returns GPUs of a topology such as h100:8 or, on eight hosts, h100:8x8, for compiling only.
    Raises an exception of any kind if the compiler is missing or doesn't know the topology."""
    # Else JAX's CUDA plugin refuses a machine without CUDA's libraries.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_enable_compilation_cache", False)  # can't load for absent devices
    name, _, shape = topology.partition(":")
    hosts, _, each = shape.rpartition("x")
    fields = known()[name]
    about = {"platform_name": "CUDA", "device_description_str": fields["name"]}
    target = as_proto({"gpu_device_info": fields} | about)
    # Hosts have no NVLink between them: each is a partition of its own.
    shape = f"{hosts or 1}x1x{each}"
    found = topologies.get_topology_desc("", "cuda", target_config=target, topology=shape)
    return list(found.devices)


@contextlib.contextmanager
def cudnn_as_of(topology: str) -> Iterator[None]:
    """Lets cuDNN's attention be traced for GPUs that aren't there. JAX asks the first local GPU for
    its capability and the installed cuDNN for its version, with no public way to override them."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    fields = known()[topology.partition(":")[0]]
    capability = tuple(fields["cuda_compute_capability"][part] for part in ("major", "minor"))
    major, minor, patch = map(int, fields["dnn_version"].split("."))

    def parts(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    with mock.patch.multiple(
        cudnn,
        check_cudnn_version=lambda: major * 10000 + minor * 100 + patch,
        check_compute_capability=lambda least: capability >= parts(least),
        is_cuda_compute_capability_equal=lambda exact: capability == parts(exact),
    ):
        yield


# --- The program ----------------------------------------------------------------------------------

MICROSECOND = 1e-6
COLLECTIVE = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"


class Sent(NamedTuple):
    """A collective of a scheduled program."""

    kind: str
    devices: int  # that take part in one
    times: int
    bytes: float  # that each device receives each time, with a ring
    beside: float  # seconds of matmuls and attention between its start and its end, at peak rates


class Kernel(NamedTuple):
    """A kernel for a matmul or for attention."""

    what: str
    by: str
    dtype: str  # of its operands
    times: int
    flops: float  # each time; for attention, of the scores that cuDNN computes


def first(shape: str) -> tuple[str, list[int]]:
    """Returns the dtype and the dimensions of an array, or of the first one in a tuple."""
    dtype, dims = re.search(r"([a-z]\w*)\[([\d,]*)\]", shape).groups()  # type: ignore[union-attr]
    return dtype, [int(n) for n in dims.split(",") if n]


def kernel_of(call: Instruction, around: dict[str, Instruction], times: int) -> Kernel | None:
    """Returns an instruction's kernel, if it has one. `around` is the instruction's computation."""
    target = call.find(r'custom_call_target="(\w+\$\w+)')
    if call.op != "dot" and not target.startswith(("__cublas", "__cudnn$fmha")):
        return None
    operands = [first(around[name].shape) for name in call.operands()]
    dtype, left = operands[0]
    if "fmha" in target:
        (rows, queries, heads, width), (_, keys, *_) = left, operands[1][1]
        what, products = ("backward", 5) if "Backward" in target else ("forward", 2)
        flops = 2 * products * rows * queries * keys * heads * width
        flops //= 2 if queries == keys else 1  # the causal half, unless the row is split
        return Kernel(f"attention {what}", "cuDNN", dtype, times, flops)
    summed = re.findall(r"\d+", call.find(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)'))
    flops = 2 * math.prod(first(call.shape)[1]) * math.prod(left[int(i)] for i in summed)
    return Kernel("matmul", "cuBLAS" if target else "Triton", dtype, times, flops)


def read(text: str, chip: chips.Chip) -> tuple[list[Sent], list[Kernel], list[str]]:
    """Returns the collectives and kernels of a GPU's scheduled program, as if loops of unknown
    length ran once, and the names of these loops."""
    program, sent, kernels, unknown = parse(text), list[Sent](), list[Kernel](), list[str]()

    def trips(loop: Instruction) -> int:
        known = loop.find(r'known_trip_count":\{"n":"(\d+)"')
        if not known:
            unknown.append(loop.name)
        return int(known or 1)

    def add(call: Instruction, shape: str, times: int, beside: float) -> None:
        kind, pairs = call.op.removesuffix("-start"), call.find(r"source_target_pairs=\{(.*?)\}\}")
        count = pairs.count("{") or group_size(call.rest)
        if re.fullmatch(COLLECTIVE, kind) and count > 1:
            whole = size(shape)[1] * (count if kind == "reduce-scatter" else 1)
            sent.append(Sent(kind, count, times, whole * share_received(kind, count), beside))

    # The seconds of kernels so far, which count a loop's body as often as it runs.
    now, started = 0.0, dict[str, tuple[Instruction, float]]()
    for call, computation, times in in_order(program, trips):
        parts = [(call, computation), *inside(call, program)]
        for each, of in parts:
            if kernel := kernel_of(each, program[of], times):
                kernels.append(kernel)
                now += times * kernel.flops / chip.flops
        # A collective is a pair of instructions, or one, or is in a computation that one calls.
        whole = next((each for each, _ in parts if re.fullmatch(COLLECTIVE, each.op)), None)
        if call.op.endswith("-start"):
            started[call.name] = whole or call, now
        elif call.op.endswith("-done") and call.operands()[0] in started:
            start, since = started.pop(call.operands()[0])
            add(start, call.shape, times, (now - since) / max(times, 1))
        elif whole:
            add(whole, whole.shape, times, 0)
    return sent, kernels, unknown


def report(text: str, chip: chips.Chip) -> str:
    """Formats the collectives and kernels of a GPU's scheduled program as tables."""
    sent, kernels, unknown = read(text, chip)
    rows = []
    groups = grouped(sent, lambda row: (row.kind, row.devices))
    for (kind, count), found in sorted(groups.items()):
        total = sum(row.times * row.bytes for row in found)
        hidden = sum(row.times * row.bytes for row in found if row.beside > MICROSECOND)
        times = sum(row.times for row in found)
        rows.append((kind, f"{count}", f"{times}", show(total), f"{hidden / total:.0%}"))
    text = table(("collective", "devices", "times", "a device receives", "beside kernels"), rows)
    cells = []
    kinds = grouped(kernels, lambda kernel: (kernel.what, kernel.by, kernel.dtype))
    for key, alike in sorted(kinds.items()):
        count, flops = sum(k.times for k in alike), sum(k.times * k.flops for k in alike)
        cells.append((*key, f"{count}", show(flops, "FLOP"), show(flops / chip.flops, "s")))
    head = ("kernel", "library", "dtype", "times", "computes", "at peak rate")
    least = "Lower bounds: a loop's length isn't in the program.\n\n" if unknown else ""
    return f"{least}{text}\n\n{table(head, cells)}"
