"""Tests that each mistake in a config, dataset or checkpoint gets one message.

tests/golden/wrong_inputs.txt lists them.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import get_args, get_type_hints

import fsspec
import jax
import pytest
import zarr

import train
from data.flat_tokens import Writer
from runtime import supervise
from runtime.config import Section
from runtime.errors import user_errors
from runtime.run import Run
from tests import golden
from tests.helpers import ROOT, SMALL, train_here
from tools import (
    flat_tokens_info,
    generate,
    huggingface_to_flat_tokens,
    plot,
    synthetic_dataset,
)

MODEL = [
    *(setting for setting in SMALL if setting != "check=types"),  # messages show all settings
    "training.steps=2",
    "flat_tokens.filespec=tokens.zarr",
    "paths.model_name=run",
]
TOKENS, STARTS = "tokens.zarr/train/encoded_tokens", "tokens.zarr/train/seq_starts"
EXPERTS = "model.experts={count: 8, d_ff: 8"
STREAM = ["flat_tokens.sequence_packing=false"]


def damage(path, change=lambda data: data[:-1] + bytes([data[-1] ^ 1])):
    file = pathlib.Path(path)
    if (changed := change(file.read_bytes())) is None:
        file.unlink()
    else:
        file.write_bytes(changed)


def is_text(path):
    pathlib.Path(path).parent.mkdir(exist_ok=True)
    pathlib.Path(path).write_text("text")


def missing(_):
    return None


def short(data):
    return data[:10]


def nothing():
    pass


def no_split():
    shutil.rmtree("tokens.zarr/validation")


def unfinished():
    zarr.open_group("tokens.zarr/train").attrs.clear()


def other_arrays():
    shutil.rmtree("tokens.zarr/train/encoded_tokens")
    zarr.open_group("tokens.zarr/train").create_array("ids", shape=(3,), dtype="int32")


class Unreachable(fsspec.AbstractFileSystem):
    """A store whose errors have a class of their own, as is common."""

    def fail(self, *_, **__):
        raise RuntimeError("no answer")

    ls = cat_file = info = fail


def unreachable():
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)


# Name of the case: what to do first, and the overrides.
CASES = {
    "an unknown key": (nothing, ["training.stepz=5"]),
    "an unknown key with a plus": (nothing, ["+training.stepz=5"]),
    "an unknown key unlike any other": (nothing, ["mesh.pipeline=5"]),
    "a key in the wrong place": (nothing, ["d_model=5"]),
    "an unknown section": (nothing, ["trainin.steps=5"]),
    "a section as a number": (nothing, ["training=5"]),
    "an unknown mesh axis": (nothing, ["+mesh.x=2"]),
    "an override that can't be read": (nothing, ["training.steps=[1"]),
    "an override without a value": (nothing, ["training.steps"]),
    "a config group that isn't one": (nothing, ["model=84m"]),
    "a config group as a number": (nothing, ["model=84"]),
    "a coordinator without a port": (nothing, ["num_hosts=2", "coordinator=10.0.0.1"]),
    "a coordinator whose port is no number": (nothing, ["num_hosts=2", "coordinator=a:b"]),
    "a group that no config has": (nothing, ["x/y=1"]),
    "a number for a section, added": (nothing, ["++mesh=4"]),
    "several values": (nothing, ["training.seed=1,2"]),
    "a section that is null": (nothing, ["hf_dataset.path=x"]),
    "null for a section": (nothing, ["checkpoints=null"]),
    "a list for a section": (nothing, ["mesh=[4,2]"]),
    "a list for a section that may be null": (nothing, ["hf_dataset=[x]"]),
    "a number for a section, by a reference": (nothing, ["flat_tokens=${training.steps}"]),
    "a number for a list": (nothing, ["training.skip_steps=5"]),
    "a number for a list, by a reference": (nothing, ["metrics.to=${training.steps}"]),
    "a word in a list": (nothing, ["training.skip_steps=[first]"]),
    "a list in a list": (nothing, ["training.skip_steps=[[1]]"]),
    "a step below 0": (nothing, ["training.skip_steps=[3,-1]"]),
    "experts without their number": (nothing, ["model.experts.per_token=2"]),
    "more experts for a token than there are": (nothing, [f"{EXPERTS}, per_token: 9}}"]),
    "scores of experts of another kind": (nothing, [f"{EXPERTS}, per_token: 2, score: linear}}"]),
    "one expert for a token, with scores that add up to 1": (
        nothing,
        [f"{EXPERTS}, per_token: 1}}"],
    ),
    "a cooldown of no steps": (nothing, ["training.schedule=wsd"]),
    "a cooldown before the first step": (
        nothing,
        ["training.schedule=wsd", "training.cooldown_steps=999"],
    ),
    "no place for any token": (nothing, ["training.routing.capacity_factor=0"]),
    "no feed-forward and no experts": (nothing, ["model.d_ff=0"]),
    "groups of tokens that a row isn't": (
        nothing,
        [f"{EXPERTS}, per_token: 2}}", "training.routing.group=5"],
    ),
    "groups that a row isn't, with places for all": (
        nothing,
        [
            f"{EXPERTS}, per_token: 2}}",
            *("training.routing.capacity_factor=null", "training.routing.group=5"),
        ],
    ),
    "a row's places on several devices": (nothing, [f"{EXPERTS}, per_token: 2}}", "mesh.c=2"]),
    "a balance of microbatches": (
        nothing,
        [
            f"{EXPERTS}, per_token: 2}}",
            *("training.routing.balance_cost=1", "training.microbatches=2"),
        ],
    ),
    "experts that don't split over t": (
        nothing,
        ["model.experts={count: 3, d_ff: 8, per_token: 2}", "mesh.t=2"],
    ),
    "neither a dataset nor a mixture": (nothing, ["flat_tokens.filespec=null"]),
    "a dataset and a mixture": (nothing, ["flat_tokens.mixture=[{filespec: x, weight: 1}]"]),
    "a mixture that is no list": (nothing, ["flat_tokens.mixture=x.zarr"]),
    "a mixture of paths": (nothing, ["flat_tokens.mixture=[x.zarr]"]),
    "a mixture without a weight": (nothing, ["flat_tokens.mixture=[{filespec: x}]"]),
    "a mixture with a weight of 0": (
        nothing,
        ["flat_tokens.mixture=[{filespec: x, weight: 0}]"],
    ),
    "a mixture with an unknown key": (nothing, ["flat_tokens.mixture=[{path: x, weight: 1}]"]),
    "no dataset at all": (nothing, ["flat_tokens=null"]),
    "a number as text": (nothing, ["training.steps=many"]),
    "an integer with a fraction": (nothing, ["training.steps=1.5"]),
    "a switch that is neither on nor off": (nothing, ["simulate_devices=perhaps"]),
    "nothing for a number": (nothing, ["training.steps=null"]),
    "a reference to nothing": (nothing, ["training.steps=${stepz}"]),
    "a deleted key": (nothing, ["~training.seed"]),
    "a negative number": (nothing, ["mesh.t=-1"]),
    "microbatches that don't divide a device's rows": (nothing, ["training.microbatches=3"]),
    "chunks that don't divide a row": (nothing, ["training.loss_chunks=5"]),
    "no microbatches": (nothing, ["training.microbatches=0"]),
    "a negative rate": (nothing, ["training.learning_rate=-1e-3"]),
    "a rate of nan": (nothing, ["training.learning_rate=nan"]),
    "an infinite rate": (nothing, ["training.learning_rate=inf"]),
    "a seed that is too large": (nothing, ["training.seed=3000000000"]),
    "skipped updates below 0": (nothing, ["training.max_skipped_updates=-1"]),
    "checkpoints below 0": (nothing, ["checkpoints.keep_last=-1"]),
    "steps between checkpoints below 0": (nothing, ["checkpoint_interval=-1"]),
    "steps of kept checkpoints below 0": (nothing, ["checkpoints.keep_every=-1"]),
    "a timeout below 0": (nothing, ["hang_timeout_seconds=-1"]),
    "a timeout of nan": (nothing, ["hang_timeout_seconds=nan"]),
    "a heartbeat timeout of 0": (nothing, ["heartbeat_timeout_seconds=0"]),
    "no steps": (nothing, ["training.steps=0"]),
    "adam_b2 of 1": (nothing, ["training.adam_b2=1"]),
    "an unknown optimizer": (nothing, ["training.optimizer=sgd"]),
    "an unknown schedule": (nothing, ["training.schedule=step"]),
    "weights that don't decay and aren't there": (nothing, ["training.no_decay=[norms]"]),
    "gradients clipped to zero": (nothing, ["training.grad_clip=0"]),
    "no name": (nothing, ["paths.model_name=???"]),
    "an empty name": (nothing, ["paths.model_name="]),
    "a name outside the root": (nothing, ["paths.model_name=../other"]),
    "an absolute path as name": (nothing, ["paths.model_name=/run"]),
    "a run on a remote store": (nothing, ["paths.root_working_dir=gs://bucket/runs"]),
    "a run below a file": (partial(is_text, "file"), ["paths.root_working_dir=file"]),
    "more devices than there are": (nothing, ["mesh={d: 8, t: 2}"]),
    "a batch that doesn't split": (nothing, ["training.tokens.batch=6"]),
    "replicas that don't divide the devices": (nothing, ["mesh={d: 4, t: 2, r: 3}"]),
    "a row that doesn't split in two pieces a device": (nothing, ["mesh={d: 1, t: 1, c: 4}"]),
    "heads that don't split": (nothing, ["model.n_kv=3"]),
    "a vocabulary that doesn't split": (nothing, ["model.vocab=49"]),
    "an odd head dimension": (nothing, ["model.d_head=5"]),
    "a vocabulary that is too small": (nothing, ["model.vocab=8"]),
    "no dataset": (nothing, ["flat_tokens.filespec=other.zarr"]),
    "a dataset on a store that can't be reached": (
        nothing,
        ["flat_tokens.filespec=foo://bucket/x.zarr"],
    ),
    "a dataset on a store that needs a package": (nothing, ["flat_tokens.filespec=abfs://x.zarr"]),
    "a dataset on a store that doesn't answer": (
        unreachable,
        ["flat_tokens.filespec=unreachable://x.zarr"],
    ),
    "a dataset without a name": (nothing, ["flat_tokens.filespec="]),
    "a dataset that is a file": (partial(is_text, "file"), ["flat_tokens.filespec=file"]),
    "a dataset without the split": (no_split, ["training.validation_interval=1"]),
    "a dataset that isn't flat tokens": (other_arrays, []),
    "a dataset not written to its end": (unfinished, []),
    "a dataset too small for a batch": (nothing, ["training.tokens.len=1000"]),
    "streams that don't divide the batch": (nothing, ["flat_tokens.streams=3"]),
    "a damaged chunk of starts": (partial(damage, f"{STARTS}/c/0"), STREAM),
    "a missing chunk of starts": (partial(damage, f"{STARTS}/c/0", missing), STREAM),
    "a dataset whose description is damaged": (partial(damage, f"{TOKENS}/zarr.json", short), []),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with a small dataset."""
    monkeypatch.chdir(tmp_path)
    for split in "train", "validation":
        with Writer("tokens.zarr", split) as writer:
            for i in range(40):
                writer.append([1 + i, 2, 3, 4, 5, 6, 7])
    return tmp_path


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    left_out = {"metrics.jsonl", ".compilation_cache"}
    return {path: path.read_bytes() for path in files if left_out.isdisjoint(path.parts)}


