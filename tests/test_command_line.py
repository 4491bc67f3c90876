"""Tests commands that people type: training runs, shipped configs, and the cost of importing."""

import json
import os
import re
import shlex
import signal
import subprocess
from typing import ClassVar

import jax
import pytest
import yaml

import train
from checks import layout, preflight
from runtime import chips
from runtime.config import plain
from runtime.program import program
from runtime.run import open_folder
from runtime.supervise import STOPS
from shardlib.errors import UserError
from shardlib.mesh import abstract_mesh
from shardlib.types import make_shapes
from tests import edits, golden, mutations
from tests.files import TIMINGS, rows, timed_rows
from tests.helpers import ROOT, SMALL, compose_config, config_of, mesh, small_config
from tests.processes import on_hosts, python
from tools.audit.step import audit_step

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "base")


def run(*arguments):
    return python("-W", "error", "-m", "train", *arguments)


@pytest.mark.slow
def test_a_run_leaves_its_config_and_a_row_per_step(tmp_path):
    done = run(
        "--config-name=local_test_synthetic", "+paths.model_name=run", "training.steps=12",
        f"paths.root_working_dir={tmp_path}", "training.validation_interval=5",
        "training.validation_batches=2", "training.learning_rate=1e-3", "check=types",
        "training.tokens.batch=16",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = timed_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(12))
    needed = {"step", "loss", "learning_rate", "grad_norm", "skipped", *TIMINGS}
    assert all(needed <= set(row) for row in rows)
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 9, 11]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert rows[-1]["validation_loss"] < rows[0]["loss"] - 1
    training = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["training"]
    assert (training["steps"], training["steps_for_lr"]) == (12, 100)
    assert [*tmp_path.iterdir()] == [tmp_path / "run"], "nothing else is written"
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "starts.jsonl", "metrics.jsonl", "checkpoints", "lock"}


@pytest.mark.slow  # tests/test_hosts.py has two hosts train, stop and go on
def test_two_hosts_train_as_one_does(tmp_path):
    """Two processes of four devices each find each other through Slurm's variables. One process
    resumes from what they saved."""
    arguments = [
        "--config-name=local_test_synthetic", *SMALL, f"paths.root_working_dir={tmp_path}",
        "training.learning_rate=3e-5",  # low enough that bf16 rounding doesn't grow
        "training.tokens={batch: 16, len: 32}", "training.steps=3", "checkpoint_interval=2",
        "training.validation_interval=3", "flat_tokens.streams=2",
    ]  # fmt: skip
    command = ["-m", "train", *arguments, "paths.model_name=two", "num_hosts=2"]
    printed = on_hosts(lambda _: command)
    assert "done: 3 steps" in printed[0]
    assert "step" not in printed[1], "the first host speaks for all"

    (records,) = (tmp_path / "two/checkpoints").glob("00000003.*/records")
    assert sorted(path.name for path in records.iterdir()) == ["0", "1", "zarr.json"]
    for name in "two", "one":
        done = run(*arguments, f"paths.model_name={name}", "training.steps=5")
        assert done.returncode == 0, done.stderr
        assert (f"resumed at step 3 from {records.parent}" in done.stdout) == (name == "two")
    two, one = (rows(tmp_path / name) for name in ("two", "one"))
    assert len(two) == len(one) == 5
    for a, b in zip(two, one, strict=True):
        assert a == pytest.approx(b, rel=1e-3)


SWEEP = ["--config-name=local_test_synthetic", "--multirun", "paths.model_name=sweep", *SMALL]
SWEEP += ["mesh={d: 2, t: 2}", "training.steps_for_lr=10"]


def test_a_sweep_is_checked_before_it_starts(tmp_path, train_here):
    settings = [f"paths.root_working_dir={tmp_path}", "training.steps=1,0"]
    actual = train_here(*SWEEP, *settings)
    assert actual == ("", "error: training.steps=0: Input should be greater than or equal to 1")
    assert not list(tmp_path.iterdir()), "nothing is written"


