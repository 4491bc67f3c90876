"""What surrounds the steps of a run: its folder and what stands there, its progress, its clock, and
all that may end it."""

import contextlib
import dataclasses
import datetime
import faulthandler
import importlib.metadata
import json
import math
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from omegaconf import MISSING, OmegaConf

from runtime import hlo
from runtime.checkpoint import CheckpointsConfig
from runtime.config import ROOT, Name, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, flat
from runtime.sinks import DESTINATIONS, Row, check_destinations, json_lines
from runtime.supervise import Stop, locked
from shardlib import devices
from shardlib.errors import UserError

IMPORTED = time.perf_counter()
SECONDS_BETWEEN_LINES = 10  # of progress


@dataclasses.dataclass(unsafe_hash=True)
class PathsConfig(Section, key="paths"):
    root_working_dir: str
    clone_from: str  # a folder of checkpoints, or one of them, that a new run starts from
    clone_weights_only: bool  # from step 0, or else with its whole state, from its step
    model_name: Name = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = pathlib.PurePath(self.model_name)
        inside = folder.parts and not folder.is_absolute() and ".." not in folder.parts
        self.require(inside, "model_name", "it names a folder in paths.root_working_dir")
        local = "://" not in self.root_working_dir
        self.require(local, "root_working_dir", "runs write to a local folder")


@dataclasses.dataclass(unsafe_hash=True)
class IoConfig(Section, key="io"):
    max_io_threads: PositiveInt


@dataclasses.dataclass(unsafe_hash=True)
class MetricsConfig(Section, key="metrics"):
    to: tuple[str, ...]  # besides metrics.jsonl: tensorboard, wandb
    norms_interval: NonNegativeInt  # steps between norms of each tensor; 0: never


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class RunConfig(Section):
    """What a config says of a run, whatever it trains."""

    paths: PathsConfig
    io: IoConfig
    metrics: MetricsConfig
    checkpoint_interval: NonNegativeInt  # steps; 0: at the end only
    checkpoints: CheckpointsConfig
    hang_timeout_seconds: NonNegativeFloat  # for a step, before it counts as hung; 0: none
    hang_ends: bool  # a step that hangs ends the run, or else is only reported
    profile: bool  # a few steps into profile/
    hlo_svg: bool  # the compiled step, drawn
    compiler_options: bool  # those of devices.COMPILER_OPTIONS
    num_hosts: PositiveInt
    coordinator: str  # address:port of the first host, where JAX can't find out; else empty
    process_id: NonNegativeInt  # of this host, from 0, if a coordinator is named
    heartbeat_timeout_seconds: PositiveInt  # without a sign of a host, after which the others end
    simulate_devices: bool