def check(case, message, before, folder):
    assert message.startswith("error: ") and "Traceback" not in message
    golden.check("wrong_inputs.txt", case, message)
    written = {p for p in contents(folder) if p not in before}
    left = {"config.yaml", "starts.jsonl", "zarr.json", "lock"}
    assert {path.name for path in written} <= left, "no data is written"
    assert before.items() <= contents(folder).items(), "nothing is harmed"


@pytest.mark.parametrize("case", CASES)
def test_training(case, folder, capsys, monkeypatch):
    prepare, overrides = CASES[case]
    prepare()
    before = contents(folder)
    _, message = train_here(
        capsys, monkeypatch, "--config-name=local_test_synthetic", *MODEL, *overrides
    )
    check(case, message, before, folder)


def test_a_choice_that_the_default_config_does_not_have(folder, capsys, monkeypatch):
    _, message = train_here(capsys, monkeypatch, "model=1b", "paths.model_name=x")
    message = message.split("NAME: ")[0]
    check("a config group without a config", message, contents(folder), folder)


@pytest.mark.parametrize("name", ["", "local_test_syntetic", "c5"])
def test_the_name_of_a_config(name, folder, capsys, monkeypatch):
    _, message = train_here(capsys, monkeypatch, *([f"--config-name={name}"] if name else []))
    message = message.split("choose from ")[0].split("NAME: ")[0]  # without the list, which grows
    check(f"config {name or 'not named'}", message, contents(folder), folder)


