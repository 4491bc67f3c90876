"""The converter, with real `datasets` and `transformers`, on local files and a loopback server."""

import contextlib
import dataclasses
import functools
import gzip
import http.server
import io
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
import zarr
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from data import text
from data.flat_tokens import FlatTokens
from data.tokenizer import Tokenizer, open_tokenizer
from shardlib.errors import UserError
from tests.data.test_tokenizer import trained_tokenizer
from tests.files import documents
from tests.helpers import ROOT, compose_config
from tests.processes import python_at_work
from tools import huggingface_to_flat_tokens as tool
from tools.huggingface_to_flat_tokens import ConvertConfig, python_stdlib


@functools.cache
def defaults():
    given = "load_dataset.data_files=x", "output=x", "column=body", "validation_share=0.2"
    folder = "configs/convert"
    return compose_config("json_files", *given, folder=folder, schema=ConvertConfig)


def settings(files, output, **changes):
    load = {"path": "json", "data_files": str(files)}
    changes = {"load_dataset": load, "output": str(output)} | changes
    return dataclasses.replace(defaults(), **changes)


def arguments(files, output, *more):
    return [f"load_dataset.data_files={files}", f"output={output}", "column=body", *more]


def texts_of(path, split):
    return [bytes(i - 1 for i in ids).decode() for ids in documents(path, split)]


def knows_its_bytes(path):
    """Returns whether each split of a dataset of `bytes_utf8` has as many bytes as it says."""
    group = zarr.open_group(path, mode="r")
    sizes = {split: sum(map(len, documents(path, split))) for split in group}
    return sizes == {split: group[split].attrs["bytes"] for split in sizes}


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))


@pytest.fixture
def run_here(train_here):
    """A function that runs the program, and returns what it printed and its exit message."""
    return functools.partial(train_here, program=tool.main)


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


def same(path, wanted):
    return all(documents(path, s) == documents(wanted, s) for s in ("train", "validation"))


def test_bytes_of_each_document(jsonl, tmp_path, capsys):
    tool.convert(settings(jsonl, tmp_path / "x.zarr"))
    assert texts_of(tmp_path / "x.zarr", "validation") == [TEXTS[0], TEXTS[5]]
    assert texts_of(tmp_path / "x.zarr", "train") == [*TEXTS[1:5], *TEXTS[6:]]
    assert "10 documents with text, 2 without" in capsys.readouterr().out
    assert knows_its_bytes(tmp_path / "x.zarr")


@pytest.mark.parametrize("kinds", [1, 2, 3, 5, 8, 20, 21, 50])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.3])
def test_kinds_that_alternate_have_the_same_share_for_validation(kinds, share):
    mask = tool.for_validation(10**12, 10**6, share)
    counts = [mask[kind::kinds].sum() for kind in range(kinds)]
    np.testing.assert_allclose(counts, share * 10**6 / kinds, rtol=0.1, atol=8)


