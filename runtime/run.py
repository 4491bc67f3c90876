"""Everything around the training steps of a run: the run's folder and its metrics, progress lines,
step timing, profiling, and the ways a run can stop."""

import contextlib
import dataclasses
import datetime
import errno
import faulthandler
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jaxlib
import numpy as np

from runtime import chips, devices, hlo
from runtime.checkpoint import Checkpoint, Checkpoints, CheckpointsConfig, path_of, recorded_path
from runtime.config import ROOT, Section, as_text, flat, plain, sources
from runtime.errors import tell
from runtime.sinks import PACKAGES, SINKS, Row, json_lines
from runtime.supervise import Stop, check_hosts_agree, handled, locked, of_all_hosts
from runtime.values import Kept, Name, NonNegativeInt, Path, PositiveInt, Seconds, one_of
from shardlib.errors import UserError
from shardlib.mesh import axis_group
from shardlib.types import named

IMPORTED = time.perf_counter()
SECONDS_BETWEEN_LINES = 10  # of progress
# Whether each array of a tree is finite. Reads each once, and allocates nothing of its size.
all_finite = jax.jit(lambda tree: jax.tree.map(lambda x: jax.numpy.isfinite(x).all(), tree))


@dataclasses.dataclass(unsafe_hash=True)
class PathsConfig(Section, key="paths"):
    root_working_dir: Path
    clone_from: Kept
    clone_weights_only: bool
    model_name: Name
    clone_other_model: bool = False  # checkpoints of earlier versions lack it

    def __post_init__(self) -> None:
        folder = pathlib.PurePath(self.model_name)
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        self.require(inside, "model_name", "it must name a folder inside paths.root_working_dir")
        local = "://" not in self.root_working_dir
        self.require(local, "root_working_dir", "it must be a local folder, not a bucket")

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder."""
        return pathlib.Path(self.root_working_dir, self.model_name)


@dataclasses.dataclass(unsafe_hash=True)
class IoConfig(Section, key="io"):
    max_io_threads: PositiveInt


@dataclasses.dataclass(unsafe_hash=True)
class MetricsConfig(Section, key="metrics"):
    to: tuple[Annotated[str, one_of(" ".join(SINKS))], ...]
    norms_interval: NonNegativeInt


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class RunConfig(Section):
    """The part of a config that doesn't depend on what is trained."""

    paths: PathsConfig
    io: IoConfig
    metrics: MetricsConfig
    check: Annotated[str, one_of("numbers noted types none")]
    checkpoint_interval: NonNegativeInt
    checkpoints: CheckpointsConfig
    hang_timeout_seconds: Seconds
    hang_ends: bool
    profile: bool
    hlo_svg: bool
    compiler_options: bool
    deterministic: bool
    num_hosts: PositiveInt
    coordinator: str
    process_id: NonNegativeInt | None
    heartbeat_timeout_seconds: PositiveInt
    simulate_devices: bool

    def __post_init__(self) -> None:
        _, colon, port = self.coordinator.rpartition(":")
        valid = not self.coordinator or (colon and port.isdecimal() and 0 < int(port) < 2**16)
        self.require(valid, "coordinator", "it must be ADDRESS:PORT of the first host")

    @property
    def checkpoints_path(self) -> str:
        """The folder or bucket that holds the run's checkpoints."""
        return path_of(self.checkpoints.root, self.paths.model_name, str(self.paths.folder))


