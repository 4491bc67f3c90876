"""Tests when the checks before the first step run, and what they say."""

import os
import sys
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

import train
from checks import numbers, preflight, trials
from runtime.devices import make_mesh
from runtime.run import MeshConfig
from shardlib.errors import ShardTypeError, UserError
from tests.helpers import ROOT, compose_config, config_of, edited, slow_but_for, small_config


class Running:
    """Takes the place of the processes that compute the numbers."""

    made: ClassVar[list["Running"]] = []
    warning = note = held = ""
    along: ClassVar[set[str]] = set()

    def __init__(self, _, configs):
        self.configs, self.closed = configs, False
        self.made.append(self)

    def verdict(self, _):
        return self.warning

    def close(self):
        self.closed = True


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Returns a function that runs the checks of a config, and returns which did run."""
    monkeypatch.setattr(preflight, "TinyRuns", Running)
    # Each call stands for a start of the program.
    monkeypatch.setattr(preflight, "source_digest", preflight.source_digest.__wrapped__)
    monkeypatch.setattr(preflight, "cache_folder", lambda: str(tmp_path / "cache"))

    def run(*overrides):
        ran: list[str] = []
        found = lambda *_: ((ran.append("types"), []), Running.held)  # noqa: E731
        monkeypatch.setattr(preflight, "check_types", found)
        monkeypatch.setattr(preflight, "untried", lambda *_: Running.note)
        monkeypatch.setattr(preflight, "communicating", lambda *_: Running.along)
        Running.made.clear()
        with preflight.begun(train, small_config("check=numbers", *overrides)) as wait:
            wait()
        assert all(running.closed for running in Running.made)
        return ran + ["numbers"] * len(Running.made)

    return run


def of_the_host(sender, *_):
    """Takes the place of run_tiny, in the processes that it runs in."""
    sender.send({"read": [os.environ["SLURM_PROCID"], hash("text")]})


def test_what_hosts_read_of_their_environment_differs_between_the_processes(monkeypatch):
    """Else two hosts could compute something else than the check did."""
    monkeypatch.setattr(preflight, "run_tiny", of_the_host)
    tiny = preflight.TinyRuns(train, [small_config()] * 2)
    one, other = (each["read"] for each in tiny.results(lambda: False))
    tiny.close()
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_what_has_passed_is_not_checked_again(checked, tmp_path, monkeypatch):
    both = ["types", "numbers"]
    assert checked() == both and checked() == []
    for other in "paths.model_name=other", "hlo_svg=true", "profile=true", "io.max_io_threads=3":
        assert checked(other) == [], other
    sizes = "training.learning_rate=0.3", "training.steps=77", "model.d_model=64", "mesh.d=2"
    for other in *sizes, "training.skip_steps=[2]", "training.validation_interval=7":
        assert checked(other) == ["types"] and checked(other) == [], other
    for other in "model.norm_eps=1e-5", "training.microbatches=2", "metrics.norms_interval=5":
        assert checked(other) == both and checked(other) == [], other
    assert checked("metrics.norms_interval=6") == []
    file = tmp_path / "mine.py"
    file.write_text("WIDTH = 1\n")
    monkeypatch.setitem(sys.modules, "mine", module := types.ModuleType("mine"))
    module.__file__ = str(file)
    assert checked() == both and checked() == []
    file.write_text("WIDTH = 2\n")
    assert checked() == both


def test_what_is_skipped_is_said(checked, capsys):
    assert checked("check=types") == ["types"] and checked("check=types") == []
    assert "check=types: numbers are not checked" in capsys.readouterr().out
    assert checked("check=none") == []
    assert "check=none: types and numbers are not checked" in capsys.readouterr().out
    assert checked() == ["types", "numbers"], "numbers need the step's trace"
    with pytest.raises(UserError, match=r"check=no: choose from numbers, noted, types, none"):
        small_config("check=no")


def test_types_that_hold_on_this_mesh_alone_are_no_pass_for_other_levels(checked, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Running, "held", "types hold only with c=1")
        assert checked("check=noted") == ["types", "numbers"]
    assert checked("check=types") == ["types"]


def test_all_hosts_wait_for_the_check_of_the_first_and_end_as_it_does(monkeypatch):
    monkeypatch.setattr(preflight, "of_all_hosts", lambda own: ["numbers change", own])
    refused = pytest.raises(UserError, match="numbers change")
    with preflight.begun(train, small_config("check=none")) as wait, refused:
        wait()


def test_a_warning_comes_at_each_start(checked, capsys, monkeypatch):
    monkeypatch.setattr(Running, "warning", "generation differs")
    for ran in ["types", "numbers"], []:
        assert checked() == ran
        assert "warning: generation differs" in capsys.readouterr().out


def test_what_does_not_pass_is_checked_again(checked, monkeypatch):
    def refuse(*_):
        raise UserError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Running, "verdict", refuse)
        for _ in range(2):
            with pytest.raises(UserError, match="no"):
                checked()
            assert Running.made[0].closed
    assert checked() == ["types", "numbers"]


def test_the_configs_that_are_compared():
    one, other = preflight.tiny(train, small_config())
    assert (one.mesh, other.mesh) == (MeshConfig(1, 1), MeshConfig(2, 3))
    assert one.model == other.model
    made = preflight.tiny(train, small_config("training.loss_chunks=4", "mesh.d=2"))
    assert [config.training.loss_chunks for config in made] == [1, 3]


def test_an_axis_along_which_values_are_passed_has_four_parts(checked, monkeypatch):
    monkeypatch.setattr(Running, "along", {"r", "s"})
    assert checked() == ["types", "numbers", "numbers"]
    meshes = [running.configs[-1].mesh.axes for running in Running.made]
    assert meshes == [{"r": 1, "s": 2, "c": 1, "t": 3}, {"r": 1, "s": 4, "c": 1, "t": 1}]


def test_steps_are_tried_without_targets_or_a_clip_and_at_first_with_a_fresh_states_values():
    added = ("nu: Subset[Stored]", 'more: f32[""]\n    nu: Subset[Stored]')
    module = edited("train.py", added, ("weights, weights, nu)", 'weights, weights, f32[""], nu)'))
    config = preflight.tiny(module, config_of(module))[-1]
    with jax.set_mesh(make_mesh(dict.fromkeys(config.mesh.axes, 1))):
        fresh = jax.device_get(train.init_state(config))
        fresh = module.State(fresh.step, fresh.weights, fresh.mu, np.zeros((), "f"), fresh.nu)
        found = [*trials.of_training(module, config, fresh, numbers.stirred(fresh), 1)]
    steps = [arrays for name, _, arrays, _ in found if name.startswith("training_step")]
    targets = [batch.loss_mask.reshape(config.mesh.d, -1).any(1) for _, batch, _ in steps]
    assert [[*each] for each in targets] == [[True, True]] * 3 + [[True, False]]
    assert [bool(np.isinf(hyper.grad_clip)) for *_, hyper in steps] == [False, False, True, False]
    assert [bool(state.more) for state, *_ in steps] == [True, False, True, True]


def test_what_the_source_remembers_is_of_the_mesh_that_it_trains_on():
    remembers = "@functools.cache\ndef devices():\n    return lax.axis_size('t')\n\n\n"
    divides = f"{ACTIVATION}\n    hidden = hidden / devices()"
    module = edited("train.py", (STEP, remembers + STEP), (ACTIVATION, divides))
    preflight.probe(module, config_of(module, "mesh={d: 2, t: 2}"))
    assert module.devices() == 2


def test_what_tiny_runs_do_not_try_must_be_accepted(checked, capsys, monkeypatch):
    monkeypatch.setattr(Running, "note", "somewhere")
    for _ in range(2):
        with pytest.raises(UserError, match=r"somewhere\. If .* accept it with check=noted"):
            checked()
    assert checked("check=noted") == [] and "note: somewhere\n" in capsys.readouterr().out
    assert checked("check=types") == [] and "somewhere" not in capsys.readouterr().out


ACTIVATION = "hidden = hidden.astype(compute.dtype)"
BRANCHES = {
    "h.shape[1] > 40": "training.tokens.len=48",
    "compute.dtype == jnp.bfloat16": "dtype=bf16",
    "w.w_up.shape[1] % 64 == 0": "model.d_ff=64",
    "h.shape[0] == 1": "training.tokens.batch=1",
}


def test_functions_of_one_name_in_two_modules_are_both_tried(monkeypatch):
    monkeypatch.setattr(trials.types, "shard_mapped", {*trials.types.shard_mapped})
    other = types.ModuleType("variants.other")
    monkeypatch.setitem(sys.modules, "variants.other", other)
    source = "from shardlib.types import f32, typed_shard_map\n\n@typed_shard_map\n"
    exec(source + "def validation_step(x: f32['']) -> f32['']:\n    return x", vars(other))
    names = {"validation_step", "variants.other.validation_step"}
    assert names <= trials.beside_the_step(train).keys()


def test_a_branch_of_another_function_that_tiny_runs_do_not_take_is_named():
    whole, length = "nats.sum()}", "config.training.tokens.len"
    branch = f"nats.sum() if {length} < 48 else nats.max()}}"
    module = edited("train.py", (whole, branch))
    assert untried(module, config_of(module, "training.tokens.len=16")) == ""
    found = untried(module, config_of(module, "training.tokens.len=96"))
    assert (
        "in validation_step: this config computes reduce_max, but reduce_sum at the tiny" in found
    )


def untried(module, config):
    """Returns the check's note on a config that computes something that the tiny runs don't."""
    return preflight.untried(module, config, *preflight.probe(module, config)[1:])


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_tiny_runs_do_not_take_is_named(branch):
    code = f"if {branch}:\n        hidden = jnp.tanh(hidden)"
    module = edited("train.py", (ACTIVATION, f"{ACTIVATION}\n    {code}"))
    settings = "mesh={d: 1, t: 1}", "training.tokens={batch: 6, len: 20}", "dtype=f32"
    small = *settings, "model.d_ff=60"
    assert untried(module, config_of(module, *small)) == ""
    found = untried(module, config_of(module, *small, BRANCHES[branch]))
    assert ", in swiglu: this config computes tanh, but " in found


SCAN = "return lax.scan(block, x, weights.layers, unroll=unroll)"
LOOP = """for i in range(config.layers):
        x, routed = block(x, jax.tree.map(lambda array: array[i], weights.layers))
    return x, routed"""
BY_LAYER = """
@functools.partial(jax.jit, static_argnames="config")
@typed_shard_map
def by_layer(weights: Stored, config: Config) -> f32["layers M/t/c/d"]:
    return jnp.stack([weights.layers.mlp_norm[i] for i in range(config.model.layers)])