class Job:
    """Takes the place of a sweep's processes: notes their arguments."""

    during: ClassVar[dict[str, int]] = {}  # signals to this process, when a job starts or runs
    late = False  # whether they end only when they are terminated

    def __init__(self, command):
        self.arguments, self.terminated = command, False
        self.started.append(self)
        self.signal("starts")

    def signal(self, when):
        if when in self.during:
            os.kill(os.getpid(), self.during[when])

    def wait(self, timeout):
        self.signal("runs")
        if self.late and not self.terminated:
            raise subprocess.TimeoutExpired("", timeout)
        return 0

    def terminate(self):
        self.terminated = True


@pytest.fixture
def jobs(train_here, monkeypatch):
    """Returns a function that runs a sweep, and returns its jobs and its exit message."""
    monkeypatch.setattr("runtime.program.subprocess.Popen", Job)

    def run(*arguments, **options):
        monkeypatch.setattr(Job, "started", [], raising=False)
        _, message = train_here(*arguments, **options)
        return Job.started, message

    return run


def test_a_run_of_a_sweep_has_the_folder_of_its_values(jobs):
    def folders(*values):
        made, message = jobs(*SWEEP, *values)
        assert not message
        return [job.arguments[-1] for job in made]

    few, more = (folders(f"training.seed={values}") for values in ("1,2", "0,1,2"))
    assert few == [f'paths.model_name="sweep/training.seed={seed}"' for seed in (1, 2)]
    assert set(few) < set(more) and len(more) == 3
    grid = folders("training.seed=1,2", "flat_tokens.filespec=a/b,c", "training.steps=5")
    assert grid[0] == 'paths.model_name="sweep/training.seed=1,flat_tokens.filespec=a%2Fb"'
    assert len(set(grid)) == 4
    long = folders("training.seed=1,2", f"flat_tokens.filespec={'x' * 300},{'x' * 301}")
    names = [folder.partition("/")[2].rstrip('"') for folder in long]
    assert len(set(names)) == 4 and {*map(len, names)} == {255}


@pytest.mark.parametrize("values", ["1", "1,1"])
def test_a_sweep_whose_runs_have_no_folders_of_their_own(jobs, values):
    started, message = jobs(*SWEEP, f"training.seed={values}")
    assert not started
    assert message.startswith("error: a sweep has several jobs, no two alike: ")
    assert message.endswith("or start a run instead")


