"""Makes a bucket on loopback fail in every way, for every kind of object, during every operation.

    python -m tests.fault_matrix            # a quarter of an hour
    python -m tests.fault_matrix --only restore --tries 10

An operation first runs without faults, to see what it asks of the bucket. Then, for each kind of
request, each fault hits one of them, once or for good. Allowed outcomes are success and one line
that says what failed. Prints all outcomes, and exits with 1 if there were any of these: wrong bits,
a traceback, an undamaged object called damaged or missing, "saved" without a checkpoint, a try that
doesn't end.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import logging
import math
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest

from data.flat_tokens import Writer
from runtime.checkpoint import Checkpoints, CheckpointsConfig, list_checkpoints
from shardlib.errors import UserError
from shardlib.types import Stacked, bf16, make_shardings, pytree_dataclass, u32
from tests.bucket import Proxy, serving
from tests.data.test_huggingface import expected
from tests.data.test_huggingface import open_loader as open_stream
from tests.data.test_loader import open_loader
from tests.helpers import mesh
from tests.runtime.test_faults import same_bits
from tests.tools.test_huggingface_to_flat_tokens import documents, settings
from tools import checkpoint_info
from tools import huggingface_to_flat_tokens as converter

FAULTS = (500, 503, "reset", "cut", "late", "lost")
LOCAL = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
LIMIT = 120  # seconds that a try may take
TIMEOUT = (
    0.7  # seconds that clients wait for an answer; a late one takes Proxy.delay, which is more
)
# What may not be said of a bucket in which all is well.
FALSE = r"damage|changed since|missing|doesn't exist|has no |isn't|unfinished|matches no|empty"


@pytree_dataclass
class Layer:
    half: bf16["F M/c/d"]


@pytree_dataclass
class Tree:
    step: u32[""]
    layers: Stacked["layers", Layer]


SIZES = {"F": 2, "M": 4, "layers": 2}
CONFIG = "model: {size: small}\n"


def tree(step: int) -> Tree:
    words = np.random.default_rng(step).integers(0, 2**16, (2, 2, 4), np.uint16)
    return Tree(np.uint32(step), Layer(words.view(ml_dtypes.bfloat16)))


def checkpoints(root: str, say: Callable[[str], None] = print, keep_last: int = 0) -> Checkpoints:
    policy = CheckpointsConfig("", keep_last, 0, True)
    return Checkpoints(f"{root}/run", Tree, SIZES, CONFIG, 4, policy, say)


@dataclasses.dataclass
class Operation:
    """Something that a program does with a bucket. The functions take the bucket's address."""

    prepare: Callable[[str], None]  # fills the bucket
    run: Callable[[str], Any]  # under faults
    right: Callable[[str, Any], bool]  # without faults, afterwards: whether the result is right;
    # the result is None after an error


def two_checkpoints(root: str) -> None:
    with jax.set_mesh(mesh(2, 1)):
        ours = checkpoints(root, say=lambda _: None)
        for step in 1, 2:
            ours.save(step, jax.tree.map(jax.device_put, tree(step), make_shardings(Tree)))
            ours.wait()


def save(root: str) -> str:
    """Saves a third checkpoint, and removes the first two."""
    said: list[str] = []
    with jax.set_mesh(mesh(2, 1)):
        ours = checkpoints(root, said.append, keep_last=1)
        ours.save(3, jax.tree.map(jax.device_put, tree(3), make_shardings(Tree)))
        ours.wait()
    assert said and said[-1].startswith("saved "), said
    assert all("\n" not in line for line in said)
    return said[-1]


def restored(root: str) -> tuple[int, Any]:
    with jax.set_mesh(mesh(2, 1)):
        ours = checkpoints(root)
        return ours.newest.step, ours.restore()


def described(root: str) -> list[str]:
    return [checkpoint_info.describe(one)[0] for one in list_checkpoints(f"{root}/run")]


def saved(root: str, said: str | None) -> bool:
    """Returns whether the new checkpoint is there if it was said to be, else that or the newest of
    the old ones, and no one that looks complete is not."""
    step, actual = restored(root)
    good = all("; intact" in line or "; incomplete" in line for line in described(root))
    return good and step in ({3} if said else {2, 3}) and same_bits(actual, tree(step))


def dataset(root: str) -> None:
    with Writer(f"{root}/x.zarr", "train") as writer:
        for i in range(10):
            writer.append(np.arange(40 * i, 40 * i + 40) + 1)


