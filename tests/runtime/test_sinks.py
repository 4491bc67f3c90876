"""Tests the sinks of metrics: files, TensorBoard, Weights & Biases."""

import resource
import shutil
import sys
import time
import types

import jax
import numpy as np
import pytest

import train
from runtime import sinks
from runtime.checkpoint import named
from runtime.run import open_folder
from shardlib.errors import UserError
from tests.files import rows, timed_rows
from tests.helpers import edited, mesh, small_config, small_run, take_step
from tests.runtime.test_run import begun, metrics, take

CONFIG = "model:\n  layers: 2\n"


@pytest.mark.slow
def test_norms_are_those_of_each_tensor_and_layer():
    """Compares norms with numpy's, for weights that are split over both axes."""
    config = small_config("model.vocab=128", "metrics.norms_interval=1", "mesh={d: 2, t: 4}")
    with jax.set_mesh(mesh(2, 4)):
        loader, _ = train.open_batches(config, train.dimensions(config))
        ((_, batch),) = loader.from_step(0, 1)
        state = train.init_state(config)
        before = jax.device_get(state.weights)
        grads = jax.device_get(train.gradients(state.weights, batch, config))
        state, logged = take_step(train, state, batch, config)
        after = jax.device_get(state.weights)
    actual = {
        "/".join(map(str, (name, *index))): norm
        for name, norms in logged.items()
        for index, norm in np.ndenumerate(norms)
        if "/" in name
    }
    wanted = {}
    updates = jax.tree.map(np.subtract, after, before)
    for what, tree in ("grad", grads), ("weight", after), ("update", updates):
        for name, value in named(tree).items():
            parts = enumerate(value) if name.startswith("layers/") else [("", value)]
            for i, part in parts:
                norm = np.linalg.norm(np.asarray(part, np.float64))
                wanted[f"{what}_norm/{name}/{i}".rstrip("/")] = norm
    assert actual.keys() == wanted.keys() and len(wanted) == 3 * (3 + 2 * 9)
    for name in wanted:
        assert actual[name] == pytest.approx(wanted[name], rel=1e-2), name  # bf16, in another order
    total = np.sqrt(sum(actual[name] ** 2 for name in actual if name.startswith("grad_norm/")))
    assert total == pytest.approx(float(logged["grad_norm"]), rel=1e-5)


