"""Tests that a run which is killed and restarted ends as if it had not been killed."""

import pathlib
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from data.tokenizer import open_tokenizer
from runtime.checkpoint import CheckpointError, Checkpoints, newest
from runtime.run import open_folder
from tests.files import arrays, name_tokenizer, rows, write_tokens
from tests.helpers import ROOT, SMALL
from tests.processes import python
from tests.torture import Kill, Torture

ARGUMENTS = ["--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}"]
ARGUMENTS += ["training.steps=10", "checkpoint_interval=3"]


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path, tmp_path_factory):
    """Runs a few of the kills of `make torture`, with its checks."""
    cache = tmp_path_factory.getbasetemp() / "compiled"
    torture = Torture(tmp_path, cache, steps=10, keep_last=1)

    text = torture.kill(1, Kill("write", 0, False, 0.07))  # while an array's zarr.json is written
    assert torture.newest == 0 and "resumed" not in text
    text = torture.kill(2, Kill("write", 1, True, 0.5))  # while one host writes a chunk
    assert torture.newest == 3 and "resumed" not in text and "\nsaved " in text
    text = torture.kill(3, Kill("row", 0, True, 0.3))
    assert torture.newest == 3 and "\nresumed at step 3 from " in text
    assert (torture.run / "metrics.jsonl").read_text().endswith('\n{"step": 5, "lo')
    # What the lost host left of a save goes first, and may be nearly a whole checkpoint.
    torture.kill(4, Kill("removal", 0, False, 1.1))
    assert torture.newest == 6, "the new one counts before the old one goes"
    torture.finish()
    assert torture.ends.total() == 2


@pytest.mark.slow
def test_a_finished_run_says_so_and_a_longer_one_goes_on(tmp_path, train_here):
    run = [*ARGUMENTS, f"paths.root_working_dir={tmp_path}", "paths.model_name=run"]
    short = [*run, "training.steps_for_lr=10", "training.steps=2"]
    train_here(*short)

    def written():
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != "lock"}

    before = written()
    for more, ends in (
        ("training.learning_rate=0.01", ""),
        ("training.learning_rate=0.02", ". It was trained with training.learning_rate=0.01"),
        ("flat_tokens.seed=7", ". It was trained with flat_tokens.seed=0"),
    ):
        out, message = train_here(*short, more)
        assert (out, message) == (
            "check=types: numbers are not checked\n"
            f"{tmp_path}/run is complete: all its steps are done. To continue it, raise "
            "training.steps, which training.steps_for_lr follows unless it is set. For a new run, "
            f"choose another paths.model_name{ends}\n",
            "",
        )
        assert before == written()

    out, message = train_here(*run, "model.d_ff=80")
    assert "has a different model: model.d_ff is 40 in the checkpoint but 80 here" in message
    assert before == written()

    out, message = train_here(*run, "mesh={d: 1, t: 4}", "training.steps=4")
    assert not message and "\nresumed at step 2 from " in out
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_with_muon_resumes_to_the_same_bits(tmp_path, train_here):
    run = [*ARGUMENTS, f"paths.root_working_dir={tmp_path}", "training.optimizer=muon"]
    run += ["training.steps_for_lr=6"]
    train_here(*run, "paths.model_name=whole", "training.steps=6")
    for steps in 3, 6:
        settings = "paths.model_name=parts", f"training.steps={steps}"
        out, message = train_here(*run, *settings)
        assert not message
    assert "\nresumed at step 3 from " in out
    ends = (tmp_path.glob(f"{name}/checkpoints/00000006.*") for name in ("whole", "parts"))
    whole, parts = (arrays(*end) for end in ends)
    (line,) = re.findall("^AdamW updates (.*); Muon the rest$", out, re.MULTILINE)
    by_adamw = {name.removeprefix("nu/") for name in whole if name.startswith("nu/")}
    assert whole == parts and {*line.split(", ")} == by_adamw
    norms = {"layers/attention_norm", "layers/mlp_norm", "final_norm"}
    assert by_adamw == {"embed", "unembed", *norms}
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    _, message = train_here(*run, "paths.model_name=parts", "training.optimizer=adamw")
    assert "has a different optimizer: nu/layers/" in message


