"""Checks the step of a program before it trains: that its types hold, and that the mesh doesn't
change its numbers. Remembers what has passed.

`program` is the module that defines the step: train.py, or a copy of it.
"""

import contextlib
import copy
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import importlib
import inspect
import math
import multiprocessing.connection
import operator
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AbstractMesh

from checks import layout, numbers, trials
from checks.blame import explain
from checks.jaxprs import communicating, equations
from configs.schema import Config
from configs.sizes import DIMENSIONS, dimensions
from runtime.config import sources
from runtime.devices import QUICK_COMPILES, have_cpu_devices, make_mesh
from runtime.run import SECONDS_BETWEEN_LINES, replace, say
from runtime.source import LIBRARIES
from runtime.supervise import STOPS, handled, of_all_hosts
from shardlib.errors import ShardTypeError, UserError
from shardlib.mesh import abstract_mesh, show_axes
from shardlib.types import computing_in, make_shapes, named

# Settings that split the work of a device into parts.
PARTS = "training.microbatches", "training.loss_chunks"
# Settings that make each term of an update visible in f32, mid-schedule.
TINY = {
    "dtype": "f32",
    "training.learning_rate": 0.1,
    "training.cooldown_steps": 8,
    "training.warmup_steps": 2,
    "training.steps": 10,
    "training.steps_for_lr": 10,
    "training.adam_eps": 1e-3,
    "training.seed": 3,
    # Settings of the loop around the steps.
    "training.skip_steps": [],
    "training.max_skipped_updates": 0,
    "training.validation_interval": 0,
    "training.validation_batches": 1,
    "training.validation_at_start": False,
}


# The parts into which tiny runs split axes, even if the config's mesh doesn't.
ALWAYS = {"s": 2, "t": 3}

# Environment variables that differ between hosts, or with their number: each process of the check
# gets other values. The first changes the order of string sets.
OF_A_HOST = ["PYTHONHASHSEED", "HOSTNAME"]
OF_A_HOST += [f"SLURM_{x}" for x in ("PROCID", "LOCALID", "NODEID", "NNODES", "NTASKS")]
OF_A_HOST += ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"]
OF_A_HOST += ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]

# Settings that a step may read.
OF_A_STEP = {*inspect.get_annotations(Config), "metrics"}


@functools.cache
def on_any_machine(config: Any) -> Any:
    """Returns the config with only the settings that a step may read: reading another one raises
    ShardTypeError."""
    others = {field.name for field in dataclasses.fields(config)} - OF_A_STEP
    members: dict[str, Any] = {x: property(layout.refused(f"config.{x}")) for x in others}
    members |= {"__eq__": object.__eq__, "__hash__": object.__hash__}
    made = copy.copy(config)
    made.__class__ = type(type(config).__name__, (type(config),), members)
    return made


def resized(
    config: Any, sizes: Mapping[str, int], axes: Mapping[str, int], others: dict[str, Any]
) -> Any:
    """Returns the config with these sizes of dimensions and mesh axes, and `others`, values by key.
    With `sizes`, it has at most two microbatches and two loss chunks. Raises UserError if they
    don't fit."""
    values: dict[str, Any] = {f"mesh.{name}": size for name, size in axes.items() if name != "s"}
    values["mesh.d"] = axes["r"] * axes["s"]
    # Other dimensions follow from these.
    values |= {DIMENSIONS[name]: size for name, size in sizes.items() if name in DIMENSIONS}
    if sizes:
        values |= {key: min(operator.attrgetter(key)(config), 2) for key in PARTS}
        values["model.start_token"] = 0  # in a vocabulary of any size
        if config.model.experts:
            values["model.experts.per_token"] = 3
    try:
        return config.changed(values | others)
    except UserError as error:
        cure = (
            "; the checks change the sizes in DIMENSIONS: if this setting follows from them, "
            "compute it in `dimensions`, or set check=none"
        )
        raise UserError(f"{error}{cure if sizes else ''}") from None


# --- Types ----------------------------------------------------------------------------------------