def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(train, "checked", lambda _: contextlib.nullcontext(str))
    monkeypatch.setattr(train, "lower_step", lambda _: None)
    monkeypatch.setattr(Run, "compile", lambda *_: None)


@pytest.mark.slow
def test_a_checkpoint_that_can_not_be_used(folder, capsys, monkeypatch):
    start = ["--config-name=local_test_synthetic", *MODEL]
    clone = [*start, "paths.model_name=clone", "paths.clone_from=runs/run/checkpoints"]
    first = "check=types", "training.steps=1", "training.steps_for_lr=2"
    train_here(capsys, monkeypatch, *start, *first)
    nothing_is_compiled(monkeypatch)
    before = contents(folder)
    _, message = train_here(capsys, monkeypatch, *start, "model.d_ff=80")
    check("a checkpoint of another model", message, before, folder)
    _, message = train_here(capsys, monkeypatch, *clone, "model.d_ff=80")
    check("a clone of another model", message, before, folder)
    (chunk,) = pathlib.Path("runs/run/checkpoints").glob("*/weights/embed/c/1/1")
    damage(chunk, short)
    before = contents(folder)
    _, message = train_here(capsys, monkeypatch, *start)
    check("a damaged checkpoint", message, before, folder)
    _, message = train_here(capsys, monkeypatch, *clone)
    check("a clone of a damaged checkpoint", message, before, folder)


