"""Tests programs on a bucket whose requests fail: they ask again, or end with one message, and
what they leave there is right."""

import contextlib
import json
import math
import re

import datasets
import fsspec
import numpy as np
import pytest

from data.flat_tokens import FlatTokens, FlatTokensError
from runtime.checkpoint import list_checkpoints
from shardlib.errors import UserError
from tests.bucket import Proxy
from tests.data.test_huggingface import expected
from tests.data.test_huggingface import open_loader as open_stream
from tests.data.test_loader import open_loader
from tests.files import write_tokens
from tests.runtime.test_checkpoint import assert_same_bits, restore
from tests.runtime.test_faults import TINY, Tiny, keeping, opened_tiny, saved, tiny, tiny_on_mesh
from tests.tools.test_huggingface_to_flat_tokens import all_texts, settings
from tools import checkpoint_info
from tools import huggingface_to_flat_tokens as converter

TEXTS = [f"text {i} " + "x" * (7 * i % 40) for i in range(30)]


pytestmark = pytest.mark.usefixtures("one_device")


def write_dataset(path):
    """A dataset of 100 packed rows whose tokens count up."""
    write_tokens(path, np.arange(400).reshape(10, 40) + 1, ["train"])


def read_rows(path):
    opened = open_loader(path, streams=2)
    return np.concatenate([opened.rows(step, range(8))[0] for step in range(3)]).tolist()


def write_checkpoint(root, step=1):
    _, error = saved(opened_tiny(root, keeping(keep_last=1)), step, tiny_on_mesh(step))
    if error:
        raise OSError(error)


def write_texts(root):
    with fsspec.open(f"{root}/texts.jsonl", "w") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def convert(root, tmp_path):
    converter.convert(settings(f"{root}/*.jsonl", f"{root}/x.zarr", column="text"))
    assert all_texts(f"{root}/x.zarr") == sorted(TEXTS)


def stream(root, tmp_path):
    """Streams a file of the bucket, which the description of a folder here names."""
    files = f"data_files: [{{split: train, path: '{root}/*.jsonl'}}]"
    card = f"---\nconfigs:\n- config_name: default\n  {files}\n---\n"
    (tmp_path / "README.md").write_text(card)
    batches = [np.asarray(batch.targets) for _, batch in open_stream(tmp_path).from_step(0, 9)]
    ids = np.concatenate(batches).ravel()
    np.testing.assert_array_equal(ids, expected(TEXTS)[0][: len(ids)])


def load(root, tmp_path):
    if not (tmp_path / "x.zarr").exists():
        write_dataset(str(tmp_path / "x.zarr"))
    assert read_rows(f"{root}/x.zarr") == read_rows(str(tmp_path / "x.zarr"))
    FlatTokens(f"{root}/x.zarr", "train").validate()


def save(root, tmp_path):
    """Saves a checkpoint, which removes the one before."""
    write_checkpoint(root, 2)
    assert_same_bits(restore(root, Tiny, TINY), tiny(2))


def read_back(root, tmp_path):
    assert_same_bits(restore(root, Tiny, TINY), tiny(1))


def inspect(root, tmp_path):
    (one,) = list_checkpoints(root)
    assert checkpoint_info.describe(one)[0].endswith("; intact")


OPERATIONS = {  # what fills the bucket, and what is tried
    "save": (write_checkpoint, save),
    "restore": (write_checkpoint, read_back),
    "inspect": (write_checkpoint, inspect),
    "load": (lambda root: write_dataset(f"{root}/x.zarr"), load),
    "convert": (write_texts, convert),
    "stream": (write_texts, stream),
}
ONCE, ALWAYS = 1, math.inf
# The operation, the request as its method and path, the fault, how often it occurs, and whether all
# ends well.
FAULTS = [
    *[(name, ".", None, ALWAYS, True) for name in OPERATIONS],
    ("save", r"PUT .*half/c/", "lost", ONCE, True),
    ("save", r"PUT .*/records", "reset", ALWAYS, False),
    ("save", r"PUT .*half/c/", 503, ALWAYS, False),
    ("save", r"DELETE|POST", 503, ALWAYS, True),  # the old checkpoint stays, with a warning
    ("restore", r"GET .*half/c/", "cut", ONCE, True),
    ("restore", r"GET .*records/0/zarr.json", "cut", ALWAYS, False),
    ("restore", r"GET .*half/c/", 503, ALWAYS, False),
    ("restore", r"list-type", 503, ALWAYS, False),
    ("inspect", r"GET .*records/0/zarr.json", "reset", ONCE, True),
    ("load", r"GET .*encoded_tokens/c/", 500, ONCE, True),
    ("load", r"GET .*encoded_tokens/c/", "silence", ONCE, True),
    ("load", r"GET .*encoded_tokens/c/", 503, ALWAYS, False),
    ("load", r"GET .*x.zarr/zarr.json", "reset", ALWAYS, False),
    ("convert", r"PUT .*encoded_tokens/c/", "reset", ONCE, True),
    ("convert", r"PUT .*x.zarr/zarr.json", "lost", ALWAYS, False),
    ("stream", r"GET .*texts.jsonl", "cut", ONCE, True),
    ("stream", r"list-type", 503, ALWAYS, False),
]
# What may not be said of a bucket in which all is well.
FALSE = r"damage|changed since|missing|doesn't exist|has no |isn't|unfinished|matches no|empty"


@pytest.mark.parametrize("name, asked, fault, times, well", FAULTS)
def test_a_request_that_fails(
    name, asked, fault, times, well, bucket, tmp_path, monkeypatch, capsys
):
    for limit in "READ", "OPEN":
        monkeypatch.setattr(datasets.config, f"STREAMING_{limit}_MAX_RETRIES", 2)
        monkeypatch.setattr(datasets.config, f"STREAMING_{limit}_RETRY_INTERVAL", 0.01)
    if fault == "silence":  # after which clients give up, by default after a minute
        limits = {"read_timeout": 5}
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": limits})
    prepare, run = OPERATIONS[name]
    prepare(bucket)
    hits = []

    def trouble(method, path):
        if re.search(asked, f"{method} {path}") and len(hits) < times:
            hits.append(path)
            return fault
        return None

    monkeypatch.setattr(Proxy, "trouble", staticmethod(trouble))
    if well:
        run(bucket, tmp_path)
    else:
        with pytest.raises((UserError, OSError)) as caught:
            run(bucket, tmp_path)
        message = str(caught.value)
        assert "\n" not in message and not re.search(FALSE + "|(^|:) *$", message), message
        monkeypatch.setattr(Proxy, "trouble", staticmethod(lambda method, path: None))
        if name == "save":  # what it left isn't taken for a checkpoint
            read_back(bucket, tmp_path)
        if name == "convert":  # its last request was carried out, only the answer was lost
            with contextlib.suppress(FileExistsError):
                convert(bucket, tmp_path)
            assert all_texts(f"{bucket}/x.zarr") == sorted(TEXTS)
        else:
            run(bucket, tmp_path)
    assert hits
    assert not re.search(FALSE, capsys.readouterr().err)


def test_what_is_not_there(bucket):
    with pytest.raises(FlatTokensError, match=rf"{bucket}/no.zarr doesn't exist"):
        FlatTokens(f"{bucket}/no.zarr", "train")
