"""Datasets on an S3 server that may fail, be slow, or disappear."""

import time

import numpy as np
import pytest

from data.flat_tokens import FlatTokens, FlatTokensError, Writer
from tests.bucket import Proxy
from tests.data.test_loader import open_loader


@pytest.fixture
def path(bucket):
    """A dataset of 100 packed rows whose tokens count up."""
    Proxy.trouble = staticmethod(lambda method, path: None)
    path = f"{bucket}/{time.time_ns()}.zarr"
    with Writer(path, "train") as writer:
        for i in range(10):
            writer.append(np.arange(40 * i, 40 * i + 40) + 1)
    return path


def some_rows(path):
    opened = open_loader(path, streams=2)
    return np.concatenate([opened.rows(step, range(8))[0] for step in range(3)])


def test_a_dataset_is_written_and_read_there_as_on_disk(path, tmp_path):
    local = str(tmp_path / "x.zarr")
    with Writer(local, "train") as writer:
        for i in range(10):
            writer.append(np.arange(40 * i, 40 * i + 40) + 1)
    FlatTokens(path, "train").validate()
    np.testing.assert_array_equal(some_rows(path), some_rows(local))


@pytest.mark.slow
def test_answers_that_fail_or_are_late_are_asked_for_again(path):
    wanted, requests = some_rows(path), set()

    def trouble(method, path):
        """Makes each request fail or delays it the first time."""
        first = (method, path) not in requests
        requests.add((method, path))
        if first and len(requests) % 3 == 0:
            time.sleep(0.5)
        elif first:
            return 503 if len(requests) % 3 == 1 else 500
        return None

    Proxy.trouble = staticmethod(trouble)
    np.testing.assert_array_equal(some_rows(path), wanted)
    assert len(requests) > 5


def test_a_server_that_fails_for_good_gets_one_message(path):
    opened = open_loader(path)
    Proxy.trouble = staticmethod(lambda method, path: 503)
    with pytest.raises(FlatTokensError, match=r"encoded_tokens: chunk 0 can't be read: "):
        opened.rows(0, range(8))
    with pytest.raises(FlatTokensError, match=r"can't be opened: "):
        FlatTokens(path, "train")


def test_what_is_not_there(bucket):
    Proxy.trouble = staticmethod(lambda method, path: None)
    with pytest.raises(FlatTokensError, match=r"s3://bucket/no.zarr doesn't exist"):
        FlatTokens(f"{bucket}/no.zarr", "train")
