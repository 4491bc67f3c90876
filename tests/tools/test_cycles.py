"""Tests what a TPU's program takes and sends by its text; tests/test_tpu.py compiles some."""

import itertools
import json
import re

import pytest

from runtime import chips
from shardlib.errors import UserError
from tools.compile import cycles

V5E = chips.CHIPS["v5e"]

SCHEDULED = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%limit (p: (s32[])) -> pred[] {
  %constant.5 = s32[] constant(6)
  ROOT %compare.1 = pred[] compare(%get-tuple-element.1, %constant.5), direction=LT
}

%carried (x: bf16[4,8]) -> bf16[8,8] {
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

%dots (x: bf16[4,2048,512], y: bf16[4,512,1024]) -> bf16[4,2048,1024] {
  %x = bf16[4,2048,512]{2,1,0} parameter(0)
  %y = bf16[4,512,1024]{2,1,0} parameter(1)
  ROOT %convolution.1 = bf16[4,2048,1024]{2,1,0} convolution(%x, %y), window={size=4 stride=3 \
lhs_dilate=4}, dim_labels=0bf_0io->0bf, metadata={op_name="jit(step)/dot" stack_frame_id=2}
}

%body (p: (bf16[4,8])) -> (bf16[4,8]) {
  %a = bf16[4,8] parameter(0)
  %b = bf16[4,2048,512]{2,1,0} parameter(1)
  %c = bf16[4,512,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %async-collective-start.7 = (bf16[4,8], bf16[8,8]) fusion(%a), kind=kCustom, calls=%carried
  %fusion.1 = bf16[4,2048,1024] fusion(%b, %c), calls=%dots, \
backend_config={"estimated_cycles":"90000"}
  %copy.2 = bf16[8,8] copy(%a), backend_config={"estimated_cycles":"200"}
  %async-collective-done.7 = bf16[8,8] fusion(%async-collective-start.7), kind=kCustom
  %reduce-scatter.2 = bf16[400000,8]{1,0} reduce-scatter(%c), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (q: f32[3]) -> f32[3] {
  %q = f32[3] parameter(0)
  %t = (bf16[4,8]) tuple(%q)
  %g.call-start = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%g
  %fusion.3 = f32[3000] fusion(%q), calls=%sums, \
metadata={op_name="jit(step)/transpose(jvp())/add" stack_frame_id=1}, \
backend_config={"estimated_cycles":"5000"}
  %all-reduce.3.call-start = (f32[3]) call-start(%q), to_apply=%sum
  %fusion.4 = f32[3] fusion(%q), calls=%sums, backend_config={"estimated_cycles":"5000"}
  %all-reduce.3.call-update = f32[3] call-update(%all-reduce.3.call-start, %fusion.4)
  %fusion.5 = f32[3] fusion(%q), calls=%sums, backend_config={"estimated_cycles":"700"}
  %all-reduce.3.call-done = f32[3] call-done(%all-reduce.3.call-update)
  %while.1 = (bf16[4,8]) while(%t), condition=%limit, body=%body
  %all-reduce.9 = f32[3] all-reduce(%q), replica_groups=mesh['d'=4,'t'=1] {'t'}, to_apply=%add
}

%sums (x: f32[3]) -> f32[3] {
  ROOT %add.4 = f32[3] add(%x, %x)
}

%sum (x: f32[3]) -> f32[3] {
  ROOT %all-reduce.4 = f32[3] all-reduce(%x), replica_groups=mesh['d'=4,'t'=1] {'d'}, to_apply=%add
}
"""


def test_what_a_scheduled_program_sends_and_takes():
    """Compares with numbers by hand: the loop runs six times; a microsecond is 1,500 cycles; the
    third array of the matmul isn't in HBM."""
    rows, sent = cycles.estimate(SCHEDULED, V5E, None)
    # A gather spans 90,200 cycles of compute and a scatter none; the operands of one sum come late;
    # another is over an axis of one device, and sends nothing.
    assert sorted(sent) == [
        (3, 2 * 3 * 4, 1, 4, 700),
        (64, 128, 6, 2, 90200),
        (6_400_000, 12_800_000, 6, 2, 0),
    ]
    kinds = {row.kind for row in rows}
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in kinds}
    (matmul,) = by_kind["matmuls"]
    flops = 6 * 2 * 4 * 2048 * 512 * 1024
    assert matmul.flops == flops and (matmul.at, matmul.phase) == ("model.py:9 step", "update")
    assert matmul.most == pytest.approx(6 * 90000 / 1.5e9)
    assert matmul.least == pytest.approx(flops / 197e12) and matmul.least < matmul.most
    (copy,) = by_kind["copies"]
    assert copy.at == "copy" and copy.most == pytest.approx(6 * 200 / 1.5e9)
    assert copy.least == pytest.approx(6 * (64 + 128) / 0.819e12)
    first = by_kind["elementwise"][0]
    assert (first.at, first.phase) == ("model.py:7 step", "backward")
    assert [row.most * 1.5e9 for row in by_kind["elementwise"]] == pytest.approx([5000, 5000, 700])
    assert first.least == pytest.approx((12000 + 12) / 0.819e12)
    exposed = sum(row.most for row in by_kind[cycles.EXPOSED])
    assert exposed == pytest.approx(6 * 12.8e6 / 100e9), "what is overlapped isn't exposed"
    assert len(rows) == 1 + 1 + 3 + len(by_kind[cycles.EXPOSED])


@pytest.mark.parametrize("devices, rings", [(2, 3), (4, 1)])
def test_what_is_sent_over_all_chips_of_a_torus_takes_several_rings(devices, rings):
    text = SCHEDULED.replace("is_scheduled=true", f"is_scheduled=true, num_partitions={devices}")
    rows, _ = cycles.estimate(text, chips.CHIPS["v5p"], None)
    exposed = sum(row.most for row in rows if row.kind == cycles.EXPOSED)
    assert exposed == pytest.approx(6 * 12.8e6 / 200e9 / rings)


def test_the_report():
    rows = [
        cycles.Row("matmuls", f"model.py:{i} step", "forward", 3e-3 + i * 1e-5, 2e-3, 1)
        for i in range(14)
    ]
    rows.append(cycles.Row(cycles.EXPOSED, "model.py:3 step", "backward", 1e-3, 1e-3, 0))
    text = cycles.report(rows, V5E, 1e12)
    assert "between 29 ms and 43.9 ms: between 18% and 12% MFU." in text
    assert "Compute is at most 64.4 Mcycles." in text
    assert re.search(r"\nmatmuls +42.9 ms +28 ms +98%\n", text)
    assert text.count("model.py:") == 10 and "model.py:13 step" in text


# --- Kernels --------------------------------------------------------------------------------------

CALL = """
  %attention_forward.{number} = (bf16[{heads},2048,128]{{2,1,0}}, f32[{heads},1,2048]) \
custom-call(%p, %q), custom_call_target="tpu_custom_call", operand_layout_constraints=\
{{s32[1,4,4]{{2,1,0}}, bf16[{heads},2048,128]{{2,1,0}}, bf16[{heads},{keys},128]{{2,1,0}}}}, \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":{metadata}
}}}}, metadata={{op_name="jit(step)/jvp()/pallas_call"}}, backend_config={{}}
"""
ENTRY = "HloModule jit_step\n\nENTRY %main (q: bf16[8]) -> bf16[8] {{{calls}}}\n"


def call(number=1, heads="2,8", keys=2048):
    return CALL.format(
        number=number, heads=heads, keys=keys, metadata=json.dumps('{"block_q": 512}')
    )


def written(parts):
    """The text of bundles, of which those with `sphi` begin loops."""
    lines = ["= control target key start", "LB: loop body", ""]
    for n, text in enumerate(itertools.chain(*parts)):
        label = "LB" if "sphi" in text else "  "
        mark = f" /* Start region {8 if text[0] == 's' else 9} */" if "sphi" in text else ""
        lines.append(f" {hex(n) if n else '0':>5} {label}: > {{ {text} }}{mark}")
    return "\n".join(lines)


def kernel_cycles(folder, dumped, chip="v5e", **options):
    (folder / "17-attention_forward.1-05-final_bundles.txt").write_text(dumped)
    (folder / "17-attention_forward.1-04-schedule-analysis_final_bundles.txt").write_text("?")
    text = ENTRY.format(calls=call(**options))
    (row,), _ = cycles.estimate(text, chips.CHIPS[chip], folder)
    assert row.kind == "kernels" and row.most == row.least
    return row.most * cycles.CLOCKS[chips.CHIPS[chip].kind][0]


def kernel(iterations, matmuls, length, matmul="bf16.gmra.mxu0"):
    """A loop of 50 bundles around an inner one of `length`, some of them matmuls."""
    inner = [["t = sphi t"], [f"v = vmatmul.{matmul} %v"] * matmuls]
    inner += [["v = vadd"] * (length - matmuls - 6), ["sbr.rel (%p1) target = $region9"]]
    outer = [["s = smov 0"], ["s = sphi s"], ["s = sadd 1"] * 40, *inner, ["nop"] * 4]
    outer += [["v = vst"] * 3, [f"p = scmp.ne.s32 s, {iterations + 2} /* loop exit test"]]
    return written([*outer, ["sbr.rel (!%p) target = $region8"], ["nop"] * 4, ["sfence"]])


@pytest.mark.parametrize("matmul", ["lmr.bf16.gmra.16.mxu1", "f32.mxu2"])
def test_a_block_takes_at_least_as_long_as_the_mxus(tmp_path, matmul):
    """Four of them take a row each in a cycle, of 8 in registers of other forms than bf16."""
    taken = kernel_cycles(tmp_path, kernel(16 * 4, 400, 500, matmul))
    assert taken == pytest.approx(16 * 4 * 50 + 16 * 10 * 800)


def test_a_kernel_of_another_form_is_not_counted(tmp_path):
    with pytest.raises(UserError, match=r"attention_forward.1 has other loops"):
        kernel_cycles(tmp_path, kernel(16 * 4, 400, 500).replace(" LB:", "   :"))


@pytest.mark.parametrize(
    "chip, cores, number, matmuls, block",
    [("v5e", 1, 1, 100, 1700), ("v5p", 2, 3, 500, 2000)],
)
def test_a_kernel_runs_the_blocks_that_causal_attention_sees(
    tmp_path, chip, cores, number, matmuls, block
):
    """16 heads of 4 blocks of queries, of which the last sees 4 blocks of keys. 500 matmuls take
    the MXUs 2,000 cycles."""
    iterations = 16 * 4 // cores
    dumped = kernel(iterations, matmuls, 1700)
    taken = kernel_cycles(tmp_path, dumped, chip, number=number)
    assert taken == pytest.approx(iterations * 50 + 16 / cores * 10 * block)
    # A quarter of a row's queries, in a balanced order: half of 4 x 16 blocks, and the diagonal.
    taken = kernel_cycles(tmp_path, dumped, chip, keys=4 * 2048)
    assert taken == pytest.approx(iterations * 50 + 16 / cores * 34 * block)


GROUPS = """
  %ragged-dot-none.3 = bf16[4096,512]{1,0} custom-call(%p, %q), \
custom_call_target="tpu_custom_call", operand_layout_constraints=\
{s32[9]{0}, s32[39]{0}, bf16[4096,256]{1,0}, bf16[8,256,512]{2,1,0}}, \
frontend_attributes={}, backend_config={}
"""


def test_a_kernel_for_groups_runs_each_tile_of_each_group(tmp_path):
    """Eight groups of 4,096 rows have 39 tiles of 128, and a loop of 300 bundles does half a tile:
    32 matmuls of 16 rows by 128 x 128."""
    for number, result, length in (1, "8,256,512", 900), (2, "4096,512", 300):
        loop = [
            ["s = sphi s"],
            ["v = vmatmul.bf16.gmra.mxu0 %v"] * 32,
            ["v = vadd"] * (length - 38),
        ]
        dumped = written([["s = smov 0"], *loop, ["sbr.rel (!%p) target = $region8"], ["nop"] * 5])
        name = f"17-ragged-dot-none.{number}-05-final_bundles.txt"
        (tmp_path / name).write_text(f"{dumped} [shape: bf16[{result}], index: 4, kind: output]")
    (row,), _ = cycles.estimate(ENTRY.format(calls=GROUPS), chips.CHIPS["v5e"], tmp_path)
    taken = row.most * cycles.CLOCKS[chips.CHIPS["v5e"].kind][0]
    assert row.kind == "kernels" and taken == pytest.approx(39 * 2 * 300, rel=0.01)
