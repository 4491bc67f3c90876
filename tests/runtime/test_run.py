"""Tests Run by itself: the rows it writes, what counts as a step's time, and what ends it."""

import contextlib
import operator
import shutil
import subprocess

import jax
import numpy as np
import pytest
import yaml

from runtime import run as module
from runtime.run import Run
from runtime.supervise import locked
from shardlib.errors import UserError
from tests.files import rows, timed_rows
from tests.helpers import compose_config, mesh, small_config
from tools.huggingface_to_flat_tokens import ConvertConfig

STEPS = 4


@pytest.fixture
def clock(monkeypatch):
    """A fake clock for Run: a list with the current time in seconds."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


class Later:
    """A number whose value is ready only after `wait()`."""

    def __init__(self, value, wait):
        self.value, self.wait = value, wait

    def __float__(self):
        self.wait()
        return float(self.value)


@contextlib.contextmanager
def begun(tmp_path, *overrides, first=0, steps=STEPS, max_skipped=0):
    config = small_config(f"paths.root_working_dir={tmp_path}", "paths.model_name=r", *overrides)
    with (
        jax.set_mesh(mesh(1, 1)),
        Run(config, first, first, steps, tokens=100, flops=1, max_skipped=max_skipped) as run,
    ):
        yield run


def metrics(loss=1.0, skipped=0, **more):
    return {"loss": loss, "grad_norm": 1.0, "skipped": skipped, **more}


def take(run, step, values):
    """Takes a step that needs no time."""
    with run.step(step, 0.0):
        pass
    run.log(step, values)


def test_a_steps_time_has_its_wait_for_data_but_no_validation_and_no_save(tmp_path, clock, capsys):
    """Each step waits 1 s for its batch and takes 2 s. The validation after step 1 takes 50 s, and
    the save after it takes 1,000 s. A wait while a step is running counts for that step, and a wait
    after a save for the next step."""

    def advance(seconds):
        clock[0] += seconds

    with begun(tmp_path, "checkpoint_interval=2") as run:
        for step in range(STEPS):
            advance(1)
            with run.step(step, 1.0):
                pass
            run.log(step, metrics(Later(step, lambda: advance(2))))
            if step == 1:
                run.pause()
                advance(50)
                run.add_validation(9.0, None)
                run.add_validation(None, None, "web")
                run.flush()
            if run.saves_after(step, {}):
                advance(1000)
        assert run.end() == 0
    lines = timed_rows(tmp_path / "r")
    assert [100 / line["tokens_per_second"] for line in lines] == pytest.approx([4, 2, 4, 2])
    assert [line["data_wait_seconds"] for line in lines] == [1] * STEPS
    assert [line["step"] for line in lines] == list(range(STEPS)), "each row once"
    assert [line.get("validation_loss") for line in lines] == [None, 9, None, None]
    note = "note: a signal interrupted the validation: it has no validation_loss/web\n"
    assert note in capsys.readouterr().out and not any("validation_loss/web" in x for x in lines)


def test_no_checkpoint_amid_skipped_updates(tmp_path):
    """The weights may have diverged before them: the last checkpoint is then the way back."""
    saved = []
    with begun(tmp_path, "checkpoint_interval=2", steps=9, max_skipped=3) as run:
        for step in range(9):
            take(run, step, metrics(skipped=int(step in (1, 2, 5, 8))))
            if run.saves_after(step, {}):
                saved.append(step)
    assert saved == [3, 6, 7, 8], "the last step's is saved in any case"


def test_a_run_whose_folder_was_replaced_writes_nothing_into_it(tmp_path):
    """Replaces it as rm -rf and a new start do while a process of the old run still ends."""
    folder = tmp_path / "r"
    with locked(folder), begun(tmp_path) as run:
        take(run, 0, metrics())
        shutil.rmtree(folder)
        with locked(folder):
            (folder / "metrics.jsonl").touch()
            take(run, 1, metrics())
            with pytest.raises(UserError, match="was removed or replaced while this run"):
                run.saves_after(1, {"x": np.zeros(1)})
            assert not rows(folder)


def test_a_run_whose_lock_was_removed_goes_on(tmp_path):
    with locked(tmp_path / "r"), begun(tmp_path) as run:
        (tmp_path / "r/lock").unlink()
        take(run, STEPS - 1, metrics())
        assert run.saves_after(STEPS - 1, {"x": np.zeros(1)}) and rows(tmp_path / "r")


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = "checkpoints.root", "paths.root_working_dir", "paths.clone_from", "flat_tokens.filespec"
    config = small_config(*(f"{key}='~/x'" for key in keys))
    assert [operator.attrgetter(key)(config) for key in keys] == ["/home/me/x"] * len(keys)


def test_a_slash_at_the_end_of_a_path_makes_no_other_place():
    config = small_config("checkpoints.root=gs://bucket/mine/", "flat_tokens.filespec=s3://b/x/")
    assert config.checkpoints_path == "gs://bucket/mine/test/checkpoints"
    assert config.flat_tokens.filespec == "s3://b/x"
    assert small_config("checkpoints.root=/").checkpoints.root == "/"


def test_a_path_is_absolute_where_it_is_kept(tmp_path, monkeypatch):
    """A name that isn't that of a file or folder here may be one of the hub, or of a bucket."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in "home/tok", "here/bytes_utf8", "here/own/tok", "x.zarr", "ours":
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here/bpe.json").touch()
    monkeypatch.chdir(tmp_path / "here")
    spelled = {"own/tok/": "here/own/tok", "./own/../own/tok": "here/own/tok", "~/tok": "home/tok"}
    spelled |= {"bpe.json": "here/bpe.json", str(tmp_path / "x.zarr"): "x.zarr"}
    wanted = {name: str(tmp_path / path) for name, path in spelled.items()}
    wanted |= {name: name for name in ("org/tok", "bytes_utf8", "none.json")}
    for name, path in wanted.items():
        given = "paths.model_name=x", "hf_dataset.path=x", f"hf_dataset.tokenizer='{name}'"
        stream = compose_config("local_stream", *given)
        converted = compose_config(
            "text_files", "output=x", "load_dataset.data_files=x", f"tokenizer='{name}'",
            folder="configs/convert", schema=ConvertConfig,
        )  # fmt: skip
        assert stream.hf_dataset.tokenizer == converted.tokenizer == path
    paths = "flat_tokens.filespec=../x.zarr", "paths.clone_from=../ours"
    kept = yaml.safe_load(small_config(*paths).to_yaml())
    assert kept["flat_tokens"]["filespec"] == str(tmp_path / "x.zarr")
    assert kept["paths"]["clone_from"] == str(tmp_path / "ours")
    mixed = "flat_tokens.filespec=null", "flat_tokens.mixture=[{filespec: ../x.zarr, weight: 1}]"
    assert small_config(*mixed).flat_tokens.mixture[0].filespec == str(tmp_path / "x.zarr")
    assert small_config("flat_tokens.filespec=gs://b/x").flat_tokens.filespec == "gs://b/x"


