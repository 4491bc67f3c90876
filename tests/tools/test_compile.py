"""A step compiled ahead of time, for the devices that are here; for others, tests/test_tpu.py."""

import contextlib
import importlib.util
import io
import json
import re
import zipfile

import jax
import pytest

from runtime import compiled
from tests import golden
from tests.helpers import SMALL, edited, mesh, small_config, train_here
from tools import compile as compiler

CONFIG = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]


@pytest.fixture(scope="module")
def said_and_written(tmp_path_factory):
    path, out = tmp_path_factory.mktemp("compiled") / "step.zip", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("sys.argv", ["compile", *CONFIG, f"output={path}"])
        compiler.main()
    return out.getvalue(), path


@pytest.fixture
def written(said_and_written):
    return said_and_written[1]


def run(capsys, monkeypatch, root, *options):
    named = [f"paths.root_working_dir={root}", "paths.model_name=run", "training.steps=3"]
    return train_here(capsys, monkeypatch, *CONFIG, "training.steps_for_lr=50", *named, *options)


def metrics(root):
    rows = map(json.loads, (root / "run/metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in rows]


def test_what_it_says(said_and_written):
    title, seconds, _, _, arguments, *_ = said_and_written[0].splitlines()
    assert title == "4 x cpu, d=2, t=2" and re.fullmatch(r"compiled in \d+ s", seconds)
    name, given, predicted, error = re.split("  +", arguments)
    assert (name, given, error) == ("arguments", predicted, "+0.0%")


def test_a_run_starts_from_it_and_does_the_same(written, tmp_path, capsys, monkeypatch):
    _, message = run(capsys, monkeypatch, tmp_path / "usual", "training.steps_for_lr=100")
    assert not message
    calls = []
    load = compiled.load
    monkeypatch.setattr(compiled, "load", lambda *given: calls.append(1) or load(*given))
    # Neither may another setting be in the way that the step doesn't depend on.
    option = [f"compiled_step={written}", "training.steps_for_lr=100", "checkpoint_interval=2"]
    out, message = run(capsys, monkeypatch, tmp_path / "compiled", *option)
    assert not message and calls and "\nstep 2/3 " in out
    assert metrics(tmp_path / "usual") == metrics(tmp_path / "compiled")


def zipped(path, cut=None, without=None, **changed):
    """As if another JAX had written it, say, or a disk had lost something."""

    def make(written, folder):
        with zipfile.ZipFile(written) as there, zipfile.ZipFile(folder / path, "w") as here:
            description = json.loads(there.read("description.json")) | changed
            description.pop(without, None)
            here.writestr("description.json", json.dumps(description))
            here.writestr("executable", there.read("executable")[:cut])

    return make


REFUSED = {
    "another setting": (None, ["training.steps_for_lr=100", "training.learning_rate=3e-3"]),
    "another model": (None, ["training.steps_for_lr=100", "model.layers=3"]),
    "another mesh": (None, ["training.steps_for_lr=100", "mesh={d: 4, t: 1}"]),
    "another jax": (zipped("step.zip", jax="0.9.0"), ["training.steps_for_lr=100"]),
    "another device": (zipped("step.zip", device="TPU v5 lite"), ["training.steps_for_lr=100"]),
    "another format": (zipped("step.zip", format=2), ["training.steps_for_lr=100"]),
    "a damaged one": (zipped("step.zip", cut=-100), ["training.steps_for_lr=100"]),
    "half a description": (zipped("step.zip", without="config"), []),
    "no archive": (lambda _, folder: (folder / "step.zip").write_text("text"), []),
    "no file": (lambda *_: None, []),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_one_is_refused(case, written, tmp_path, capsys, monkeypatch):
    make, options = REFUSED[case]
    if make:
        make(written, tmp_path)
    path = tmp_path / "step.zip" if make else written
    _, message = run(capsys, monkeypatch, tmp_path / "runs", f"compiled_step={path}", *options)
    for version in re.findall(r"here it is (\d+\.\d+\.[\d.]+)", message):
        message = message.replace(version, "VERSION")
    golden.check("wrong_inputs.txt", f"compiled step: {case}", message.replace(str(path), "FILE"))
    assert not (tmp_path / "runs/run").exists()


def test_an_edit_of_the_source_is_noticed(written):
    module = edited(
        "train.py", ("axis=-1, keepdims=True) + eps", "axis=-1, keepdims=True) + 2 * eps")
    )
    config = small_config("mesh={d: 2, t: 2}", "model.vocab=128")
    with (
        jax.set_mesh(mesh(2, 2)),
        pytest.raises(compiled.CompiledStepError, match="another source"),
    ):
        compiled.load(str(written), module.lower_step(config), config)


@pytest.mark.parametrize(
    "option", ["output=no/such/folder/step.zip", "output=tests", "topology=v5e:0x8"]
)
def test_what_can_not_be_done_is_said_before_compiling(option, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    out, message = train_here(capsys, monkeypatch, *CONFIG, option, program=compiler.main)
    assert not out
    golden.check("wrong_inputs.txt", f"compile: {option}", message)


def test_sums_that_the_source_does_not_say():
    name = 'metadata={op_name="jit(training_step)/shard_map/'
    lines = [
        f'  %a = f32[4]{{0}} all-reduce(%x), {name}jvp(psum({{U:d}} -> ))/unreduced_psum"}}',
        f'  %b = bf16[2,3]{{1,0}} all-reduce(%x), {name}jvp(all_gather(M|d -> M))/all_gather"}}',
        "  %c = (bf16[8]{0}, f32[4,4]{1,0}) all-reduce(%x, %y), to_apply=%add",
        f'  %d = f32[9]{{0}} all-gather(%x), {name}jvp(all_gather(M|d -> M))/all_gather"}}',
    ]
    assert list(compiler.summed_whole("\n".join(lines))) == [
        ("bf16[2,3] all_gather(M/d -> M): all_gather", 12),
        ("bf16[8] reduce_scatter", 16),
        ("f32[4,4] reduce_scatter", 64),
    ]


def test_without_libtpu(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, message = train_here(capsys, monkeypatch, *CONFIG, "topology=v5e:2x2", program=compiler.main)
    golden.check("wrong_inputs.txt", "compile: without libtpu", message)