def make_mesh(config: RunConfig, axes: dict[str, int]) -> jax.sharding.Mesh:
    """Raises UserError if the devices or hosts that the config asks for can't be had."""
    if config.simulate_devices:
        devices.simulate_cpu_devices(math.prod(axes.values()) // config.num_hosts)
    if config.num_hosts > 1:
        try:
            found = dict[str, Any](heartbeat_timeout_seconds=config.heartbeat_timeout_seconds)
            if config.coordinator:
                found |= {"coordinator_address": config.coordinator}
                found |= {"num_processes": config.num_hosts, "process_id": config.process_id}
            jax.distributed.initialize(**found)
        except ValueError as error:
            raise UserError(f"num_hosts={config.num_hosts}: {error}") from None
    if jax.process_count() != config.num_hosts:
        raise UserError(f"num_hosts={config.num_hosts}, but there are {jax.process_count()}")
    return devices.make_mesh(axes)


def compile_step(config: RunConfig, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program with the compiler options of the mesh's chips."""
    kind = jax.sharding.get_mesh().devices.flat[0].device_kind
    options = devices.compiler_options(kind) if config.compiler_options else {}
    return lowered.compile(compiler_options=options)


def say(text: str) -> None:
    """Prints a line, on the first host alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def use_cache(root: str) -> None:
    """Has JAX keep what it compiles in `<root>/.compilation_cache`, for the next start of the same
    program, unless the user has chosen a folder for that."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        folder = pathlib.Path(root).expanduser().absolute() / ".compilation_cache"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        # Else an edit of a type string alone would find the program that has the old one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def due(interval: int, step: int, steps: int) -> bool:
    """At the end of a step: every `interval` steps, unless it is 0; and at the run's end, unless
    it is never due."""
    return interval > 0 and ((step + 1) % interval == 0 or step + 1 == steps)


def replace(file: pathlib.Path, content: bytes) -> None:
    """Writes a file anew, so that whoever is killed here leaves the old one."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content)
    part.replace(file)


def rows_before(metrics: pathlib.Path, step: int) -> Iterator[bytes]:
    """The lines of a metrics.jsonl up to the first of `step`, or of a later one, or one cut short.
    Raises UserError for one that can't be read."""
    for number, line in enumerate(metrics.read_bytes().splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                return
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{metrics}, line {number} is no row of metrics; mend it, or move it away"
            ) from None
        yield line


def open_folder(
    folder: pathlib.Path, to: tuple[str, ...], config: str, first_step: int
) -> list[Callable[[Row], None]]:
    """Writes a run's config and what else it depends on into its folder, and says what has changed
    in the config. Returns the functions that each row of metrics is to be given: metrics.jsonl's,
    and those of the destinations that `to` names. For the first host only.

    Keeps the metrics of the steps before `first_step`: later ones, which an earlier start did after
    the checkpoint, are cut off. A run from step 0 sets all earlier metrics aside, as
    `metrics.<time>.jsonl`. Raises UserError for metrics that it can't read."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, earlier = folder / "metrics.jsonl", folder / "config.yaml"
    if metrics.exists() and first_step == 0:
        kept_as = folder / f"metrics.{metrics.stat().st_mtime_ns}.jsonl"
        metrics.rename(kept_as)
        say(f"no checkpoint to go on from; the earlier metrics are {kept_as.name}")
    if metrics.exists():
        replace(metrics, b"".join(rows_before(metrics, first_step)))
    if first_step and earlier.exists():
        before, now = (flat(OmegaConf.create(text)) for text in (earlier.read_text(), config))
        for key in sorted({*before, *now}):
            if (value := now.get(key)) != (other := before.get(key)):
                say(f"changed since the last start: {key}={value}, before {other}")
    replace(earlier, config.encode())
    with (folder / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps({"first_step": first_step, "config": config} | origin()) + "\n")
    makers = [json_lines, *(DESTINATIONS[name] for name in to)]
    return [make(folder, first_step, config) for make in makers]


class Run:
    """One start of a run, in the folder `<root>/<name>/`, in which no other runs beside it.

        with Run(config) as run:
            run.begin(first, steps, ...)
            for step in range(first, steps):
                with run.step(step, waited):
                    ...
                run.log(step, {"loss": loss})
                if run.saves_after(step):
                    run.flush()
                    ...
                if run.stopping:
                    break
            code = run.end()

    All hosts make the same calls, at the same steps.
    """

    def __init__(self, config: RunConfig):
        check_destinations(config.metrics.to)  # of this machine: who reads a config needs none
        self.config, self.name = config, config.paths.model_name
        self.folder = pathlib.Path(config.paths.root_working_dir).expanduser() / self.name
        self.first_host = jax.process_index() == 0
        self.profile = self.folder / f"profile/host_{jax.process_index()}"
        self.stop = Stop()
        self.stopping = self.last = False
        self.destinations: list[Callable[[Row], None]] = []  # of metrics, on the first host
        self.row: dict[str, Any] = {}  # of the last step, if it isn't written yet
        self.seconds: list[float] = []  # of each step
        self.shown = -math.inf  # when the progress was printed
        self.skipped = 0  # updates, in a row

    def __enter__(self) -> "Run":
        self.held = contextlib.ExitStack()
        if self.first_host:
            self.held.enter_context(locked(self.folder))
        self.held.enter_context(self.stop)
        self.held.callback(faulthandler.cancel_dump_traceback_later)
        use_cache(self.config.paths.root_working_dir)
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    @property
    def checkpoints(self) -> str:
        """The folder or bucket of its checkpoints."""
        root = self.config.checkpoints.root
        return f"{root}/{self.name}/checkpoints" if root else f"{self.folder}/checkpoints"

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles the step's program, and draws it if the config says so."""
        if self.config.hlo_svg:  # so that lines are of this source, not of one in the cache
            jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        self.program = compile_step(self.config, lowered)
        if self.config.hlo_svg and self.first_host:
            say(f"drew {hlo.draw(str(self.program.as_text()), self.folder / 'step.svg')}")
        return self.program

    def begin(
        self,
        first: int,
        steps: int,
        tokens: int,
        parameters: int,
        flops: int,
        max_skipped: int,
        vectors: dict[str, list[str]],
        origin: str,
    ) -> None:
        """Opens the folder before step `first` of `steps`, and says what is trained and from where.
        A step has so many tokens and model FLOPs. More than `max_skipped` updates in a row that are
        left out end the run. Some of the values that `log` takes are vectors, whose entries have
        these names, and are logged every metrics.norms_interval steps."""
        self.first, self.steps, self.tokens, self.flops = first, steps, tokens, flops
        self.max_skipped, self.vectors, self.done = max_skipped, vectors, first
        if first >= steps:
            clone = self.config.paths.clone_from
            raise UserError(
                f"paths.clone_from={clone} has done {first} steps; set training.steps above that"
            )
        few = range(min(first + 2, steps - 1), min(first + 5, steps))
        self.profiled = few if self.config.profile else range(0)
        if self.first_host:
            to, config = self.config.metrics.to, self.config.to_yaml()
            self.destinations = open_folder(self.folder, to, config, first)
        say(f"{parameters:,} parameters, {tokens:,} tokens per step, {self.folder}")
        if origin:
            say(origin)

    @contextlib.contextmanager
    def step(self, step: int, waited: float) -> Iterator[None]:
        """Around the call of a step's program, for whose batch the loop has waited so many seconds:
        they are part of the step's time. Where the next one isn't begun within
        hang_timeout_seconds, the stacks of all threads go to standard error."""
        if seconds := self.config.hang_timeout_seconds:
            faulthandler.dump_traceback_later(seconds, exit=self.config.hang_ends)
        if step in self.profiled[:1]:
            self.flush()
            hlo.start_profile(self.profile)
        if not self.row:  # else a step is still at work, and this one begins when that ends
            self.since = time.perf_counter() - waited
        self.waited = waited
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def log(self, step: int, values: dict[str, Any], explain: Callable[[], str] = str) -> None:
        """Begins the row of a step.

        Reading a value blocks until its step has ended. So a row is written when the next one is
        begun, while the devices do that step. `explain` says more of a loss that is no number.
        """
        self.flush()
        self.row, self.explain = {"step": step, **values}, explain
        self.row["data_wait_seconds"] = self.waited

    def settle(self) -> None:
        """Blocks until the step of the last row has ended, so that what follows isn't billed to
        it."""
        if not self.row or "tokens_per_second" in self.row:
            return
        row: Row = {"step": self.row.pop("step")}
        for name, value in self.row.items():
            if name not in self.vectors:
                row[name] = float(value)
            elif due(self.config.metrics.norms_interval, int(row["step"]), self.steps):
                row |= zip(self.vectors[name], value.tolist(), strict=True)
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.since = now
        if row["step"] == self.first:
            say(f"time to first step: {now - IMPORTED:.1f} s after the imports")
        self.row = row | {"tokens_per_second": self.tokens / self.seconds[-1]}

    def flush(self, **more: Any) -> None:
        """Writes the row of the last step, if it isn't written yet, with these values too. So the
        time until the next step is not in that one's. Raises UserError after too many updates in a
        row that were left out."""
        if self.row:
            self.settle()
            row, self.row = self.row, {}
            self.write(row | {name: float(value) for name, value in more.items()})
        if self.last:
            # What follows, a save, may take longer than a step.
            faulthandler.cancel_dump_traceback_later()

    def write(self, row: Row) -> None:
        """Writes a row and shows the progress; judges the updates that are left out."""
        for destination in self.destinations:
            destination(row)
        self._show(row)
        self.skipped = self.skipped + 1 if row["skipped"] else 0
        if self.skipped:
            loss, norm = row["loss"], row["grad_norm"]
            found = f"step {row['step']}: loss {loss:.5g}, gradient norm {norm:.5g}"
            if self.skipped > self.max_skipped:
                raise UserError(
                    f"{found}; {self.explain()}. No checkpoint has it. training.skip_steps leaves "
                    "batches out, training.max_skipped_updates lets some be"
                )
            say(f"warning: {found}; the update is left out, {self.skipped} in a row")

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after a step: by the interval, a signal, or the run's end.
        To be called once a step: here the profile of the last few ends, too."""
        self.done, self.stopping = step + 1, self.stop.after(step)
        self.last = self.stopping or self.done == self.steps
        if step in self.profiled and (self.last or self.done == self.profiled.stop):
            self.flush()
            say(f"profiled {hlo.stop_profile(self.profile, self.program)}")
        return self.last or due(self.config.checkpoint_interval, step, self.steps)

    def end(self) -> int:
        """Says how the run ended, once all is saved; returns the exit code."""
        if not self.seconds:
            say(
                f"{self.folder} is complete: all its steps are done. To go on, raise "
                "training.steps; to start anew, choose another paths.model_name"
            )
            return 0
        self.flush()
        if self.stopping and self.done < self.steps:
            name = self.stop.signal.name
            say(f"stopped after step {self.done} by {name}; the same command goes on there")
            return 128 + self.stop.signal
        typical = statistics.median(self.seconds[1:] or self.seconds)
        say(
            f"done: {self.steps - self.first} steps, {typical:.3f} s per step (median), "
            f"{self.tokens / typical:,.0f} tokens/s, MFU {self._mfu(typical)}"
        )
        return 0

    def _show(self, row: Row) -> None:
        """Prints the progress: of the first and the last step, of each validation, and in between
        a line in so many seconds."""
        step, now = row["step"], time.perf_counter()
        always = "validation_loss" in row or step + 1 == self.steps
        if not always and now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        typical = statistics.median(self.seconds[-20:])
        left = datetime.timedelta(seconds=round(typical * (self.steps - step - 1)))
        shown = [f"step {step}/{self.steps}", f"loss {row['loss']:.4f}"]
        if "validation_loss" in row:
            shown.append(f"validation loss {row['validation_loss']:.4f}")
        shown.append(f"{self.tokens / typical:,.0f} tokens/s")
        if devices.find_chip(jax.devices()[0].device_kind):
            shown.append(f"MFU {self._mfu(typical)}")
        say("  ".join([*shown, f"{left} left"]))

    def _mfu(self, seconds: float) -> str:
        kind, count = jax.devices()[0].device_kind, jax.sharding.get_mesh().size
        return devices.mfu(kind, count, self.flops / seconds)


def origin() -> dict[str, Any]:
    """What a run depends on besides its config."""
    packages = ("jax", "jaxlib", "numpy", "zarr", "datasets", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    devices = jax.devices()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions},
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "hosts": jax.process_count(),
    }


def commit() -> str | None:
    """The git commit of the source, with `-dirty` if files differ from it; None without git."""
    describe = "describe --always --dirty --abbrev=40 --exclude='*'"
    failed, found = subprocess.getstatusoutput(f"git -C {shlex.quote(str(ROOT))} {describe}")
    return None if failed else found