def load(root: str) -> list[int]:
    opened = open_loader(f"{root}/x.zarr", streams=2)
    rows = np.concatenate([opened.rows(step, range(8))[0] for step in range(12)])
    return rows[:, 0].tolist()


@functools.cache
def loaded() -> list[int]:
    """Returns what `load` returns for the same dataset on this machine."""
    dataset(str(LOCAL))
    return load(str(LOCAL))


TEXTS = [[f"text {i}.{j} " + "x" * (7 * j % 40) for j in range(30)] for i in range(3)]


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "body": text}) + "\n" for text in texts)


@functools.cache
def source() -> str:
    """Writes the texts to files on this machine. Returns their pattern."""
    for i, texts in enumerate(TEXTS):
        (LOCAL / f"{i}.jsonl").write_text(lines(texts))
    return str(LOCAL / "*.jsonl")


def convert(root: str) -> str:
    converter.convert(settings(source(), f"{root}/x.zarr"))
    return "done"


def converted(root: str, result: str | None) -> bool:
    """Returns whether the dataset is right, if need be after the same command once more."""
    if not result:
        # The answer to the very last request, which marks the dataset complete, may be lost.
        with contextlib.suppress(FileExistsError):
            convert(root)
    parts = [documents(f"{root}/x.zarr", split) for split in ("train", "validation")]
    texts = [bytes(i - 1 for i in ids).decode() for part in parts for ids in part]
    return sorted(texts) == sorted(text for part in TEXTS for text in part)


def text_files(root: str) -> None:
    for i, texts in enumerate(TEXTS):
        with fsspec.open(f"{root}/{i}.jsonl", "w") as file:
            file.write(lines(texts))


def stream(root: str) -> list[int]:
    """Streams text files of the bucket, which the description of a folder here names."""
    folder = LOCAL / root.rpartition("/")[2]
    folder.mkdir(exist_ok=True)
    files = f"data_files: [{{split: train, path: '{root}/*.jsonl'}}]"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")
    opened = open_stream(folder)
    batches = [batch for _, batch in opened.from_step(0, 40)]
    return np.concatenate([np.asarray(batch.targets) for batch in batches]).ravel().tolist()


def streamed(root: str, result: list[int] | None) -> bool:
    ids, _ = expected([text for part in TEXTS for text in part])
    return result is None or result == ids[: len(result)].tolist()


OPERATIONS = {
    "save": Operation(two_checkpoints, save, saved),
    "restore": Operation(
        two_checkpoints,
        restored,
        lambda _, result: result is None or (result[0] == 2 and same_bits(result[1], tree(2))),
    ),
    "inspect": Operation(
        two_checkpoints,
        described,
        lambda _, result: (
            result is None or [line.endswith("; intact") for line in result] == [1, 1]
        ),
    ),
    "convert": Operation(lambda root: None, convert, converted),
    "load": Operation(dataset, load, lambda _, result: result in (None, loaded())),
    "stream": Operation(text_files, stream, streamed),
}
ARRAYS = ("step", "half", "encoded_tokens", "seq_starts")


def kind(method: str, path: str) -> str:
    """Returns what a request is about, such as `an array's zarr.json, read`."""
    address, _, query = path.partition("?")
    *folders, name = address.split("/")
    if method in ("POST", "DELETE"):
        return "a DELETE"
    if "list-type" in query:
        return "a listing"
    verb = "write" if method == "PUT" else "read"
    if "writers" in folders:
        return f"writers/*, {verb}"
    if name.endswith(".jsonl"):
        return f"a text file, {verb}"
    if name != "zarr.json":
        return f"a chunk, {verb}"
    root = re.fullmatch(r"\d{8}\.\d+|.*\.zarr", folders[-1])
    of = "an array" if folders[-1] in ARRAYS else "the root" if root else "a group"
    return f"{of}'s zarr.json, {verb}"


@dataclasses.dataclass
class Plan:
    """Counts the requests to a bucket, and says which of them fail and how: of those of a kind, the
    first ones for the object that request number `number` is about."""

    kind: str = ""
    number: int = 0
    fault: Any = None
    times: float = 0  # that it fails, then the bucket has recovered

    def __post_init__(self) -> None:
        self.lock, self.victim, self.seen = threading.Lock(), "", collections.Counter()

    def __call__(self, method: str, path: str) -> Any:
        with self.lock:
            this = kind(method, path)
            self.seen[this] += 1
            if this != self.kind:
                return None
            address = path if "list-type" in path else path.partition("?")[0]
            if self.seen[this] == self.number + 1:
                self.victim = address
            if address != self.victim or self.times <= 0:
                return None
            self.times -= 1
            return self.fault