def test_other_rows_are_refused(tmp_path, train_here):
    """A batch of flat tokens is chosen by its number: with another size, rows would come again."""
    run = [*ARGUMENTS, f"paths.root_working_dir={tmp_path}", "paths.model_name=run"]
    train_here(*run, "training.steps=2")
    before = arrays(*(tmp_path / "run/checkpoints").glob("*"))
    config = (tmp_path / "run/config.yaml").read_text()
    copy = shutil.copytree(ROOT / "data/synthetic.zarr", tmp_path / "copy.zarr")
    one, other = (f"{{filespec: {x}, weight: " for x in ("data/synthetic.zarr", copy))
    mixed = f"flat_tokens.mixture=[{one}3}}, {other}1}}]", "flat_tokens.filespec=null"
    for key, value, *change in (
        ("training.tokens.batch", 16), ("training.tokens.len", 24), ("flat_tokens.seed", 7),
        ("flat_tokens.mixture", [0.75, 0.25], *mixed),
    ):  # fmt: skip
        out, message = train_here(*run, *(change or [f"{key}={value}"]), "training.steps=3")
        problem = rf"was written with {re.escape(key)}.*, now {re.escape(str(value))}: "
        assert re.search(problem, message)
        assert "flat_tokens.other_rows=true" in message and "resumed at" not in out
        assert arrays(*(tmp_path / "run/checkpoints").glob("*")) == before
        assert (tmp_path / "run/config.yaml").read_text() == config
    accepted = "flat_tokens.seed=7", "flat_tokens.other_rows=true"  # with the same program
    out, message = train_here(*run, *accepted, "training.steps=3")
    assert not message and "\nresumed at step 2 from " in out
    assert re.search(r"^note: .* was written with flat_tokens.seed=0, now 7$", out, re.MULTILINE)


@pytest.mark.slow
def test_a_dataset_that_has_become_another_is_refused(tmp_path, train_here):
    """Under the same name, with another tokenizer, other tokens, or another number of them; or with
    the datasets of a mixture in another order."""
    tokens = {"one": np.arange(200), "other": np.arange(210), "as_long": np.arange(200)[::-1]}
    paths = [write_tokens(f"{tmp_path}/{name}.zarr", [ids % 128]) for name, ids in tokens.items()]
    run = [*ARGUMENTS, "mesh={d: 1, t: 1}", f"paths.root_working_dir={tmp_path}"]
    one, other, as_long = paths
    both = [f"{{filespec: {path}, weight: 1}}" for path in (one, other)]
    mixed, turned = (
        ["flat_tokens.filespec=null", f"flat_tokens.mixture=[{','.join(order)}]"]
        for order in (both, both[::-1])
    )
    for name, begun, changed, message in (
        ("single", [f"flat_tokens.filespec={one}"], [f"flat_tokens.filespec={other}"],
         "the datasets' tokens=[200], now [210]: "),
        ("as long", [f"flat_tokens.filespec={one}"], [f"flat_tokens.filespec={as_long}"],
         "the datasets' samples=["),
        ("mixed", mixed, turned, "the datasets' tokens=[200, 210], now [210, 200]: "),
    ):  # fmt: skip
        run_of = [*run, f"paths.model_name={name}"]
        train_here(*run_of, *begun, "training.steps=1")
        _, refused = train_here(*run_of, *changed, "training.steps=2")
        assert message in refused and "flat_tokens.other_rows=true" in refused
    accepted = [*run_of, *turned, "flat_tokens.other_rows=true", "training.steps=2"]
    out, refused = train_here(*accepted)
    assert not refused and "\nresumed at step 1 from " in out
    run_of = [*run, f"flat_tokens.filespec={one}", "paths.model_name=tokenized"]
    known = open_tokenizer("bytes_utf8").vocabulary
    for steps, tokenizer, vocabulary, message in (
        (1, "bytes_utf8", known, ""),
        (2, "bytes_utf8", "other", "the tokenizer bytes_utf8 has changed since"),
        (2, "gone", "", " is bytes_utf8, the dataset's is gone: "),
    ):
        name_tokenizer(one, tokenizer, vocabulary)
        _, refused = train_here(*run_of, f"training.steps={steps}")
        assert message in refused and bool(message) == bool(refused)


@pytest.mark.slow
def test_a_validation_split_that_has_become_another_is_noted(tmp_path, train_here):
    path = write_tokens(tmp_path / "x.zarr", [np.arange(200) % 128])
    run = [*ARGUMENTS, "mesh={d: 1, t: 1}", f"paths.root_working_dir={tmp_path}"]
    run += [f"flat_tokens.filespec={path}", "training.validation_interval=1"]
    run += ["paths.model_name=run", "training.validation_batches=1"]
    for steps, noted in (1, False), (2, False), (3, True):
        if noted:
            shutil.rmtree(f"{path}/validation")
            write_tokens(path, [np.arange(200)[::-1] % 128], ["validation"])
        out, refused = train_here(*run, f"training.steps={steps}")
        assert not refused and ("note: the validation split has changed" in out) == noted


