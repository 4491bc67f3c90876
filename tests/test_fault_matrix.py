"""A sample of tests/fault_matrix.py, and whether it would notice what it is there to notice."""

import logging
import math
import time

import fsspec
import pytest

from shardlib.errors import UserError
from tests import fault_matrix
from tests.fault_matrix import OPERATIONS, Matrix, Operation, Try, impatient

SAMPLE = [
    Try("save", "a chunk, write", 1, "lost", 1),
    Try("save", "writers/*, write", 1, "reset", math.inf),
    Try("restore", "an array's zarr.json, read", 2, "cut", math.inf),
    Try("inspect", "the root's zarr.json, read", 0, "reset", 1),
    Try("convert", "the root's zarr.json, write", 1, "lost", math.inf),
    Try("load", "a chunk, read", 0, "late", 1),
    Try("stream", "a text file, read", 2, "cut", 1),
    Try("stream", "a listing", 0, 503, math.inf),
]


@pytest.fixture
def matrix(bucket):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's
    with impatient(attempts=1):
        yield Matrix()


@pytest.mark.slow
def test_a_sample_of_faults(matrix):
    for name in OPERATIONS:
        matrix.prepare(name)
    matrix.run(SAMPLE, threads=4)
    assert not matrix.problems
    # On a busy machine, an answer to a second attempt may be late, too.
    assert set(matrix.outcomes.values()) == {"ok", "error"}, matrix.table()


def failing(error):
    """Returns an operation that lists a bucket, and raises `error` if that fails."""

    def run(root):
        try:
            fsspec.core.url_to_fs(root)[0].ls(root)
        except OSError:
            raise error from None
        return "wrong"

    return run


# An operation, the fault of its only request, and what the matrix says of the outcome.
FOUND = {
    "a traceback": (failing(KeyError("no")), 503, "Traceback"),
    "false damage": (failing(UserError("x is damaged")), 503, "falsely: "),
    "a missing object": (failing(UserError("x doesn't exist")), 503, "falsely: "),
    "two lines": (failing(UserError("x\ny")), 503, "not a message"),
    "no reason": (failing(OSError("x can't be opened: ")), 503, "not a message"),
    "other bits": (failing(OSError("no")), None, "wrong bits"),
    "a hang": (lambda root: time.sleep(2), 503, "a hang"),
}


@pytest.mark.parametrize("case", [*FOUND, "nothing wrong"])
def test_what_it_finds(case, matrix, monkeypatch):
    run, fault, problem = FOUND.get(case, (failing(OSError("x can't be read: busy")), 503, ""))
    operation = Operation(lambda root: None, run, lambda root, result: result != "wrong")
    monkeypatch.setitem(OPERATIONS, "operation", operation)
    if case == "a hang":
        monkeypatch.setattr(fault_matrix, "LIMIT", 1)
    matrix.run([Try("operation", "a listing", 0, fault, math.inf)], 1)
    if problem:
        assert len(matrix.problems) == 1 and problem in matrix.problems[0], matrix.problems
    else:
        assert not matrix.problems and "1 tries: 1 error" in matrix.table()