def test_each_document_once_whatever_its_shard(shards, whole):
    texts = all_texts(whole)
    lines = [line for path in shards.parent.iterdir() for line in path.read_text().splitlines()]
    assert texts == sorted(json.loads(line)["body"] for line in lines)
    assert len(texts_of(whole, "validation")) == -(-len(texts) // 5)


def all_texts(path):
    return sorted(texts_of(path, "train") + texts_of(path, "validation"))


WAITING = """
import time
from tools import huggingface_to_flat_tokens as tool

tool.COMMIT_SECONDS, commit = 0, tool.Conversion.commit

def commit_and_wait(conversion):
    commit(conversion)
    if conversion.writers["train"].token_count > 60_000:
        print("waiting", flush=True)
        time.sleep(60)  # at most

tool.Conversion.commit = commit_and_wait
tool.main()
"""


def waiting(*arguments):
    """Starts the program, and returns it when it waits, halfway and after a commit."""
    # If pytest runs in the background, it ignores Ctrl-C, and its children would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = python_at_work("-c", WAITING, "--config-name=json_files", *arguments)
    signal.signal(signal.SIGINT, before)
    assert run.stdout.readline() == "waiting\n"
    return run


def test_stopped_by_ctrl_c_it_goes_on_where_it_was(shards, whole, tmp_path, run_here):
    wanted = [*arguments(shards, tmp_path / "x.zarr"), "validation_share=0.2"]
    run = waiting(*wanted)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    said = "interrupted; run the same command again to continue\n"
    assert (run.returncode, errors) == (130, said)
    with pytest.raises(ValueError, match=r"validation_share=0.2, not 0.3; choose another"):
        tool.convert(settings(shards, tmp_path / "x.zarr", validation_share=0.3))
    assert run_here("--config-name=json_files", *wanted)[1] == ""
    assert same(tmp_path / "x.zarr", whole)
    groups = zarr.open_group(tmp_path / "x.zarr"), zarr.open_group(whole)
    assert groups[0].attrs["conversion"] == groups[1].attrs["conversion"]


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
def grown(file):
    """Adds a document to a file, and then restores it."""
    before = file.read_bytes()
    file.write_bytes(before + b'{"body": "one more"}\n')
    yield
    file.write_bytes(before)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_killed_at_any_write_and_its_source_changed(shards, tmp_path, monkeypatch):
    """Every conversion ends equal, byte for byte, to one that wasn't killed; while its source is
    another, it is refused and stays as it is."""
    folder, rng, refused = tmp_path / "files", random.Random(0), 0
    shutil.copytree(shards.parent, folder)
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, outputs = Deadly(monkeypatch), (tmp_path / f"{i}.zarr" for i in range(1000))
    output = next(outputs)
    assert not deadly.convert(settings(folder / "*.jsonl", output))
    most, whole, output = deadly.count // 3, contents(output), next(outputs)
    problem = r"train has changed .* read: bytes \d+, now \d+; names and sizes \w+, now \w+\. "
    problem += "Restore it, or the .*, or start over: delete an unfinished conversion, or "
    for number in range(20):
        while not deadly.convert(settings(folder / "*.jsonl", output), rng.randrange(1, most)):
            assert contents(output) == whole
            output = next(outputs)
        progress = zarr.open_group(output).attrs.get("conversion", {})
        if number % 5 and "positions" in progress:  # else the next start begins anew
            with grown(folder / "09.jsonl"), pytest.raises(UserError, match=problem):
                deadly.convert(settings(folder / "*.jsonl", output))
            refused += 1
    assert not deadly.convert(settings(folder / "*.jsonl", output))
    assert contents(output) == whole
    assert refused > 8, "most were killed after the first commit"


@pytest.mark.long
def test_killed_at_any_time_and_its_source_changed(shards, tmp_path):
    """Kills the program with SIGKILL, and tries to go on with one of the files grown."""
    folder, rng, output = tmp_path / "files", random.Random(0), tmp_path / "x.zarr"
    shutil.copytree(shards.parent, folder)
    program = "import tools.huggingface_to_flat_tokens as t; t.COMMIT_SECONDS = 0; t.main()"
    command = "-c", program, "--config-name=json_files"

    def run(output, kill_after=600.0):
        """Returns the exit code and the errors."""
        wanted = [*arguments(folder / "*.jsonl", output), "validation_share=0.2"]
        with python_at_work(*command, *wanted, stdout=None) as process:
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
            with grown(folder / "09.jsonl"):
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
    trained_tokenizer(TEXTS, ["<s>"]).save(str(file))
    assert deadly.convert(config, writes=40)
    trained_tokenizer(TEXTS, ["<pad>"]).save(str(file))
    open_tokenizer.cache_clear()
    with pytest.raises(UserError, match=r"has changed .* read: tokenizer \w+, now \w+\. Restore"):
        deadly.convert(config)


@pytest.mark.slow
def test_a_full_disk(shards, whole, tmp_path, run_here):
    """Simulates a full disk by a limit on the size of files."""
    wanted = [*arguments(shards, tmp_path / "x.zarr"), "validation_share=0.2"]
    program = sys.executable, "-m", tool.__name__, "--config-name=json_files"
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *program, *wanted]  # KiB
    full = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 1 and full.stderr.startswith("error: ")
    assert "File too large" in full.stderr and "Traceback" not in full.stderr
    with pytest.raises(ValueError, match="its conversion is unfinished"):
        FlatTokens(str(tmp_path / "x.zarr"), "train")
    assert run_here("--config-name=json_files", *wanted)[1] == ""
    assert same(tmp_path / "x.zarr", whole)


def test_max_tokens_ends_with_the_document_that_reaches_it(shards, whole, tmp_path):
    for limit in 1, 12_345:
        tool.convert(settings(shards, tmp_path / f"{limit}.zarr", max_tokens=limit))
        train = documents(tmp_path / f"{limit}.zarr", "train")
        assert train == documents(whole, "train")[: len(train)]
        assert sum(map(len, train)) >= limit > sum(map(len, train[:-1]))
        assert knows_its_bytes(tmp_path / f"{limit}.zarr")


