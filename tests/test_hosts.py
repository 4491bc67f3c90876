"""Tests what one host does when the other gets a signal or is lost, and that both can resume."""

import json
import re
import signal
import socket
import time

import pytest

from runtime.run import make_mesh
from shardlib.errors import UserError
from tests.files import arrays, rows
from tests.helpers import small_config
from tests.processes import on_hosts, python_at_work, slurm
from tests.torture import ARGUMENTS, LIMIT, NEVER, QUICK, Hosts, complete, start_hosts

# A run saves only when it stops; the number of steps is chosen after that.
SETTINGS = [*ARGUMENTS, "checkpoint_interval=0"]
ENDLESS = 10**6


class Run:
    """A run in `<root>/<name>` that can be started several times."""

    def __init__(self, root, cache, name):
        self.root, self.cache, self.name, self.folder = root, cache, name, root / name
        self.starts = 0

    def start(self, steps, *moments):
        self.starts += 1
        where = [f"paths.root_working_dir={self.root}", f"paths.model_name={self.name}"]
        output = self.root / f"{self.name}.{self.starts}"
        return Hosts(output, self.cache, [*SETTINGS, *where, f"training.steps={steps}"], *moments)

    @staticmethod
    def until_it_trains(hosts):
        while "time to first step" not in hosts.text():
            assert all(process.poll() is None for process in hosts.processes), hosts.text()
            time.sleep(0.01)

    def stop(self, host, number):
        """Starts the run and sends a signal to one host. Returns the exit codes, the signal that
        the output names, and the number of steps done."""
        with self.start(ENDLESS) as hosts:
            self.until_it_trains(hosts)
            hosts.processes[host].send_signal(number)
            codes = hosts.wait(LIMIT)
            text = hosts.text()
        stopped = re.search(r"stopped by (\w+) after (\d+) steps; the same command resumes", text)
        assert stopped and f"/{int(stopped[2]):08d}." in text, text
        return codes, stopped[1], int(stopped[2])

    def finish(self, steps):
        with self.start(steps) as hosts:
            assert hosts.wait() == [0, 0], hosts.text(0) + hosts.text(1)
            return hosts.text()


# What a process finds in its environment, given a number of the job that determines the port.
CLUSTERS = {
    "slurm": slurm,
    "mpi": lambda job, process, count: {
        "OMPI_MCA_orte_hnp_uri": f"{job * 2**12}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": count,
        "OMPI_COMM_WORLD_RANK": process,
        "OMPI_COMM_WORLD_LOCAL_RANK": process,
    },
    "kubernetes": lambda job, process, count: {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "http_proxy": "http://127.0.0.1:1",  # that isn't there
        "SETTINGS": f"coordinator=localhost:{61440 + job} process_id={process}",
    },
}
CONNECTED = """
import os, sys
import jax
from runtime.run import make_mesh
from tests.helpers import small_config
settings = os.environ.get("SETTINGS", "").split()
config = small_config(sys.argv.pop(1), "num_hosts=2", *settings)
mesh = make_mesh(config, config.mesh.axes)
"""
VISIBLE = 'print(mesh.size, jax.config.values["jax_cuda_visible_devices"])'