class PerThread(io.TextIOBase):
    """Text that a thread prints goes to its own buffer, if it has one, else to `rest`."""

    def __init__(self) -> None:
        self.rest, self.own = io.StringIO(), threading.local()

    def write(self, text: str) -> int:
        return getattr(self.own, "buffer", self.rest).write(text)


@contextlib.contextmanager
def impatient(attempts: int = 3) -> Iterator[None]:
    """Lets clients give up early. Their usual limits would only make this take longer."""
    retries = {"total_max_attempts": attempts}
    limits = {"read_timeout": TIMEOUT, "connect_timeout": TIMEOUT, "retries": retries}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"config_kwargs": limits})
        patch.setattr("s3fs.S3FileSystem.retries", 2)
        for name in "READ", "OPEN":
            patch.setattr(datasets.config, f"STREAMING_{name}_MAX_RETRIES", 2)
            patch.setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0.1)
        patch.setattr(converter, "COMMIT_SECONDS", 0)  # after each unit
        patch.setattr(Proxy, "trouble", Proxy.trouble)  # which a Matrix changes
        yield


@dataclasses.dataclass(frozen=True)
class Try:
    """One run of an operation, and the fault that it meets."""

    operation: str
    kind: str
    number: int
    fault: Any
    times: float


def draw(rng: random.Random, requests: int, count: int) -> list[int]:
    return rng.sample(range(requests), min(count, requests))