def test_max_tokens_and_a_kill_at_any_write(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    deadly, whole = Deadly(monkeypatch), tmp_path / "whole.zarr"
    config = settings(shards.parent / "0[01].jsonl", whole, max_tokens=300)
    assert not deadly.convert(config)
    for writes in range(deadly.count - 9, deadly.count):  # from before the last commit on
        config = dataclasses.replace(config, output=str(tmp_path / f"{writes}.zarr"))
        assert deadly.convert(config, writes)
        with contextlib.suppress(FileExistsError):  # killed at its very end
            assert not deadly.convert(config)
        assert contents(tmp_path / f"{writes}.zarr") == contents(whole)


def test_a_validation_split_of_its_own(shards, whole, tmp_path):
    """Applies max_tokens to it too, and reads all of it without max_tokens."""
    held = str(shutil.copy(shards.parent / "00.jsonl", tmp_path / "held.jsonl"))
    files = {"train": str(shards), "held": held}
    load = {"path": "json", "data_files": files}
    changes = {"load_dataset": load, "validation_split": "held"}
    tool.convert(settings(shards, tmp_path / "x.zarr", **changes))
    train, validation = (texts_of(tmp_path / "x.zarr", s) for s in ("train", "validation"))
    assert sorted(train) == all_texts(whole)
    assert sorted(validation) == sorted(text for text in train if text.startswith("0."))
    tool.convert(settings(shards, tmp_path / "y.zarr", max_tokens=9_000, **changes))
    for split in "train", "validation":
        assert 9_000 <= FlatTokens(str(tmp_path / "y.zarr"), split).token_count < 9_200


def test_a_tokenizer_that_transformers_opens(jsonl, tmp_path):
    """Opens one that cuts texts and puts a special token before them, as published ones do."""
    inner = trained_tokenizer(TEXTS, [])
    inner.enable_truncation(5)
    inner.add_special_tokens(["<s>"])
    start = "<s>", inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[start])
    path = str(tmp_path / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(path)
    tool.convert(settings(jsonl, tmp_path / "x.zarr", tokenizer=path))
    rows = documents(tmp_path / "x.zarr", "train") + documents(tmp_path / "x.zarr", "validation")
    again = f"{path}/tokenizer.json"
    tool.convert(settings(jsonl, tmp_path / "y.zarr", tokenizer=again))
    assert same(tmp_path / "y.zarr", tmp_path / "x.zarr"), "the file alone gives the same ids"
    ids = np.array(documents(tmp_path / "y.zarr", "validation")[0], np.uint32)
    assert Tokenizer(again).decode(ids) == TEXTS[0]
    assert any(0 in ids for ids in rows), "0 is an id like any other"
    assert sorted(inner.decode(ids, skip_special_tokens=False) for ids in rows) == sorted(TEXTS)
    assert sum(map(len, rows)) < (size := sum(len(text.encode()) for text in TEXTS))
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert group["train"].attrs["bytes"] + group["validation"].attrs["bytes"] == size
    assert group["validation"].attrs["bytes"] == len((TEXTS[0] + TEXTS[5]).encode())


def test_a_tokenizer_in_python_alone(jsonl, tmp_path):
    """Uses ByT5, which has no Rust implementation. Its ids are bytes plus 3."""
    (tmp_path / "byt5").mkdir()
    name = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "byt5/tokenizer_config.json").write_text(json.dumps(name))
    write_texts(jsonl, texts := ["the end </s>", *TEXTS[1:]])
    tool.convert(settings(jsonl, tmp_path / "x.zarr", tokenizer=str(tmp_path / "byt5")))
    rows = documents(tmp_path / "x.zarr", "validation")
    assert rows == [[byte + 3 for byte in text.encode()] for text in (texts[0], texts[5])]


