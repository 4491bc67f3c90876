"""Tests that each mistake in a config, dataset or checkpoint gets one message.

tests/golden/wrong_inputs.txt lists them.
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
from functools import partial

import jax
import pytest

import train
from checks import preflight
from runtime import supervise
from runtime.config import keys, load
from runtime.errors import user_errors
from runtime.run import Run
from shardlib.errors import UserError
from tests import golden
from tests.files import save_state, write_tokens
from tests.helpers import ROOT, SMALL, compose_config, mesh, random_weights
from tests.processes import python_at_work
from tools import flat_tokens_info, huggingface_to_flat_tokens, plan, plot
from tools.audit import __main__ as audit
from tools.compile import __main__ as compiler
from tools.generate import __main__ as generate

START = [
    "--config-name=local_test_synthetic",
    *(setting for setting in SMALL if setting != "check=types"),  # messages show all settings
    *("training.steps=2", "flat_tokens.filespec=tokens.zarr", "paths.model_name=run"),
]
TOKENS = "tokens.zarr/train/encoded_tokens"
EXPERTS = "model.experts={count: 8, d_ff: 8, per_token: 2}"
BALANCE, VALIDATES = "training.routing.balance_cost=1", "training.validation_interval=1"


def flip_last_bit(path):
    *rest, last = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(bytes([*rest, last ^ 1]))


def is_text(path):
    pathlib.Path(path).write_text("text")


CASES = {
    "an unknown key": ["training.stepz=5"],
    "an unknown key unlike any other": ["training.pipeline=5"],
    "an unknown mesh axis": ["mesh.s=2"],
    "a key in the wrong place": ["d_model=5"],
    "an unknown section": ["trainin.steps=5"],
    "a section as a number": ["training=5"],
    "an override that can't be read": ["training.steps=[1"],
    "an override without a value": ["training.steps"],
    "a path with quotes": ["flat_tokens.filespec=it's=\".zarr"],
    "a path in brackets": ["flat_tokens.filespec=[x].zarr"],
    "a name that is read as a list": ["paths.model_name=[x]"],
    "a sweep without --multirun": ["paths.model_name=a,b"],
    "a sweep over an interval": ["--multirun", "training.steps=interval(1,3)"],
    "options among overrides": ["training.seed=0", "--multirun", "training.steps=1,0"],
    "a config group as a number": ["model=84"],
    "a coordinator without a port": ["num_hosts=2", "coordinator=10.0.0.1"],
    "a second host of one": ["process_id=1"],
    "a host without its number": ["num_hosts=2", "coordinator=10.0.0.1:8476"],
    "a coordinator of one host": ["coordinator=10.0.0.1:8476"],
    "a group that no config has": ["x/y=1"],
    "a section that is null": ["hf_dataset.path=x"],
    "a list for a section that may be null": ["hf_dataset=[x]"],
    "a number for a section, by a reference": ["flat_tokens=${training.steps}"],
    "a number for a list": ["training.skip_steps=5"],
    "a step below 0": ["training.skip_steps=[3,-1]"],
    "experts without their number": ["model.experts.per_token=2"],
    "more experts for a token than there are": [EXPERTS, "model.experts.per_token=9"],
    "one expert for a token, with scores that add up to 1": [EXPERTS, "model.experts.per_token=1"],
    "a cooldown of no steps": ["training.schedule=wsd"],
    "a cooldown before the first step": ["training.schedule=wsd", "training.cooldown_steps=999"],
    "a decay that rises": ["training.cosine_learning_rate_final_fraction=10"],
    "RoPE scaling with its factors exchanged": [
        "model.rope_scaling={factor: 8, low_frequency_factor: 4, high_frequency_factor: 1, "
        "original_len: 64}"
    ],
    "no feed-forward and no experts": ["model.d_ff=0"],
    "a balance of microbatches": [EXPERTS, BALANCE, "training.microbatches=2"],
    "a dataset and a mixture": ["flat_tokens.mixture=[{filespec: x, weight: 1}]"],
    "a mixture of paths": ["flat_tokens.mixture=[x.zarr]"],
    "a mixture without a weight": ["flat_tokens.mixture=[{filespec: x}]"],
    "a mixture with a weight of 0": ["flat_tokens.mixture=[{filespec: x, weight: 0}]"],
    "a mixture of a dataset and itself": [
        "flat_tokens.filespec=null",
        "flat_tokens.mixture=[{filespec: tokens.zarr, weight: 1}, "
        "{filespec: ./tokens.zarr, weight: 1}]",
    ],
    "a mixture with an unknown key": ["flat_tokens.mixture=[{path: x, weight: 1}]"],
    "a validation set without a name": ["flat_tokens.validation=x.zarr"],
    "a validation set without a path": ["flat_tokens.validation={web: null}"],
    "a validation set that is not there": ["flat_tokens.validation={web: x.zarr}", VALIDATES],
    "an end token without files that need it": ["flat_tokens.end_token=5"],
    "ids of a type that no file has": ["flat_tokens.bin_dtype=int32"],
    "no dataset at all": ["flat_tokens=null"],
    "true for a number": ["checkpoints.keep_last=true"],
    "false for a rate": ["training.learning_rate=false"],
    "true for an id": ["flat_tokens.end_token=true"],
    "a number as text": ["training.steps=many"],
    "an integer with a fraction": ["training.steps=1.5"],
    "nothing for a number": ["training.steps=null"],
    "a reference to nothing": ["training.steps=${stepz}"],
    "a deleted key": ["~training.seed"],
    "microbatches that don't divide a device's rows": ["training.microbatches=3"],
    "chunks that don't divide a row": ["training.loss_chunks=5"],
    "a rate of nan": ["training.learning_rate=nan"],
    "a seed that is too large": ["training.seed=3000000000"],
    "checkpoints below 0": ["checkpoints.keep_last=-1"],
    "no steps": ["training.steps=0"],
    "adam_b2 of 1": ["training.adam_b2=1"],
    "an unknown optimizer": ["training.optimizer=sgd"],
    "weights that don't decay and aren't there": ["training.no_decay=[norms]"],
    "gradients clipped to zero": ["training.grad_clip=0"],
    "a number that is 0 in f32": ["training.routing.z_cost=1e-46"],
    "a number that f32 has with few digits": ["training.learning_rate=1e-39"],
    "a number that is infinite in f32": ["training.grad_clip=1e39"],
    "nothing to keep AdamW from dividing by 0": ["training.adam_eps=0"],
    "no name": ["paths.model_name=???"],
    "an empty name": ["paths.model_name="],
    "a name outside the root": ["paths.model_name=../other"],
    "an absolute path as name": ["paths.model_name=/run"],
    "a bucket with one slash": ["checkpoints.root=gs:/bucket/x"],
    "a run on a remote store": ["paths.root_working_dir=gs://bucket/runs"],
    "more devices than there are": ["mesh={d: 8, t: 2}"],
    "a batch that doesn't split": ["training.tokens.batch=6"],
    "replicas that don't divide the devices": ["mesh={d: 4, t: 2, r: 3}"],
    "a row that doesn't split in two pieces a device": ["mesh={d: 1, t: 1, c: 4}"],
    "a vocabulary that doesn't split": ["model.vocab=49"],
    "an odd head dimension": ["model.d_head=5"],
    "no dataset": ["flat_tokens.filespec=other.zarr"],
    "a dataset on a store that can't be reached": ["flat_tokens.filespec=foo://bucket/x.zarr"],
    "a dataset on a store that needs a package": ["flat_tokens.filespec=abfs://x.zarr"],
}


@pytest.fixture
def folder(here):
    """An empty working folder with a small dataset."""
    write_tokens("tokens.zarr", [[1 + i, 2, 3, 4, 5, 6, 7] for i in range(40)])
    return here


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    left_out = {"metrics.jsonl", ".compilation_cache"}
    return {path: path.read_bytes() for path in files if left_out.isdisjoint(path.parts)}


def check(case, message, before, folder):
    assert message.startswith("error: ") and "Traceback" not in message
    golden.check("wrong_inputs.txt", case, message.replace(f"{folder}/", ""))
    written = {p for p in contents(folder) if p not in before}
    left = {"config.yaml", "starts.jsonl", "zarr.json", "lock"}
    assert {path.name for path in written} <= left, "no data is written"
    assert before.items() <= contents(folder).items(), "nothing is harmed"


NAMES = {
    "config not named": [],
    "config local_test_syntetic": ["--config-name=local_test_syntetic"],
    "a config group without a config": ["model=1b", "paths.model_name=x"],
    "a config group with two configs": ["--config-name=c4_h100x8_1b", "+model=2b"],
    "a config beside which another base is": ["--config-dir=own", "--config-name=mine"],
    "a config with a dotted key": ["--config-dir=.", "--config-name=dotted", "paths.model_name=x"],
}


@pytest.mark.parametrize("case", NAMES)
def test_the_name_of_a_config(case, folder, train_here):
    dotted = "defaults: [local_test_synthetic, _self_]\ntraining.steps: 2"
    pathlib.Path("dotted.yaml").write_text(dotted)
    pathlib.Path("own").mkdir()
    pathlib.Path("own/base.yaml").write_text("training: {seed: 7}")
    pathlib.Path("own/mine.yaml").write_text("defaults: [base, _self_]")
    _, message = train_here(*NAMES[case])
    message = message.replace(str(ROOT), "...")
    message = message.split("choose from ")[0].split("NAME: ")[0]  # without the list, which grows
    check(case, message, contents(folder), folder)


def test_a_config_that_extends_nothing():
    """Hydra would set up logging for it, in this process."""
    with pytest.raises(UserError, match=r"^the config lacks .*begin its file with `defaults: \[ba"):
        load(train.Config, {})


def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(preflight, "begun", lambda *_: contextlib.nullcontext(str))
    monkeypatch.setattr(train, "lower_step", lambda _: None)
    monkeypatch.setattr(Run, "compile", lambda *_: None)


@pytest.mark.slow
def test_a_checkpoint_that_can_not_be_used(folder, train_here, monkeypatch):
    config = compose_config(START[0].partition("=")[2], *START[1:])
    with jax.set_mesh(mesh(4, 2)):
        save_state("runs/run/checkpoints", config, random_weights(train, config), 1)
    nothing_is_compiled(monkeypatch)
    clone = [*START, "paths.model_name=clone", "paths.clone_from=runs/run/checkpoints"]
    before = contents(folder)
    _, message = train_here(*clone, "model.d_ff=80")
    check("a clone of another model", message, before, folder)
    (chunk,) = pathlib.Path("runs/run/checkpoints").glob("*/weights/embed/c/1/1")
    os.truncate(chunk, 10)
    before = contents(folder)
    _, message = train_here(*START)
    check("a damaged checkpoint", message, before, folder)
    _, message = train_here(*clone)
    check("a clone of a damaged checkpoint", message, before, folder)


without_checkpoint = partial(os.makedirs, "runs/x/checkpoints")
# What to do first, and the overrides.
LATER = {
    "a run below a file": (partial(is_text, "file"), ["paths.root_working_dir=file"]),
    "a dataset whose description is damaged": (partial(os.truncate, f"{TOKENS}/zarr.json", 10), []),
    "a damaged chunk of tokens": (partial(flip_last_bit, f"{TOKENS}/c/0"), []),
    "a missing chunk of tokens": (partial(os.remove, f"{TOKENS}/c/0"), []),
    "checkpoints in a file": (partial(is_text, "text.txt"), ["checkpoints.root=text.txt"]),
    "a clone of a checkpoint that isn't there": (
        without_checkpoint,
        ["paths.clone_from=runs/x/checkpoints/00000003.1"],
    ),
}


@pytest.mark.parametrize("case", [*CASES, *LATER])
def test_training(case, folder, train_here, monkeypatch):
    nothing_is_compiled(monkeypatch)
    prepare, overrides = LATER.get(case) or (dict, CASES[case])
    prepare()
    before = contents(folder)
    _, message = train_here(*START, *overrides)
    check(case, message, before, folder)


def test_a_run_that_is_at_work(folder, train_here, monkeypatch):
    nothing_is_compiled(monkeypatch)
    with supervise.locked(pathlib.Path("runs/run")):
        before = contents(folder)
        _, message = train_here(*START)
    message = message.replace(f"{os.getpid()} on {socket.gethostname()}", "PID on HOST")
    check("a run that is in use", message, before, folder)


TOOLS = {
    "generate: a seed that is too large": (generate, ["x", "--seed=99999999999999999999"]),
    "generate: no device along t": (generate, ["x", "--t=0"]),
    "generate: a share above 1": (generate, ["x", "--top-p=1.5"]),
    "generate: prompts twice": (generate, ["x", "--prompts=y", "--prompt=z"]),
    "generate: an evaluation and a prompt": (generate, ["x", "--evaluate=y", "--prompt="]),
    "generate: rows without an evaluation": (generate, ["x", "--length=3"]),
    "generate: an evaluation and a seed": (generate, ["x", "--evaluate=y", "--seed=1"]),
    "flat_tokens_info: fewer documents than none": (flat_tokens_info, ["x", "--decode=-1"]),
    "flat_tokens_info: bits of zarr": (flat_tokens_info, ["x", "--dtype=uint32"]),
    "plot: smoothing of nan": (plot, ["x", "--smoothing=nan"]),
}


@pytest.mark.parametrize("case", TOOLS)
def test_an_option(case, folder, ended):
    tool, arguments = TOOLS[case]
    before = contents(folder)
    _, errors, code = ended(tool.main, *arguments)
    assert code == 2 and contents(folder) == before
    golden.check("wrong_inputs.txt", case, errors.splitlines()[-1].removeprefix("python -m "))


def test_what_needs_more_memory_than_there_is():
    of_jax = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    for error in MemoryError("Unable to allocate 9 TiB"), of_jax:
        with pytest.raises(SystemExit) as stopped, user_errors():
            raise error
        assert stopped.value.code == f"error: not enough memory: {error}"


PRINTS = """
import sys
from runtime.errors import user_errors
sys.stdin.read()
with user_errors():
    for _ in range(20000):
        print("a line of text")
