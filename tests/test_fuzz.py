"""Tests that a program, whatever its arguments, runs or ends with one message and no output."""

import contextlib
import functools
import io
import json
import shutil
import sys

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import train
from data.flat_tokens import Writer, encode
from runtime.program import _keys
from tests.helpers import ROOT

NUMBERS = ["0", "1", "-1", "2", "3", "7", "64", "1.5", "1e3", "1e400", "-1e400", "nan", "inf",
           "-inf", "2147483647", "2147483648", "99999999999999999999", "1_000", "0x10"]  # fmt: skip
OTHERS = ["null", "true", "text", "", "''", '""', "'", '"', " ", "' '", "a b", "'a b'", "'a\nb'",
          "'a\"b'", "\\", "a=b", "a:b", "~", ".", "..", "a/b", "%s", "$HOME", "☃", "'☃'", "???",
          "[]", "[1]", "[-1]", "[null]", "[[1]]", "[a,b]", "[" * 50, "{}", "{a:1}", "{a:{b:[]}}",
          "${x}", "${training}", "${training.steps}", "${oc.env:NONE}", "${", "1,2", "range(1,3)",
          "choice(a)", "int(x)", "foo://x", "gs://b/x", "s3://", "tokens.zarr", "texts",
          "text.txt", "bytes_utf8", "train"]  # fmt: skip
FLAGS = ["--help", "--hydra-help", "--version", "--cfg=job", "--cfg=all", "--resolve",
         "--none", "-x", "--", "-"]  # fmt: skip
# No slash, as some texts name a folder to write to.
ANY = st.characters(codec="utf-8", exclude_characters="/\0")


def overrides(schema):
    """A strategy for an override, with the names of which its error message must have one. They are
    empty unless the override sets a known key."""
    values = st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(OTHERS),
        st.integers().map(str),
        st.floats().map(repr),
        st.text(ANY, max_size=8),
    )
    known = st.sampled_from(sorted(_keys(schema)))
    keys = st.one_of(
        known,
        known.map(lambda key: key[:-1]),
        known.map(lambda key: f"{key}.x"),
        known.map(lambda key: key.rpartition(".")[2]),
        st.sampled_from(["x", "model", "data", "hydra/launcher", "hydra", "a.b", "", "x@y", "0"]),
    )
    plain = st.builds(
        lambda key, value: (f"{key}={value}", (key.rpartition(".")[2], value.strip("'\" "), "inf")),
        known,
        values,
    )
    signs = st.sampled_from(["", "+", "++", "~", "~~", " "])
    other = st.one_of(
        st.builds("{}{}={}".format, signs, keys, values),
        st.builds("{}{}".format, signs, keys),
        st.text(ANY, max_size=12),
    )
    return st.one_of(plain, plain, other.map(lambda text: (text, ("",))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with small datasets, which is also the user's home."""
    folder = tmp_path_factory.mktemp("above") / "work"
    folder.mkdir()
    tokens, lengths = encode(np.full(1024, 7), np.zeros(1, np.intp)), np.array([1024])
    for split in "train", "validation":
        with Writer(f"{folder}/tokens.zarr", split) as writer:
            for _ in range(1100):
                writer.extend(tokens, lengths)
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    (folder / "text.txt").write_text("a text\n")
    import datasets  # noqa: F401  it looks up the home folder on import

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "argv", ["program"])
        yield folder


def ends(program, arguments):
    """Runs a program. Returns its exit message or code, or "" if it ran, and what it printed."""
    sys.argv[1:] = arguments
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            program()
        except SystemExit as stop:
            return stop.code or "", printed.getvalue()
    return "", printed.getvalue()


def check(folder, program, arguments, named):
    """Runs a program; if it is refused, checks that the message has one of the names."""
    before = {path: {*path.iterdir()} for path in (folder, folder.parent)}
    message, printed = ends(program, arguments)
    note(f"{arguments} -> {message or 'runs'}")
    if message == 2:  # Hydra's, of an option
        assert "usage: " in printed and "error: " in printed
    elif message:
        assert message.startswith("error: ") and any(name in message for name in named), message
        assert "Traceback" not in message and "object at 0x" not in message, message
    new = [path for known, there in before.items() for path in {*known.iterdir()} - there]
    files = [path for top in new for path in (top, *top.rglob("*")) if path.is_file()]
    for path in new:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    expected = {".compilation_cache"}
    assert not [path for path in files if expected.isdisjoint(path.parts)]


def fuzz(folder, program, schema, starts, examples):
    """Runs a program with random starts, flags and overrides."""
    goes_on = functools.cache(lambda which: not ends(program, starts[which])[0])
    assert goes_on(-1)

    @settings(
        max_examples=examples,
        derandomize=examples < 1000,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(range(len(starts))),
        st.just([]) | st.lists(st.sampled_from(FLAGS), max_size=2),
        st.lists(overrides(schema), min_size=1, max_size=3),
    )
    def some(which, flags, given):
        texts, named = zip(*given, strict=True)
        alone = len(given) == 1 and not flags and goes_on(which)
        check(folder, program, [*flags, *starts[which], *texts], named[0] if alone else [""])

    some()


EXAMPLES = pytest.mark.parametrize(
    "examples", [60, pytest.param(4000, marks=pytest.mark.long)], ids=["some", "many"]
)
STREAM = ["hf_dataset.path=texts", "hf_dataset.tokenizer=bytes_utf8", "hf_dataset.num_workers=1"]


def starts():
    """The arguments that start each shipped config on a dataset in the folder."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem == "base":
            continue
        streams = "stream" in path.stem or "fineweb" in path.stem
        data = STREAM if streams else ["flat_tokens.filespec=tokens.zarr"]
        yield [f"--config-name={path.stem}", "paths.model_name=x", *data]


@EXAMPLES
def test_training(examples, folder, monkeypatch):
    def alone(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    monkeypatch.setattr(train, "train", lambda *_: None)
    if examples < 1000:
        monkeypatch.setattr(train, "check_types", lambda _: None)  # a second each
    fuzz(folder, train.main, train.Config, [*starts()], examples)