def trace_step(program: Any, config: Any, mesh: AbstractMesh, function: Any = None) -> Any:
    """The jaxpr of the training step, or of another function of the program, on a mesh without
    devices. Raises UserError if a dimension doesn't split over the mesh."""
    config = on_any_machine(config)
    kinds, static = program.step_arguments(config), [config]
    if function:
        kinds, static = trials.arguments(function, kinds, config)
    with jax.sharding.use_abstract_mesh(mesh), computing_in(config.dtype):
        shapes = make_shapes(tuple(kinds), dimensions(config), DIMENSIONS)
        return layout.traced(function or program.training_step, shapes, *static)


def probe(program: Any, config: Any, alone: Collection[str] = ()) -> list[Any]:
    """Returns the step's jaxpr at probe sizes; and for the step (None) and each other function, the
    function and its jaxprs at the config's sizes, on its mesh and on one device. Checks the types
    at probe sizes, where no two dimensions have the same length by chance, and that both jaxprs
    have the same operations. Takes seconds. Axes in `alone` have one device at probe sizes.
    Raises ShardTypeError, or whatever an edited step raises while it is traced."""
    axes = config.mesh.axes
    mesh, one_device = abstract_mesh(axes), abstract_mesh(dict.fromkeys(axes, 1))
    unused = {axis for axis, size in axes.items() if size == 1} - {*ALWAYS}
    functions = [("the step", None), *trials.beside_the_step(program).items()]

    def trace(function: Any, mesh: AbstractMesh, sizes: dict[str, int]) -> Any:
        try:
            return trace_step(program, resized(config, sizes, mesh.shape, {}), mesh, function)
        except Exception as error:
            error.args = tuple(layout.name_lengths(str(x), mesh.shape, sizes) for x in error.args)
            raise

    # First on the config's own mesh: whatever the source remembers, as by functools.cache, is then
    # of the mesh that it will train on. Errors are better at probe sizes, whose lengths have names.
    own, one = dict[Any, Any](), dict[Any, Any]()
    for made, on in (own, mesh), (one, one_device):
        for _, function in functions:
            with contextlib.suppress(Exception):
                made[function] = trace(function, on, {})

    def scans_layers(function: Any) -> bool:
        """Returns whether a function is as long with twice as many layers. On one device, as Muon
        pads matrices to the number of devices."""
        with contextlib.suppress(Exception):  # these layers may not fit the program
            layers = {"model.layers": 2 * config.model.layers}
            twice = resized(config, {}, one_device.shape, layers)
            both = one[function], trace_step(program, twice, one_device, function)
            return len({sum(1 for _ in equations(each)) for each in both}) == 1
        return False

    probed, pairs = list[Any](), list[Any]()
    for name, function in functions:
        on, sizes = layout.probe_mesh(axes, dimensions(config), alone)
        if not scans_layers(function):
            del sizes["layers"]  # at probe sizes they are too many for a loop in Python
        with contextlib.suppress(trials.NothingFits):  # `untried` names it
            probed.append(trace(function, on, sizes))
            layout.check(probed[-1], dict(on.shape), sizes, unused)
            here = own.get(function) or trace(function, mesh, {})
            there = one.get(function) or trace(function, one_device, {})
            pairs.append((function, here, there))
            if parting := layout.parting(here, there, entries=True):
                at, here, there = parting
                raise ShardTypeError(
                    f"{at}: {name} differs between meshes from here on: {here}, but {there} on one "
                    "device. Does a slice, or a branch in Python, go by the length of a device's "
                    "part or by the number of devices?"
                )
    return [probed[0], pairs]


def untried(program: Any, config: Any, pairs: list[Any]) -> str:
    """Names the first thing that tiny runs don't test: a function that can't be called, or that
    calls shard_map itself, a number that depends on the mesh, or a computation that isn't done at
    tiny sizes. Returns "" if there is none. `pairs` is from `probe`."""
    for name, function in trials.beside_the_step(program).items():
        try:
            trials.arguments(function, program.step_arguments(config), config)
        except trials.NothingFits as error:
            return f"{name} isn't checked: nothing fits its parameter {error.args[0]}"
    if hidden := trials.out_of_sight(program):
        cure = f"define it outside of {hidden[0]}, under typed_shard_map"
        return f"{hidden[0]} maps an unchecked function over devices: {cure}"
    config = tiny(program, config)[-1]
    only = (
        "this config computes {}, but {} at the tiny sizes of the check. From there on, the check "
        "can't tell whether the mesh changes the numbers"
    )
    for function, own, one in pairs:
        if parting := layout.parting(own, one, numbers=True):
            at, here, there = parting
            return (
                f"{at}: a number depends on the mesh: {here}, but {there} on one device. At the "
                "check's tiny sizes this may make no difference"
            )
        try:
            made = trace_step(program, config, abstract_mesh(config.mesh.axes), function)
        except Exception:  # at tiny sizes; the tiny runs report it
            continue
        if parting := layout.parting(own, made):
            return f"{parting[0]}: {only.format(*parting[1:])}"
        # Muon transposes whole matrices or doesn't, by their lengths, which the mesh leaves alone.
        lines = {line for line, _ in layout.moved(own) - layout.moved(one)}
        if unseen := lines - {line for line, _ in layout.moved(made)}:
            at = min(unseen).replace(" ", ", in ")
            return f"{at}: {only.format('a transpose or reshape', 'none')}"
    return ""