"""


@pytest.mark.parametrize("program", [["-c", PRINTS], ["-m", "tools.plan", "--help"]])
def test_a_reader_that_is_gone_ends_a_program_quietly(program):
    with python_at_work(*program) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


OWN_KEYS = {
    audit: [f"audit.{key}" for key in keys(audit.AuditOptions)],
    compiler: ["topology", "slices"],
    plan: ["chips"],
}


@pytest.mark.parametrize("tool", OWN_KEYS)
def test_the_help_begins_with_what_a_programs_own_keys_mean(tool, train_here):
    out, message = train_here("--help", program=tool.main)
    assert not message and out.startswith(tool.__doc__)
    for key in OWN_KEYS[tool]:
        assert re.search(rf"^    {re.escape(key)}=\S+ +\w", tool.__doc__, re.MULTILINE)


CONVERT = ["--config-name=text_files", "load_dataset.data_files=text.txt"]
CONVERSIONS = {
    "convert: no output": CONVERT,
    "convert: the output is there": [*CONVERT, "output=tokens.zarr"],
    "convert: one document": [*CONVERT, "output=new.zarr"],
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_converting(case, folder, train_here):
    pathlib.Path("text.txt").write_text("a text\n" * 40)
    before = contents(folder)
    _, message = train_here(*CONVERSIONS[case], program=huggingface_to_flat_tokens.main)
    check(case, message, before, folder)
