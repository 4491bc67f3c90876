"""Adding a source of tokens takes a class and a line, and a model's tokens mean what they meant."""

import contextlib
import os
import re
import shutil
import types

import huggingface_hub
import jax
import pytest
from transformers import PreTrainedTokenizerFast

import train
from data import sources
from data.sources import check_same_rows, kept_by_import, open_batches, say_problem_of_start
from runtime import checkpoint
from runtime.config import plain
from runtime.run import Run, as_begun
from shardlib.errors import UserError
from tests import golden
from tests.data.test_tokenizer import SPECIAL, trained_tokenizer, write_tokenizer
from tests.files import edit_config, write_tokens
from tests.helpers import SMALL, compose_config, mesh, small_config
from tests.test_wrong_inputs import nothing_is_compiled
from tests.tools.test_huggingface_weights import SMOLLM_2, random_tensors, write_folder
from tools import huggingface_weights
from tools.generate import __main__ as generate


@pytest.fixture
def imported(here, train_here, monkeypatch):
    """A working folder with a model that was imported with the tokenizer `english`, datasets of
    several, and a function that starts a run, which ends where it would compile."""
    write_tokenizer(here / "english")
    shutil.copytree("english", "copy")
    german = trained_tokenizer(["zwei und zwei ist vier, sagt er mir hier"] * 3, SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=german).save_pretrained("german")
    more = PreTrainedTokenizerFast.from_pretrained("english")
    more.add_tokens([f"<|{i}|>" for i in range(99)], special_tokens=True)
    more.save_pretrained("more")
    for name in "english", "copy", "more", "german", "gone", "bytes_utf8":
        write_tokens(f"{name}.zarr", [[300, 2, 3, 4, 5, 6, 7]] * 16, tokenizer=name)
    config = SMOLLM_2 | {"vocab_size": 320}
    shutil.copytree("english", "hf")
    write_folder(here / "hf", config, random_tensors(config))
    given = "import", "hf", "imported", "--config=mine.yaml"
    out, message = train_here(*given, program=huggingface_weights.main)
    assert (out, message) == ("imported and mine.yaml written\n", "")
    nothing_is_compiled(monkeypatch)

    def compiles(*_):
        raise UserError("it compiles")

    monkeypatch.setattr(Run, "compile", compiles)
    small = "mesh={d: 1, t: 1}", "training.tokens={batch: 8, len: 12}", "paths.model_name=run"
    small += f"--config-dir={here}", "--config-name=mine"
    return lambda *more: train_here(*small, *more)[1].removeprefix("error: ")


def test_a_resumed_run_keeps_where_its_weights_come_from(capsys):
    first = small_config("paths.clone_from=a", "++other_tokenizer=true")
    begun = types.SimpleNamespace(settings=plain(first.to_yaml()))
    for later in [], ["paths.clone_from=b"]:
        kept = plain(as_begun(small_config(*later), begun))
        assert kept["paths"]["clone_from"] == "a" and kept["other_tokenizer"]
    note = "note: paths.clone_from=b has no effect, as the run has checkpoints\n"
    assert capsys.readouterr().out == note


def test_a_dataset_of_another_tokenizer_is_refused(imported, tmp_path, train_here, monkeypatch):
    def refused(case, message):
        golden.check("datasets.txt", f"tokenizer: {case}", message.replace(str(tmp_path), "..."))

    for same in "english", "copy", "more":  # which adds only special tokens
        assert imported(f"flat_tokens.filespec={same}.zarr") == "it compiles"
    for other in "german", "gone", "bytes_utf8":
        refused(other, imported(f"flat_tokens.filespec={other}.zarr"))
    german = "flat_tokens.filespec=german.zarr"
    allowed = german, "other_tokenizer=true"
    assert imported(*allowed) == "it compiles"
    _, message = train_here("imported", "--evaluate=german.zarr", program=generate.main)
    refused("evaluation", message)
    more = "export", "imported", "out", "--tokenizer=more"
    _, message = train_here(*more, program=huggingface_weights.main)
    refused("export", message)

    # A clone of a clone, and of one that was allowed the other.
    configs = []
    english = "flat_tokens.filespec=english.zarr", "paths.clone_from=imported"
    for name, settings in ("clone", english), ("other", allowed):
        source = checkpoint.newest("imported").path
        path = shutil.copytree(source, source.replace("imported", name))
        with monkeypatch.context() as patched:
            patched.setattr("train.train", lambda config, *_: configs.append(config.to_yaml()))
            imported(*settings)
        edit_config(path, lambda _: configs.pop())
    shutil.rmtree("english.zarr")
    assert "german" in imported("paths.clone_from=clone", german)
    assert imported("paths.clone_from=other", german) == "it compiles"
    assert kept_by_import(checkpoint.newest("other")) is None
    monkeypatch.chdir("/")
    kept = kept_by_import(checkpoint.newest(f"{tmp_path}/clone"))
    assert kept == f"{tmp_path}/imported/huggingface", "from any folder"
    notes = list[str]()
    model = checkpoint.newest(f"{tmp_path}/imported")
    os.rename(model.path, f"{model.path}1")
    assert kept_by_import(checkpoint.newest(f"{tmp_path}/clone"), notes.append) is None
    shutil.rmtree(f"{tmp_path}/imported")
    assert kept_by_import(checkpoint.newest(f"{tmp_path}/clone"), notes.append) is None
    assert "it was imported after the run began. If the run began as an import, that" in notes[0]
    assert (
        "imported doesn't exist. If the run began as an import, that model's settings and"
        in notes[1]
    )