"""


def test_a_loop_in_python_goes_over_as_many_layers_as_the_config_has():
    """The other sizes of the probe would take hours: it has half a million layers."""
    for edit in (SCAN, LOOP), (STEP, BY_LAYER + STEP):
        module = edited("train.py", edit)
        assert untried(module, config_of(module)) == ""


SWAPPED = {
    "hidden = jax.nn.silu(": ("gate", "up"),
    "sin, cos = sin[:, :, None]": ("sin", "cos"),
    "root = jnp.sqrt(v": ("m", "v"),
    "mixed = attention(": ("k", "v"),
}


@pytest.mark.parametrize("line", SWAPPED)
def test_operands_that_depend_on_the_mesh_are_named(line):
    """The tiny runs split t into three."""
    a, b = SWAPPED[line]
    swap = f"{a}, {b} = ({b}, {a}) if lax.axis_size('t') > 3 else ({a}, {b}); "
    module = edited("train.py", (line, swap + line))
    sizes = "model={n_kv: 4, vocab: 512}", "mesh={d: 1, t: 2}"
    preflight.probe(module, config_of(module, *sizes))
    with pytest.raises(ShardTypeError, match="of other values on one device"):
        preflight.probe(module, config_of(module, *sizes, "mesh.t=4"))


def test_a_transpose_that_tiny_runs_do_not_take_is_named():
    """Other heads come first on a device than in the whole."""
    whole = 'w_o = ops.all_gather("M/c/s Q K/t D'
    code = "mixed = mixed.swapaxes(2, 3).reshape(mixed.shape) if config.d_ff >= 1024 else mixed"
    module = edited("train.py", (whole, f"{code}\n        {whole}"))
    small = untried(module, config_of(module, "model.d_ff=512"))
    found = untried(module, config_of(module, "model.d_ff=1024"))
    assert ": this config computes a transpose or reshape, but none at" in found and not small


def test_nan_on_one_device_is_no_difference_between_meshes(monkeypatch):
    monkeypatch.setattr(preflight.TinyRuns, "start", lambda *_: None)
    made = {"validation_step": {"nats": np.float32([1, np.nan])}}
    monkeypatch.setattr(preflight.TinyRuns, "results", lambda *_: [made, made])
    with pytest.raises(UserError, match="NaN is in nats of validation_step even on one "):
        preflight.TinyRuns(train, [small_config()]).verdict(lambda: False)


def test_a_program_that_python_runs_as_a_file_is_checked(monkeypatch):
    monkeypatch.setattr(preflight.TinyRuns, "start", lambda *_: None)
    monkeypatch.setattr(train, "__spec__", None)
    assert preflight.TinyRuns(train, [small_config()]).program == "train"


NATS = "nats = (log_sum - logit) * loss_mask"
ROWS = "nats.shape[0] % 7 + 1"  # 64 in all, 16 on a device
LIMITS = [
    ("1e4 / config.mesh.t", "min with 5000, but min with 10000 on one device. "),
    ("config.training.tokens.len // config.mesh.t", "min with 32, but min with 64 on one device. "),
    (f"jax.lax.top_k(jnp.arange(9.0), {ROWS})[0][0]", "top_k with k=3, but top_k with k=2"),
    (f"jnp.asarray(numpy.full(3, {ROWS})).max()", "reduce_max with numbers of checksum "),
    ("lax.fori_loop(0, nats.shape[0] // 64, lambda _, x: x + 1, 9.0)", "scan with length=0, but "),
    (
        "jnp.pad(jnp.ones(9), (nats.shape[0] // 64, 0))[0]",
        "pad with 1, 0, but pad with 1, 0, 1 bef",
    ),
]


@pytest.mark.parametrize("limit, named", LIMITS)
def test_a_number_that_depends_on_the_mesh_is_named(limit, named):
    """Tries operands, parameters of primitives and an array made by NumPy, hidden by tiny sizes."""
    edit = (NATS, f"import numpy\n        {NATS}\n        nats = jnp.minimum(nats, {limit})")
    module = edited("train.py", edit)
    config = config_of(module, "training.tokens={batch: 64, len: 64}")
    found = untried(module, config).replace(".0", "")  # jax 0.12 keeps integers as they are
    assert f", in loss: a number depends on the mesh: {named}" in found


def test_a_key_made_outside_of_the_step_is_no_number():
    noise = f"{NATS}\n        nats += jax.random.uniform(KEY, ())"
    top = "# --- Loss"
    module = edited("train.py", (NATS, noise), (top, f"KEY = jax.random.key(7)\n{top}"))
    assert untried(module, config_of(module)) == ""


STEP = '@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")'
LOOPS = """
@jax.jit
@typed_shard_map
def averaged({}) -> Stored:
    return jax.tree.map(lambda a, w: a + {}, average, weights)


