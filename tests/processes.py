"""Starts Python processes, alone or as the hosts of a run."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from runtime.config import ROOT
from runtime.devices import QUICK_COMPILES


def python(*arguments: Any, cwd=ROOT, timeout: float | None = None, **environment: str):
    """Runs Python. Returns its exit code and what it printed, as subprocess.run does."""
    command, how = [sys.executable, *map(str, arguments)], {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, timeout=timeout, **how)


def python_at_work(*arguments: Any, **options: Any) -> subprocess.Popen:
    """Starts Python, with pipes to its standard input, output and error."""
    options = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | options
    options = {"cwd": ROOT, "text": True} | options
    return subprocess.Popen([sys.executable, *map(str, arguments)], **options)


def slurm(job: int, process: int, count: int) -> dict[str, Any]:
    """The environment of a Slurm job's process. The job's number determines the port."""
    counts = dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), count)
    place = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), process)
    return {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost"} | counts | place


def start_hosts(count, devices, command, output="", cluster=slurm, **settings):
    """Starts Python processes with `devices` CPU devices each, which find each other by a cluster's
    environment variables. Host i runs `command(i)` and prints to `<output>.<i>`, or to a pipe if
    `output` is empty."""
    job = next(job for job in iter(lambda: random.randrange(4096), None) if is_free(61440 + job))
    flags = f"--xla_force_host_platform_device_count={devices} "
    settings["XLA_FLAGS"] = flags + settings.pop("flags", QUICK_COMPILES)
    hosts = []
    with contextlib.ExitStack() as files:
        for i in range(count):
            out = files.enter_context(open(f"{output}.{i}", "w")) if output else subprocess.PIPE
            found = {name: str(value) for name, value in cluster(job, i, count).items()}
            error = subprocess.STDOUT if output else subprocess.PIPE
            env = os.environ | settings | found
            hosts.append(python_at_work(*command(i), env=env, stdin=None, stdout=out, stderr=error))
    return hosts


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) != 0


def on_hosts(command, devices=4, cluster=slurm) -> list[str]:
    """Runs `command(i)` on two hosts, as start_hosts does. Returns what each host printed."""
    hosts = start_hosts(2, devices, command, cluster=cluster)
    printed = [host.communicate(timeout=300) for host in hosts]
    assert not any(host.returncode for host in hosts), printed
    return [out for out, _ in printed]


def batches_on_hosts(**asked: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The ids of some batches, assembled from two hosts, and each host's position."""
    printed = on_hosts(lambda _: ["-m", "tests.batches_of_host", json.dumps(asked)])
    results = [json.loads(out.splitlines()[-1]) for out in printed]
    batches = []
    for parts in zip(*(host["rows"] for host in results), strict=True):
        rows = {int(first): ids for part in parts for first, ids in part.items()}
        batches.append(np.concatenate([rows[first] for first in sorted(rows)]))
    return batches, {str(host["host"]): host["position"] for host in results}