# Like CASES; these mistakes appear after the type check or after the step is compiled.
LATER = {
    "a damaged chunk of tokens": (partial(damage, f"{TOKENS}/c/0"), []),
    "a chunk of tokens cut short": (partial(damage, f"{TOKENS}/c/0", short), []),
    "a missing chunk of tokens": (partial(damage, f"{TOKENS}/c/0", missing), []),
    "a run whose folder is a file": (partial(is_text, "runs/run"), []),
    "checkpoints on a store that isn't known": (nothing, ["checkpoints.root=foo://bucket/x"]),
    "checkpoints on a store that needs a package": (nothing, ["checkpoints.root=abfs://bucket/x"]),
    "checkpoints on a store that doesn't answer": (
        unreachable,
        ["checkpoints.root=unreachable://x"],
    ),
    "checkpoints in a file": (partial(is_text, "text.txt"), ["checkpoints.root=text.txt"]),
    "a clone of what isn't there": (nothing, ["paths.clone_from=nowhere"]),
    "a clone of an empty folder": (partial(os.mkdir, "empty"), ["paths.clone_from=empty"]),
    "a clone of a run's folder": (
        partial(os.makedirs, "runs/x/checkpoints"),
        ["paths.clone_from=runs/x"],
    ),
    "a clone of a checkpoint that isn't there": (
        nothing,
        ["paths.clone_from=runs/x/checkpoints/00000003.1"],
    ),
    "a clone of a file": (partial(is_text, "text.txt"), ["paths.clone_from=text.txt"]),
    "a clone from a store that isn't known": (nothing, ["paths.clone_from=foo://bucket/x"]),
}


@pytest.mark.parametrize("case", LATER)
def test_starting(case, folder, capsys, monkeypatch):
    nothing_is_compiled(monkeypatch)
    prepare, overrides = LATER[case]
    prepare()
    before = contents(folder)
    _, message = train_here(
        capsys, monkeypatch, "--config-name=local_test_synthetic", *MODEL, *overrides
    )
    check(case, message, before, folder)


def test_a_run_that_is_at_work(folder, capsys, monkeypatch):
    nothing_is_compiled(monkeypatch)
    with supervise.locked(pathlib.Path("runs/run")):
        before = contents(folder)
        _, message = train_here(capsys, monkeypatch, "--config-name=local_test_synthetic", *MODEL)
        held = f"process {os.getpid()} on {socket.gethostname()}"
        assert held in message
        message = message.replace(held, "process PID on HOST")
        check("a run that is in use", message, before, folder)