def test_a_sweep_is_of_the_config_that_was_asked_for(jobs, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [local_test_synthetic]\n")
    ours = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    (tmp_path / "more").mkdir()
    search = f"hydra.searchpath=[{tmp_path}/more]"
    made, message = jobs(*ours, "-m", search, "paths.model_name=x", "training.seed=1,2")
    assert not message and len(made) == 2
    for job in made:
        at = job.arguments.index(search)
        assert job.arguments[at : at + 6] == [search, "hydra.mode=RUN", *ours]
        assert "-m" not in job.arguments[at:]
    (tmp_path / "local_test_synthetic.yaml").write_text("")
    made, message = jobs(*ours[:2], *SWEEP)
    assert not made and f"is in {ROOT}/configs and in {tmp_path}: rename one of them" in message


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("when", ["starts", "runs"])
def test_a_sweep_remembers_a_signal(jobs, monkeypatch, when, number):
    monkeypatch.setattr(Job, "during", {when: number})
    (job,), message = jobs(*SWEEP, "training.seed=1,2")
    assert message == str(128 + number)
    assert job.terminated == (when == "starts" or number != signal.SIGINT)


def test_an_interrupt_that_reached_the_sweep_alone_reaches_its_run(jobs, monkeypatch):
    monkeypatch.setattr(Job, "during", {"starts": signal.SIGINT})
    monkeypatch.setattr(Job, "late", True)
    (job,), message = jobs(*SWEEP, "training.seed=1,2")
    assert job.terminated and message == str(128 + signal.SIGINT)


NUMBERS = ["null", "1e3", "0.10", "2024_1_11", "true", "1_0", "+5", ".5", "-Inf"]


def test_a_text_reaches_a_run_as_typed(tmp_path, train_here, jobs):
    """Names that Hydra or YAML would read as numbers, and what a message says to write in place of
    one that Hydra can't read; in a sweep, and as a resumed run's checkpoint has it."""
    configs, start = [], ("--config-name=local_test_synthetic", "paths.clone_from=0.10")
    main = program(train.Config, "configs", names="paths.model_name")(configs.append)

    def given(*overrides):
        return train_here(*start, *overrides, program=main)[1]

    refused = ["it's", "{x}", "a,b", "1,2", 'a"b']
    taken = ["on", "~", "a=b", "x#y", "(x)", "a;b", "x=\\", "é"]
    for name in *NUMBERS, *taken, "007", "0x1f", "1:30", "a::b", "*.x", "a b", *refused:
        message = given(f"paths.model_name={name}")
        assert bool(message) == (name in refused)
        if message:
            cure = re.split("quote it: |list and ", message)[1].removesuffix(" for a text")
            assert not given(*shlex.split(cure))
        kept = plain(configs[-1].to_yaml())["paths"]
        assert kept["model_name"] == configs[-1].paths.model_name == name
        assert kept["clone_from"] == "0.10"

    mine = "defaults: [local_test_synthetic, _self_]\npaths: {model_name: 2024_1_11}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    message = given("--config-dir", str(tmp_path), "--config-name=mine")
    assert "paths.model_name=2024111: Input should be a valid string; quote text" in message
    before = [*map(signal.getsignal, STOPS)]
    names = f"paths.model_name={','.join(NUMBERS)}"
    made, message = jobs(*start, "--multirun", names, program=main)
    assert not message and [*map(signal.getsignal, STOPS)] == before
    for number, job in zip(NUMBERS, made, strict=True):
        assert not given(*job.arguments[-3:])
        assert configs[-1].paths.model_name == f"{number}/0"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_number_of_a_sweep_is_in_the_program(optimizer):
    """The seed of the weights isn't either, nor what concerns the host alone."""

    def program(*overrides):
        config = small_config(f"training.optimizer={optimizer}", *overrides)
        with jax.set_mesh(mesh(4, 2)):
            return train.lower_step(config).as_text()

    numbers = [
        "learning_rate=0.5", "weight_decay=0.3", "grad_clip=0.7", "adam_b1=0.7", "adam_b2=0.8",
        "adam_eps=1e-3", "adam_eps_root=1e-4", "muon_momentum=0.6", "warmup_steps=7", "steps=77",
        "steps_for_lr=66", "cosine_learning_rate_final_fraction=0.3", "schedule=wsd",
        "cooldown_steps=9", "seed=5", "validation_interval=3", "max_skipped_updates=4",
    ]  # fmt: skip
    other = program(*(f"training.{number}" for number in numbers))
    assert other == program() != program("training.loss_chunks=2")


@pytest.mark.slow
def test_a_sweep_has_a_folder_and_a_process_for_each_run(tmp_path):
    """The sweep has meshes of two sizes; the first doesn't fit the model."""
    settings = [f"paths.root_working_dir={tmp_path}", "training.steps=2"]
    done = run(*SWEEP, *settings, "mesh.d=3,1")
    assert done.returncode == 1
    problem, summary = done.stderr.splitlines()
    assert problem.startswith("error: dimension M=32 does not split evenly over d=3")
    assert summary == "error: 1 of 2 jobs failed: 0"
    assert re.findall("^job (.): .*mesh.d=(.)", done.stdout, re.M) == [("0", "3"), ("1", "1")]
    assert "\ndone: 2 steps" in done.stdout
    (sweep,) = tmp_path.iterdir()
    (folder,) = sweep.iterdir()
    assert (sweep.name, folder.name) == ("sweep", "mesh.d=1")
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["mesh"] == {"d": 1, "t": 2, "r": 1, "c": 1}


def test_bad_input_gets_one_message(tmp_path):
    """Runs a command; tests/test_wrong_inputs.py has the other mistakes, in-process."""
    start = "--config-name=local_test_synthetic", "paths.model_name=x", "num_hosts=2"
    done = run(*start, f"paths.root_working_dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "num_hosts=2" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") < 8
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_composes_and_says_what_its_step_needs(name):
    text = (ROOT / f"configs/{name}.yaml").read_text()
    assert re.match(rf"# .*\n(#.*\n)*#   python -m train --config-name={name} .*\n", text)
    streamed = name.startswith(("local_stream", "fineweb_edu"))
    where = "hf_dataset.path=x" if streamed else "flat_tokens.filespec=x.zarr"
    config = compose_config(name, "paths.model_name=x", where)
    assert not [*config.notes()], "a setting without effect"
    named = [name for name in ("v5e", "a100", "h100") if name in text.splitlines()[0].lower()]
    (chip,) = named or [""]
    needed = audit_step(config, None, chips.CHIPS.get(chip))["peak"]
    stated = re.search(r"each (chip|device) needs ([\d.]+) GB\.$", text.splitlines()[0])[2]
    assert f"{needed / 1e9:.{len(stated.partition('.')[2])}f}" == stated
    # JAX reserves three quarters of a GPU's memory by default.
    limit = {"": 0.02, "v5e": 15.75}.get(chip, 60)
    assert needed < limit * 2**30


def choices(group):
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.mark.parametrize("model", choices("model"))
def test_every_choice_of_model_data_and_hardware_composes(model):
    """Each dimension splits over the mesh, and the model's file gives its number of weights."""
    comment = (ROOT / f"configs/model/{model}.yaml").read_text()
    number, unit = re.search(r"([\d.]+) (million|billion)", comment).groups()
    weights = float(number) * {"million": 1e6, "billion": 1e9}[unit]
    others = [("c4", hardware) for hardware in choices("hardware")]
    others += [(data, "h100x8") for data in choices("data")] * (model == "1b")
    for data, hardware in others:
        where = "flat_tokens.filespec=x.zarr" if data == "c4" else "hf_dataset.path=x"
        groups = f"model={model}", f"data={data}", f"hardware={hardware}"
        config = compose_config("pretrain", *groups, "paths.model_name=x", where)
        assert config.source() is (config.flat_tokens if data == "c4" else config.hf_dataset)
        mesh = abstract_mesh(config.mesh.axes)
        with jax.sharding.use_abstract_mesh(mesh):
            state, *_ = make_shapes(train.step_arguments(config), train.dimensions(config))
        count = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        assert f"{count:.3g}" == f"{weights:.3g}"


# Those of the first kind keep every shape on a square mesh but change the result; one branches on a
# length, which fits; JAX or Python reports the others.
WRONG_EDITS = edits.listed("""
=== a layer's gain gathered in the wrong order
--- swap norm_before: ops.all_gather("M/t/c/s -> M", gain)
ops.all_gather("M/c/s/t -> M", gain)
=== a weight gathered along the wrong axis
--- swap swiglu: ops.all_gather("M/c/s F/t -> M F/t", w.w_up)
ops.all_gather("M/c/s F/t -> M/c/s F", w.w_up)
=== a sum that is never paid
--- instead block: ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
=== a sum that is paid in full and not scattered
--- instead block: ops.psum_scatter("B/d L/c M {U:t} -> B/d L/c M/t", y)
y = ops.psum("B/d L/c M {U:t} -> B/d L/c M", y)
=== an owed sum in a logarithm
--- instead against_largest: sum_exp
=== a loss that is not summed over the batch
--- swap loss: ops.psum("{U:d,c} -> ", ops.reduce_sum("B/d l/c -> {U:d,c}", nats))
ops.reduce_sum("B/d l/c -> {U:d,c}", nats)
=== heads split over the other axis
--- swap block: ops.all_gather("M/c/s K/t D -> M K/t D", w.w_k)
ops.all_gather("K/d M/t D -> K/d M D", w.w_k.swapaxes(0, 1)).swapaxes(0, 1)
=== more decay by the length of a part
--- after training_step: update(kinds, state.weights, grads, state.mu, state.nu, hyper, config)
wide = config.model.d_model
weights = jax.tree.map(lambda w: 0.9 * w if w.shape[-1] == wide else w, weights)
=== a gain used without its gather
--- instead forward: return
x, routed = lax.scan(block, x, weights.layers)
return x * weights.final_norm, routed
=== a chunk of the sequence that meets all of it
--- swap loss: (log_sum - logit) * loss_mask
(log_sum - logit) * batch.loss_mask
=== a gradient that JAX doesn't have
--- swap against_largest: lax.stop_gradient(logits)
logits
=== a gradient that JAX finds missing only backward
--- instead swiglu: hidden
hidden = lax.while_loop(lambda h: h.max() > 9, jnp.sqrt, hidden).astype(compute.dtype)
=== a value that leaks from a scan
--- instead forward: return
seen = []
remember = lambda x, w: (seen.append(jnp.sin(x)), block(x, w))[1]
x, routed = lax.scan(remember, x, weights.layers)
return x + seen[0], routed
=== the number of devices
--- instead swiglu: hidden
hidden = hidden.astype(compute.dtype) / jax.device_count()
=== groups of 32
--- instead swiglu: hidden
most = hidden.reshape(*h.shape[:2], -1, 32).max(-1)
hidden = (hidden / (1 + jnp.repeat(most, 32, -1))).astype(compute.dtype)
=== a carry that starts the same everywhere
--- instead forward: return
twice = lambda both, w: ((x := block(both[0], w)[0], x), None)
(x, _), routed = lax.scan(twice, (x, jnp.zeros(x.shape, x.dtype)), weights.layers)
return x, routed
=== a field that isn't there, in a function of the standard library
--- swap block: norm_before(h, w.attention_norm, config)
functools.singledispatch(lambda w: w.w_upp)(w)
""")


@pytest.mark.parametrize("case", WRONG_EDITS)
def test_the_probe_explains_a_wrong_edit(case):
    module = mutations.load(edits.edited_source(WRONG_EDITS[case]), "train.py")
    config = config_of(module, "mesh={d: 2, t: 2}", "training.loss_chunks=4")
    with pytest.raises(UserError) as error:
        preflight.check_types(module, config)
    # JAX's messages differ between versions, and line numbers change with every edit.
    text = re.sub(r"    JAX says: .*", "    JAX says: ...", str(error.value))
    text = re.sub(r"(pcast\(\.\.\., )\([^)]*\)", r"\1AXES", text)  # in any order
    text = re.sub(r"https://\S+", "https://...", text.replace(f"{ROOT}/", ""))
    golden.check("probe.txt", case, text)


def test_a_mistake_of_the_probe_is_not_taken_for_one_of_the_source(monkeypatch):
    monkeypatch.setattr(layout, "SCOPE", None)
    found = r"\nlayout.py:\d+, in check\n.*\nAttributeError: 'NoneType'"
    with pytest.raises(UserError, match=found):
        preflight.check_types(train, config_of(train))


def test_importing_train_leaves_out_what_a_run_does_not_need():
    unneeded = {"datasets", "transformers", "optax"}
    script = f"import sys, train; print(*{unneeded} & set(sys.modules))"
    done = python("-c", script)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_python_without_asserts_is_refused(tmp_path):
    done = python("-O", "-m", "tools.flat_tokens_info", tmp_path)
    assert done.stderr.startswith("error: run Python without -O") and done.returncode == 1


def test_an_earlier_runs_metrics_are_kept(tmp_path):
    for config in "a", "b":
        (write,) = open_folder(tmp_path / "run", (), config, 0, 0)
        write({"step": 0, "loss": float("nan")})
    assert (tmp_path / "run/config.yaml").read_text() == "b"
    kept = sorted((tmp_path / "run").glob("metrics*.jsonl"))
    assert len(kept) == 2
    assert all(json.loads(path.read_text()) == {"step": 0, "loss": None} for path in kept)