MISTAKES = {
    "column=nothing": "has no column=nothing; the columns are body",
    "validation_share=2": "validation_share=2",
    "validation_share=0": "validation_share=0: Input should be greater than 0",
    "max_tokens=0": "max_tokens=0: Input should be greater than or equal to 1",
    "validation_split=missing": "no split missing: train has ['texts.jsonl']. Choose one of these",
    "+load_dataset.nonsense=1": "nonsense",
    "validation_split=train": "validation_split=train: training has it, too",
    "load_dataset.data_files={train: texts.jsonl, validation: '*.jsonl'}": "is in both splits",
    "load_dataset.data_files=2024": "load_dataset.data_files=2024 matches no file",
    "load_dataset.data_files=[*.jsonl,x/*]": "data_files=x/* matches no file in FOLDER",
    "+speed=fast": "speed",
    "end_token=true": "tokenizer bytes_utf8 names no end-of-text token, which end_token=true needs",
    "tokenizer=nowhere.json": "nowhere.json can't be opened: No such file",
    "tokenizer=/nowhere": "the tokenizer /nowhere can't be opened: there is no such folder",
    "tokenizer=no/such/folder": "no/such/folder can't be opened: there is no such folder",
    "+load_dataset.num_proc=4": "load_dataset.num_proc doesn't apply",
    "+load_dataset.split=train": "Leave it out; train_split and validation_split",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_leaves_one_message_alone(jsonl, here, mistake, run_here):
    wanted = ["--config-name=json_files", *arguments(jsonl, here / "x.zarr"), mistake]
    wanted += ["validation_split=validation"] * ("validation:" in mistake)
    _, message = run_here(*wanted)
    assert message.startswith("error: ") and message.count("error: ") == 1
    assert MISTAKES[mistake].replace("FOLDER", str(here)) in message
    assert not (here / "x.zarr").exists()


@pytest.mark.parametrize("name", sorted(x.stem for x in ROOT.glob("configs/convert/[!b]*.yaml")))
def test_each_config_loads(name):
    given = name, "output=x", "++load_dataset.data_files=x"
    compose_config(*given, folder="configs/convert", schema=ConvertConfig)


def test_without_a_config_the_message_lists_them(run_here):
    _, message = run_here("output=x.zarr")
    assert "--config-name=NAME: c4_en, fineweb_edu, json_files," in message


def test_the_standard_library_is_its_sources_without_tests():
    files = python_stdlib()
    assert files == sorted(files)
    assert 500 < len(files) < 1500
    assert any(file.endswith("/argparse.py") for file in files)
    assert not any("/test/" in file or "site-packages" in file for file in files)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def converted(folder, run_here):
    """A function that converts the folder, and returns what was printed, and the dataset's texts or
    the error message."""

    def convert(*more, config="json_files"):
        output = folder.parent / "x.zarr"
        shutil.rmtree(output, ignore_errors=True)
        if not any("load_dataset" in x for x in more):
            more = f"load_dataset.data_files={folder}/*", *more
        out, message = run_here(f"--config-name={config}", f"output={output}", *more)
        return out, message or all_texts(output)

    return convert


HI = 'say "hi"\né'
NOT_TEXT = ["NaN", "5", "[1]", '{"a": 1}', "true", '"\\ud800"']


@pytest.mark.parametrize("value", NOT_TEXT)
def test_a_value_that_is_not_text(folder, converted, value):
    """Names it, or leaves it out; the texts before and after it stay as they are."""
    texts = [json.dumps({"text": text}) for text in (HI, "123", '{"a": 1}', HI)]
    (folder / "x.jsonl").write_text("\n".join([*texts[:3], f'{{"text": {value}}}', texts[3]]))
    _, message = converted()
    assert message.startswith(f"error: {folder}/x.jsonl, row 4: column=text is ")
    assert message.endswith("skip_not_text=true to leave out such rows, or correct the row")
    out, texts = converted("skip_not_text=true")
    assert "read 1 file: 4 documents with text, 1 without" in out
    assert texts == sorted([HI, "123", '{"a": 1}', HI])


def test_a_late_row_that_is_not_text_is_left_out_by_a_second_start(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "COMMIT_SECONDS", 0)
    rows = [*[{"body": HI}] * 9000, {"body": 5}]
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = folder / "x.jsonl", tmp_path / "x.zarr"
    with pytest.raises(UserError, match="row 9001: column=body is 5"):
        tool.convert(settings(*given))
    assert zarr.open_group(given[1]).attrs["conversion"]["positions"][0]
    tool.convert(settings(*given, skip_not_text=True))
    assert all_texts(given[1]) == [HI] * 9000


def test_nulls_first_and_columns_that_vary(folder, converted):
    rows = [{"text": None}] * 300 + [{"text": HI, "x": x} for x in (1, "a", [2], None, {"b": 3})]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"y": 1}])))
    (folder / "b.jsonl").write_text("\ufeff\n" + json.dumps([{"text": "last", "z": 1}], indent=1))
    assert converted()[1] == ["last", *[HI] * 5]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_any_type_that_holds_strings(folder, converted, kind):
    of = pyarrow.dictionary("int32", "string") if kind == "dictionary" else getattr(pyarrow, kind)()
    for i, x in enumerate([1, "a"]):  # of different types in the other column
        table = pyarrow.table({"text": pyarrow.array([HI, None, f"{i}"], of), "x": [x] * 3})
        pyarrow.parquet.write_table(table, folder / f"{i}.parquet")
    assert converted(config="parquet_files")[1] == ["0", "1", HI, HI]


CSV = {  # texts, or what is wrong
    'x,text\n1,007\n2,NA\n3,\n4,"say ""hi""\n"\n\n5,null\n': ["007", "NA", "null", 'say "hi"\n'],
    "\ufeffx,text\r\n1,a,\r\n2,b\r\n3,c,,\r\n": ["a", "b", "c"],
    "text,x\n007,1,\n008,2\n": ["007", "008"],
    "x,text\n1,a\n2,b, c\n": "row 2 can't be read: it has 3 fields for 2 columns",
    "x,text\n1,a line\nand another\n": "row 2 can't be read: it has 1 field for 2 columns",
    "text,x,text\na,1,b\n": "two columns are named text",
    'x,text\n1,a\n2,"b\n3,c\n': "row 2 can't be read: unexpected end of data",
    'x,text\n1,"say \\"hi\\""\n': "if its quotes are written \\\", set '+load_dataset.escapechar=",
}


