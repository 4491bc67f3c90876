"""Kills a run on two hosts many times, and compares it with an uninterrupted run.

    python -m tests.torture --kills 50 --seed 0

Each kill is a SIGKILL at a moment drawn from the seed: at a write, a rename or a removal of a save,
just before or after a host's record, at the copy before a save, at a row of the metrics, while a
checkpoint is read, or at any time. It hits both hosts, or one of them, and then the other host has
to exit by itself. After each kill, all complete checkpoints and metrics must equal the
uninterrupted run's, bit for bit.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import random
import re
import shutil
import signal
import tempfile
import time

from runtime.devices import QUICK_COMPILES
from tests.files import arrays, rows, untimed
from tests.helpers import SMALL
from tests.processes import start_hosts

ARGUMENTS = [
    "--config-name=local_test_synthetic", *SMALL, "mesh={d: 2, t: 2}", "num_hosts=2",
    "io.max_io_threads=4", "checkpoint_interval=3", "heartbeat_timeout_seconds=10",
    "training.steps_for_lr=100",  # one program for any number of steps
]  # fmt: skip
# Most of the test's time goes into starts, so programs are compiled quickly and always cached.
QUICK = {"flags": QUICK_COMPILES, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
LIMIT = 120  # seconds until a start must reach its moment, or a host must notice a lost host
NEVER = "never 0"
KINDS = [
    *("write", "time", "row", "removal", "rename", "time", "record", "row", "write", "read"),
    *("copy", "time", "write", "row", "recorded", "time", "rename", "removal", "write", "time"),
]
# The ways in which a host may exit when the other is lost: the exit code and the message.
ENDS = {
    "train's error": (1, r"error: a step failed, perhaps because another host was lost: "),
    "JAX's abort": (-6, r"Terminating process because the JAX distributed service detected fatal"),
}


class Hosts:
    """A start of a run on two hosts with two devices each. Leaving the `with` block kills it."""

    def __init__(self, texts, cache, arguments, moments=(NEVER, NEVER), killed_by="SIGKILL"):
        """Starts the hosts. The output of host i goes to `<texts>.<i>`, and `moments` to
        tests/killed.py."""

        def command(i: int) -> list[str]:
            return ["-m", "tests.killed", *moments[i].split(), *arguments]

        settings = QUICK | {"JAX_COMPILATION_CACHE_DIR": str(cache), "KILLED_BY": killed_by}
        self.texts = texts
        self.processes = start_hosts(2, 2, command, str(texts), **settings)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, host: int = 0) -> str:
        return pathlib.Path(f"{self.texts}.{host}").read_text()

    def wait(self, limit: float = 5 * LIMIT) -> list[int]:
        """Waits for the hosts, and returns their exit codes. Raises subprocess.TimeoutExpired."""
        return [process.wait(limit) for process in self.processes]

    def end_of(self, host: int) -> str:
        """Waits until a host that has lost the other one exits. Returns in which of the ways in
        ENDS."""
        code, text = self.processes[host].wait(LIMIT), self.text(host)
        known = ENDS.items()
        ways = [name for name, (end, says) in known if code == end and re.search(says, text)]
        assert ways, f"host {host} exited with {code}: {text}"
        return ways[0]


@dataclasses.dataclass(frozen=True)
class Kill:
    """One start of the run, and the moment at which it is killed."""

    kind: str  # of moment, as in tests/killed.py, or time
    host: int  # that is killed at the moment
    alone: bool  # or the other host is killed, too
    part: float  # fraction of the moments of this kind in three saves, or of the time, before it


def draw(rng: random.Random, count: int) -> list[Kill]:
    """Returns random kills."""
    kinds = list(itertools.islice(itertools.cycle(KINDS), count))
    rng.shuffle(kinds)
    # The first two are in saves, so that a checkpoint exists for the others.
    kinds[:2] = ["write", "write"][:count]
    return [
        Kill(kind, 0 if kind == "removal" else rng.randrange(2), rng.random() < 0.5, rng.random())
        for kind in kinds
    ]


def complete(run: pathlib.Path, folder: str = "checkpoints") -> dict[int, pathlib.Path]:
    """Returns a run's complete checkpoints by step, found without the code under test."""
    paths = {}
    for path in sorted(run.glob(f"{folder}/????????.*")):
        files = [*path.glob("records/*/zarr.json")]
        if files and len(files) == json.loads(files[0].read_text())["attributes"]["hosts"]:
            step = int(path.name.split(".")[0])
            assert step not in paths, f"two of step {step}"
            paths[step] = path
    return paths