RING = ["{d: 4, t: 2, r: 2}", "{d: 2, t: 1, r: 2, c: 4}", "{d: 1, t: 1}"]


@pytest.mark.slow
def test_a_run_that_goes_on_on_a_ring_of_layouts_has_the_losses_of_one_device(tmp_path):
    """Losses differ by 4e-4 at most in 12 steps, by rounding in bf16."""
    run = ["-m", "train", "--config-name=local_test_synthetic", *SMALL, "training.steps_for_lr=12"]
    run += [f"paths.root_working_dir={tmp_path}", "training.tokens.len=48"]

    def start(name, steps, layout):
        part = [f"paths.model_name={name}", f"training.steps={steps}", f"mesh={layout}"]
        done = python(*run, *part, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    start("one", 12, "{d: 1, t: 1}")
    for i, layout in enumerate(RING, 1):
        out = start("ring", 4 * i, layout)
        assert (f"\nresumed at step {4 * i - 4} from " in out) == (i > 1)
    wanted, losses = ([row["loss"] for row in rows(tmp_path / name)] for name in ("one", "ring"))
    assert wanted[-1] < wanted[0] - 0.3
    assert losses == pytest.approx(wanted, rel=2e-3)


# The text, and the steps whose rows are kept at a start from step 2.
METRICS = {
    "a last row without an end of line": ('{"step": 0}\n{"step": 1}', [0, 1]),
    "rows": ('{"step": 0}\n{"step": 1}\n{"step": 2}\n', [0, 1]),
    "a row cut short": ('{"step": 0}\n{"step": 1}\n{"st', [0, 1]),
    "a damaged row": ('{"st"\n{"step": 1}\n{"step": 2}\n', [1]),
    "zeros, as a power failure leaves them": ('{"step": 0}\n' + "\0" * 99 + "\n", [0]),
    "a step out of order": ('{"step": 0}\n{"step": 9}\n{"step": 1}\n', [0, 1]),
    "brackets": ('{"step": 0}\n' + "[" * 10**5 + '\n{"step": 1}\n', [0, 1]),
}


@pytest.mark.parametrize("case", METRICS)
def test_what_is_kept_of_the_metrics(case, here, capsys):
    text, kept = METRICS[case]
    folder = pathlib.Path("runs/run")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    (write,) = open_folder(folder, (), "", 2, 2)
    assert [row["step"] for row in rows(folder)] == kept
    others = [other.read_text() for other in folder.glob("metrics.*.jsonl")]
    damaged = case in ("a damaged row", "zeros, as a power failure leaves them", "brackets")
    assert others == ([text] if damaged else [])
    assert (".jsonl: 1; metrics." in capsys.readouterr().out) == damaged
    write({"step": 2, "loss": 1.5})
    assert rows(folder)[-1] == {"step": 2, "loss": 1.5}


def test_checkpoints_that_are_elsewhere_are_named(tmp_path, capsys):
    """A later start may leave out checkpoints.root."""
    folder, elsewhere = tmp_path / "run", f"{tmp_path}/bucket/run/checkpoints"
    for root in f"{tmp_path}/bucket", "":
        settings = f"checkpoints: {{root: '{root}'}}\npaths: {{model_name: run}}\n"
        open_folder(folder, (), settings, 0, 0)
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
        with pytest.raises(CheckpointError) as refused:
            newest(str(folder))
        assert (f"by its config.yaml they are in {elsewhere}" in str(refused.value)) == bool(root)
    assert f"; the earlier checkpoints may be in {elsewhere}\n" in capsys.readouterr().out


def test_only_a_source_with_positions_needs_as_many_hosts():
    one = SimpleNamespace(path="x", metadata={"positions": [None, None]})
    assert Checkpoints.position(SimpleNamespace(newest=one)) is None
    one.metadata["positions"][1] = {"used": 1}
    with pytest.raises(CheckpointError, match="resume with as many, not 1"):
        Checkpoints.position(SimpleNamespace(newest=one))


def test_a_start_killed_while_it_writes_the_config_harms_no_later_one(tmp_path, monkeypatch):
    write = pathlib.Path.write_bytes

    def killed(path, content):
        write(path, content[:24])
        raise KeyboardInterrupt

    config = "model:\n  d_model: 32\n  n_q_per_kv: 2\n"
    open_folder(tmp_path / "run", (), config, 0, 0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pathlib.Path, "write_bytes", killed)
        open_folder(tmp_path / "run", (), config, 2, 2)
    open_folder(tmp_path / "run", (), config, 2, 2)
    assert (tmp_path / "run/config.yaml").read_text() == config