@pytest.mark.parametrize("content", CSV)
def test_csv_files_as_typed_or_not_at_all(folder, converted, content):
    (folder / "x.csv").write_text(content, newline="")
    _, result = converted(f"load_dataset={{path: csv, data_files: {folder}/x.csv}}")
    wanted = CSV[content]
    assert wanted in result if isinstance(wanted, str) else sorted(wanted) == result


def test_settings_of_csv_files(folder, converted):
    (folder / "x.csv").write_text('1;"say \\"hi\\""\n2;a\n')
    path = f"load_dataset={{path: csv, data_files: {folder}/x.csv, delimiter: ';'"
    names = ", column_names: [x, text]"
    assert converted(path + names + r""", escapechar: "\\"}""")[1] == ["a", 'say "hi"']
    assert "load_dataset.nrows isn't among the settings" in converted(path + ", nrows: 1}")[1]


ROWS = '[{"text": "a"}, {"text": "b"}]', '{"text": ["a", "b"], "x": [1, 2]}', '["a", "b"]'
NO_ROWS = [
    '{"a": {"text": "x"}, "b": {"text": "y"}}', '"abc"', "5", "null", "[[1], [2]]",
    '{"text": ["a", "b"], "x": [1]}', '{"text": {"0": "a", "1": "b"}}',
]  # fmt: skip


@pytest.mark.parametrize("value", [*ROWS, *NO_ROWS])
def test_rows_in_a_field(folder, converted, value):
    (folder / "x.json").write_text(f'{{"data": {value}}}')
    _, result = converted("+load_dataset.field=data", f"load_dataset.data_files={folder}/x.json")
    problem = "load_dataset.field=data holds neither a list of objects nor columns"
    assert result == ["a", "b"] if value in ROWS else problem in result


NESTED = {"meta": [{"text": "a"}, None, {"text": "b"}], "x.y": ["c", "d", None]}


@pytest.mark.parametrize("kind", ["json", "parquet", "arrow"])
def test_a_column_in_a_column(folder, converted, kind):
    table = pyarrow.table(NESTED)
    datasets.Dataset(table).to_json(folder / "x.json")
    pyarrow.parquet.write_table(table, folder / "x.parquet")
    with pyarrow.ipc.new_file(f"{folder}/x.arrow", table.schema) as writer:
        writer.write_table(table)
    files = f"load_dataset={{path: {kind}, data_files: {folder}/x.{kind}}}"
    for column, texts in ("meta.text", ["a", "b"]), ("x.y", ["c", "d"]):
        assert converted(files, f"column={column}")[1] == texts
    problem = f"x.{kind} has no column=meta.z; the columns are meta, "
    assert problem in converted(files, "column=meta.z")[1]


IN_INPUT = {
    "files/**": "files/out.zarr",
    "[files/*.txt,**/*.json]": "files/more/out.zarr",
    "files/*/*/**": "files/out.zarr",
    "files/a.txt": "files/a.txt",
    "files/train/*": "files",
}


@pytest.mark.parametrize("pattern", IN_INPUT)
def test_an_output_among_the_files_is_refused(folder, run_here, monkeypatch, pattern):
    monkeypatch.chdir(folder.parent)
    for name in "a.txt", "train/b.txt", "train/c/d.json":
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    before = contents(folder)
    wanted = [f"load_dataset.data_files={pattern}", f"output={IN_INPUT[pattern]}"]
    _, message = run_here("--config-name=text_files", *wanted)
    assert "which is read: move it out" in message or "choose another output" in message
    assert contents(folder) == before
    outside = f"output={folder.parent}.zarr"
    _, message = run_here("--config-name=text_files", wanted[0], outside)
    assert not message or message.startswith("error: one document is too few")


def test_a_split_that_is_done_may_not_change(folder, run_here):
    """A file of the other split, of which nothing is written, may be corrected."""
    files = f"load_dataset.data_files={{train: {folder}/a.jsonl, held: {folder}/b.jsonl}}"
    wanted = files, "validation_split=held", "column=body", f"output={folder.parent}/x.zarr"
    write_texts(folder / "a.jsonl", TEXTS)
    (folder / "b.jsonl").write_text('{"body": "a text"}\n' * 300 + '{"body": 5}')
    assert "b.jsonl, row 301: column=body is 5" in run_here("--config-name=json_files", *wanted)[1]
    write_texts(folder / "a.jsonl", [*TEXTS, "more"])
    write_texts(folder / "b.jsonl", TEXTS)
    problem = "the split train has changed since the part before was read: bytes "
    assert problem in run_here("--config-name=json_files", *wanted)[1]
    write_texts(folder / "a.jsonl", TEXTS)
    assert "documents with text" in run_here("--config-name=json_files", *wanted)[0]