axis_group("d", "r", "s")  # data parallelism: replicas, and the shards of each


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig(Section, key="mesh"):
    d: PositiveInt
    t: PositiveInt
    r: PositiveInt = 1
    c: PositiveInt = 1

    def __post_init__(self) -> None:
        self.require(self.d % self.r == 0, "r", f"it must divide mesh.d={self.d}")

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes, outermost first."""
        return {"r": self.r, "s": self.d // self.r, "c": self.c, "t": self.t}


PROXIES = {"http_proxy", "https_proxy", "grpc_proxy"}  # environment variables that gRPC reads


def make_mesh(config: RunConfig, axes: dict[str, int]) -> jax.sharding.Mesh:
    """Returns a mesh of these axis sizes, and connects the hosts if there are several. Raises
    UserError if the config's devices or hosts aren't available."""
    for key in "process_id", "coordinator":
        fits = config.num_hosts > 1 or not getattr(config, key)
        config.require(fits, key, "num_hosts is 1, with which each host trains alone")
    there = not config.coordinator or config.process_id is not None
    config.require(there, "process_id", "give each host its number, from 0")
    count = math.prod(axes.values()) // config.num_hosts
    if config.simulate_devices:
        devices.simulate_cpu_devices(count)
    else:
        devices.have_threads(count)  # XLA_FLAGS may simulate devices, too
    if config.num_hosts > 1:
        try:
            settings = dict[str, Any](heartbeat_timeout_seconds=config.heartbeat_timeout_seconds)
            bound = os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0  # to one GPU
            if (count > 1 or bound) and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
                # Under Slurm and MPI JAX would take the one GPU with the process's local number.
                settings |= {"local_device_ids": range(count)}
            if config.coordinator:
                address, _, port = config.coordinator.rpartition(":")
                if config.process_id == 0:  # JAX crashes if it can't listen
                    socket.create_server(("", int(port))).close()
                settings |= {"coordinator_address": config.coordinator}
                settings |= {"num_processes": config.num_hosts, "process_id": config.process_id}
                if PROXIES & {*os.environ}:  # set for downloads; gRPC would go through them, too
                    os.environ.setdefault("no_grpc_proxy", address.strip("[]"))
            at = config.coordinator and f" at {config.coordinator}"
            waits = f"waiting for {config.num_hosts} hosts{at}, for at most five minutes"
            waiting = threading.Timer(30, tell, (waits, sys.stderr))
            waiting.daemon = True
            waiting.start()
            with handled([signal.SIGINT], signal.SIG_DFL):  # JAX would go on waiting
                jax.distributed.initialize(**settings)
            waiting.cancel()
        except (ValueError, OSError) as error:
            where = config.coordinator and f" coordinator={config.coordinator}"
            unless = "unless Slurm, Open MPI or a TPU pod starts the hosts"
            cure = "" if where else f". Set coordinator=ADDRESS:PORT and process_id, {unless}"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                cure = "; another process here has the port, perhaps with the same process_id"
            raise UserError(f"num_hosts={config.num_hosts}{where}: {error}{cure}") from None
    if jax.process_count() != config.num_hosts:
        raise UserError(f"num_hosts={config.num_hosts}, but JAX found {jax.process_count()} hosts")
    if config.num_hosts > 1:
        check_settings_agree(config)
    for name in "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE":
        if config.num_hosts == 1 and (started := os.environ.get(name, "1")) != "1":
            say(f"note: {name}={started}, and num_hosts=1: each of these processes trains alone")
    return devices.make_mesh(axes, trains=not config.simulate_devices)


def check_settings_agree(config: RunConfig) -> None:
    """Raises UserError on all hosts if their settings or their source differ. Otherwise each would
    train with its own, or wait for the others forever."""
    own = flat(dataclasses.asdict(config)) | {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    own |= dict.fromkeys(("process_id", "coordinator"), "")  # in which they may differ
    for name in "XLA_FLAGS", "LIBTPU_INIT_ARGS":  # dumps may have other places
        own[name] = " ".join(x for x in os.environ.get(name, "").split() if "dump" not in x)
    for file in sources():
        own[str(file.relative_to(ROOT))] = hashlib.sha256(file.read_bytes()).hexdigest()
    check_hosts_agree(own, "Start all with the same settings and the same source")


def check_programs_agree(lowered: jax.stages.Lowered) -> None:
    """Raises UserError on all hosts if they have traced different programs. Otherwise each would
    compute something else, or wait for the others forever."""
    if jax.process_count() == 1:
        return
    lines = lowered.as_text().splitlines()
    digests = of_all_hosts(" ".join(f"{zlib.crc32(line.encode()):x}" for line in lines))
    each_line = itertools.zip_longest(*(text.split() for text in digests))
    if different := [i for i, hashes in enumerate(each_line) if len({*hashes}) > 1]:
        at = hlo.operation(lowered, min(different[0], len(lines) - 1))
        cause = "such as the order of a set, the environment or the host's name"
        cause = f"the code before depends on something that differs between hosts, {cause}"
        raise UserError(f"hosts trace different programs, from {at} on: {cause}")


def compile_step(config: RunConfig, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program with the compiler options for the mesh's chips."""
    device = jax.sharding.get_mesh().devices.flat[0]
    options = chips.compiler_options(device.device_kind) if config.compiler_options else {}
    if device.platform == "gpu":
        options |= chips.DETERMINISTIC if config.deterministic else {}
        options |= chips.PROFILED if config.profile else {}
    return lowered.compile(compiler_options=options)