def check_types(program: Any, config: Any, noted: bool = False) -> tuple[list[Any], str]:
    """Returns the jaxprs of `probe`, and "". Raises UserError if the program's types don't hold. If
    they hold with some axes unsplit, which neither the config's mesh nor the tiny runs split,
    `noted` accepts that: returns the jaxprs on that mesh, and a note."""
    try:
        return probe(program, config), ""
    except UserError:  # the mesh doesn't fit
        raise
    except Exception as error:  # ShardTypeError, or any error of JAX or Python in an edited step
        cure, more = "check=none trains it, and compares no numbers", ""
        if isinstance(error, OverflowError):
            more = (
                "\n    Integers have 32 bits, and dimensions are large here: make a factor a float"
            )
        elif found := _where_they_hold(program, config):
            alone, probed = found
            where = show_axes(dict.fromkeys(config.mesh.axes, 1), alone)
            if ALWAYS.keys().isdisjoint(alone):
                if noted:
                    return probed, f"types hold only with {where}"
                cure = "in training, check=noted accepts it, and compares the numbers"
            more = f"\n    They hold with {where}, as in this config: {cure}"
        elif not isinstance(error, ShardTypeError):
            with contextlib.suppress(Exception):
                trace_step(program, config, abstract_mesh(config.mesh.axes))
                more = (
                    "\n    At the config's sizes, on its mesh, the step can be traced. If it needs "
                    f"sizes like these, such as multiples of 32, or two that are equal: {cure}"
                )
        problem = "train.py's types don't hold (traced at sizes that tell all dimensions apart)"
        raise UserError(f"{problem}\n{explain(error)}{more}") from None


def _where_they_hold(program: Any, config: Any) -> tuple[list[str], list[Any]] | None:
    """Returns axes of size 1 on the config's mesh for which size 1 at probe sizes makes types hold,
    and the jaxprs of `probe` then. Prefers axes that the tiny runs don't split."""
    unsplit = [axis for axis, size in config.mesh.axes.items() if size == 1]
    for alone in [axis for axis in unsplit if axis not in ALWAYS], unsplit:
        with contextlib.suppress(Exception):  # whatever an edited step raises
            return alone, probe(program, config, alone)
    return None


# --- Numbers --------------------------------------------------------------------------------------


def tiny(program: Any, config: Any, passed_along: Collection[str] = ()) -> list[Any]:
    """Returns the config at tiny sizes, for one device, and for a mesh that splits s, t and the
    axes that the config's mesh splits, with microbatches and loss chunks if the config has them. If
    the step passes values to neighbors along the axes `passed_along`, the mesh splits only these,
    into four: with two, the left and right neighbors are the same."""
    split = {axis: min(size, 2) for axis, size in config.mesh.axes.items()} | ALWAYS
    if passed_along:
        split = {axis: 4 if axis in passed_along and n > 1 else 1 for axis, n in split.items()}
    sizes = dimensions(config) | {"layers": min(config.model.layers, 6)}
    del sizes["L"]
    sizes = numbers.tiny_sizes(program.step_arguments(config), sizes, split | {"t": 3})
    sizes |= {"L": 12 * split["c"]}
    parts: Any = {key: 3 if operator.attrgetter(key)(config) > 1 else 1 for key in PARTS}
    whole = resized(config, sizes, dict.fromkeys(split, 1), TINY | dict.fromkeys(PARTS, 1))
    return [whole, resized(config, sizes, split, TINY | parts | {"num_hosts": 2})]


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Returns arrays by name, without their index in a function's results: loss for 1/loss."""
    arrays = named(jax.device_get(tree)).items()
    made = {name.lstrip("0123456789/") or "its result": np.asarray(x) for name, x in arrays}
    assert len(made) == len(arrays)  # else some wouldn't be compared
    return made


