"""Batches of a streamed dataset: every token once and in order, also in a resumed run."""

import dataclasses
import functools
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest

from data import huggingface, text
from data.loader import BatchSpec
from data.tokenizer import open_tokenizer
from shardlib.errors import UserError
from tests import golden
from tests.files import arrays, rows
from tests.helpers import SMALL, axes, compose_config, mesh, starts_of
from tests.processes import batches_on_hosts

LENGTH = 8
BYTES = text.TextConfig(
    column="text", tokenizer="bytes_utf8", train_split="train", validation_split=None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of four files, one shard each, in which some documents are empty."""
    folder, rng = tmp_path_factory.mktemp("stream"), np.random.default_rng(0)
    for i, count in enumerate([30, 7, 21, 40]):
        texts = [f"{i}{j:02d}" + "abcdefghi" * int(rng.integers(0, 4)) for j in range(count)]
        texts[2:4] = ["", ""]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"train-{i}.jsonl").write_text("".join(lines))
    (folder / "validation-0.jsonl").write_text(json.dumps({"text": "held out " * 99}) + "\n")
    return folder


def documents(folder, files=range(4)):
    lines = [(folder / f"train-{i}.jsonl").read_text().splitlines() for i in files]
    return [[json.loads(line)["text"] for line in of_file] for of_file in lines]


@functools.cache
def shipped_config():
    return compose_config("local_stream", "hf_dataset.path=x", "paths.model_name=x").hf_dataset


def open_loader(folder, batch=4, split="train", vocab=300, skip=(), **changes):
    few = {"path": str(folder), "validation_split": "validation", "sequences_packed_per_batch": 5}
    config = dataclasses.replace(shipped_config(), **few | changes)
    with jax.set_mesh(mesh(4, 2)):
        return config.open(BatchSpec(batch, LENGTH, vocab, 0, skip), split)


def flat(batches):
    """The targets of batches and whether they start documents, end to end. All are in the loss, and
    inputs are the tokens before them."""
    batches = [batch for _, batch in batches]
    assert all(batch.loss_mask.all() for batch in batches)
    ids = np.concatenate([np.asarray(batch.targets).ravel() for batch in batches])
    starts = np.concatenate([starts_of(batch).ravel() for batch in batches])
    inputs = np.concatenate([np.asarray(batch.inputs).ravel() for batch in batches])
    np.testing.assert_array_equal(inputs[1:][inputs[1:] != 0], ids[:-1][inputs[1:] != 0])
    return ids, starts


def expected(texts):
    """Returns the ids and starts of texts, end to end, without using the code under test."""
    ids = [byte + 1 for text in texts for byte in text.encode()]
    starts = [i == 0 for text in texts for i in range(len(text))]
    return np.array(ids), np.array(starts)


def test_each_token_once_and_then_from_the_start(folder, capsys):
    opened = open_loader(folder)
    wanted, is_start = expected([text for part in documents(folder) for text in part] * 2)
    count = len(wanted) // (4 * LENGTH)
    ids, starts = flat(opened.from_step(0, count))
    np.testing.assert_array_equal(ids, wanted[: len(ids)])
    is_start[::LENGTH] = True
    np.testing.assert_array_equal(starts, is_start[: len(ids)])
    assert count > 50
    assert "starts over: read 98 documents, 8 without text" in capsys.readouterr().out


def test_the_order_does_not_depend_on_threads_or_units(folder):
    wanted, _ = flat(open_loader(folder, num_workers=1).from_step(0, 60))
    for changes in {"num_workers": 7}, {"num_workers": 2, "sequences_packed_per_batch": 1}:
        ids, _ = flat(open_loader(folder, **changes).from_step(0, 60))
        np.testing.assert_array_equal(ids, wanted)


@pytest.mark.parametrize("hosts", [1, 3, 4, 6])
def test_each_document_on_one_host_from_any_position_on(folder, hosts):
    """Covers fewer shards than hosts, which then read all of them."""
    source, read = text.Source({"path": str(folder)}, "train", BYTES, documents=4), []
    for host in range(hosts):
        units = list(source.read({}, host, hosts))
        for i in range(0, len(units), 3):
            position = json.loads(json.dumps(units[i][1]))
            assert list(source.read(position, host, hosts)) == units[i + 1 :]
        read += [document for unit, _ in units for document in unit]
    assert sorted(read) == sorted(itertools.chain(*documents(folder)))


def test_hosts_with_fewer_shards_are_named(folder, capsys, monkeypatch):
    """Four shards. The mesh of one host doesn't fit several, which is found out later."""
    for hosts in 2, 3, 5:
        monkeypatch.setattr(jax, "process_count", lambda hosts=hosts: hosts)
        monkeypatch.setattr(huggingface, "check_hosts_agree", lambda *_: None)
        with pytest.raises(UserError, match="needs a mesh"):
            open_loader(folder)
    assert re.findall("(?m)^note: .*", capsys.readouterr().out) == [
        "note: 4 shards on 3 hosts, which take equally many tokens: documents of hosts with 1 "
        "shards come more often"
    ]


def test_a_unit_ends_by_its_length(tmp_path, monkeypatch):
    """However short the documents before were."""
    monkeypatch.setattr(text, "UNIT_CHARACTERS", 1000)
    texts = ["short"] * 64 + ["x" * 600] * 9
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in texts))
    source = text.Source({"path": str(tmp_path)}, "train", BYTES)
    assert [len(unit) for unit, _ in source.read({})] == [66, 2, 2, 2, 1]


