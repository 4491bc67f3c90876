"""Tests that a program, whatever its arguments, runs or ends with one message and no output."""

import contextlib
import functools
import io
import itertools
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import train
from data.flat_tokens import SPLITS, Writer, encode
from runtime import checks, config, program
from tests.helpers import ROOT
from tests.tools.test_huggingface_weights import LLAMA_2, random_tensors, write_folder
from tests.tools.test_plot import make_run
from tools import (
    audit,
    check,
    checkpoint_info,
    compile,
    flat_tokens_info,
    generate,
    huggingface_to_flat_tokens,
    huggingface_weights,
    plot,
    synthetic_dataset,
)

NUMBERS = ["0", "1", "-1", "2", "3", "7", "64", "1.5", "1e3", "1e400", "-1e400", "nan", "inf",
           "-inf", "2147483647", "2147483648", "99999999999999999999", "1_000", "0x10"]  # fmt: skip
OTHERS = ["null", "true", "text", "", "''", '""', "'", '"', " ", "' '", "a b", "'a b'", "'a\nb'",
          "'a\"b'", "\\", "a=b", "a:b", "~", ".", "..", "a/b", "%s", "$HOME", "☃", "'☃'", "???",
          "[]", "[1]", "[-1]", "[null]", "[[1]]", "[a,b]", "[" * 50, "{}", "{a:1}", "{a:{b:[]}}",
          "${x}", "${training}", "${training.steps}", "${oc.env:NONE}", "${", "1,2", "range(1,3)",
          "choice(a)", "int(x)", "foo://x", "gs://b/x", "s3://", "tokens.zarr", "texts",
          "text.txt", "bytes_utf8", "train", "runs/run", "checkpoints", "llama", "new", "t=2",
          "~/x", "a::b", "a[b"]  # fmt: skip
FLAGS = ["--help", "--hydra-help", "--version", "--cfg=job", "--cfg=all", "--resolve",
         "--multirun", "--none", "-x", "--", "-"]  # fmt: skip
# No slash, as some texts name a folder to write to.
ANY = st.characters(codec="utf-8", exclude_characters="/\0")


VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(OTHERS),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(ANY, max_size=8),
)
SECONDS = 60  # that a program may take


def overrides(schema):
    """A strategy for an override, with the names of which its error message must have one. They are
    empty unless the override sets a known key."""
    known = st.sampled_from(sorted(config.keys(schema)))
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
        VALUES,
    )
    signs = st.sampled_from(["", "+", "++", "~", "~~", " "])
    other = st.one_of(
        st.builds("{}{}={}".format, signs, keys, VALUES),
        st.builds("{}{}".format, signs, keys),
        st.text(ANY, max_size=12),
    )
    return st.one_of(plain, plain, other.map(lambda text: (text, ("",))))


def options(main, start):
    """A strategy for arguments of a program that has argparse, and its options with numbers."""
    _, usage = ends(main, [*start[:1], "--help"])
    names = sorted({"--x", *re.findall(r"--[\w-]+", usage)} - {"--help"})
    numbers = [f"{name}={value}" for name in names for value in NUMBERS]
    # Hypothesis would choose the same few again and again.
    number = st.integers(0, 2**64).map(lambda seed: random.Random(seed).choice(numbers))
    name = st.sampled_from(names)
    other = st.one_of(st.builds("{}={}".format, name, VALUES), name, VALUES).map(str)
    return st.one_of(number, number, number, other).map(lambda text: (text, ("",))), numbers


def with_one_wrong(starts):
    """The starts, a quarter of them with one argument replaced."""
    for wrong in OTHERS:
        for start in starts:
            for i in range(len(start)):
                yield [*start[:i], wrong, *start[i + 1 :]]
                yield from [start] * 3


STREAM = ["hf_dataset.path=texts", "hf_dataset.tokenizer=bytes_utf8", "hf_dataset.num_workers=1"]


def configs():
    """The arguments that start each shipped config on a dataset in the folder."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem == "base":
            continue
        streams = "stream" in path.stem or "fineweb" in path.stem
        data = STREAM if streams else ["flat_tokens.filespec=tokens.zarr"]
        yield [f"--config-name={path.stem}", "paths.model_name=x", *data]


SMALLEST = ["--config-name=local_test_synthetic", "flat_tokens.filespec=tokens.zarr"]
CONVERT = ["--config-name=json_files", "load_dataset.data_files=texts/*.jsonl", "output=new.zarr"]
CONVERT += ["tokenizer=bytes_utf8"]
WITH_HYDRA = {
    train: (train.Config, [*configs()]),
    audit: (audit.AuditConfig, [SMALLEST]),
    check: (train.Config, [SMALLEST]),
    compile: (compile.CompileConfig, [SMALLEST]),
    huggingface_to_flat_tokens: (huggingface_to_flat_tokens.ConvertConfig, [CONVERT]),
}
WITH_ARGPARSE = {
    checkpoint_info: [["checkpoints"]],
    flat_tokens_info: [["tokens.zarr", "--decode=1", "--tokenizer=bytes_utf8"]],
    generate: [
        ["checkpoints", "--tokenizer=bytes_utf8"],
        ["checkpoints", "--evaluate=tokens.zarr", "--batches=1"],
    ],
    huggingface_weights: [["export", "checkpoints", "new"], ["import", "llama", "new"]],
    plot: [["runs/run"]],
    synthetic_dataset: [["new.zarr", "--train-tokens=9"]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with small datasets, a run's folder, and a model's weights in both formats.
    It is also the user's home."""
    folder = tmp_path_factory.mktemp("above") / "work"
    folder.mkdir()
    tokens, lengths = encode(np.full(1024, 7), np.zeros(1, np.intp)), np.array([1024])
    for split in SPLITS:
        with Writer(f"{folder}/tokens.zarr", split) as writer:
            for _ in range(1100):
                writer.extend(tokens, lengths)
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    (folder / "texts/b.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    (folder / "text.txt").write_text("a text\n")
    (folder / "runs").mkdir()
    make_run(folder / "runs", "run", 0.1, [3.0, 2.0])
    llama = LLAMA_2 | {"vocab_size": 264}
    write_folder(folder / "llama", llama, random_tensors(llama))
    import datasets  # noqa: F401  it looks up the home folder on import

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "argv", ["program"])
        assert ends(huggingface_weights.main, ["import", "llama", "checkpoints"])[0] == ""
        yield folder


