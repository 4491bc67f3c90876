#!/usr/bin/env bash
# What to measure on one H200, in order of worth. All of it takes some twelve minutes: set LIMIT=800.
# Prints each result as it comes, and into $OUT/PART.txt.
#
#   bash benchmarks/h200.sh wheels        here: the packages that the GPU's machine lacks, into .whl
#   bash benchmarks/h200.sh [PART...]     there, in a checkout with .whl
#
# Begins nothing after LIMIT seconds, and ends what runs. To try it without a GPU, with a tiny model:
#   LIMIT=900 JAX_PLATFORMS=cpu EXTRA="model.d_model=256 model.n_kv=2 model.layers=2 model.d_ff=256 \
#     training.tokens.batch=4 training.tokens.len=128" bash benchmarks/h200.sh
set -uo pipefail
LIMIT=${LIMIT:-570}
export OUT=${OUT:-/tmp/h200} RUNS=${RUNS:-/tmp/runs} PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
export JAX_COMPILATION_CACHE_DIR=$RUNS/cache PYTHONPATH=/tmp/site
data=flat_tokens.filespec=data/synthetic.zarr
long="training.tokens={batch: 32, len: 8192}"

do_() { # runs a command for as long as there is time, and goes on if it fails
    local left=$((LIMIT - SECONDS))
    echo "--- ${SECONDS} s: ${*:2}"
    if ((left > 10)); then timeout -k 5 $left "$@" 2>&1 || echo "exit code $?"; else echo "no time left"; fi
}
timed() { # MODULE ARGUMENTS: times steps for 5 seconds, or ten of them
    local run="from tools import benchmark; benchmark.SECONDS = 5; from $1 import main; main()"
    do_ python3 -c "$run" "${@:2}" ${EXTRA:-}
}
step() { # ARGUMENTS: ours, PyTorch's, and ours with tokamax's attention
    timed tools.benchmark "$@" $data
    timed benchmarks.pytorch "$@"
    timed benchmarks.attention "$@" $data attention=tokamax
}
trained() { # MODULE... NAME ARGUMENTS
    do_ python3 -m "$@" --config-name=c4_a100x1_84m $data paths.root_working_dir=$RUNS \
        training.tokens.batch=32 training.microbatches=1 training.warmup_steps=2 \
        training.validation_interval=0 check=types ${EXTRA:-}
}

attention() {
    for args in "c4_a100x1_84m" "pretrain model=1b hardware=a100x1"; do
        for spread in 1 0; do
            local shape=("training.microbatches=1")
            [[ $args == pretrain* ]] && shape=("training.microbatches=4" "$long")
            do_ python3 -m benchmarks.attention --config-name=$args "${shape[@]}" spread=$spread ${EXTRA:-}
        done
    done
}
84m() { step --config-name=c4_a100x1_84m; }
1b() { step --config-name=pretrain model=1b hardware=a100x1 training.microbatches=4; }
1b_long() { step --config-name=pretrain model=1b hardware=a100x1 training.microbatches=4 "$long"; }
540m() { step --config-name=pretrain model=540m hardware=a100x1 training.microbatches=2; }
270m() { step --config-name=pretrain model=270m hardware=a100x1 training.microbatches=2; }
tests() { do_ make test-gpu PYTHON=python3; }
bits() { # two runs, and one that is killed and resumed
    local same="training.steps=20 checkpoint_interval=5 deterministic=true"
    trained train paths.model_name=a $same
    trained train paths.model_name=b $same
    trained tests.killed row 12 paths.model_name=c $same
    trained train paths.model_name=c $same
    python3 - <<END
import json
rows = [[(x["step"], x["loss"], x["grad_norm"]) for x in map(json.loads, open(f"$RUNS/{n}/metrics.jsonl"))] for n in "abc"]
print(*(f"{len(each)} steps, the same bits as the first: {each == rows[0]}" for each in rows), sep="\n")
END
}
profile() {
    trained train paths.model_name=p training.steps=6 profile=true
    ls -l $RUNS/p/profile/host_*
}
run() { # a thousand steps, and PyTorch's: not by default. Needs packages.zarr, of benchmarks.packages
    local same="flat_tokens.filespec=packages.zarr paths.root_working_dir=$RUNS ${EXTRA:-}"
    do_ python3 -m train --config-name=packages_a100x1_84m $same paths.model_name=ours
    do_ python3 -m benchmarks.pytorch --config-name=packages_a100x1_84m $same paths.model_name=torch curve=true
    do_ python3 -m tools.plot $RUNS/ours $RUNS/torch --output "$OUT/curves.svg"
    for name in ours torch; do gzip -c $RUNS/$name/metrics.jsonl >"$OUT/$name.jsonl.gz"; done
}

if [[ ${1:-} == wheels ]]; then
    at="--python-version 3.12 --implementation cp --only-binary=:all: --no-deps -q -d .whl"
    for glibc in 2_28 2_27 2_17; do at+=" --platform manylinux_${glibc}_x86_64"; done
    python3 -m pip download $at --platform manylinux2014_x86_64 hydra-core omegaconf zarr numcodecs donfig \
        google-crc32c beartype pydantic==2.14.4 pydantic_core==2.50.5 annotated-types typing-inspection \
        fsspec tokamax==0.0.17 einshape immutabledict qwix
    python3 -m pip wheel -q --no-deps -w .whl antlr4-python3-runtime==4.9.3
    exit
fi
mkdir -p "$OUT" "$RUNS"
if [[ -d .whl && ! -d /tmp/site ]]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .whl/*.whl
    mkdir -p /tmp/site/xprof/cli # tokamax imports it for its own benchmarks
    echo "get_kernel_stats_tool = None" >/tmp/site/xprof/cli/tools.py
fi
for part in ${*:-attention 84m 1b_long 1b tests bits 540m 270m profile}; do
    $part 2>&1 | grep -v "absl:\|FutureWarning" | tee -a "$OUT/$part.txt"
done
