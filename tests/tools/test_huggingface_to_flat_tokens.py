"""The converter, with real `datasets` and `transformers`, on local files and a loopback server."""

import contextlib
import http.server
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import datasets
import numpy as np
import pytest
import zarr

from data import text
from data.flat_tokens import NOT_A_TARGET, FlatTokens, decode
from data.text import Tokenizer
from shardlib.errors import UserError
from tests.data.test_text import CHATML, PLAIN, SPECIAL, chat, write_tokenizer
from tests.helpers import ROOT, train_here
from tools import huggingface_to_flat_tokens as tool
from tools.huggingface_to_flat_tokens import ConvertConfig, python_stdlib

PROGRAM = [sys.executable, "-m", "tools.huggingface_to_flat_tokens", "--config-name=json_files"]


def settings(files, output, **changes):
    return ConvertConfig(
        **{
            "load_dataset": {"path": "json", "data_files": str(files)},
            "column": "body",
            "tokenizer": "bytes_utf8",
            "end_token": False,
            "chat": False,
            "train_split": "train",
            "validation_split": None,
            "validation_share": 0.2,
            "max_tokens": None,
            "processes": 1,
            "output": str(output),
        }
        | changes
    )


def arguments(files, output, *more):
    return [f"load_dataset.data_files={files}", f"output={output}", "column=body", *more]


def documents(path, split):
    dataset = FlatTokens(str(path), split)
    dataset.validate()
    ids, _ = dataset.read(0, dataset.token_count)
    return [part.tolist() for part in np.split(ids, dataset.seq_starts[1:-1].astype(int))]


def texts_of(path, split):
    return [bytes(i - 1 for i in ids).decode() for ids in documents(path, split)]


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))