@pytest.mark.slow
def test_tensorboard_has_each_row_once(tmp_path, monkeypatch):
    """The run does three steps, goes on from the second one, and ends after four."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def log(first, end):
        settings = "metrics={to: [tensorboard], norms_interval: 2}"
        with begun(tmp_path, settings, first=first, steps=end) as run:
            for step in range(first, end):
                take(run, step, metrics(10 * end + step, **{"grad_norm/x": step}))
            assert run.end() == 0

    log(0, 3)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e6)  # of a machine whose clock is behind
    log(1, 4)
    events = accumulator.EventAccumulator(str(tmp_path / "r/tensorboard"))
    events.Reload()
    logged = timed_rows(tmp_path / "r")
    assert [row["loss"] for row in logged] == [30, 41, 42, 43]
    assert ["grad_norm/x" in row for row in logged] == [False, True, False, True]
    for name in logged[-1]:
        actual = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(row["step"], row[name]) for row in logged if name in row]
        assert actual == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted], name
    (text,) = [event for event in events.Tensors("config/text_summary") if event.step == 0]
    assert b"d_model: 32" in text.tensor_proto.string_val[0]


def test_rows_that_a_sink_refused_come_later_and_others_get_them_at_once(tmp_path, monkeypatch):
    """The first sink fails from row 1 on, and has recovered when the run ends."""
    order, full = [], [True]

    def sink(name):
        def log(row):
            if name == "a" and row["step"] == 1 and full[0]:
                raise ValueError("no room")
            order.append((name, row["step"]))

        return lambda *_: log

    monkeypatch.setattr("runtime.run.SINKS", {"tensorboard": sink("a"), "wandb": sink("b")})
    with begun(tmp_path, "metrics.to=[tensorboard,wandb]") as run:
        for step in range(3):
            take(run, step, metrics())
        run.flush()
        full[0] = False
        with pytest.raises(UserError, match=r"^step 1 can't be logged: no room; stopped after "):
            run.end()
    assert order == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("a", 1), ("a", 2)]


@pytest.mark.parametrize("name", ["json_lines", "tensorboard"])
def test_a_row_that_does_not_fit_on_the_disk_is_refused_whole(name, tmp_path, monkeypatch):
    """A limit of the size of files stands for a full disk."""
    log = getattr(sinks, name)(tmp_path, 0, CONFIG)
    log({"step": 0, "loss": 1.0})
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))
    try:
        with pytest.raises(OSError):
            log({"step": 1, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if name == "json_lines":
        assert file.read_bytes() == before
        log({"step": 1, "loss": 2.0})
        assert file.read_bytes() == before + b'{"step": 1, "loss": 2.0}\n'


def test_wandb_goes_on_in_the_run_that_was_begun(tmp_path, monkeypatch):
    """The package isn't installed: the test looks at the calls to a fake one."""
    asked, logged = [], []

    def init(**settings):
        asked.append(settings)
        return types.SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    folder = tmp_path / "swept" / "training.seed=1,mesh={d:1,t:1}"  # as a sweep names one
    folder.mkdir(parents=True)
    for first_step in 0, 3, 0:
        for write in open_folder(folder, ("wandb",), CONFIG, first_step, first_step):
            write({"step": first_step, "loss": 1.5})
    copied = shutil.copytree(folder, tmp_path / "swept" / "copied")
    copied_sweep = shutil.copytree(tmp_path / "swept", tmp_path / "copied")
    for copy in copied, copied_sweep / folder.name:
        open_folder(copy, ("wandb",), CONFIG, 3, 3)
    one, resumed, anew, *copies = (settings["id"] for settings in asked)
    assert one == resumed and len({one, anew, *copies}) == 4
    assert one.isalnum(), "W&B refuses ids with any of :;,#?/'"
    assert asked[0]["name"] == folder.name
    assert asked[0]["config"] == {"model": {"layers": 2}} and asked[0]["resume"] == "allow"
    assert logged == [{"step": step, "loss": 1.5} for step in (0, 3, 0)]


def test_a_sink_that_is_not_there_is_told_before_compiling(tmp_path, train_here, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it weren't installed
    run = small_run(tmp_path)
    monkeypatch.setattr("checks.preflight.probe", None)  # nothing may be traced
    out, message = train_here(*run, "metrics.to=[mlflow]")
    assert (out, message) == ("", "error: metrics.to[0]=mlflow: choose from tensorboard, wandb")
    assert not list(tmp_path.iterdir())
    out, message = train_here(*run, "metrics.to=[wandb]")
    assert message == "error: metrics.to=[wandb] needs a package: pip install wandb"
    assert not [*tmp_path.iterdir()]


def test_another_destination_is_a_function(tmp_path, capsys, monkeypatch):
    """Adds a sink as the module's docstring describes."""
    line = "SINKS: dict[str, Callable[[pathlib.Path, int, str], Callable[[Row], None]]] = {\n"
    mine = "def printed(*_):\n    return lambda row: print(row['loss'])\n\n\n"
    module = edited("runtime/sinks.py", (line, mine + line + '    "printed": printed,\n'))
    monkeypatch.setattr("runtime.run.SINKS", module.SINKS)
    for write in open_folder(tmp_path / "run", ("printed",), CONFIG, 0, 0):
        write({"step": 0, "loss": 1.5})
    assert capsys.readouterr().out == "1.5\n" and rows(tmp_path / "run")[0]["loss"] == 1.5