def content(checkpoint: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a checkpoint, except those that describe the run that wrote it."""
    files = {str(p.relative_to(checkpoint)): p for p in checkpoint.rglob("*") if p.is_file()}
    about = "zarr.json", "records/", "complete/"
    return {name: p.read_bytes() for name, p in files.items() if not name.startswith(about)}


class Torture:
    """An uninterrupted run in `<root>/whole`, and the run to be killed in `<root>/killed`."""

    def __init__(self, root: pathlib.Path, cache: pathlib.Path, steps: int, keep_last: int):
        self.root, self.cache, self.keep_last = root, cache, keep_last
        self.whole, self.run = root / "whole", root / "killed"
        self.arguments = [*ARGUMENTS, f"paths.root_working_dir={root}", f"training.steps={steps}"]
        self.killed = "paths.model_name=killed", f"checkpoints.keep_last={keep_last}"
        (root / "texts").mkdir()
        self.ends: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0  # seconds until a host exited by itself, at most
        self.newest, self.seen = 0, {0}
        with self.start("whole", "paths.model_name=whole") as hosts:
            assert hosts.wait() == [0, 0], hosts.text(0) + hosts.text(1)
            texts = hosts.text(0), hosts.text(1)
        ends = (json.loads(text.rpartition("\nmoments ")[2].split("\n")[0]) for text in texts)
        self.moments = [{kind: 3 * n // end["save"] for kind, n in end.items()} for end in ends]
        self.seconds = self._until_first_step(texts[0])
        self.rows, self.checkpoints = rows(self.whole), complete(self.whole)
        assert [row["step"] for row in self.rows] == list(range(steps))
        assert self.rows[-1]["loss"] < self.rows[0]["loss"] - 0.1
        last = self.checkpoints[steps]
        self.arrays = len(arrays(last))
        self.entries = 1 + sum(1 for _ in last.rglob("*"))  # that a removal deletes

    def start(self, name: str, *arguments: str, moments=(NEVER, NEVER)) -> Hosts:
        texts = self.root / "texts" / name
        return Hosts(texts, self.cache, [*self.arguments, *arguments], moments)

    @staticmethod
    def _until_first_step(text: str) -> float:
        """Returns the seconds from the start to the first step, with about 1.5 s of imports."""
        match = re.search(r"time to first step: ([\d.]+) s", text)
        return float(match[1]) + 1.5 if match else 0

    def aim(self, kill: Kill) -> str:
        """Returns a kill's moment, as tests/killed.py takes it."""
        if kill.kind == "time":
            return NEVER
        counts = {**self.moments[kill.host], "read": self.arrays, "removal": self.entries, "row": 9}
        first = self.newest if kill.kind == "row" else 1
        return f"{kill.kind} {first + int(kill.part * counts[kill.kind])}"

    def kill(self, number: int, kill: Kill) -> str:
        """Starts the run and kills it. Returns the first host's output."""
        moment = self.aim(kill)
        moments = [moment if host == kill.host else NEVER for host in range(2)]
        with self.start(str(number), *self.killed, moments=moments) as hosts:
            if kill.kind == "time":
                self._at_time(hosts, kill)
            assert hosts.processes[kill.host].wait(LIMIT) == -signal.SIGKILL, hosts.text(kill.host)
            died = time.monotonic()
            if kill.alone:
                self.ends[hosts.end_of(1 - kill.host)] += 1
                self.slowest = max(self.slowest, time.monotonic() - died)
        texts = [hosts.text(host) for host in range(2)]
        self.check(texts)
        print(f"kill {number}: {kill}; the next start must resume at {self.newest}", flush=True)
        return texts[0]

    def _at_time(self, hosts: Hosts, kill: Kill) -> None:
        """Kills the host at a fraction of the usual time. If it is killed alone, waits first until
        both hosts are connected: without that, the other would wait for it for five minutes."""
        victim, begin = hosts.processes[kill.host], time.monotonic()
        while kill.alone and not all("connected\n" in hosts.text(host) for host in range(2)):
            if victim.poll() is not None or time.monotonic() > begin + LIMIT:
                return
            time.sleep(0.01)
        until = time.monotonic() + 1.5 * kill.part * self.seconds
        while time.monotonic() < until and victim.poll() is None:
            if len(self._lines()) > self.newest + 12:  # so fast that it might end before
                break
            time.sleep(0.01)
        victim.kill()

    def _lines(self) -> list[str]:
        """Returns the complete lines of the metrics."""
        path = self.run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def check(self, texts: list[str]) -> None:
        """Checks the files and the output after a start."""
        self.seconds = self._until_first_step(texts[0]) or self.seconds
        resumed = re.search(r"^resumed at step (\d+) from ", texts[0], re.MULTILINE)
        assert not resumed or int(resumed[1]) == self.newest, resumed[0]
        for text in texts:
            bad = re.search("Traceback|is damaged|is complete:|no checkpoint to resume", text)
            assert not bad or not self.newest, text
        checkpoints = complete(self.run)
        newest = max(checkpoints, default=0)
        assert newest >= self.newest and len(checkpoints) <= self.keep_last + 1, checkpoints
        for step, path in checkpoints.items():
            assert content(path) == content(self.checkpoints[step]), path
        lines = [json.loads(line) for line in self._lines()]
        assert len(lines) >= newest and untimed(lines) == self.rows[: len(lines)]
        self.newest = newest
        self.seen.add(newest)

    def finish(self) -> None:
        """Resumes the run until its end, and compares it with the uninterrupted run."""
        with self.start("end", *self.killed) as hosts:
            assert hosts.wait() == [0, 0], hosts.text(0) + hosts.text(1)
            self.check([hosts.text(0), hosts.text(1)])
        assert rows(self.run) == self.rows
        left, last = complete(self.run), max(self.checkpoints)
        assert sorted(left) == sorted(self.checkpoints)[-self.keep_last :]
        assert {*self.run.glob("checkpoints/*")} == {*left.values()}, "no parts are left"
        assert arrays(left[last]) == arrays(self.checkpoints[last])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    kills = draw(random.Random(args.seed), args.kills)
    root = pathlib.Path(tempfile.mkdtemp(prefix="torture-"))
    print(f"{root} holds the runs and the output of each start")
    torture = Torture(root, root / "compiled", steps=40 + 3 * args.kills, keep_last=3)
    print(f"uninterrupted: {len(torture.rows)} steps, {time.monotonic() - begin:.0f} s", flush=True)
    for number, kill in enumerate(kills, 1):
        torture.kill(number, kill)
    torture.finish()
    print(
        f"{len(kills)} kills, seed {args.seed}, {time.monotonic() - begin:.0f} s\n"
        f"  of one host alone: {sum(kill.alone for kill in kills)}; the other ended with "
        f"{dict(torture.ends)}, within {torture.slowest:.1f} s\n"
        f"  different steps resumed from: {len(torture.seen)}"
    )
    print("the killed run equals the uninterrupted run, bit for bit")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