TEXTS = [f"document {i}! naïve ☃ {'x' * i}\nend" for i in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    write_texts(path, [*TEXTS[:3], "", *TEXTS[3:], None])
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A pattern that matches eleven files of 0 to 900 documents."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for i, count in enumerate([300, 1, 900, 255, 256, 257, 40, 0, 512, 30, 700]):
        texts = [f"{i}.{j} " + "y" * int(rng.integers(0, 99)) for j in range(count)]
        write_texts(folder / f"{i:02d}.jsonl", texts)
    return folder / "*.jsonl"


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The dataset that an uninterrupted conversion of the shards makes."""
    path = tmp_path_factory.mktemp("whole") / "x.zarr"
    tool.convert(settings(shards, path))
    return path


def children(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def runs(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def committed(path):
    """Returns how many train tokens a conversion would keep if it were killed now."""
    conversion = zarr.open_group(path, mode="r").attrs["conversion"]
    return conversion["written"]["train"]["tokens"]


def same(path, wanted):
    return all(documents(path, s) == documents(wanted, s) for s in ("train", "validation"))


def test_bytes_of_each_document(jsonl, tmp_path, capsys):
    tool.convert(settings(jsonl, tmp_path / "x.zarr"))
    assert texts_of(tmp_path / "x.zarr", "validation") == [TEXTS[0], TEXTS[5]]
    assert texts_of(tmp_path / "x.zarr", "train") == [*TEXTS[1:5], *TEXTS[6:]]
    assert "skipped 2 empty documents" in capsys.readouterr().out


def test_each_document_once_whatever_its_shard(shards, whole):
    texts = all_texts(whole)
    lines = [line for path in shards.parent.iterdir() for line in path.read_text().splitlines()]
    assert texts == sorted(json.loads(line)["body"] for line in lines)
    assert len(texts_of(whole, "validation")) == -(-len(texts) // 5)


def test_the_number_of_processes_does_not_show(shards, whole, tmp_path):
    tool.convert(settings(shards, tmp_path / "x.zarr", processes=3))
    assert same(tmp_path / "x.zarr", whole)
    actual, wanted = (
        zarr.open_group(path).attrs["conversion"] for path in (tmp_path / "x.zarr", whole)
    )
    assert actual == wanted


def all_texts(path):
    return sorted(texts_of(path, "train") + texts_of(path, "validation"))


def test_a_dataset_that_is_not_streamed(shards, whole, tmp_path):
    load = {"path": "json", "data_files": str(shards), "streaming": False}
    load["cache_dir"] = str(tmp_path / "cache")
    tool.convert(settings(shards, tmp_path / "x.zarr", load_dataset=load))
    assert all_texts(tmp_path / "x.zarr") == all_texts(whole)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_any_moment_it_goes_on_where_it_was(shards, whole, tmp_path, processes):
    """Kills it with SIGKILL, once halfway and once near the end."""
    slowed = (
        "import time; from tools import huggingface_to_flat_tokens as tool;"
        "tool.COMMIT_SECONDS = 0; add = tool.Conversion.add;"
        "tool.Conversion.add = lambda *a: (time.sleep(0.05), add(*a))[1];"
        "tool.main()"
    )
    wanted = [
        *arguments(shards, tmp_path / "x.zarr"),
        "validation_share=0.2",
        f"processes={processes}",
    ]
    command = [sys.executable, "-c", slowed, "--config-name=json_files", *wanted]
    counts = []
    for tokens in 15_000, 60_000:
        run = subprocess.Popen(command, cwd=ROOT)
        while run.poll() is None:
            try:
                if committed(tmp_path / "x.zarr") > tokens:
                    break
            except (KeyError, FileNotFoundError, ValueError):
                pass
            time.sleep(0.01)
        workers = [int(pid) for pid in children(run.pid)]
        run.kill()
        assert run.wait() == -signal.SIGKILL
        assert len(workers) >= (0 if processes == 1 else 2)
        while any(map(runs, workers)):
            time.sleep(0.05)  # they exit by themselves
        counts.append(committed(tmp_path / "x.zarr"))
    assert counts[0] < counts[1] < 130_000
    with pytest.raises(ValueError, match="its conversion is unfinished"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")
    with pytest.raises(ValueError, match=r"validation_share=0.2, not 0.3; choose another"):
        tool.convert(settings(shards, tmp_path / "x.zarr", validation_share=0.3))
    subprocess.run(command, cwd=ROOT, check=True)
    assert same(tmp_path / "x.zarr", whole)


class Killed(BaseException):
    """Ends a conversion at once: nothing catches it."""


class Deadly:
    """Makes conversions die before a write."""

    def __init__(self, monkeypatch):
        self.count, self.last, put = 0, None, zarr.storage.LocalStore.set

        async def put_or_die(store, *args, **kwargs):
            self.count += 1
            if self.last and self.count > self.last:
                raise Killed
            await put(store, *args, **kwargs)

        monkeypatch.setattr(zarr.storage.LocalStore, "set", put_or_die)

    def convert(self, config, writes=None):
        """Returns whether it died, which it does after this many writes."""
        self.count, self.last = 0, writes
        try:
            tool.convert(config)
        except Killed:
            return True
        return False


@contextlib.contextmanager
def changed(folder, kind):
    """Changes a folder of files, and restores it."""
    before = contents(folder)
    if kind == "added":
        write_texts(folder / "05a.jsonl", ["one more"])
    elif kind == "removed":
        (folder / "03.jsonl").unlink()
    elif kind == "grown":
        with (folder / "09.jsonl").open("a") as file:
            file.write('{"body": "one more"}\n')
    elif kind == "renamed":
        (folder / "02.jsonl").rename(folder / "99.jsonl")
    yield
    for path in folder.iterdir():
        path.unlink()
    for name, content in before.items():
        (folder / name).write_bytes(content)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


NUMBERS = r"bytes \d+, now \d+; names and sizes \w+, now \w+"
CURE = r"\. Restore it, or begin anew: delete an unfinished conversion, or "
DIFFERENCES = {
    "added": rf"train has changed .*: files 11, now 12; {NUMBERS}; shards 11, now 12{CURE}",
    "removed": rf"train has changed .*: files 11, now 10; {NUMBERS}; shards 11, now 10{CURE}",
    "grown": rf"train has changed .* read: {NUMBERS}{CURE}",
    "renamed": rf"train has changed .* read: names and sizes \w+, now \w+{CURE}",
}


@pytest.mark.slow
def test_killed_at_any_write_and_its_source_changed(shards, tmp_path, monkeypatch):
    """Every conversion ends equal, byte for byte, to one that wasn't killed; while its source is
    another, it is refused and stays as it is."""
    folder, rng = tmp_path / "files", random.Random(0)
    shutil.copytree(shards.parent, folder)
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, outputs = Deadly(monkeypatch), iter(range(1000))
    assert not deadly.convert(settings(folder / "*.jsonl", tmp_path / "whole.zarr"))
    most, refused, output = deadly.count // 3, [], None
    for kind in itertools.islice(itertools.cycle([*DIFFERENCES, "none"]), 20):
        output = output or tmp_path / f"{next(outputs)}.zarr"
        config = settings(folder / "*.jsonl", output)
        while not deadly.convert(config, writes=rng.randrange(1, most)):
            assert contents(output) == contents(tmp_path / "whole.zarr")
            output = tmp_path / f"{next(outputs)}.zarr"
            config = settings(folder / "*.jsonl", output)
        progress = zarr.open_group(output).attrs.get("conversion", {})
        if kind != "none" and "positions" in progress:  # else the next start begins anew
            with changed(folder, kind), pytest.raises(UserError, match=DIFFERENCES[kind]):
                deadly.convert(config)
            refused.append(kind)
    assert not deadly.convert(config)
    assert contents(output) == contents(tmp_path / "whole.zarr")
    assert len(refused) > 8, "most were killed after the first commit"


@pytest.mark.long
def test_killed_at_any_time_and_its_source_changed(shards, tmp_path):
    """Kills the program with SIGKILL, and tries to go on with one of the files grown."""
    folder, rng, output = tmp_path / "files", random.Random(0), tmp_path / "x.zarr"
    shutil.copytree(shards.parent, folder)
    program = "import tools.huggingface_to_flat_tokens as t; t.COMMIT_SECONDS = 0; t.main()"
    command = [sys.executable, "-c", program, "--config-name=json_files"]

    def run(output, kill_after=600.0):
        """Returns the exit code and the errors."""
        wanted = [*arguments(folder / "*.jsonl", output), "validation_share=0.2"]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, *wanted], cwd=ROOT, stderr=pipe, text=True) as process:
            while process.poll() is None and not output.exists():
                time.sleep(0.01)
            try:
                errors = process.communicate(timeout=kill_after)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                errors = process.communicate()[1]
        return process.returncode, errors

    assert run(tmp_path / "whole.zarr")[0] == 0
    kills = refused = 0
    while kills < 20:
        code, errors = run(output, kill_after=rng.uniform(0, 1))
        progress = zarr.open_group(output).attrs.get("conversion", {})
        if code == 0 or (progress and "positions" not in progress):  # killed at its very end
            assert contents(output) == contents(tmp_path / "whole.zarr")
            shutil.rmtree(output)
            continue
        assert code == -signal.SIGKILL, errors
        kills += 1
        if progress:
            with changed(folder, "grown"):
                code, errors = run(output)
            assert code == 1 and "has changed" in errors, errors
            refused += 1
    assert run(output) == (0, "")
    assert contents(output) == contents(tmp_path / "whole.zarr")
    assert refused > 8


def test_another_tokenizer_under_the_same_name(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, file = Deadly(monkeypatch), tmp_path / "tokenizer.json"
    config = settings(shards, tmp_path / "x.zarr", tokenizer=str(file))
    train_tokenizer(tmp_path, ["<unused>", "<s>"])
    assert deadly.convert(config, writes=40)
    train_tokenizer(tmp_path, ["<unused>", "<pad>"])
    text.tokenizer.cache_clear()
    with pytest.raises(UserError, match=r"has changed .* read: tokenizer \w+, now \w+\. Restore"):
        deadly.convert(config)


def test_a_file_that_is_damaged_in_the_middle(shards, tmp_path):
    shutil.copytree(shards.parent, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "08.jsonl"
    damaged.write_text(damaged.read_text()[:9000] + '"}]\n')
    problem = r"the split train can't be read: .*JSON"
    with pytest.raises((OSError, ValueError), match=problem):
        tool.convert(settings(tmp_path / "*.jsonl", tmp_path / "x.zarr", processes=2))
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match="its conversion is unfinished"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")


def test_a_worker_that_is_killed(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tool.Conversion, "add", lambda *_: [p.kill() for p in multiprocessing.active_children()]
    )
    with pytest.raises(OSError, match="a tokenizer process died"):
        tool.convert(settings(shards, tmp_path / "x.zarr", processes=2))
    assert not multiprocessing.active_children()


def test_ctrl_c(shards, tmp_path):
    command = [*PROGRAM, *arguments(shards, tmp_path / "x.zarr"), "processes=1"]
    # If pytest runs in the background, it ignores Ctrl-C, and its children would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    while not (tmp_path / "x.zarr/validation").exists():
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate()
    message = "interrupted; run the same command again to continue\n"
    assert (run.returncode, errors) == (130, message)


@pytest.mark.slow
def test_a_full_disk(shards, whole, tmp_path):
    """Simulates a full disk by a limit on the size of files."""
    command = [*PROGRAM, *arguments(shards, tmp_path / "x.zarr"), "validation_share=0.2"]
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]  # KiB
    full = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 1 and full.stderr.startswith("error: ")
    assert "File too large" in full.stderr and "Traceback" not in full.stderr
    with pytest.raises(ValueError, match="its conversion is unfinished"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")
    subprocess.run(command, cwd=ROOT, check=True)
    assert same(tmp_path / "x.zarr", whole)


def test_max_tokens_ends_with_the_document_that_reaches_it(shards, whole, tmp_path):
    for limit in 1, 12_345, 50_000:
        tool.convert(settings(shards, tmp_path / f"{limit}.zarr", max_tokens=limit))
        train = documents(tmp_path / f"{limit}.zarr", "train")
        assert train == documents(whole, "train")[: len(train)]
        assert sum(map(len, train)) >= limit > sum(map(len, train[:-1]))


def test_a_validation_split_of_its_own(shards, whole, tmp_path):
    """Applies max_tokens to it too, and reads all of it without max_tokens."""
    load = {
        "path": "json",
        "data_files": {"train": str(shards), "held": str(shards.parent / "0[3-9]*")},
    }
    changes = {"load_dataset": load, "validation_split": "held"}
    tool.convert(settings(shards, tmp_path / "x.zarr", **changes))
    train, validation = (texts_of(tmp_path / "x.zarr", s) for s in ("train", "validation"))
    assert sorted(train) == all_texts(whole)
    assert sorted(validation) == sorted(
        t for t in train if "03" <= f"0{t[: t.index('.')]}"[-2:] <= "09"
    )
    tool.convert(settings(shards, tmp_path / "y.zarr", max_tokens=9_000, **changes))
    for split in "train", "validation":
        assert 9_000 <= FlatTokens(str(tmp_path / "y.zarr"), split).token_count < 9_200


def train_tokenizer(folder, special):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(5)  # as some published tokenizers do
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1] if special else None
    ).save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("special", [["<unused>", "<s>"], []], ids=["id 0 free", "id 0 in use"])
def test_a_tokenizer_that_transformers_opens(jsonl, tmp_path, special):
    tokenizer = train_tokenizer(tmp_path / "tokenizer", special)
    wanted = {"tokenizer": str(tmp_path / "tokenizer")}
    tool.convert(settings(jsonl, tmp_path / "x.zarr", **wanted))
    rows = documents(tmp_path / "x.zarr", "train") + documents(tmp_path / "x.zarr", "validation")
    again = str(tmp_path / "tokenizer/tokenizer.json")
    tool.convert(settings(jsonl, tmp_path / "y.zarr", tokenizer=again))
    assert same(tmp_path / "y.zarr", tmp_path / "x.zarr"), "the file alone gives the same ids"
    ids = np.array(documents(tmp_path / "y.zarr", "validation")[0], np.uint32)
    assert Tokenizer(again).decode(ids) == TEXTS[0]
    assert special or any(0 in ids for ids in rows), "0 is an id like any other"
    assert sorted(tokenizer.decode(ids) for ids in rows) == sorted(TEXTS)
    assert not special or all(1 not in ids for ids in rows), "no special tokens"
    assert sum(map(len, rows)) < sum(len(text.encode()) for text in TEXTS)


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path):
    train_tokenizer(tmp_path / "tokenizer", ["<unused>", "<s>"])
    texts = ["a <s> b", "<unused>"]
    write_texts(tmp_path / "x.jsonl", texts)
    config = settings(
        tmp_path / "x.jsonl", tmp_path / "x.zarr", tokenizer=str(tmp_path / "tokenizer")
    )
    tool.convert(config)
    rows = documents(tmp_path / "x.zarr", "train") + documents(tmp_path / "x.zarr", "validation")
    assert min(min(ids) for ids in rows) > 1


def test_a_tokenizer_in_python_alone(jsonl, tmp_path):
    """Uses ByT5, which has no Rust implementation. Its ids are bytes plus 3."""
    (tmp_path / "byt5").mkdir()
    name = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "byt5/tokenizer_config.json").write_text(json.dumps(name))
    tool.convert(settings(jsonl, tmp_path / "x.zarr", tokenizer=str(tmp_path / "byt5")))
    tool.convert(settings(jsonl, tmp_path / "y.zarr"))
    rows, wanted = (documents(tmp_path / name, "train") for name in ("x.zarr", "y.zarr"))
    assert rows == [[i + 2 for i in ids] for ids in wanted]


def test_a_missing_output_and_an_existing_one(jsonl, tmp_path, capsys, monkeypatch):
    wanted = ["--config-name=json_files", *arguments(jsonl, tmp_path / "x.zarr")]
    assert train_here(capsys, monkeypatch, *wanted, program=tool.main)[1] == ""
    before = documents(tmp_path / "x.zarr", "train")
    _, message = train_here(capsys, monkeypatch, *wanted, program=tool.main)
    assert "already has a split train" in message
    del wanted[2]
    assert "output" in train_here(capsys, monkeypatch, *wanted, program=tool.main)[1]
    assert documents(tmp_path / "x.zarr", "train") == before


MISTAKES = {
    "column=nothing": "the columns are body: str",
    "validation_share=2": "validation_share=2",
    "validation_share=0": "a dataset needs both splits",
    "max_tokens=0": "max_tokens=0: it must be at least 1 and below 2147483648",
    "processes=-1": "processes=-1: it must be at least 1 and below 2147483648",
    "train_split=missing": "missing",
    "validation_split=missing": "missing",
    "+load_dataset.nonsense=1": "nonsense",
    "load_dataset.path=nonsense/nowhere": "nonsense/nowhere",
    "+speed=fast": "speed",
    "tokenizer=nowhere/at-all": "nowhere/at-all",
    "chat=true": "chat=true: tokenizer=bytes_utf8 has no chat template",
    "end_token=true": "end_token=true: tokenizer=bytes_utf8 names no end-of-text token",
    "tokenizer=nowhere.json": "nowhere.json can't be opened: No such file",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_message_and_leaves_nothing(
    jsonl, tmp_path, capsys, monkeypatch, mistake
):
    wanted = ["--config-name=json_files", *arguments(jsonl, tmp_path / "x.zarr"), mistake]
    _, message = train_here(capsys, monkeypatch, *wanted, program=tool.main)
    assert message.startswith("error: ") and message.count("error: ") == 1
    assert MISTAKES[mistake] in message
    assert not (tmp_path / "x.zarr").exists()


@pytest.mark.parametrize("given", ["notes/*.txt", "[*.py,notes/*.txt]", "notes.txt"])
def test_a_pattern_that_matches_no_file_is_named(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("text")
    wanted = ["--config-name=text_files", f"load_dataset.data_files={given}", "output=x.zarr"]
    _, message = train_here(capsys, monkeypatch, *wanted, program=tool.main)
    pattern = given.strip("[]").split(",")[-1]
    problem = f"load_dataset.data_files={pattern} matches no file in {tmp_path}"
    assert message == f"error: {problem}"


@pytest.mark.parametrize("given", [[], ["--config-name=base"], ["load_dataset.path=json"]])
def test_without_a_config_the_message_lists_them(given, capsys, monkeypatch):
    _, message = train_here(capsys, monkeypatch, *given, "output=x.zarr", program=tool.main)
    assert "--config-name=NAME: c4_en, chats, fineweb_edu, json_files," in message


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_files_that_have_the_text_in_a_column(kind, jsonl, tmp_path, capsys, monkeypatch):
    files = str(jsonl)
    if kind == "parquet":
        files = str(tmp_path / "texts.parquet")
        datasets.Dataset.from_list([{"body": text} for text in TEXTS]).to_parquet(files)
    wanted = [f"load_dataset.data_files={files}", "column=body", f"output={tmp_path / 'x.zarr'}"]
    name = f"--config-name={kind}_files"
    assert train_here(capsys, monkeypatch, name, *wanted, program=tool.main)[1] == ""
    assert all_texts(tmp_path / "x.zarr") == sorted(TEXTS)


def test_a_single_document_makes_no_dataset(tmp_path):
    write_texts(tmp_path / "x.jsonl", ["all there is"])
    with pytest.raises(ValueError, match="too few for two splits"):
        tool.convert(settings(tmp_path / "x.jsonl", tmp_path / "x.zarr"))
    for split in "train", "validation":
        with pytest.raises(ValueError):
            FlatTokens(str(tmp_path / "x.zarr"), split)


class Gate(http.server.BaseHTTPRequestHandler):
    """A hub that gates all its datasets."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_a_gated_dataset(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate) as hub:
        threading.Thread(target=hub.serve_forever).start()
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        run = subprocess.run(
            [*PROGRAM, *arguments("x", tmp_path / "x.zarr"), "load_dataset={path: some/secret}"],
            cwd=ROOT, capture_output=True, text=True,
            env=os.environ | here | {"HF_HUB_OFFLINE": "0"},
        )  # fmt: skip
        hub.shutdown()
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "some/secret" in run.stderr and "gated" in run.stderr
    assert not (tmp_path / "x.zarr").exists()


def test_the_standard_library_is_its_sources_without_tests():
    files = python_stdlib()
    assert files == sorted(files)
    assert 500 < len(files) < 1500
    assert any(file.endswith("/argparse.py") for file in files)
    assert not any("/test/" in file or "site-packages" in file for file in files)


@pytest.mark.parametrize("lines, problem", [
    ([], "the split train has no documents"),
    (['{"text": ""}', '{"text": 5}'],
     "column=text is not a text column; the columns are text: int"),
    (['{"text": null}', '{"text": "a"}', '{"text": "b"}'], ""),
])  # fmt: skip
def test_json_rows_whose_text_is_not_always_a_string(lines, problem, tmp_path, capsys, monkeypatch):
    (tmp_path / "x.jsonl").write_text("".join(f"{line}\n" for line in lines))
    given = ["--config-name=json_files", f"load_dataset.data_files={tmp_path}/x.jsonl"]
    given += [f"output={tmp_path}/x.zarr"]
    out, message = train_here(capsys, monkeypatch, *given, program=tool.main)
    assert message == (f"error: {problem}" if problem else "")
    assert bool(problem) != ("skipped 1 empty document" in out)


@pytest.fixture
def chats(tmp_path):
    """A pattern that matches three files of chats, two of which have no reply."""
    for i, count in enumerate([300, 40, 600]):
        rows = [{"messages": chat(f"what is {i}.{j}?", f"a {i}.{j}")} for j in range(count)]
        rows[2:4] = [{"messages": chat("hi")}, {"messages": []}]
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "*.jsonl"


def test_chats_become_documents_with_targets(chats, tmp_path, capsys, monkeypatch):
    path = write_tokenizer(tmp_path / "tokenizer", eos_token=SPECIAL[0])
    given = ["--config-name=chats", f"load_dataset.data_files={chats}", f"tokenizer={path}"]
    for output, processes in ("x", 1), ("y", 2):
        more = f"output={tmp_path / output}.zarr", f"processes={processes}"
        out, message = train_here(capsys, monkeypatch, *given, *more, program=tool.main)
        assert not message and "skipped 6 empty documents" in out
    assert same(tmp_path / "y.zarr", tmp_path / "x.zarr")
    tokenizer, said = Tokenizer(path), []
    for split in "train", "validation":
        dataset = FlatTokens(str(tmp_path / "x.zarr"), split)
        ids, is_start = decode(dataset.read_encoded(0, dataset.token_count))
        for document in np.split(ids, np.flatnonzero(is_start)[1:]):
            said.append(tokenizer.decode(document[document < NOT_A_TARGET]))
            number = said[-1][2:].removesuffix("<|im_end|>\n")
            question = f"<|im_start|>user\nwhat is {number}?<|im_end|>\n"
            whole = f"{question}<|im_start|>assistant\n{said[-1]}"
            assert tokenizer.decode(document % NOT_A_TARGET) == whole
    assert len(set(said)) == len(said) == 934


def test_an_unfinished_conversion_of_an_earlier_version(shards, whole, tmp_path, monkeypatch):
    """Settings that it didn't have aren't recorded."""
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, output = Deadly(monkeypatch), tmp_path / "x.zarr"
    assert deadly.convert(settings(shards, output), writes=40)
    conversion = zarr.open_group(output).attrs["conversion"]
    for key in "end_token", "chat":
        assert conversion["settings"].pop(key) is False
    deadly.last = None
    zarr.open_group(output).attrs["conversion"] = conversion
    with pytest.raises(UserError, match="unfinished conversion with chat=False, not True"):
        tool.Conversion(settings(shards, output, chat=True), [])
    assert not deadly.convert(settings(shards, output))
    assert same(output, whole)


def test_another_chat_template(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, path = Deadly(monkeypatch), write_tokenizer(tmp_path / "tokenizer", CHATML)
    kind = {"column": "messages", "chat": True, "tokenizer": path}
    config = settings(chats, tmp_path / "x.zarr", **kind)
    assert deadly.convert(config, writes=40)
    write_tokenizer(tmp_path / "tokenizer", PLAIN)
    text.tokenizer.cache_clear()
    with pytest.raises(UserError, match=r"has changed .* read: tokenizer \w+, now \w+\. Restore"):
        deadly.convert(config)


@pytest.mark.parametrize("row, types", [
    ({"messages": "hi"}, "messages: str"),
    ({"messages": ["hi"]}, "messages: list"),
    ({"messages": [{"from": "human", "value": "hi"}]}, "messages: list"),
    ({"chat": []}, "chat: list"),
])  # fmt: skip
def test_a_column_without_chats(row, types, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    kind = {"column": "messages", "chat": True, "tokenizer": write_tokenizer(tmp_path / "t")}
    with pytest.raises(UserError) as error:
        tool.convert(settings(tmp_path / "x.jsonl", tmp_path / "x.zarr", **kind))
    problem = "column=messages is not a chat column, with lists of {role, content}"
    assert str(error.value) == f"{problem}; the columns are {types}"