def say(text: str) -> None:
    """Prints a line, on the first host only."""
    if jax.process_index() == 0:
        tell(text, sys.stdout)


@contextlib.contextmanager
def reserved(config: RunConfig) -> Iterator[None]:
    """Locks the run's folder against other processes. Raises UserError if one holds it, or if a
    sink's package isn't installed. JAX caches compiled programs in root_working_dir unless the
    user has chosen a cache folder; the next start of the same program then skips compiling."""
    for key, value in flat(config.values()).items():
        # A checkpoint's config with such a value would be refused.
        if "${" in str(value):
            raise UserError(f"{key}={value}: it can't have ${{ in it")
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        cache = pathlib.Path(config.paths.root_working_dir).absolute() / ".compilation_cache"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        # Otherwise an edit that only changes a type string would load the old program.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    first, to = jax.process_index() == 0, config.metrics.to  # the first host has the sinks
    needed = [PACKAGES[name] for name in to if first and name in PACKAGES]
    missing = " ".join(name for name in needed if not importlib.util.find_spec(name))
    if missing := of_all_hosts(missing)[0]:
        raise UserError(f"metrics.to=[{','.join(to)}] needs a package: pip install {missing}")
    with locked(config.paths.folder) if first else contextlib.nullcontext():
        yield


# Prefixes of keys that change a loss by rounding or not at all.
ROUNDING = (
    *("training.microbatches", "training.loss_chunks", "training.unroll"),
    *("training.validation_interval", "training.validation_at_start"),
    *("training.max_skipped_updates", "flat_tokens.other_rows", "flat_tokens.validation"),
    "hf_dataset.num_workers",
)


def trained_with(config: RunConfig, checkpoint: Checkpoint, *keys: str) -> str:
    """Lists a checkpoint's settings that now differ by more than rounding, as the checkpoint has
    them. Their keys start with one of `keys`, by default those of the model, the training, and
    which checkpoints are kept."""
    keys = keys or ("model.", "training.", "dtype", "checkpoints.keep_")
    before, now = flat(checkpoint.settings), flat(plain(config.to_yaml()))

    def there(x: str, settings: dict[str, Any]) -> str:
        """The key or, as a null section has no keys, its section; "" if settings lack both."""
        return next((key for key in (x, x.rpartition(".")[0]) if key in settings), "")

    pairs = [(there(x, before), x) for x in {**before, **now} if there(x, now)]
    differ = {y: before[y] for y, x in pairs if y and before.get(x) != now.get(x)}
    shown = [x for x in differ if x.startswith(keys) and not x.startswith(ROUNDING)]
    return ", ".join(f"{x}={as_text(differ[x])}" for x in shown)


def as_begun(config: Any, checkpoint: Checkpoint) -> str:
    """Returns the config that a resumed run's checkpoints record, as YAML. Tools learn from it
    where the weights come from, so it keeps the run's first `paths.clone_from`, and
    `other_tokenizer` if it was set."""
    before, clone = flat(checkpoint.settings), config.paths.clone_from
    begun = before.get("paths.clone_from") or ""
    if clone not in ("", begun):
        say(f"note: paths.clone_from={clone} has no effect, as the run has checkpoints")
    other = bool(before.get("other_tokenizer")) or config.other_tokenizer
    kept = {"paths.clone_from": begun, "other_tokenizer": other}
    return str(config.changed(kept).to_yaml())