TOOLS = {
    "generate: a seed that is too large": (generate, ["x", "--seed=99999999999999999999"]),
    "generate: a negative seed": (generate, ["x", "--seed=-1"]),
    "generate: too many tokens": (generate, ["x", "--tokens=100000000000"]),
    "generate: too many samples": (generate, ["x", "--samples=100000000000"]),
    "flat_tokens_info: fewer documents than none": (flat_tokens_info, ["x", "--decode=-1"]),
    "plot: too much smoothing": (plot, ["x", "--smoothing=1e30"]),
    "plot: smoothing of nan": (plot, ["x", "--smoothing=nan"]),
    "synthetic_dataset: a small vocabulary": (synthetic_dataset, ["x", "--vocab=5"]),
    "synthetic_dataset: a negative seed": (synthetic_dataset, ["x", "--seed=-1"]),
}


@pytest.mark.parametrize("case", TOOLS)
def test_an_option(case, folder, capsys, monkeypatch):
    tool, arguments = TOOLS[case]
    before = contents(folder)
    monkeypatch.setattr("sys.argv", ["python -m tools.synthetic_dataset", *arguments])
    with pytest.raises(SystemExit) as stopped:
        tool.main()
    assert stopped.value.code == 2 and contents(folder) == before
    message = capsys.readouterr().err.splitlines()[-1]
    golden.check("wrong_inputs.txt", case, message.removeprefix("python -m "))


def test_what_needs_more_memory_than_there_is(capsys, monkeypatch):
    for error in (
        MemoryError("Unable to allocate 9 TiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ):
        with pytest.raises(SystemExit) as stopped, user_errors():
            raise error
        assert stopped.value.code == f"error: not enough memory: {error}"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 20000])
def test_a_reader_that_is_gone_ends_a_program_quietly(lines, unbuffered):
    script = (
        "import sys\nfrom runtime.errors import user_errors\nsys.stdin.read()\n"
        f"with user_errors():\n    [print('a line of text') for _ in range({lines})]"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_broken_pipe_of_another_kind_is_an_error(capsys):
    with pytest.raises(SystemExit, match=r"error: .*Broken pipe"), user_errors():
        raise BrokenPipeError(32, "Broken pipe")


CONVERT = ["--config-name=text_files", "load_dataset.data_files=text.txt"]
CONVERSIONS = {
    "convert: no output": CONVERT,
    "convert: the output is there": [*CONVERT, "output=tokens.zarr"],
    "convert: no text": ["--config-name=text_files", "output=new.zarr"],
    "convert: no such column": [*CONVERT, "output=new.zarr", "column=words"],
    "convert: an unknown key": [*CONVERT, "outptu=new.zarr"],
    "convert: an argument that the config lacks": [*CONVERT, "load_dataset.data_dir=x"],
    "convert: a flag that needs another": [*CONVERT, "output=new.zarr", "--resolve"],
    "convert: one document": [*CONVERT, "output=new.zarr"],
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_converting(case, folder, capsys, monkeypatch):
    pathlib.Path("text.txt").write_text("a text\n" * 40)
    before = contents(folder)
    _, message = train_here(
        capsys, monkeypatch, *CONVERSIONS[case], program=huggingface_to_flat_tokens.main
    )
    check(case, message, before, folder)


def test_a_number_without_a_bound_says_why():
    """A new number in the config must have a bound."""

    def plain_numbers(section):
        for name, hint in get_type_hints(section, include_extras=True).items():
            if hint in (int, float, int | None, float | None):
                yield section.prefix + name
            for part in hint, *get_args(hint):
                if isinstance(part, type) and issubclass(part, Section):
                    yield from plain_numbers(part)

    assert [*plain_numbers(train.Config)] == ["training.grad_clip"], "which checks itself"
    assert not [*plain_numbers(huggingface_to_flat_tokens.ConvertConfig)]


def test_there_are_at_least_40():
    assert len(CASES) >= 40
    assert (ROOT / "tests/golden/wrong_inputs.txt").read_text().count("\nerror: ") >= 40
