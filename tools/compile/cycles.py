"""Estimates how long a step takes on TPUs, from the estimates in its compiled program.

For its scheduler, the TPU's compiler writes down the cycles of each instruction. Their sum, times
the trip counts of the loops around them, is the pessimistic figure. In the optimistic one, an
instruction takes no longer than its FLOPs and bytes do at the chip's peak rates.
"""

import atexit
import functools
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

from runtime.chips import Chip
from runtime.hlo import Instruction, Program, parse, phase, tracebacks
from runtime.source import source_line
from shardlib.errors import UserError
from tools.tables import grouped, show, table

# By Chip.kind: cycles per second, and how many cores act as one device.
CLOCKS = {
    "TPU v4": (1.05e9, 2),
    "TPU v5 lite": (1.5e9, 1),
    "TPU v5": (1.75e9, 2),
    "TPU v6 lite": (1.75e9, 1),
}
EXPOSED = "exposed communication"
HIDES = 1000  # cycles of compute beside which a transfer counts as overlapped
CAVEAT = """\
Nothing has run. "At most" adds up the compiler's estimates, which are 2.5 to 4 times too high for
elementwise work in bf16; "at least" is what FLOPs and bytes need at the chip's peak rates. Neither
has stalls, contention for memory or links, the network between slices, the host, or the input."""

# --- The program's text ---------------------------------------------------------------------------

ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
MOVES = {"parameter", "copy", "bitcast", "transpose", "reshape", "tuple", "get-tuple-element"}


def inside(call: Instruction, program: Program) -> Iterator[tuple[Instruction, str]]:
    """Yields the instructions that `call` calls, at any depth, each with its computation."""
    for name in call.called():
        for each in program[name].values():
            yield each, name
            yield from inside(each, program)


def in_order(
    program: Program, trips: Callable[[Instruction], int], computation: str = "", times: int = 1
) -> Iterator[tuple[Instruction, str, int]]:
    """Yields the instructions of a scheduled program in their order, each with its computation and
    how often it runs. In place of a loop, which runs `trips(loop)` times, yields its body."""
    for call in program[computation].values():
        if call.op == "while":
            body = call.called("body")[0]
            yield from in_order(program, trips, body, times * trips(call))
        else:
            yield call, computation, times


def trip_count(program: Program, loop: Instruction) -> int:
    """Returns how often a loop runs: it counts from 0 to the constant in its condition."""
    condition = program[loop.called("condition")[0]].values()
    numbers = (i.rest.partition(")")[0] for i in condition if i.op == "constant")
    return max((int(number) for number in numbers if number.isdigit()), default=1)


def elements(dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d)