"""


def loop_calls(arguments, added):
    module = edited("train.py", (STEP, LOOPS.format(arguments, added) + STEP))
    return module, config_of(module)


def test_a_function_that_only_the_loop_calls_is_tried():
    module, config = loop_calls("average: Stored, weights: Stored", "0.1 * (w - a)")
    assert untried(module, config) == ""
    with jax.set_mesh(make_mesh(dict.fromkeys(config.mesh.axes, 1))):
        tiny = preflight.tiny(module, config)[0]
        state = numbers.stirred(module.init_state(tiny))
        found = trials.of_training(module, tiny, state, state, 1)
        ((_, _, (average, weights)),) = [each for each in found if each[0] == "averaged"]
    assert average is not weights
    module, config = loop_calls("average: Stored, weights: Stored", "w / w.sum()")
    with pytest.raises(ShardTypeError, match=r", in averaged: reduce_sum over V/t"):
        preflight.probe(module, config)
    module, config = loop_calls("average: Stored, weights: Stored, every: int", "w")
    assert untried(module, config) == "averaged isn't checked: nothing fits its parameter every"


@pytest.mark.parametrize("mapped", ["typed_shard_map(print)", "jax.shard_map(print)"])
def test_a_function_that_the_loop_maps_over_devices_is_named(mapped):
    kinds = "kinds = state_type(config)"
    module = edited("train.py", (f"{kinds}\n", f"{kinds} or {mapped}\n"))
    assert untried(module, config_of(module)).startswith("fresh_state maps an unchecked function")


@pytest.mark.parametrize("mesh, added", [("{d: 2, t: 1}", True), ("{d: 2, t: 2}", False)])
def test_an_edit_that_is_right_on_this_mesh_alone(mesh, added):
    module = edited("train.py", (ACTIVATION, f"{ACTIVATION}\n    hidden = jax.nn.softmax(hidden)"))
    with pytest.raises(UserError, match=r"use ops.reduce_max") as error:
        preflight.check_types(module, config_of(module, f"mesh={mesh}"))
    line = "They hold with r=1, c=1, t=1, as in this config: check=none trains it, and compares no"
    assert (line in str(error.value)) == added


def test_an_edit_that_is_right_if_rows_are_not_split():
    """The tiny runs don't split them either."""
    module = edited("train.py", (ACTIVATION, f"{ACTIVATION}\n    hidden = jnp.cumsum(hidden, 1)"))
    with pytest.raises(UserError, match=r"as in this config: in training, check=noted"):
        preflight.check_types(module, config_of(module))
    _, held = preflight.check_types(module, config_of(module), noted=True)
    assert held == "types hold only with r=1, c=1"


CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*_*.yaml"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", slow_but_for(["local_test_synthetic"], CONFIGS))
def test_no_config_gets_a_note(name, optimizer):
    """The step of a config of the repository is that of its tiny runs, with the same numbers on any
    mesh, so a line that warns of something else would be a false alarm."""
    path = ["hf_dataset.path=x"] if name.startswith(("local_stream", "fineweb_edu")) else []
    settings = "paths.model_name=x", f"training.optimizer={optimizer}", *path
    config = compose_config(name, *settings)
    assert untried(train, config) == ""