def test_it_goes_on_after_any_batch_as_if_it_had_not_stopped(folder):
    """Two documents have fewer tokens than a batch, more, or none."""
    units = {"sequences_packed_per_batch": 2}
    opened, batches, positions = open_loader(folder, **units), [], [None]
    for _, batch in opened.from_step(0, 60):  # more than an epoch
        batches.append(jax.device_get(batch))
        positions.append(json.loads(json.dumps(opened.position)))
        assert positions[-1]["vocabulary"] == open_tokenizer("bytes_utf8").vocabulary
    for stop in *range(1, 60, 9), 58:
        again = open_loader(folder, **units)
        again.position = positions[stop]
        for (_, batch), wanted in zip(again.from_step(stop, 60), batches[stop:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(batch), wanted)


def test_batches_that_are_left_out(folder):
    every = [jax.device_get(batch) for _, batch in open_loader(folder).from_step(0, 9)]
    opened = open_loader(folder, skip=(2, 1, 2))
    batches = list(opened.from_step(0, 3))
    again = open_loader(folder, skip=(6, 2, 1))
    again.position = opened.position
    batches += again.from_step(3, 5)
    for (_, batch), number in zip(batches, [0, 3, 4, 5, 7], strict=True):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(batch), every[number])


@pytest.mark.slow
def test_hosts_read_shards_of_their_own_and_go_on(folder):
    """Each of two hosts has half of every batch's rows."""
    config = vars(open_loader(folder).config)
    request = {"config": config, "shape": (4, LENGTH, 300), "mesh": axes(4, 2)}
    before, positions = batches_on_hosts(**request, steps=(0, 5))
    after, _ = batches_on_hosts(**request, steps=(5, 9), positions=positions)
    rows = np.stack([*before, *after])
    for host, files in enumerate([(0, 2), (1, 3)]):
        ids = rows[:, 2 * host : 2 * host + 2].ravel()
        wanted, _ = expected([*itertools.chain(*documents(folder, files))])
        np.testing.assert_array_equal(ids, wanted[: len(ids)])


@pytest.mark.slow
def test_a_run_resumed_sees_what_one_would_have_seen_that_was_not(folder, tmp_path, train_here):
    run = [
        "--config-name=local_stream", *SMALL, "model.vocab=272", "mesh={d: 2, t: 2}",
        f"hf_dataset.path={folder}", "hf_dataset.sequences_packed_per_batch=4",
        "hf_dataset.validation_split=validation", f"paths.root_working_dir={tmp_path}",
        "training.validation_interval=3", "training.validation_batches=2", "checkpoint_interval=2",
        "training.steps_for_lr=6",
    ]  # fmt: skip
    out, message = train_here(*run, "training.steps=6", "paths.model_name=whole")
    assert message == "" and "done: 6 steps" in out
    for steps in 4, 6:
        out, message = train_here(*run, f"training.steps={steps}", "paths.model_name=stopped")
        assert message == ""
    assert "resumed at step 4" in out
    stopped, whole = rows(tmp_path / "stopped"), rows(tmp_path / "whole")
    del stopped[3]["validation_loss"]  # computed because the first start ended here
    assert stopped == whole
    ends = [max((tmp_path / n / "checkpoints").glob("00000006.*")) for n in ("stopped", "whole")]
    assert arrays(ends[0]) == arrays(ends[1])