def test_names_and_patterns_that_datasets_would_take_for_others(folder, converted):
    (folder / "v1").mkdir()
    write_texts(folder / "v1/a.jsonl", TEXTS)
    shutil.copytree(folder / "v1", folder / "v[1]")
    shutil.copy(folder / "v1/a.jsonl", folder / "v1/a[b].jsonl")
    for given in (
        f"load_dataset={{path: '{folder}/v[1]', data_files: null}}",
        f"load_dataset.data_files='{folder}/v1/a[b].jsonl'",
    ):
        assert re.search("/v.*] would be read as a pattern|a.b..jsonl would", converted(given)[1])
    for pattern in "memory://x/typo*.jsonl", f"{folder}/v*":  # which only folders match
        wanted = f"load_dataset.data_files=[{folder}/v1/a.jsonl, {pattern}]", "column=body"
        assert f"load_dataset.data_files={pattern} matches no file" in converted(*wanted)[1]


def test_secrets_stay_out_of_the_dataset(folder, converted):
    write_texts(folder / "a.jsonl", TEXTS)
    more = "+load_dataset.token=hf_1234", "+load_dataset.storage_options={secret: abc1234}"
    path = f"load_dataset.data_files={folder}/a.jsonl"
    assert converted(path, *more, "column=body")[1] == sorted(TEXTS)
    written = (p.read_bytes() for p in folder.parent.rglob("*") if p.is_file())
    assert not any(b"1234" in content for content in written)


def test_files_in_the_home_folder(folder, converted, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    write_texts(folder / "a.jsonl", TEXTS)
    for files in (
        'load_dataset.data_files="~/files/*.jsonl"',
        'load_dataset.data_files={train: ["~/files/a.jsonl"]}',
        'load_dataset.data_files=[{split: train, path: "~/files/*.jsonl"}]',
        'load_dataset={path: "~/files", data_files: null}',
    ):
        assert converted(files, "column=body")[1] == sorted(TEXTS)


def test_a_long_document_in_the_validation_split(folder, converted):
    """Documents 0 and 13 are in it."""
    for first, noted in ("x" * 40, False), ("x" * 4000, True):
        write_texts(folder / "a.jsonl", [first] + ["x" * 40] * 19)
        assert ("note: 84.87% of the tokens are" in converted("column=body")[0]) == noted


def test_what_is_read_twice_or_lost_is_noted(folder, run_here):
    """The second tokenizer knows two letters, so bits per byte would mean nothing."""
    write_texts(folder / "a.jsonl", ["abba", "äba\tä"])
    (folder / "b.jsonl").symlink_to("a.jsonl")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "__old__").mkdir()
    write_texts(folder / "__old__/c.jsonl", ["a"])
    (folder.parent / "far").mkdir()
    write_texts(folder.parent / "far/d.jsonl", ["a"])
    (folder / "linked").symlink_to(folder.parent / "far")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    inner.save(name := str(folder.parent / "ab.json"))
    files = f"load_dataset.data_files=[{folder}/a.jsonl,{folder}/**]"
    for tokenizer, lost in ("bytes_utf8", False), (name, True):
        output = f"{folder.parent}/{lost}.zarr"
        wanted = files, "column=body", f"tokenizer={tokenizer}", f"output={output}"
        out, _ = run_here("--config-name=json_files", *wanted)
        assert f"note: {folder}/a.jsonl is read 3 times\n" in out
        assert f"note: {folder}/a.jsonl.gz is read, and {folder}/a.jsonl: do they have" in out
        assert f"{folder}/** leaves out folders like __x__: ['__old__/c.jsonl']\n" in out
        assert f"{folder}/** leaves out links to folders: ['linked']\n" in out
        note = f"note: the tokenizer {name} loses or changes 33.3% of the characters, such as 'ä'\n"
        known = zarr.open_group(f"{output}/train").attrs
        assert (note in out, "bytes" not in known) == (lost, lost)


def compressed(kind, content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, kind) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACKED = {"bz2": "bz2", "gz": "gzip", "lz4": "lz4", "zst": "zstd", "xz": "", "zip": "", "arrow": ""}