def test_the_tokenizer_of_a_runs_dataset_counts_if_it_has_more_tokens(imported, monkeypatch):
    monkeypatch.setattr(sources, "kept_by_import", lambda _: "english")
    words = sources.open_tokenizer("more").vocabulary
    for named, found in (
        (("more", words), "more"),
        (("more", "changed"), "english"),
        (("copy", ""), "english"),
        (("gone", ""), "english"),
    ):
        position = dict(zip(("tokens", "tokenizer", "vocabulary"), ("", *named), strict=True))
        made = types.SimpleNamespace(metadata={"positions": [position]})
        assert sources.tokenizer_of_model(made).name == found


def streamed(*overrides):
    stream = "hf_dataset.path=notes", "paths.model_name=run", "mesh={d: 1, t: 1}"
    return compose_config("local_stream", *SMALL, "model.vocab=272", *stream, *overrides)


def test_a_streams_tokenizer_that_has_changed_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "kept_by_import", lambda _: None)
    used = streamed().source().tokenizer_used(remote=True)
    for vocabulary, refused in (used.vocabulary, False), ("another", True), ("", False):
        checkpoint = types.SimpleNamespace(
            path="x",
            metadata={"positions": [{"vocabulary": vocabulary}]},
            config=lambda *_, **__: streamed(),
        )
        problem = pytest.raises(UserError, match="bytes_utf8 has changed since")
        with problem if refused else contextlib.nullcontext():
            sources.check_same_tokenizer(checkpoint, used, "a setting")


MIXED = "flat_tokens={{mixture: [{{filespec: a, weight: {}}}, {{filespec: b, weight: {}}}]}}"

# Settings of a checkpoint at step 3, those of a run that goes on, and what is refused, if any.
RESUMED = {
    "the next batch left out": (small_config, [], ["training.skip_steps=[3]"], ""),
    "a batch that was used": (  # its batches are 2, 3 and 4
        small_config, ["training.skip_steps=[0,1]"], ["training.skip_steps=[0,1,4]"],
        "training.skip_steps=[0, 1], now [0, 1, 4]",
    ),
    "a batch that was not": (
        small_config, ["training.skip_steps=[0,1]"], ["training.skip_steps=[5,1,0]"], "",
    ),
    "a batch no longer left out": (
        streamed, ["training.skip_steps=[1,9]"], [], "training.skip_steps=[1], now []",
    ),
    "a stream's later batch": (streamed, [], ["training.skip_steps=[3]"], ""),
    "another column": (streamed, [], ["hf_dataset.column=title"], "hf_dataset.column=text, now"),
    "more rows of a stream": (streamed, [], ["training.tokens.batch=16"], ""),
    "a moved stream": (streamed, [], ["hf_dataset.path=there", "hf_dataset.num_workers=3"], ""),
    "another end token": (
        small_config, ["flat_tokens.end_token=5"], ["flat_tokens.end_token=6"],
        "flat_tokens.end_token=5, now 6",
    ),
    "ids of another type": (
        small_config, [], ["flat_tokens.bin_dtype=uint32"], "flat_tokens.bin_dtype=uint16, now",
    ),
    "another validation set": (small_config, [], ["flat_tokens.validation={a: b.zarr}"], ""),
    "the same shares of a mixture": (
        small_config, [MIXED.format(0.7, 0.3)], [MIXED.format(7, 3)], "",
    ),
    "more streams": (small_config, [], ["flat_tokens.streams=2"], "flat_tokens.streams=1, now 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
def test_rows_of_the_steps_that_are_done_stay_theirs(case):
    make, before, now, problem = RESUMED[case]
    settings, metadata = plain(make(*before).to_yaml()), {"positions": [None]}
    source = types.SimpleNamespace(path="x", step=3, settings=settings, metadata=metadata)
    refused = pytest.raises(UserError, match=re.escape(f"x was written with {problem}"))
    with refused if problem else contextlib.nullcontext():
        check_same_rows(make(*now), source, types.SimpleNamespace(made_of=None))


def test_another_kind_of_source_is_refused():
    source = types.SimpleNamespace(path="x", step=3, metadata={"positions": [{"tokens": [9]}]})
    source.settings = plain(small_config().to_yaml())
    problem = "the dataset=flat_tokens, now hf_dataset: .*clone the run"
    with pytest.raises(UserError, match=problem):
        check_same_rows(streamed(), source, types.SimpleNamespace(made_of=None))


def test_a_validation_that_takes_rows_again_says_so(capsys):
    """The validation split has 1,669 rows of 12 tokens, and a batch 8."""

    def said(batches):
        validates = "training.validation_at_start=true", f"training.{batches}"
        config = small_config(*validates, "model.vocab=128")
        with jax.set_mesh(mesh(8, 1)):
            open_batches(config, train.dimensions(config))
        return capsys.readouterr().out

    assert said("validation_batches=209") == ""
    assert said("validation_batches=418") == (
        "note: a validation takes 3,344 rows, and the split has 1,669, so some come again: "
        "lower training.validation_batches\n"
    )


def test_a_start_token_that_is_a_word_of_the_tokenizer_is_noted(tmp_path, monkeypatch, capsys):
    """If the tokenizer is at hand."""
    path = write_tokenizer(tmp_path / "words", eos_token=SPECIAL[0])
    cached = {"some/words": path}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: cached[name])
    for name in path, "some/words":
        say_problem_of_start(name, 3)
        assert "note: model.start_token=3 is the word '!' of" in capsys.readouterr().out
    for name, start in (path, 0), ("not/cached", 3), ("/not/there", 3), ("", 3), ("bytes_utf8", 0):
        say_problem_of_start(name, start)
    assert not capsys.readouterr().out