def tried(program: Any, config: Any, parts: int = 0) -> list[trials.Trial]:
    """Lists the trials for the mesh in context. Rows are in the order of a mesh that splits them
    into `parts` parts."""
    parts, config = parts or config.mesh.c, on_any_machine(config)
    state = program.init_state(config)
    stirred = numbers.stirred(state)
    found: list[trials.Trial] = [("init_state", lambda: state, ())]
    found += trials.of_training(program, config, jax.device_get(state), stirred, parts)
    if parts == 1:  # generation doesn't split rows
        found += trials.of_generation(program, config, stirred.weights)
    return found


def results(given: list[trials.Trial], recorded: str = "") -> Iterator[tuple[str, Any]]:
    """Computes trials on the mesh in context. Yields each one's name and its arrays by name. With
    `recorded`, computes only the trial of this name, and adds its ops' events."""
    for name, function, arrays, *static in given:
        if recorded in ("", name):
            with numbers.recording() if recorded else contextlib.nullcontext() as events:
                made = by_name(numbers.run(function, arrays, *static))
            yield name, (made, events) if recorded else made


def run_tiny(
    sender: Any, folder: str | None, program: str, config: Any, recorded: str, parts: int
) -> None:
    """Sends the results by name, or an error message. Runs in a process of its own, whose only
    devices are the mesh's CPUs."""
    gc.disable()  # it ends soon, and collecting garbage would take a tenth of its time
    os.environ["XLA_FLAGS"] = QUICK_COMPILES
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", folder)
    # An edit leaves most of these programs as they are, and each compiles in less than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    have_cpu_devices(math.prod(config.mesh.axes.values()))
    mesh = make_mesh(config.mesh.axes)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with jax.set_mesh(mesh), computing_in(config.dtype), layout.on_any_machine():
        try:
            found = tried(importlib.import_module(program), config, parts)
            sender.send(dict(results(found, recorded)))
        except Exception as error:  # any error of JAX or Python in an edited step
            sender.send(explain(error))