def packed(folder, kind, texts):
    """Returns the name of a file of texts, and its content."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "arrow":
        table, sink = pyarrow.table({"text": texts}), pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return "x.arrow", sink.getvalue().to_pybytes()
    if kind == "zip":  # of a compressed file
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as archive:
            archive.writestr("x.jsonl.zst", compressed("zstd", content))
        return "x.zip", sink.getvalue()
    if kind == "xz":
        return "x.jsonl.xz", lzma.compress(content)
    return f"x.jsonl.{kind}", compressed(PACKED[kind], content)


@pytest.mark.parametrize("kind", PACKED)
def test_a_file_that_ends_early(folder, converted, kind):
    """However little is missing, and if all is."""
    texts = [random.Random(i).randbytes(40).hex() for i in range(900)]
    name, content = packed(folder, kind, texts)
    path = "arrow" if kind == "arrow" else "json"
    files = f"load_dataset={{path: {path}, data_files: {folder}/*}}"
    (folder / name).write_bytes(content)
    assert converted(files)[1] == sorted(texts)
    for length in len(content) // 2, len(content) - 8, 0:
        (folder / name).write_bytes(content[:length])
        assert re.search(f"{folder}/{name}(, row .*)? can't be read", converted(files)[1])


def test_arrow_files_of_which_the_first_has_only_nulls(folder, converted):
    """Covers both formats of files, and other columns that vary."""
    tables = {"text": pyarrow.nulls(9)}, {"x": [1, 2], "text": [HI, HI]}
    for table, new in zip(tables, (pyarrow.ipc.new_stream, pyarrow.ipc.new_file), strict=True):
        with new(f"{folder}/{len(table)}.arrow", pyarrow.table(table).schema) as writer:
            writer.write_table(pyarrow.table(table))
    files = f"load_dataset={{path: {folder}, data_files: null}}"
    out, texts = converted(files)
    assert "read 2 files: 2 documents with text, 9 without" in out and texts == [HI, HI]


def test_a_changed_byte_of_a_parquet_file_with_checksums(folder, converted):
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": [HI, HI]}), folder / "0.parquet", **options)
    content = (folder / "0.parquet").read_bytes()
    (folder / "0.parquet").write_bytes(content.replace(HI.encode(), HI.upper().encode()))
    assert "0.parquet, row 1 can't be read: " in converted(config="parquet_files")[1]


def test_two_arrow_streams_in_a_file(folder, converted):
    _, content = packed(folder, "arrow", [HI])
    (folder / "x.arrow").write_bytes(2 * content)
    files = f"load_dataset={{path: arrow, data_files: {folder}/*}}"
    assert "row 2 can't be read: it has more than one stream" in converted(files)[1]


def test_special_tokens_that_the_vocabulary_has_too_are_noted(folder):
    write_texts(folder / "a.jsonl", TEXTS)
    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((chr(i), -2.0) for i in range(32, 127))]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    inner.add_special_tokens(["<unk>", "</s>"])
    inner.save(name := str(folder.parent / "unigram.json"))
    load = {"path": "json", "data_files": f"{folder}/*"}
    source = text.Source(load, "train", dataclasses.replace(defaults(), tokenizer=name))
    source.check()
    assert f"the tokenizer {name} takes </s> in a text for special tokens" in source.notes


def test_a_file_of_a_web_server_is_known_by_its_size_and_its_url_kept_secret(folder, converted):
    write_texts(folder / "a.jsonl", TEXTS)
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl?signature=1234"
        load = {"path": "json", "data_files": url}
        before = text.Source(load, "train", defaults()).check()
        assert before[text.UNTAGGED] == (folder / "a.jsonl").stat().st_size
        assert converted(f"load_dataset.data_files='{url}'", "column=body")[1] == sorted(TEXTS)
        server.shutdown()
    assert "1234" not in (folder.parent / "x.zarr/zarr.json").read_text()


def test_a_parquet_column_that_is_not_text(folder, converted):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "0.parquet")
    _, message = converted(config="parquet_files")
    assert f"{folder}/0.parquet, row 1: column=text is 1, which is no text" in message


def test_a_folder_of_text_files_has_a_document_per_file(folder, converted):
    for i in range(3):  # one with a byte order mark
        (folder / f"{i}.txt").write_text("\ufeff" * (i == 1) + f"{i}\r\nline\n")
    (folder / "3.md").write_text("a text")
    (folder / "more").symlink_to(folder.parent)
    out, texts = converted(f"load_dataset={{path: {folder}, data_files: null}}")
    assert out.count(f"note: {folder} has files that aren't read: ['3.md', 'more']\n") == 1
    assert "read 3 files: 3 documents with text" in out
    assert texts == [f"{i}\r\nline\n" for i in range(3)]


def test_what_save_to_disk_wrote(folder, converted):
    """With what Dataset.map has left beside it."""
    held_out, made = (datasets.Dataset.from_dict({"text": [x, x]}) for x in ("held out", HI))
    datasets.DatasetDict(test=held_out, train=made).save_to_disk(folder)
    shutil.copy(next(folder.glob("train/data-*.arrow")), folder / "train/cache-1.arrow")
    _, message = converted(f"load_dataset={{path: {folder}, data_files: null}}")
    cure = re.search("'(load_dataset=.*)'", message)[1]
    assert converted(cure)[1] == [HI, HI]


def test_a_text_file_has_a_document_per_line_if_asked_for(folder, converted):
    (folder / "0.txt").write_text("\ufeffone\r\ntwo")
    files = f"load_dataset.data_files={folder}/*", "load_dataset.sample_by=line"
    assert converted(*files, config="text_files")[1] == ["one", "two"]
    typed = converted(files[0], "load_dataset.sample_by=lines", config="text_files")[1]
    assert "load_dataset.sample_by=lines: choose document or line" in typed


def test_files_in_a_zip_archive(folder, converted):
    files = f"load_dataset.data_files={folder}/x.zip"
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        read = "__init__.py", "a//[1] x::y.py", "a/z.py", "a/x/c.py", "a-b/d.py", "http://b/e.py"
        for name in *reversed(read), ".hidden", "__MACOSX/a.py":
            archive.writestr(name, name)
    assert converted(files, config="text_files")[1] == sorted(read)
    first, others = (texts_of(folder.parent / "x.zarr", split) for split in ("validation", "train"))
    assert (*first, *others) == read
    one = f"load_dataset.data_files=[zip://a/z.py::{folder}/x.zip,{folder}/y.py]"
    (folder / "y.py").write_text("y")
    assert converted(one, config="text_files")[1] == ["a/z.py", "y"]
    with zipfile.ZipFile(folder / "x.zip", "a") as archive:
        archive.writestr("b/c.tar.gz", "")
    _, message = converted(files, config="text_files")
    assert f"b/c.tar.gz in {folder}/x.zip is an archive, too: unpack them" in message


def test_one_zip_archive_is_open_at_a_time(folder, converted):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(90):
        with zipfile.ZipFile(folder / f"{i}.zip", "w") as archive:
            archive.writestr("a.jsonl", json.dumps({"text": str(i)}))
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
    try:
        assert converted()[1] == sorted(map(str, range(90)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_of_a_zip_archive_that_lacks_the_column(folder, converted):
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "a"}')
        archive.writestr("b.jsonl", '{"content": "b"}')
    wanted = f"b.jsonl in {folder}/x.zip has no column=text; the columns are content"
    assert wanted in converted()[1]


@pytest.mark.parametrize(
    "names, problem",
    {
        "b.jsonl W.JSONL a.zip train.jsonl": "in no split, ['W.JSONL', 'a.zip', 'b.jsonl']: by",
        "eval-notes.jsonl unit-test.jsonl": "no split train: test has ['eval-notes.jsonl', 'u",
    }.items(),
)
def test_a_folder_with_files_in_no_split(folder, converted, names, problem):
    for name in names.split():
        write_texts(folder / name, [name])
    (folder / "README.md").write_text("---\nlicense: mit\n---\nRead them with data_files:")
    _, message = converted(f"load_dataset={{path: {folder}, data_files: null}}", "column=body")
    assert problem in message


CUT = gzip.compress(random.Random(0).randbytes(999).hex().encode())[:-50]
NOT_UTF8 = "FILE, row 1 or a later one, isn't utf-8: invalid.*load_dataset.encoding_errors=replace$"
ARCHIVE = "^error: FILE is an archive: unpack it, and choose the files in it$"
DAMAGED = b'{"text": "a"}\n' * 300 + b'{"text": "b"}]\n'
_, ZIP = packed("", "zip", "a")
UNREADABLE = {  # a file, its content, and the message
    "b.jsonl": (b"", "^error: the split train has no text$"),
    "c.jsonl": (DAMAGED, "^error: FILE, row 301 can't be read: .* line 1 column"),
    "b.txt": ("naïve".encode("latin-1"), NOT_UTF8),
    "b16.txt": (
        "naïve".encode("utf-16"),
        "^error: FILE is UTF-16: set .load_dataset.encoding=utf-16$",
    ),
    "d.txt": (gzip.compress(b"naive"), "^error: FILE is compressed: end its name with .gz$"),
    "e.txt": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "^error: FILE, .*: it is a pointer of",
    ),
    "a.txt::b.txt": (b"naive", "^error: FILE would be read as two addresses: rename it$"),
    "b.txt.gz": (CUT, "FILE, .*marker was reached. Correct the file"),
    "b": (ZIP, "^error: FILE is a zip archive: rename it, with .zip at the end$"),
} | {f"b.{end}": (b"x", ARCHIVE) for end in ("tar", "TAR.gz", "tgz", "tar.zst", "7z", "rar")}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_can_not_be_read_is_named(folder, converted, name):
    content, problem = UNREADABLE[name]
    (folder / name).write_bytes(content)
    for other in "ac" * (".txt" in name):
        (folder / f"{other}.txt").write_text("naïve")
    _, message = converted(config="text_files" if ".txt" in name else "json_files")
    assert re.search(problem, message.replace(f"{folder}/{name}", "FILE")), message
