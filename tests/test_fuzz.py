"""Tests that a program with a config, whatever its overrides, runs or ends with one message and no
output."""

import json
import random
import shutil
import signal
import sys
import tempfile
import time
import types

import jax
import numpy as np
import pytest

import train
from checks import preflight
from data.flat_tokens import SPLITS, Writer, encode
from runtime import config, program
from tools import check, huggingface_to_flat_tokens
from tools.audit import __main__ as audit
from tools.compile import __main__ as compiler

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
SECONDS = 60  # that a program may take


def text(rng):
    """A number, another text that may be misread, or random characters."""
    # No slash, as some texts name a folder to write to.
    characters = (
        chr(rng.randrange(1, rng.choice([0x7F, 0xD800]))) for _ in range(rng.randrange(9))
    )
    return rng.choice([*NUMBERS, *OTHERS, "".join(characters).replace("/", "")])


def override(schema):
    """A function that makes an override, with the names of which its error message must have one.
    They are empty unless the override sets a known key."""
    known = sorted(config.keys(schema))

    def make(rng):
        key, value = rng.choice(known), text(rng)
        if rng.random() < 0.6:
            return f"{key}={value}", (key.rpartition(".")[2], value.strip("'\" "), "inf")
        others = key[:-1], f"{key}.x", key.rpartition(".")[2]
        odd = "x", "model", "data", "hydra/launcher", "hydra", "a.b", "", "x@y", "0"
        key = rng.choice(["", "+", "++", "~", "~~", " "]) + rng.choice([key, *others, *odd])
        return rng.choice([f"{key}={value}", key, text(rng)]), ("",)

    return make


SMALLEST = ["--config-name=local_test_synthetic", "flat_tokens.filespec=tokens.zarr"]
NAMED = [*SMALLEST, "paths.model_name=x"]
CONVERT = ["--config-name=json_files", "load_dataset.data_files=texts/*.jsonl", "output=new.zarr"]
CONVERT += ["tokenizer=bytes_utf8"]
PROGRAMS = {
    train: (train.Config, NAMED),
    audit: (audit.AuditConfig, SMALLEST),
    check: (train.Config, SMALLEST),
    compiler: (compiler.CompileConfig, SMALLEST),
    huggingface_to_flat_tokens: (huggingface_to_flat_tokens.ConvertConfig, CONVERT),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with small datasets. It is also the user's home."""
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
    import datasets  # noqa: F401  it looks up the home folder on import

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "argv", ["program"])
        yield folder


class Hangs(BaseException):
    """A program took more than SECONDS."""


def hangs(*_):
    raise Hangs


def on_disk(folder):
    """Returns the time and the size of each file in a folder, except those of JAX's cache."""
    found = {}
    for path in folder.rglob("*"):
        if ".compilation_cache" not in path.parts:
            stat = path.stat()
            found[path] = (stat.st_mtime_ns, stat.st_size) if path.is_file() else None
    return found


def attempt(ended, folder, copy, main, arguments, named):
    """Runs a program, and returns whether it ran. If it is refused, checks that the message has one
    of the names, and that nothing was written."""
    before = on_disk(folder)
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        out, errors, message = ended(main, *arguments)
    finally:
        signal.alarm(0)
        changed = {path for path, _ in before.items() ^ on_disk(folder).items()}
        for path in sorted(changed):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if changed:
            shutil.copytree(copy, folder, dirs_exist_ok=True)
    if message == 2:  # Hydra's or argparse's, of an option
        assert "usage: " in errors and "error: " in errors
    elif message == 1:  # it has printed what is wrong
        assert "error: " in out + errors
    elif message:
        assert message.startswith("error: ") and any(name in message for name in named), message
        assert "Traceback" not in message and "object at 0x" not in message, message
    if main is huggingface_to_flat_tokens.main:  # it may leave an unfinished conversion
        changed &= before.keys()
    assert not (message and changed), (message, changed)
    return not message


MANY = 500


def no_cluster(**_):
    raise ValueError("coordinator_address should be defined.")


@pytest.mark.parametrize("examples", [8, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_with_a_config(module, examples, folder, ended, monkeypatch):
    """Tries the same few each time, or 500 others as a long test."""
    schema, start = PROGRAMS[module]
    monkeypatch.setattr(jax.distributed, "initialize", no_cluster)
    monkeypatch.setattr(train, "train", lambda *_: None)
    agree = types.SimpleNamespace(verdict=lambda _: "", close=lambda: None)
    monkeypatch.setattr(preflight, "TinyRuns", lambda *_: agree)
    monkeypatch.setattr(program, "_sweep", lambda *_: None)
    if examples < MANY:  # tracing takes a second, and more follows
        monkeypatch.setattr(preflight, "check_types", lambda *_: sys.exit())
    make, rng = override(schema), random.Random(0 if examples < MANY else time.time_ns())
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        assert attempt(ended, folder, copy, module.main, start, [""])
        for _ in range(examples):
            texts, named = zip(*(make(rng) for _ in range(rng.choice([1, 1, 2]))), strict=True)
            flags = rng.choices(FLAGS, k=rng.choice([0, 0, 0, 1, 2]))
            named = named[0] if len(texts) == 1 and not flags else [""]
            print(given := [*flags, *start, *texts])
            attempt(ended, folder, copy, module.main, given, named)