def _end_with_parent() -> None:
    """Ends this process when its parent ends, which may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


class TinyRuns:
    """Computes the trials of two tiny configs, each in a process beside the program, and compares
    them. `program` is the module that defines the step."""

    def __init__(self, program: Any, configs: list[Any]):
        # Not __name__, which is __main__ for a program that Python runs, nor always __spec__, which
        # `python train.py` doesn't have.
        spec = program.__spec__
        self.program = spec.name if spec else pathlib.Path(program.__file__).stem
        kinds = named(program.state_type(configs[0]).mu)
        self.learned = [name for name, kind in kinds.items() if kind.initial.learned]
        self.start(configs)

    def start(self, configs: list[Any], recorded: str = "", parts: int = 0) -> None:
        self.configs, self.running = configs, {}
        spawn = multiprocessing.get_context("spawn")
        # Signals are for the program alone, which then ends these processes.
        with handled(STOPS, signal.SIG_IGN):
            for seed, config in enumerate(configs):
                receiver, sender = spawn.Pipe(duplex=False)
                work = sender, cache_folder(), self.program, config, recorded, parts
                process = spawn.Process(target=run_tiny, args=work, daemon=True)
                with mock.patch.dict(os.environ, dict.fromkeys(OF_A_HOST, str(seed + 1))):
                    process.start()
                sender.close()
                self.running[receiver] = process

    def results(self, interrupted: Callable[[], bool]) -> list[dict[str, Any]] | None:
        """Returns each process's results by name, or None if it is interrupted. Prints progress now
        and then. Raises UserError if a process fails."""
        made, told = dict[Any, Any](), time.monotonic()
        while left := self.running.keys() - made.keys():
            if interrupted():
                return None
            if (now := time.monotonic()) - told > SECONDS_BETWEEN_LINES:
                told = now
                say(f"comparing the numbers: {len(made)} of {len(self.running)} results are there")
            ready: list[Any] = multiprocessing.connection.wait(left, timeout=1)
            for receiver in ready:
                try:
                    made[receiver] = receiver.recv()
                except EOFError:
                    self.running[receiver].join()
                    code = self.running[receiver].exitcode
                    if code == -signal.SIGKILL:
                        problem = "a process of the check was killed, for lack of memory?"
                        raise UserError(f"{problem} Start again") from None
                    made[receiver] = f"its process ended with exit code {code}"
                if isinstance(made[receiver], str):
                    problem = "the step doesn't run at tiny sizes, at which two meshes are compared"
                    raise UserError(f"{problem}\n{made[receiver]}")
        return [made[receiver] for receiver in self.running]

    def verdict(self, interrupted: Callable[[], bool]) -> str | None:
        """Blocks until the results are there. Returns a warning, or "", or None if it is
        interrupted. Raises UserError that names the results that differ between the meshes, and the
        first op that differs."""
        if not (made := self.results(interrupted)):
            return None
        first, other = made
        for function, arrays in other.items():
            if nan := [name for name, x in first[function].items() if np.isnan(x).any()]:
                what = f"{', '.join(nan[:3])} of {function}"
                raise UserError(f"NaN is in {what} even on one device, at tiny sizes in f32")
            if differ := numbers.differences(first[function], arrays):
                raise UserError(self._explain(function, differ))
        if differ := numbers.differences(first.get("forward", {}), first.get("generation", {})):
            return (
                f"logits of tools.generate differ from training's ({differ[0]}). It computes a "
                "prompt, then one position at a time: only attention, once in a layer, may mix "
                "positions, and nothing may depend on their number, as a random mask's shape does"
            )
        # Both steps begin with the same mu, and then differ by their batches' gradients.
        a, b = (first[f"training_step {n}"] for n in (3, 999))
        mu = {name: f"mu/{name}" for name in self.learned}
        if dead := [name for name, x in mu.items() if np.array_equal(a[x], b[x])]:
            return f"the loss doesn't depend on {', '.join(dead)}: the gradient is zero"
        return ""

    def _explain(self, function: str, differ: list[str]) -> str:
        def shown(config: Any) -> str:
            parts = {key.partition(".")[2]: operator.attrgetter(key)(config) for key in PARTS}
            sizes = config.mesh.axes | parts
            return show_axes(sizes) if max(sizes.values()) > 1 else "one device"

        more = [f"{len(differ) - 3} more"] if len(differ) > 3 else []
        return (
            f"the numbers of {function} change, at tiny sizes in f32,\n"
            f"    from {' to '.join(map(shown, self.configs))}:\n"
            f"    {', '.join([*differ[:3], *more])}, relative to the largest entry\n"
            f"    {self._where(function, self.configs[1])}"
        )

    def _where(self, function: str, config: Any) -> str:
        """Computes a function again, in one part, and names the first op that differs."""
        if function == "init_state":
            return "the values of a fresh state may depend on nothing but the config"
        whole = config.changed(dict.fromkeys(PARTS, 1))
        faulthandler.cancel_dump_traceback_later()  # it takes longer than a step
        self.close()
        self.start([self.configs[0], whole], function, whole.mesh.c)
        deadline = time.monotonic() + 300  # callbacks of many devices can block
        made = None
        with contextlib.suppress(UserError):
            made = self.results(lambda: time.monotonic() > deadline)
        if not made:
            return "the first op that differs couldn't be found"
        arrays, events = zip(*(each[function] for each in made), strict=True)
        if not (found := numbers.first_difference(*events)):
            if whole != config and not numbers.differences(*arrays):
                return "in one microbatch and one loss chunk they agree: look at how parts add up"
            problem = f"no op's operand or result differs: look outside of them, in {function}"
            ordered = ", at code that depends on the order of a row, which c changes"
            return problem + (ordered if whole.mesh.c > 1 else "")
        before, first = found
        gradient = "the gradient of " if first.backward else ""
        lines = [f"the first to differ is {gradient}{first.what}"]
        if before:
            lines.append(f"the last that agrees before it is {gradient}{before.what}")
        return "\n    ".join(lines)

    def close(self) -> None:
        for receiver, process in self.running.items():
            process.kill()
            process.join()
            receiver.close()


# --- Both checks, remembered ----------------------------------------------------------------------


def cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined,no-any-return]


@functools.cache
def source_digest() -> str:
    """A hash of JAX's and Python's versions and of the source: every file of this repository, and
    every imported module that is not an installed package. Ignores modules whose file doesn't
    exist, such as some of PyTorch's."""
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    files |= {*map(str, sources())}
    texts = [
        pathlib.Path(file).read_bytes()
        for file in sorted(files)
        if file.endswith(".py") and not file.startswith(LIBRARIES) and os.path.exists(file)
    ]
    versions = f"{version('jax')} {sys.version}".encode()
    return hashlib.sha256(b"".join([versions, *texts])).hexdigest()