def complete(config: RunConfig, checkpoints: Checkpoints) -> int:
    """Says that all steps are done. Returns the exit code. Raises CheckpointError for another
    model."""
    checkpoints.check_model()
    keys = "model.", "training.", "dtype", "flat_tokens", "hf_dataset"
    other = trained_with(config, checkpoints.newest, *keys)
    other = f". It was trained with {other}" if other else ""
    cure = "raise training.steps, which training.steps_for_lr follows unless it is set"
    cure = f"To continue it, {cure}. For a new run, choose another paths.model_name"
    say(f"{config.paths.folder} is complete: all its steps are done. {cure}{other}")
    return 0


def due(interval: int, step: int, steps: int) -> bool:
    """Returns whether something is due after a step: every `interval` steps and after the last
    step; never if `interval` is 0."""
    return interval > 0 and ((step + 1) % interval == 0 or step + 1 == steps)


def replace(file: pathlib.Path, content: bytes) -> None:
    """Replaces a file atomically: a process killed here leaves the old content."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content)
    part.replace(file)


def rows_before(metrics: pathlib.Path, step: float) -> tuple[list[bytes], int]:
    """Returns the lines of a metrics.jsonl for steps before `step`, and the number of damaged
    lines. A last line that was cut off in writing doesn't count."""
    lines, damaged = list[bytes](), 0
    *whole, last = metrics.read_bytes().split(b"\n")
    for number, line in enumerate((*whole, last)):
        try:
            if json.loads(line)["step"] < step:
                lines.append(line + b"\n")
        except Exception:  # it may hold anything
            damaged += number < len(whole)
    return lines, damaged