class Hangs(BaseException):
    """A program took more than SECONDS."""


def hangs(*_):
    raise Hangs


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


def on_disk(folder):
    """Returns the time and the size of each file in a folder, except those of JAX's cache."""
    found = {}
    for path in folder.rglob("*"):
        if ".compilation_cache" not in path.parts:
            stat = path.stat()
            found[path] = (stat.st_mtime_ns, stat.st_size) if path.is_file() else None
    return found


def attempt(folder, copy, main, arguments, named):
    """Runs a program, and returns whether it ran. If it is refused, checks that the message has one
    of the names, and that nothing was written."""
    before = on_disk(folder)
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        message, printed = ends(main, arguments)
    finally:
        signal.alarm(0)
        changed = {path for path, _ in before.items() ^ on_disk(folder).items()}
        for path in sorted(changed):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if changed:
            shutil.copytree(copy, folder, dirs_exist_ok=True)
    if message == 2:  # Hydra's or argparse's, of an option
        assert "usage: " in printed and "error: " in printed
    elif message == 1:  # it has printed what is wrong
        assert "error: " in printed
    elif message:
        assert message.startswith("error: ") and any(name in message for name in named), message
        assert "Traceback" not in message and "object at 0x" not in message, message
    if main is huggingface_to_flat_tokens.main:  # it may leave an unfinished conversion
        changed &= before.keys()
    assert not (message and changed), (message, changed)
    return not message


def fuzz(folder, main, starts, flags, arguments, examples):
    """Runs a program with random starts, flags and arguments."""

    @functools.cache
    def goes_on(which):
        return attempt(folder, copy, main, starts[which], [""])

    @settings(
        max_examples=examples,
        derandomize=examples < MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(range(len(starts))),
        st.one_of(*[st.just([])] * 3, st.lists(st.sampled_from(flags), max_size=2)),
        st.lists(arguments, min_size=1, max_size=2),
    )
    def some(which, flags, given):
        texts, named = zip(*given, strict=True)
        alone = len(given) == 1 and not flags and goes_on(which)
        note(all_given := [*flags, *starts[which], *texts])
        attempt(folder, copy, main, all_given, named[0] if alone else [""])

    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        assert goes_on(-1)
        some()


@pytest.fixture
def little_memory():
    """Lets the test have 16 GB at most, so that what asks for more is refused on any machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


MANY = 500


def some_or_many(programs):
    """Tries a program a few times, or 500 times as a long test."""
    some = [(module, 12 if module is train else 4) for module in programs]
    many = [pytest.param(module, MANY, marks=pytest.mark.long) for module in programs]
    return pytest.mark.parametrize(("module", "examples"), some + many)


def no_cluster(**_):
    raise ValueError("coordinator_address should be defined.")


class Agree:
    """Takes the place of the comparison of numbers, which starts processes."""

    def __init__(self, configs):
        pass

    def verdict(self):
        return ""

    def close(self):
        pass


@some_or_many(WITH_HYDRA)
def test_a_program_with_a_config(module, examples, folder, monkeypatch):
    schema, starts = WITH_HYDRA[module]
    monkeypatch.setattr(jax.distributed, "initialize", no_cluster)
    monkeypatch.setattr(train, "train", lambda *_: None)
    monkeypatch.setattr(checks, "Numbers", Agree)
    monkeypatch.setattr(program, "_sweep", lambda *_: None)
    if examples < MANY:  # tracing takes a second, and more follows
        monkeypatch.setattr(checks, "check_types", lambda _: sys.exit())
    fuzz(folder, module.main, starts, FLAGS, overrides(schema), examples)


@some_or_many(WITH_ARGPARSE)
def test_a_program_with_options(module, examples, folder, little_memory, monkeypatch):
    main, starts = module.main, WITH_ARGPARSE[module]
    whole, append = generate.generate, Writer.append
    monkeypatch.setattr(generate, "generate", lambda *args: itertools.islice(whole(*args), 3))
    if examples < MANY:  # compiling takes seconds
        monkeypatch.setattr(generate.Checkpoints, "restore", lambda *_: sys.exit())

    def append_and_end(writer, ids):
        append(writer, ids)
        writer.token_count = 2**31

    monkeypatch.setattr(synthetic_dataset.Writer, "append", append_and_end)
    arguments, numbers = options(main, starts[0])
    if examples == MANY:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            for number in numbers:  # each once, as chance may not choose the one that fails
                attempt(folder, copy, main, [*starts[0], number], [""])
    fuzz(folder, main, [*with_one_wrong(starts)], ["--help", "-x"], arguments, examples)