def printed_by(script, *arguments, devices=1, cluster=slurm):
    """Returns what a script prints on two hosts, each with an argument of its own, once they are
    connected."""

    def command(i):
        mesh = f"mesh={{d: {2 * devices}, t: 1}}"
        return ["-W", "error", "-c", CONNECTED + script, mesh, *arguments[i : i + 1]]

    return on_hosts(command, devices, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_process_has_all_gpus_of_its_host(cluster):
    """JAX would take a process that Slurm or MPI starts to be for one GPU."""
    printed = printed_by(VISIBLE, devices=4, cluster=CLUSTERS[cluster])
    assert [out.splitlines()[-1] for out in printed] == ["8 0,1,2,3"] * 2


DIFFERENT = """
from runtime.run import check_programs_agree
from shardlib.errors import UserError
from tests.helpers import edited
line = "hidden = hidden.astype(compute.dtype)"
module = edited("train.py", (line, f"{line} * {sys.argv[1]}"))
with jax.set_mesh(mesh):
    try:
        check_programs_agree(module.lower_step(config))
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["2", "(2 + jax.process_index())"])
def test_hosts_that_trace_different_programs_stop(factor):
    printed = printed_by(DIFFERENT, factor, factor)
    found = "hosts trace different programs, from constant at train_edited.py:"
    assert [found in out for out in printed] == ["jax" in factor] * 2


APART = """
from tests.runtime.test_faults import opened_tiny
os.chdir(sys.argv[1])
with jax.set_mesh(mesh):
    try:
        print("starts at", opened_tiny("run").starting_point("", True)[1])
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", ["aa", "ab"])
def test_hosts_that_do_not_share_the_folder_of_checkpoints_stop(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    printed = printed_by(APART, *(str(tmp_path / name) for name in names))
    apart = "run can't be used for checkpoints: host 0 doesn't see what host 1 writes: all hosts "
    apart += "need one folder, or a bucket"
    wanted = apart if names == "ab" else "starts at 0"
    assert [wanted in out.splitlines() for out in printed] == [True] * 2
    assert not [*tmp_path.glob("a/run/try.*")] or names == "ab"


@pytest.fixture
def run(tmp_path, tmp_path_factory):
    return Run(tmp_path, tmp_path_factory.getbasetemp() / "compiled", "run")


def assert_ends_as_one_that_was_left_alone(run, steps):
    whole = Run(run.root, run.cache, "whole")
    whole.finish(steps)
    assert rows(run.folder) == rows(whole.folder)
    ends = [complete(folder)[steps] for folder in (run.folder, whole.folder)]
    assert arrays(ends[0]) == arrays(ends[1])


@pytest.mark.slow
def test_a_signal_to_one_host_stops_both_after_the_same_step(run):
    """The host turns Ctrl-C into SIGTERM, which JAX announces to the other hosts."""
    codes, signal_name, step = run.stop(1, signal.SIGINT)
    assert (codes, signal_name) == ([143, 130], "SIGTERM"), "the first host speaks for itself"
    assert list(complete(run.folder)) == [step] and len(rows(run.folder)) == step
    assert f"\nresumed at step {step} from " in run.finish(step + 3)


@pytest.mark.long
def test_a_host_that_is_lost_ends_the_other_one(run):
    codes, signal_name, step = run.stop(0, signal.SIGTERM)
    assert (codes, signal_name) == ([143, 143], "SIGTERM")
    for host in 0, 1:
        for number in signal.SIGKILL, signal.SIGSTOP:
            with run.start(ENDLESS) as hosts:
                run.until_it_trains(hosts)
                hosts.processes[host].send_signal(number)
                hosts.end_of(1 - host)
    assert f"\nresumed at step {step} from " in run.finish(step + 9)
    assert_ends_as_one_that_was_left_alone(run, step + 9)


@pytest.mark.long
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_host_that_is_lost_in_compiling_restoring_or_saving_ends_the_other_one(run, number):
    run.finish(3)
    for moment in "compile 1", "read 1", "write 9":
        for host in 0, 1:
            moments = [moment if i == host else NEVER for i in range(2)]
            with run.start(6, moments, number) as hosts:
                hosts.end_of(1 - host)
            assert list(complete(run.folder)) == [3]
    assert "\nresumed at step 3 from " in run.finish(6)
    assert_ends_as_one_that_was_left_alone(run, 6)
    left = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert left == {path.name for path in complete(run.folder).values()}, "no incomplete ones"


# Hangs in C code, as a hung step does; no Python signal handler runs there.
HANGS = """
import ctypes
from runtime.supervise import Stop

mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
with Stop():
    lock(mutex)
    print("hangs", flush=True)
    lock(mutex)
"""


def test_the_second_ctrl_c_ends_a_process_at_once():
    with python_at_work("-c", HANGS) as process:
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == (
            "SIGINT: stopping; a step in progress is finished and saved; "
            "Ctrl-C again ends at once\n"
        )
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(LIMIT) == 130
        finally:
            process.kill()


FAILS = """
from runtime import storage
from runtime.checkpoint import CheckpointError
from shardlib.types import make_shardings
from tests.runtime.test_faults import Tiny, opened_tiny, tiny

def fail(*_):
    raise OSError(28, "No space left on device")

with jax.set_mesh(mesh):
    make = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
    tree = jax.tree.map(make, tiny(1), make_shardings(Tiny))
    checkpoints = opened_tiny(sys.argv[1])
    checkpoints.save(1, tree)
    checkpoints.wait()
    if jax.process_index() == 1:
        storage.write = fail
    checkpoints.save(2, tree)
    try:
        checkpoints.save(3, tree)
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_save_that_fails_on_one_host_is_reported_by_both_at_the_next_save(tmp_path):
    printed = printed_by(FAILS, *[str(tmp_path / "some")] * 2)
    left = {path.name.split(".")[0]: path for path in (tmp_path / "some").iterdir()}
    problem = f"{left['00000002']} can't be written: [Errno 28] No space left on device"
    assert [out.splitlines()[-1] for out in printed] == [problem] * 2
    assert list(complete(tmp_path, "some")) == [1]


def test_a_port_in_use_gets_one_message():
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        config = small_config("num_hosts=2", f"coordinator={address}", "process_id=0")
        with pytest.raises(UserError) as error:
            make_mesh(config, {"d": 2, "t": 1})
    message = f"num_hosts=2 coordinator={address}: [Errno 98] Address already in use"
    assert str(error.value).startswith(message)


def assert_both_end(folder, message, *settings, program=("-m", "train")):
    """Starts a run, for which each host has a setting of its own, and checks both hosts' ends."""

    def command(i):
        name = f"paths.root_working_dir={folder}", "paths.model_name=run"
        return [*program, *SETTINGS, *name, settings[i]]

    processes = start_hosts(2, 2, command, str(folder / "out"), **QUICK)
    assert [process.wait(LIMIT) for process in processes] == [1, 1]
    for i in range(2):
        assert re.search(f"{message}\\n$", (folder / f"out.{i}").read_text())


@pytest.mark.slow
def test_hosts_that_differ_do_not_start(tmp_path):
    problem = "hosts differ in training.learning_rate: 0.001 on host 0, 0.01 on host 1. "
    message = f"error: {problem}Start all with the same settings and the same source"
    assert_both_end(tmp_path, message, *(f"training.learning_rate={x}" for x in (1e-3, 1e-2)))


@pytest.mark.slow
def test_a_sink_that_one_host_can_not_open_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").touch()
    message = f"error: {tmp_path}/run/tensorboard can't be written: File exists"
    assert_both_end(tmp_path, message, *["metrics.to=[tensorboard]"] * 2)


FULL = """
import train
from runtime import run

def json_lines(*_):
    def log(row):
        raise OSError(28, "No space left on device")
    return log

run.json_lines = json_lines
train.main()
"""


@pytest.mark.slow
def test_metrics_that_the_first_host_can_not_write_end_all(tmp_path):
    problem = r"error: step 0 can't be logged: \[Errno 28\] No space left on device; "
    message = problem + r"stopped after \d+ steps, which are saved"
    assert_both_end(tmp_path, message, *["training.steps=1000000"] * 2, program=("-c", FULL))
    printed = (tmp_path / "out.0").read_text()
    unwritten = [
        json.loads(row) for row in re.findall("^not in metrics.jsonl: (.*)$", printed, re.M)
    ]
    assert [row["step"] for row in unwritten] == [*range(len(unwritten))] and unwritten