def size(shape: str) -> tuple[int, int]:
    """Returns elements and bytes of a shape such as `(bf16[8,128]{1,0:T(8,128)}, pred[])`."""
    parts = [(elements(dims), int(bits or 8)) for bits, dims, _ in ARRAY.findall(shape)]
    return sum(n for n, _ in parts), sum(n * bits // 8 for n, bits in parts)


# --- Communication --------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A collective of a TPU's scheduled program."""

    elements: int  # of the array gathered over the axes
    bytes: int  # of that array; for an all-reduce, twice as many
    times: int
    devices: int = 0  # that it connects; 0 if they are in several slices
    overlapped: float = 0  # cycles of compute scheduled between its start and its end


def payload(call: Instruction, program: Program, times: int) -> Sent | None:
    """Returns the collective that an instruction is or calls, if any, without any overlap."""
    if call.op not in ("all-gather", "reduce-scatter", "all-reduce"):
        called = (payload(each, program, times) for each, _ in inside(call, program))
        return next(filter(None, called), None)
    group, (count, nbytes) = group_size(call.rest), size(call.shape)
    scale = group if call.op == "reduce-scatter" else 1
    twice = 2 if call.op == "all-reduce" else 1
    return Sent(scale * count, scale * twice * nbytes, times, group) if group > 1 else None


def group_size(rest: str) -> int:
    """Returns how many devices communicate with each other, given an instruction's text with its
    `replica_groups`: `mesh['d'=64,'t'=4] {'t'}`, or `{{0,1},{2,3}}` with jax 0.10."""
    if named := re.search(r"groups=mesh\[([^]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", named[2]))
    listed = re.search(r"groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def share_overlapped(sent: list[Sent]) -> str:
    """Says how much a program sends in a step, and what share of it overlaps with more than
    HIDES cycles of compute."""
    sentences = []
    for between_slices in False, True:
        rows = [row for row in sent if (not row.devices) == between_slices]
        total = sum(row.times * row.bytes for row in rows)
        hidden = sum(row.times * row.bytes for row in rows if row.overlapped > HIDES)
        share = f", {hidden / total:.0%} of it overlapped with compute" if total else ""
        where = " between slices" if between_slices else ""
        if total or not between_slices:
            said = f"A step sends {show(total)}{where}{share}"
            sentences.append(f"{said} in the compiler's schedule.")
    return "\n".join(sentences)


# --- Time -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The cost of an instruction in a step."""

    kind: str
    at: str  # the line of the source, or an op that the compiler added
    phase: str
    most: float  # seconds
    least: float
    flops: float  # of its matmuls


def matmul_flops(call: Instruction, computation: dict[str, Instruction]) -> float:
    """Returns the FLOPs of a matmul. TPU programs write it as a convolution, which if dilated by b
    multiplies b pairs of matrices. Its arrays have b M K, b K N and b M N elements."""
    shapes = [call.shape, *(computation[name].shape for name in call.operands())]
    batch = math.prod(int(n) for n in call.find(r"lhs_dilate=([\dx]+)").split("x") if n)
    return 2 * math.sqrt(math.prod(size(shape)[0] for shape in shapes) / batch)


def estimate(
    text: str, chip: Chip, bundles: pathlib.Path | None, window: int | None = None
) -> tuple[list[Row], list[Sent]]:
    """Estimates the time and the communication of a scheduled program's step. `bundles` is from
    `dump_bundles`; without it, kernels take no time. `window` is the config's sliding_window."""
    program, traces, (clock, _) = parse(text), tracebacks(text), CLOCKS[chip.kind]
    link, of_all = next(iter(chip.links.values())), re.search(r"num_partitions=(\d+)", text)
    rows, sent = list[Row](), list[Sent]()

    def add(call: Instruction, computation: str, times: int, cycles: float, kind: str = "") -> None:
        fused = [*inside(call, program)] or [(call, computation)]
        flops = sum(matmul_flops(i, program[c]) for i, c in fused if i.op == "convolution")
        most = least = times * cycles / clock
        if not kind:
            only_moves = {i.op for i, _ in fused} <= MOVES
            kind = "matmuls" if flops else "copies" if only_moves else "elementwise"
            read = [program[computation][name].shape for name in call.operands()]
            arrays = ARRAY.finditer(" ".join([call.shape, *(s for s in read if s[0] != "(")]))
            moved = sum(size(a[0])[1] for a in arrays if "S(" not in a[0])  # S: not in HBM
            least = min(most, times * max(flops / chip.flops, moved / chip.bandwidth))
        # A fusion without a line of its own gets the last line among its instructions.
        at, name = call.op, call.find(r'op_name="([^"]*)"')
        for each in (call, *(i for i, _ in reversed(fused))):
            if line := source_line(traces[each.find(r"stack_frame_id=(\d+)") or "0"]):
                at, name = line, each.find(r'op_name="([^"]*)"')
                break
        rows.append(Row(kind, at, phase(name), most, least, times * flops))

    def send(call: Instruction, computation: str, row: Sent) -> None:
        sent.append(row)
        rings = chip.rings if of_all and row.devices == int(of_all[1]) else 1
        exposed = max(0, row.bytes / link / rings * clock - row.overlapped)
        add(call, computation, row.times, exposed, EXPOSED)

    # The cycles so far, which count a loop's body as often as it runs.
    now, started = 0.0, dict[str, tuple[Instruction, Sent, float]]()
    for call, computation, times in in_order(program, functools.partial(trip_count, program)):
        cycles = float(call.find(r'"estimated_cycles":"(\d+)"') or 0)
        # On v5e: %async-collective-start.7, fusions that advance it, %async-collective-done.7.
        # On a SparseCore: %x.call-start, %x.call-update if operands come late, %x.call-done.
        step = re.fullmatch(r"(.*?)[.-](?:call-|collective-)?(start|update|done)(.*)", call[0])
        key = step[1] + step[3] if step else call.name
        if "tpu_custom_call" in call.rest:
            known = re.search(f"attention_|{RAGGED}", call.name)
            cycles = kernel_cycles(call, chip, bundles, window) if bundles and known else 0
            add(call, computation, times, cycles, "kernels" if known else "kernels not counted")
            now += times * cycles
        elif call.op == "recv" and "megascale" in call.rest:
            # The buffers have a part for each slice; a device receives all but its own.
            buffer = size(next(ARRAY.finditer(call.shape))[0])
            started[call.name] = call, Sent(*buffer, times), now
        elif call.op == "recv-done" and call.operands()[0] in started:
            _, row, since = started.pop(call.operands()[0])
            sent.append(row._replace(overlapped=(now - since) / max(times, 1)))
        elif step and step[2] == "done" and key in started:
            start, row, since = started.pop(key)
            send(start, computation, row._replace(overlapped=(now - since) / max(times, 1)))
        elif step and step[2] == "update" and key in started:
            started[key] = *started[key][:2], now
        elif cycles:
            add(call, computation, times, cycles)
            now += times * cycles
        elif sends := payload(call, program, times):
            if step:
                started[key] = call, sends, now
            else:
                send(call, computation, sends)
    return rows, sent


def report(rows: list[Row], chip: Chip, flops: float) -> str:
    """Reports a step's time by kind of instruction and by line, and its MFU, given the FLOPs that
    the model needs on each chip."""
    most, least = sum(row.most for row in rows), sum(row.least for row in rows)

    def totals(names: tuple[str, ...], key: Callable[[Row], tuple[str, ...]]) -> str:
        groups = grouped(rows, key).items()
        cells = [(k, sum(r.most for r in v), sum(r.least for r in v)) for k, v in groups]
        cells.sort(key=lambda cell: -cell[1])
        shown = [(*k, show(a, "s"), show(b, "s"), f"{a / most:.0%}") for k, a, b in cells[:10]]
        return table((*names, "at most", "at least", "share"), shown)

    slow, fast = (f"{flops / chip.flops / seconds:.0%}" for seconds in (most, least))
    cycles = CLOCKS[chip.kind][0] * sum(row.most for row in rows if row.kind != EXPOSED)
    return "\n".join([
        f"By the compiler's estimates, a step takes between {show(least, 's')} and "
        f"{show(most, 's')}: between {fast} and {slow} MFU.",
        f"Compute is at most {show(cycles, 'cycles')}.\n",
        totals(("kind",), lambda row: (row.kind,)),
        "\nThe most expensive lines:\n",
        totals(("at", "phase"), lambda row: (row.at, row.phase)),
        f"\n{CAVEAT}",
    ])  # fmt: skip


# --- Kernels --------------------------------------------------------------------------------------

DUMP = (
    "--xla_jf_dump_llo_text --xla_jf_dump_category_filter=codegen "
    "--xla_jf_dump_llo_pass_label_regex=^final_bundles --xla_jf_dump_to="
)
RAGGED = "ragged-dot-none"  # XLA's name of the kernel of `lax.ragged_dot`
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
BRANCH = re.compile(r"sbr\.rel .*target = \$region(\d+)")


def dump_bundles() -> pathlib.Path:
    """Makes libtpu write the instruction bundles of its programs to a folder, which is deleted at
    exit. Call it before libtpu is loaded."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {DUMP}{folder}".strip()
    return pathlib.Path(folder)


def kernel_cycles(call: Instruction, chip: Chip, folder: pathlib.Path, window: int | None) -> float:
    """Returns the cycles of a kernel that the compiler doesn't estimate: of flash_attention.py, or
    of a `lax.ragged_dot`.

    A bundle of instructions takes a cycle. The inner loop, with the matmuls, runs for each pair of
    blocks of queries and keys that causal attention sees in its `window`, or for each tile of a
    group, and no faster than the MXUs.
    """
    operands = ARRAY.findall(call.rest.partition("attributes=")[0])
    result = next(ARRAY.finditer(call.shape))
    output = f"{result[0].partition('{')[0]}, index: {len(operands)}, kind: output"
    # Instructions with the same program share a file, named after one of them.
    name = re.sub(r"\.\d+$", "", call.name)
    files = [p for n in (call.name, f"{name}*") for p in folder.glob(f"*-{n}-*-final_bundles.txt")]
    texts = (path.read_text() for path in files)
    text = next(text for text in texts if name != RAGGED or output in text)
    _, *parts = re.split(r"^ *0(?:x[0-9a-f]+)? +(\w\w)? *:", text, flags=re.M)
    labels, bundles = parts[::2], parts[1::2]
    region = {r: i for i, text in enumerate(bundles) for r in REGION.findall(text)}
    jumps = [(i, region.get(r, 0)) for i, text in enumerate(bundles) for r in BRANCH.findall(text)]
    loops = [i for i, label in enumerate(labels) if label == "LB"]
    ends = {target: i + 5 for i, target in jumps if target in loops}  # 4 bundles of delay
    if len(loops) < 2 - (name == RAGGED) or len(ends) != len(loops):
        raise UserError(f"{call.name} has other loops than expected: its cycles can't be counted")

    start = loops[0 if name == RAGGED else -1]
    end = ends[start]
    # A bf16 register has 16 rows, of which some vmatmuls take 8. The MXUs take 4 rows a cycle.
    matmuls = re.findall(r"= vmatmul\.(\S+)", "".join(bundles[start:end]))
    rows = sum(16 if re.match(r"(mubr\.)?bf16", m) else 8 for m in matmuls)
    inner, cores = max(end - start, rows / 4), CLOCKS[chip.kind][1]
    if name == RAGGED:
        arrays = [[*map(int, dims.split(","))] for _, dims, _ in (result.groups(), *operands)]
        tiles, tokens = (max(a[0] for a in arrays if len(a) == n) for n in (1, 2))
        groups, *matrix = next(a for a in arrays if len(a) == 3)
        # Two groups may share a tile of tokens. Each row of a matmul meets 128 x 128 numbers.
        products = tokens // (tiles - groups + 1) * math.prod(matrix)
        return tiles * math.ceil(products / (rows * 128 * 128)) / cores * inner

    # A core's iterations, besides two that fill and drain the pipeline of loads and stores.
    *_, limit = re.findall(r", (\d+) /\* loop exit test", "".join(bundles))
    heads = max(elements(",".join(dims.split(",")[:-2])) for _, dims, _ in operands)
    n = int(operands[0][1].split(",")[-1])  # blocks: the first operand is `ranges`, [B, 2, n]
    queries, keys = (int(dims.split(",")[-2]) for _, dims, _ in operands[1:3])
    of_keys = n * keys // queries if "forward" in name else n
    size = keys // of_keys
    # Of a whole row. If it is split, a device has a share of the blocks of queries.
    before = (max(0, i * size - window + 1) // size for i in range(of_keys)) if window else ()
    seen = heads / cores * (of_keys * (of_keys + 1) / 2 - sum(before)) * queries / keys
    outer = ends[loops[0]] - loops[0]
    return (int(limit) - 2) * (outer - (end - start)) + seen * inner