def open_folder(
    folder: pathlib.Path, to: tuple[str, ...], config: str, first_step: int, saved: int
) -> list[Callable[[Row], None]]:
    """Writes config.yaml and appends to starts.jsonl in the run's folder. Returns the functions
    that log a row of metrics: one for metrics.jsonl and one for each sink that `to` names. Called
    on the first host only.

    Keeps only the rows of metrics.jsonl before `saved`, the step of the run's own last checkpoint:
    an earlier start may have run further. If the run has none, existing metrics are another
    attempt's: renames them to `metrics.<time>.jsonl`, even if a clone starts at a later step. Keeps
    metrics with damaged lines there, too."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, was, said = folder / "metrics.jsonl", recorded_path(str(folder)), ""
    if metrics.exists():
        other = folder / f"metrics.{metrics.stat().st_mtime_ns}.jsonl"
        lines, damaged = rows_before(metrics, saved)
        if not saved:
            metrics.rename(other)
            said = f"no checkpoint to resume from; renamed the earlier metrics to {other.name}"
        elif damaged:
            replace(other, metrics.read_bytes())
            said = f"warning: damaged lines left out of {metrics}: {damaged}; {other.name} has them"
        if saved:
            replace(metrics, b"".join(lines))
    replace(folder / "config.yaml", config.encode())
    if said and not saved and was not in ("", recorded_path(str(folder))):
        said += f"; the earlier checkpoints may be in {was}"
    if said:
        say(said)
    starts = folder / "starts.jsonl"
    start = json.dumps({"first_step": first_step, "config": config} | origin()) + "\n"
    # As a whole: a full disk could cut off an added line.
    replace(starts, (starts.read_bytes() if starts.exists() else b"") + start.encode())
    sinks = [json_lines, *(SINKS[name] for name in to)]
    return [make(folder, saved, config) for make in sinks]


@dataclasses.dataclass
class Run(contextlib.ExitStack):
    """One start of a run: its metrics, its clock, and the ways it can stop.

        with Run(config, saved, first, steps, ...) as run:
            step_once = run.compile(...)
            for step in range(first, steps):
                with run.step(step, waited):
                    ...
                run.log(step, {"loss": loss})
                if run.saves_after(step, state):
                    ...
                if run.stopping:
                    break
            code = run.end()

    All hosts make the same calls at the same steps. The constructor opens the run's folder and
    sinks. It raises UserError on all hosts if that fails on one, or if no step is left.
    """

    config: RunConfig
    saved: int  # the step of the run's own last checkpoint, 0 if it has none
    first: int  # the first step of this start, of `steps` in all
    steps: int
    tokens: int  # of a step
    flops: int  # of a step, the model's
    max_skipped: int  # consecutive skipped updates; one more ends the run
    skipped: int = 0  # consecutive ones so far, also before this start

    def __post_init__(self) -> None:
        if self.first >= self.steps:
            clone = f"paths.clone_from={self.config.paths.clone_from}"
            raise UserError(f"{clone} is at step {self.first}; set training.steps above that")
        self.folder = self.config.paths.folder
        self.first_host = jax.process_index() == 0
        lock = self.folder / "lock"
        self.lock = lock.stat().st_ino if self.first_host and lock.exists() else 0
        # On the first host: each sink's function, and the rows that it hasn't taken yet.
        self.loggers: list[tuple[Callable[[Row], None], list[Row]]] = []
        problem, to = "", self.config.metrics.to
        try:
            if self.first_host:
                logs = open_folder(self.folder, to, self.config.to_yaml(), self.first, self.saved)
                self.loggers = [(log, []) for log in logs]
        except OSError as error:  # such as a full disk
            problem = f"{error.filename or self.folder} can't be written: {error.strerror}"
        except Exception as error:  # sinks raise errors of many types
            problem = f"metrics.to=[{','.join(to)}]: {error}"
        if problem := "".join(of_all_hosts(problem)):
            raise UserError(problem)
        super().__init__()
        self.stop, self.stopping = self.enter_context(Stop()), False
        self.callback(faulthandler.cancel_dump_traceback_later)
        self.unlogged = ""  # why metrics can't be written any more
        self.row: dict[str, Any] = {}  # the last step's, until it is written
        self.extra: Row = {}  # what `add_validation` adds to it
        self.seconds: list[float] = []  # duration of each step
        self.printed = -math.inf  # time of the last progress line
        self.due = False  # whether the interval asks for a checkpoint
        self.profile = contextlib.ExitStack()  # closing it ends the profile

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles the training step, and draws it if the config asks for that."""
        mesh = jax.sharding.get_mesh()
        say(f"compiling for {mesh.size} x {mesh.devices.flat[0].device_kind} ...")
        check_programs_agree(lowered)
        if self.config.hlo_svg or self.config.profile:
            # Else a cached program could show another source's lines.
            jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        self.program = compile_step(self.config, lowered)
        if self.config.hlo_svg and self.first_host:
            say(hlo.draw(str(self.program.as_text()), self.folder / "step.svg"))
        return self.program

    @contextlib.contextmanager
    def step(self, step: int, waited: float) -> Iterator[None]:
        """Context manager for the call of the training step. `waited` is how many seconds the loop
        waited for the batch, which count as part of the step's time. If the next step or a pause
        hasn't begun within hang_timeout_seconds, the stacks of all threads go to standard error."""
        if self.config.profile and step == min(self.first + 2, self.steps - 1):
            self.flush()
            folder = self.folder / f"profile/host_{jax.process_index()}"
            self.profile.enter_context(hlo.profile(folder, self.program, say))
        self._watch()
        if not self.row:  # otherwise the previous step is still running, and this one follows it
            self.since = time.perf_counter() - waited
        self.waited = waited
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def log(self, step: int, values: dict[str, Any], explain: Callable[[], str] = str) -> None:
        """Starts the row of a step, and writes the row of the step before: reading metrics blocks,
        so step n is logged while step n+1 runs. `explain` returns details on a loss that isn't
        finite.

        Entries of an array are logged by their indices, as name/0/1. These, and norms of a tensor
        (grad_norm/embed), are logged only every metrics.norms_interval steps."""
        self._settle()
        self._write()
        self.row = {"step": step, **values, "data_wait_seconds": self.waited}
        self.explain = explain

    def add_validation(
        self, loss: float | None, bytes_per_token: float | None, name: str = "", when: str = ""
    ) -> None:
        """Adds a validation set's loss to the next row that is written: in nats per token, and in
        bits per byte if the set's bytes are known. None, of a validation that a signal has
        interrupted, isn't added."""
        ends = when + (name and f"/{name}")
        if loss is None:
            say(f"note: a signal interrupted the validation: it has no validation_loss{ends}")
            return
        self.extra[f"validation_loss{ends}"] = loss
        if bytes_per_token:
            bits = loss / math.log(2) / bytes_per_token
            self.extra[f"validation_bits_per_byte{ends}"] = bits

    def pause(self) -> None:
        """Blocks until the last step is done. The time from here to the next step belongs to no
        step. Saving and a validation's first batch may take any time."""
        self._settle()
        faulthandler.cancel_dump_traceback_later()

    def _replaced(self) -> str:
        """Says that the folder was removed, or that a new run has begun under its name, which has
        another lock; else returns ""."""
        try:
            gone = self.first_host and (self.folder / "lock").stat().st_ino != self.lock
        except FileNotFoundError:
            gone = not self.folder.exists()
        except OSError:
            gone = False  # it can't be reached now
        return f"{self.folder} was removed or replaced" if gone else ""

    def flush(self) -> None:
        """Pauses, and writes the pending row. Raises UserError after too many consecutive skipped
        updates."""
        self.pause()
        self._write()

    def _require_savable(self, state: Any) -> None:
        """Raises UserError if an array of the state isn't finite, or if the run's folder, where it
        is to be saved, is no longer there."""
        if gone := of_all_hosts(self._replaced())[0]:
            raise UserError(f"{gone} while this run was writing to it; stopped without saving")
        if bad := [name for name, finite in named(all_finite(state)).items() if not finite]:
            problem = f"after step {self.first + len(self.seconds) - 1} these are NaN or infinite"
            cure = "Lower training.learning_rate"  # gradients were finite
            raise UserError(f"{problem}, and in no checkpoint: {', '.join(bad)}. {cure}")

    def _settle(self) -> None:
        if not self.row or "tokens_per_second" in self.row:
            return
        row: Row = {"step": (step := self.row.pop("step"))}
        in_parts = due(self.config.metrics.norms_interval, step, self.steps)
        for name, value in self.row.items():
            if in_parts or ("_norm/" not in name and np.ndim(value) == 0):
                entries = np.ndenumerate(np.asarray(value))
                row |= {"/".join(map(str, (name, *index))): float(x) for index, x in entries}
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.since = now
        if step == self.first:
            say(f"time to first step: {now - IMPORTED:.1f} s (imports not included)")
        self.row = row | {"tokens_per_second": self.tokens / self.seconds[-1]}

    def interrupted(self) -> bool:
        """Returns whether a signal asks to stop. Call it between parts of long work, such as the
        batches of a validation. Each part may take hang_timeout_seconds."""
        self._watch()
        self.stopping = self.stop.reached()
        return self.stopping

    def _watch(self) -> None:
        if seconds := self.config.hang_timeout_seconds:
            faulthandler.dump_traceback_later(seconds, exit=self.config.hang_ends)

    def _write(self) -> None:
        if self.row:
            row, self.row, self.extra = self.row | self.extra, {}, {}
            self.write(row)

    def write(self, row: Row) -> None:
        """Logs a row, prints progress, and ends the run after too many skipped updates."""
        self._give_sinks(row)
        self._print_progress(row)
        self.skipped = self.skipped + 1 if row["skipped"] else 0
        if self.skipped:
            loss, norm = row["loss"], row["grad_norm"]
            problem = f"step {row['step']}: loss {loss:.5g}, gradient norm {norm:.5g}"
            if self.skipped > self.max_skipped:
                faulthandler.cancel_dump_traceback_later()  # `explain` waits for a save
                say(f"{problem}: examining its gradients ...")
                raise UserError(f"{problem}; stopped without saving this step; {self.explain()}")
            say(f"warning: {problem}; skipped the update, {self.skipped} in a row")

    def _give_sinks(self, *row: Row) -> None:
        """Gives each sink the rows that it hasn't taken yet. An error stops the run."""
        for log, rows in self.loggers:
            rows.extend(row)
            try:
                while rows:
                    if gone := self._replaced():
                        raise OSError(gone)
                    log(rows[0])
                    rows.pop(0)
            except Exception as error:  # sinks raise errors of many types
                problem = f"step {rows[0]['step']} can't be logged: {error}"
                self.unlogged = self.unlogged or problem
                self.stop.ask()

    def saves_after(self, step: int, state: Any) -> bool:
        """Returns whether to save the state after a step: because of the interval, a signal or the
        end of the run. After skipped updates, which may be due to weights that have diverged, a
        save for the interval waits for the next update. Call it once per step: it also ends the
        profile. Raises what `flush` raises, and UserError for a state that can't be saved."""
        self.stopping = self.stop.reached()
        last = self.stopping or step + 1 == self.steps
        if self.config.profile and (last or step == self.first + 4):
            self.flush()
            self.profile.close()
            of_all_hosts("")  # one may take much longer, which mustn't count as a hung step
        self.due |= due(self.config.checkpoint_interval, step, self.steps)
        if not (last or self.due):
            return False
        self.flush()
        self._require_savable(state)
        self.due = self.skipped > 0 and not last
        return not self.due

    def end(self) -> int:
        """Prints how the run ended, after the last save. Returns the exit code."""
        self.flush()
        done = self.first + len(self.seconds)
        if unlogged := "".join(of_all_hosts(self.unlogged)):  # all hosts end with 1, none earlier
            self._give_sinks()  # a save may have removed old checkpoints, and so made room
            for row in self.loggers[0][1] if self.first_host else []:
                say(f"not in metrics.jsonl: {json.dumps(row)}")
            raise UserError(f"{unlogged}; stopped after {done} steps, which are saved")
        if self.stopping and done < self.steps:
            name = self.stop.received.name
            say(f"stopped by {name} after {done} steps; the same command resumes there")
            return 128 + self.stop.received
        typical = statistics.median(self.seconds[1:] or self.seconds)
        each = f"{typical:.3f} s per step (median), {self._speed(typical)}"
        skipped = f"; the last {self.skipped} updates were skipped" if self.skipped else ""
        say(f"done: {self.steps - self.first} steps, {each}{skipped}")
        return 0

    def _print_progress(self, row: Row) -> None:
        """Prints a progress line for the first and last step and each validation, and otherwise
        every SECONDS_BETWEEN_LINES."""
        step, now = row["step"], time.perf_counter()
        losses = [name for name in row if name.startswith(("loss", "validation_loss"))]
        always = len(losses) > 1 or step + 1 == self.steps
        if not always and now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        typical = statistics.median(self.seconds[-20:])
        left = datetime.timedelta(seconds=round(typical * (self.steps - step - 1)))
        losses = [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in losses]
        line = [f"step {step}/{self.steps}", *losses, self._speed(typical), f"{left} left"]
        say("  ".join(line))

    def _speed(self, seconds: float) -> str:
        """Returns tokens per second, and MFU if it is known, for a step of so many seconds."""
        speed, kind = f"{self.tokens / seconds:,.0f} tokens/s", jax.devices()[0].device_kind
        mfu = chips.mfu(kind, jax.sharding.get_mesh().size, self.flops / seconds)
        return f"{speed}, MFU {mfu}" if mfu else speed


# Beginnings of environment variables that may change numbers or speed.
ENVIRONMENT = "JAX_", "XLA_", "LIBTPU_", "NCCL_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE"


def origin() -> dict[str, Any]:
    """Records what a run depends on besides its config: source, versions, devices, environment."""
    packages = ("jax", "jaxlib", "numpy", "zarr", "datasets", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    found = jax.devices()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        "edits": edits(),
        "versions": {"python": platform.python_version(), **versions},
        "devices": f"{len(found)} x {found[0].device_kind}",
        "hosts": jax.process_count(),
        "environment": {k: x for k, x in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    }


def commit() -> str | None:
    """The git commit of the source, with `-dirty` after it if files differ; None without git."""
    described = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return described.strip() or None


def edits() -> str:
    """Returns the changes since that commit, for `git apply`, without untracked files; "" without
    git."""
    return _git("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".")


def _git(*command: str) -> str:
    """The output of git in the source's folder, which another user may own; "" if it fails."""
    command = "git", "-c", "safe.directory=*", "-C", str(ROOT), *command
    try:
        return subprocess.run(command, capture_output=True).stdout.decode(errors="replace")
    except OSError:  # there is no git
        return ""