def test_the_commit_is_known_in_a_repository_of_another_user(monkeypatch):
    before = module.commit()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert module.commit() == before


def test_a_run_with_nothing_to_do_is_refused(tmp_path):
    refused = pytest.raises(UserError, match=r"is at step 4; set training\.steps above that")
    with refused, begun(tmp_path, first=4):
        pass
    assert not (tmp_path / "r/metrics.jsonl").exists()


def test_what_has_parts_is_logged_by_their_indices_when_it_is_due(tmp_path):
    with begun(tmp_path, "metrics.norms_interval=3") as run:
        for step in range(STEPS):
            own = {"grad_norm/embed": 3, "train/right": 4}
            take(run, step, metrics(load=np.array([[step, 0.5]]), **own))
        run.flush()
    keys = "load/0/0", "load/0/1", "grad_norm/embed", "load", "train/right"
    actual = [tuple(map(row.get, keys)) for row in rows(tmp_path / "r")]
    early = None, None, None, None, 4
    assert actual == [early, early, (2, 0.5, 3, None, 4), (3, 0.5, 3, None, 4)]


def test_a_start_records_edits_that_git_applies(tmp_path, monkeypatch):
    def git(*command, **options):
        return subprocess.run(["git", *command], cwd=tmp_path, check=True, **options)

    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.edits() == ""
    git("init", "-q")
    file = tmp_path / "train.py"
    file.write_text("a = 1\n")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x")
    git("config", "color.ui", "always")
    file.write_text("a = 2\n")
    edits = module.edits()
    git("checkout", "-q", ".")
    git("apply", "-", input=edits.encode())
    assert file.read_text() == "a = 2\n"
    file.write_bytes(b"a = '\xe9'\n")
    assert "+a = '" in module.edits()