class Matrix:
    """The outcomes of all tries. Each has a bucket of its own, so several can run at once."""

    def __init__(self) -> None:
        import boto3  # which, like s3fs, only the tests need

        self.client = boto3.client("s3", endpoint_url="http://{}:{}".format(*Proxy.target))
        self.plans: dict[str, Plan] = {}
        self.contents: dict[str, list[tuple[str, bytes]]] = {}
        self.seen: dict[str, collections.Counter[str]] = {}
        self.outcomes: dict[Try, str] = {}
        self.problems: list[str] = []
        self.messages: collections.Counter[str] = collections.Counter()
        self.printed = PerThread()
        self.slowest = 0.0
        self.name = f"m{time.time_ns()}"  # that buckets begin with
        Proxy.trouble = staticmethod(self.trouble)

    def trouble(self, method: str, path: str) -> Any:
        plan = self.plans.get(re.split("[/?]", path)[1])
        return plan and plan(method, path)

    def prepare(self, name: str) -> None:
        """Learns what a bucket holds before an operation."""
        bucket = self.bucket(f"before-{name}")
        OPERATIONS[name].prepare(f"s3://{bucket}")
        keys = [
            one["Key"] for one in self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        ]
        self.contents[name] = [
            (key, self.client.get_object(Bucket=bucket, Key=key)["Body"].read()) for key in keys
        ]

    def learn(self, name: str) -> list[str]:
        """Runs an operation without a fault. Returns the kinds of its requests."""
        self.prepare(name)
        bucket = self.bucket(f"without-{name}", name)
        plan = self.plans[bucket] = Plan()
        result = OPERATIONS[name].run(f"s3://{bucket}")
        self.seen[name] = collections.Counter(plan.seen)
        del self.plans[bucket]
        assert result and OPERATIONS[name].right(f"s3://{bucket}", result)
        return sorted(self.seen[name])

    def bucket(self, name: str, operation: str = "") -> str:
        """Makes a bucket with what an operation needs. Returns its full name."""
        bucket = f"{self.name}-{name}"
        self.client.create_bucket(Bucket=bucket)
        for key, content in self.contents.get(operation, []):
            self.client.put_object(Bucket=bucket, Key=key, Body=content)
        return bucket

    def attempt(self, number: int, one: Try) -> None:
        """Tries one, within LIMIT seconds, and records its outcome."""
        done: list[str] = []
        thread = threading.Thread(target=lambda: done.append(self.outcome(number, one)))
        thread.daemon = True
        begin = time.monotonic()
        thread.start()
        thread.join(LIMIT)
        self.slowest = max(self.slowest, time.monotonic() - begin)
        self.outcomes[one] = done[0] if done else "a hang"
        if self.outcomes[one] not in ("ok", "error", "not hit"):
            self.problems.append(f"{one}: {self.outcomes[one]}")

    def outcome(self, number: int, one: Try) -> str:
        """Returns `ok` or `error`, `not hit` if no request was of the kind, or what is wrong."""
        self.printed.own.buffer = buffer = io.StringIO()
        operation = OPERATIONS[one.operation]
        try:
            name = self.bucket(f"try-{number}", one.operation)
            address = f"s3://{name}"
            plan = self.plans[name] = Plan(one.kind, one.number, one.fault, one.times)
            result, message = None, ""
            try:
                result = operation.run(address)
            except (UserError, OSError) as error:  # which programs print as `error: ...`
                message = str(error)
            del self.plans[name]
            for text in message, buffer.getvalue():
                if re.search(FALSE, text):
                    return f"falsely: {text}"
            if "\n" in message or (result is None and re.search(r"(^|:) *$", message)):
                return f"not a message: {message!r}"
            if message:
                self.messages[re.sub(r"\d+", "N", f"{one.operation}: {message}")] += 1
            if not plan.victim:
                return "not hit"
            buffer.truncate(0)
            if not operation.right(address, result):
                return f"wrong bits, after {message or 'success'}"
            if re.search("damage", buffer.getvalue()):
                return f"afterwards: {buffer.getvalue()}"
            return "error" if message else "ok"
        except BaseException:
            return traceback.format_exc()

    def tries(self, count: int, rng: random.Random, names: list[str]) -> list[Try]:
        """Returns `count` tries of each fault, once and for good, at each kind of request, or
        fewer if there are fewer such requests."""
        return [
            Try(name, kind, number, fault, times)
            for name in names
            for kind in self.learn(name)
            for fault in FAULTS
            for times in (1, math.inf)
            for number in draw(rng, self.seen[name][kind], count)
        ]

    def run(self, tries: list[Try], threads: int) -> None:
        with (
            contextlib.redirect_stderr(self.printed),
            contextlib.redirect_stdout(self.printed),
            ThreadPoolExecutor(threads) as pool,
        ):
            list(pool.map(self.attempt, range(len(tries)), tries))
        if "Traceback" in self.printed.rest.getvalue():
            self.problems.append(self.printed.rest.getvalue())

    def table(self) -> str:
        """Returns the outcomes: for each fault, once and for good, `ok+error`."""
        cells: Any = collections.defaultdict(collections.Counter)
        for one, outcome in self.outcomes.items():
            short = outcome if outcome in ("ok", "error", "not hit") else "bad"
            cells[one.operation, one.kind, one.fault, one.times > 2][short] += 1
        heads = [f"{fault}{'!' * last}" for last in (0, 1) for fault in FAULTS]
        rows = [f"{'':36}" + "".join(f"{head:>8}" for head in heads)]
        for operation, about in dict.fromkeys(key[:2] for key in cells):
            row = [
                cells[operation, about, fault, last] for last in (False, True) for fault in FAULTS
            ]
            texts = [f"{c['ok']}+{c['error']}" + f"+{c['bad']}!" * (c["bad"] > 0) for c in row]
            rows.append(f"{f'{operation}: {about}':36}" + "".join(f"{text:>8}" for text in texts))
        totals = collections.Counter(
            outcome if outcome in ("ok", "error", "not hit") else "BAD"
            for outcome in self.outcomes.values()
        )
        counts = ", ".join(f"{count} {name}" for name, count in totals.most_common())
        return "\n".join(
            [
                "ok+error for each fault, once and (!) for good:",
                *rows,
                f"{len(self.outcomes)} tries: {counts}; the slowest took {self.slowest:.0f} s",
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tries", type=int, default=2, help="of each fault at each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--messages", action="store_true", help="print all kinds of messages")
    args = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's
    begin = time.monotonic()
    with serving(), impatient():
        matrix = Matrix()
        matrix.run(matrix.tries(args.tries, random.Random(args.seed), args.only), args.threads)
    if args.messages:
        for message, count in sorted(matrix.messages.items()):
            print(f"{count:4} {message}")
    print("\n\n".join(f"PROBLEM: {problem}" for problem in matrix.problems))
    print(f"{matrix.table()}\nseed {args.seed}, {time.monotonic() - begin:.0f} s in total")
    sys.stdout.flush()
    os._exit(1 if matrix.problems else 0)  # a try that hangs would keep the process alive


if __name__ == "__main__":
    main()