REFUSED = {
    "a vocabulary too small": {"vocab": 100},
    "no such column": {"column": "words"},
    "no such dataset": {"path": "nowhere/at-all"},
    "no split for validation": {"split": "validation", "validation_split": None},
    "no such tokenizer": {"tokenizer": "nowhere/at-all"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_streamed(folder, case):
    with pytest.raises(UserError) as error:
        list(open_loader(**({"folder": folder} | REFUSED[case])).from_step(0, 1))
    message = str(error.value).replace(str(folder), "FOLDER").split("\n")[0]
    golden.check("datasets.txt", f"stream: {case}", message)


def test_ids_that_the_model_lacks_are_noted(folder, capsys):
    open_loader(folder=folder, vocab=200)
    note = "note: the tokenizer bytes_utf8 has ids up to 256; one that model.vocab=200 lacks ends"
    assert note in capsys.readouterr().out


def resumed(folder, position, step, **changes):
    """Returns the ids of some batches from a step on, of a stream that goes on at a position."""
    again = open_loader(folder, **changes)
    again.position = json.loads(json.dumps(position))
    return flat(again.from_step(step, step + 5))[0]


def grow(file):
    with file.open("a") as text:
        text.write(json.dumps({"text": "one more"}) + "\n")


NUMBERS = r"bytes \d+, now \d+; names and sizes \w+, now \w+"
CURE = r"\. Restore it, or the .*, or start over: .*, or clone a run's weights into a new one$"
CHANGES = {
    "added": (lambda x: grow(x / "train-4.jsonl"), f"files 4, now 5; {NUMBERS}; shards 4, now 5"),
    "removed": (lambda x: (x / "train-2.jsonl").unlink(), f"files 4, now 3; {NUMBERS}; shards 4, "),
    "grown": (lambda x: grow(x / "train-3.jsonl"), NUMBERS),
    "renamed": (lambda x: (x / "train-3.jsonl").rename(x / "train-4.jsonl"), r"read: names"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_list_of_files_can_not_go_on(folder, tmp_path, kind):
    step = 1 if kind == "grown" else 30  # in the first unit, or later
    change, difference = CHANGES[kind]
    opened = open_loader(folder)
    list(opened.from_step(0, step))
    position, (wanted, _) = opened.position, flat(opened.from_step(step, step + 5))
    shutil.copytree(folder, tmp_path / "moved")
    grow(tmp_path / "moved/validation-0.jsonl")  # not of this split
    np.testing.assert_array_equal(resumed(tmp_path / "moved", position, step), wanted)
    change(tmp_path / "moved")
    with pytest.raises(UserError, match=difference + ".*" + CURE):
        resumed(tmp_path / "moved", position, step)


def test_a_position_of_an_earlier_version_can_not_go_on(folder):
    opened = open_loader(folder)
    list(opened.from_step(0, 30))
    found = opened.position["position"]["source"]
    old = {"turn": 0, "lanes": [{}], "source": found | {"documents at a time": 5}}
    for position in old, {"turn": 0, "lanes": [{}]}:
        with pytest.raises(UserError, match=rf"has changed since .*{CURE}"):
            resumed(folder, opened.position | {"position": position}, 30)


def test_files_that_change_between_epochs(folder, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n")
    opened = open_loader(tmp_path)
    batches = opened.from_step(0, 9)
    next(batches)
    position = opened.position
    grow(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match="has changed"):
        list(batches)
    with pytest.raises(UserError, match="has changed"):
        resumed(tmp_path, position, 1)
