"""Compares this project's training step with MaxText's by the TPU compiler's own estimates. No TPU
is needed.

    .venv-tpu/bin/python -m benchmarks.tpu --maxtext=.venv-maxtext/bin/python
    .venv-tpu/bin/python -m benchmarks.tpu --maxtext=... --models=270m,1b training.loss_chunks=2

Compiles both for the same slices, with FSDP over all chips and the same shapes, rows and saved
activations: this project with tools.compile, to which it passes further arguments, and MaxText with
its own train_compile. Then tools.cycles reads both programs. Takes ten minutes on two cores.

MaxText needs an environment of its own, with the same versions of jax and libtpu:

    python3.12 -m venv .venv-maxtext
    .venv-maxtext/bin/pip install --no-deps maxtext==0.2.5
    .venv-maxtext/bin/pip install -r benchmarks/requirements-maxtext.txt
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import yaml  # type: ignore[import-untyped]

from runtime import chips
from runtime.config import ROOT
from tools import arguments, cycles
from tools.compile import WITHOUT_TPU
from tools.tables import table

# Model, slice, its name in MaxText, chips, rows on a chip, tokens in a row.
PROGRAMS = [
    ("270m", "v5e:4x4", "v5e-16", 16, 8, 1024),
    ("1b", "v5e:16x16", "v5e-256", 256, 4, 2048),
    ("2b", "v5p:2x2x4", "v5p-32", 16, 2, 4096),
]
# Runs a program, and saves the last step that it compiles.
RECORD = """
import pathlib, runpy, sys, jax
folder, compile = pathlib.Path(sys.argv[1]), jax.stages.Lowered.compile
def record(*args, **options):
    step = compile(*args, **options)
    (folder / "program").write_text(step.as_text())
    (folder / "peak").write_text(str(step.memory_analysis().peak_memory_in_bytes))
    return step
jax.stages.Lowered.compile = record
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
MAXTEXT = """
run_name=step base_output_directory=maxtext enable_checkpointing=false dataset_type=synthetic
steps=1000 compile_topology_num_slices=1 decoder_block=llama2 mlp_activations=[silu,linear]
head_dim=128 base_num_query_heads=16 base_num_kv_heads=16 base_num_decoder_layers=8 vocab_size=32768
dtype=bfloat16 weight_dtype=float32 attention=flash packing=true enable_dropout=false
opt_type=adamw gradient_clipping_threshold=1.0 num_vocab_tiling=4 remat_policy=custom
query_proj=device key_proj=device value_proj=device context=device out_proj=device mlpwi_0=device
mlpwi_1=device
"""
# Without it, MaxText's products are cut into a piece for each chip: 270m takes five times as long.
WHOLE_PRODUCTS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"


def compiled(python: str, module: str, arguments: list[str], chip: chips.Chip) -> list[float]:
    """Mcycles of compute at most and at least, Mcycles of exposed communication, and GB."""
    with tempfile.TemporaryDirectory() as name:
        folder, environment = pathlib.Path(name), os.environ | WITHOUT_TPU
        environment |= {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": f"{cycles.DUMP}{name}"}
        command = [python, "-c", RECORD, name, module, *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows, _ = cycles.estimate((folder / "program").read_text(), chip, folder)
        peak = int((folder / "peak").read_text())
    mega, compute = cycles.CLOCKS[chip.kind][0] / 1e6, [r for r in rows if r.kind != cycles.EXPOSED]
    most, least = sum(row.most for row in compute), sum(row.least for row in compute)
    exposed = sum(row.most for row in rows) - most
    return [most * mega, least * mega, exposed * mega, peak / 1e9]


def main() -> None:
    parser = arguments.parser("benchmarks.tpu", __doc__)
    parser.add_argument("--maxtext", required=True, help="the Python that has MaxText")
    parser.add_argument("--models", default="270m,1b,2b")
    options, further = parser.parse_known_args()
    find = "import maxtext; print(maxtext.__path__[0] + '/configs/base.yml')"
    base = subprocess.check_output([options.maxtext, "-c", find], text=True).strip()
    lines = []
    for model, topology, slice_, count, rows, length in PROGRAMS:
        if model not in options.models.split(","):
            continue
        chip = chips.CHIPS[topology.split(":")[0]]
        size = yaml.safe_load((ROOT / f"configs/model/{model}.yaml").read_text())["model"]
        same = chips.COMPILER_OPTIONS[chip.kind].items()
        flags = [WHOLE_PRODUCTS, *(f"--{name}={str(value).lower()}" for name, value in same)]
        ours = compiled(sys.executable, "tools.compile", [
            "--config-name=pretrain", f"model={model}", f"topology={topology}",
            f"mesh={{d: {count}, t: 1}}",
            f"training.tokens={{batch: {rows * count}, len: {length}}}", *further,
        ], chip)  # fmt: skip
        theirs = compiled(options.maxtext, "maxtext.trainers.pre_train.train_compile", [
            base, *MAXTEXT.split(), f"compile_topology={slice_}",
            f"base_emb_dim={size['d_model']}", f"base_mlp_dim={size['d_ff']}",
            f"max_target_length={length}", f"per_device_batch_size={rows}",
            f"compile_xla_flags={' '.join(flags)}",
        ], chip)  # fmt: skip
        name = f"{model}, {topology}, {rows} x {length:,} a chip"
        for who, values in (("this project", ours), ("MaxText", theirs)):
            lines.append((name, who, *(f"{value:.3g}" for value in values)))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        lines.append((name, "ratio", *(f"{ratio:.2f}" for ratio in ratios)))
    print(table(("program", "", "Mcycles", "at least", "exposed", "GB"), lines))


if __name__ == "__main__":
    main()