class Mark:
    """Remembers, in the folder of JAX's cache, that a check of a config has passed with this
    source, and what it said. Only the settings that a step may read count; of metrics, only whether
    norms are logged."""

    def __init__(self, check: str, config: Any):
        relevant: Any = {key: getattr(config, key) for key in sorted(OF_A_STEP - {"metrics"})}
        relevant["norms"] = config.metrics.norms_interval > 0
        digest = hashlib.sha256(repr((source_digest(), check, relevant)).encode()).hexdigest()
        folder = cache_folder()
        local = folder and "://" not in folder
        self.file = pathlib.Path(str(folder), f"checked-{digest}") if local else None
        # None: it has not passed.
        self.said = self.file.read_text() if self.file and self.file.exists() else None

    def write(self, text: str) -> None:
        self.said = text
        if self.file:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                replace(self.file, text.encode())
            except OSError as error:
                say(f"warning: the next start will check again: {error}")


@contextlib.contextmanager
def begun(program: Any, config: Any) -> Iterator[Callable[..., str | None]]:
    """Checks types, and numbers while the block runs, as far as `config.check` asks for it. Skips a
    check that has passed before.

    Yields `wait(interrupted)`, which blocks until the numbers are checked, or returns None once
    `interrupted()` is true. It prints and returns a warning if generation differs from training or
    a weight has no gradient, else "". It raises UserError if numbers differ between meshes, and
    with check=numbers also for whatever `untried` names, which check=noted only prints."""
    level = config.check
    if level in ("types", "none"):
        say(f"check={level}: {'' if level == 'types' else 'types and '}numbers are not checked")
    types = Mark("types", config)
    running: list[TinyRuns] = []
    mark = None

    def wait(interrupted: Callable[[], bool] = lambda: False) -> str | None:
        warning, problem = (mark and mark.said) or "", ""
        if running and mark:
            say("comparing the numbers of two meshes ...")
            alone = jax.process_count() == 1  # one of several hosts may not stop alone
            try:
                verdicts = [each.verdict(lambda: alone and interrupted()) for each in running]
                if None in verdicts:
                    return None
                warning = max(filter(None, verdicts), default="")
                mark.write(warning)
            except UserError as error:
                problem = "\n    ".join(filter(None, [str(error), types.said]))
        # The other hosts wait here for the first, as in a step they would count as hung.
        if problem := of_all_hosts(problem)[0]:
            raise UserError(problem)
        if types.said and level == "numbers":
            raise UserError(f"{types.said}. If that is intended, accept it with check=noted")
        if warning:
            say(f"warning: {warning}")
        return warning

    with contextlib.ExitStack() as stack:
        if level in ("numbers", "noted"):  # begins first, as it takes longest
            configs = tiny(program, config)
            mark = Mark("numbers", configs[-1])
            # Numbers are the same on all hosts, so the first one checks for all.
            if mark.said is None and jax.process_index() == 0:
                running.append(stack.enter_context(contextlib.closing(TinyRuns(program, configs))))
        if level != "none":
            if types.said is None or running:  # numbers need the trace
                (probed, pairs), held = check_types(program, config, level == "noted")
                if running and (axes := communicating(probed, "permute")):
                    more = TinyRuns(program, tiny(program, config, axes))
                    running.append(stack.enter_context(contextlib.closing(more)))
                said = untried(program, config, pairs)
                if held:  # which other levels of the check don't accept
                    types.said = "; ".join(filter(None, [held, said]))
                else:
                    types.write(said)
            if types.said and level == "noted":
                say(f"note: {types.said}")
        yield wait
