"""Runs the check that the mesh doesn't change the numbers, and remembers what has passed."""

import contextlib
import hashlib
import math
import os
import pathlib
import pickle
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax

from runtime.config import ROOT
from runtime.run import say
from shardlib import numbers
from shardlib.devices import COUNT_FLAG, show_axes
from shardlib.errors import UserError

def cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined,no-any-return]


def mark_of(folder: str, relevant: object) -> pathlib.Path:
    """The file that says that the checks have passed with this source, JAX, Python and whatever
    else is relevant. "Source" is every imported module that is not an installed package, and the
    tools that the check runs. Modules whose file doesn't exist, such as some of PyTorch's, are
    ignored."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    files |= {str(ROOT / "tools" / name) for name in ("tiny.py", "generate.py")}
    texts = [
        pathlib.Path(file).read_bytes()
        for file in sorted(files)
        if file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
    versions = repr((relevant, version("jax"), sys.version)).encode()
    digest = hashlib.sha256(b"".join([versions, *texts])).hexdigest()
    return pathlib.Path(folder, f"checked-{digest}")


class Numbers:
    """Computes the same on two meshes, at tiny sizes, beside the program. Each mesh gets a process
    of its own with no devices but its CPUs, so that the program's devices don't matter, and a count
    of devices in the source shows. See tools/tiny.py.

    configs: the tiny configs for one device, and for a mesh that splits everything.
    """

    def __init__(self, one: Any, other: Any):
        self.configs = {"one": one, "other": other}
        self.folder = tempfile.TemporaryDirectory(prefix="tiny_")
        self.start()

    def start(self, *record: str) -> None:
        self.processes = [self._process(name, *record) for name in self.configs]

    def _process(self, name: str, *record: str) -> subprocess.Popen[str]:
        config, file = self.configs[name], pathlib.Path(self.folder.name, name)
        file.with_suffix(".yaml").write_text(config.to_yaml())
        count = math.prod(vars(config.mesh).values())
        settings = {
            "JAX_PLATFORMS": "cpu",
            # To optimize these programs takes longer than to run them.
            "XLA_FLAGS": f"{COUNT_FLAG}={count} --xla_backend_optimization_level=0 "
            "--xla_llvm_disable_expensive_passes=true",
        }
        if folder := cache_folder():
            settings |= {"JAX_COMPILATION_CACHE_DIR": folder}
            settings |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tools.tiny", str(file), *record],
            cwd=ROOT,
            env=os.environ | settings,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches the program alone
        )

    def results(self, timeout: float | None = None) -> list[Any]:
        """Returns what the two have computed. Raises UserError if one couldn't."""
        for process in self.processes:
            _, errors = process.communicate(timeout=timeout)
            if process.returncode:
                raise UserError(
                    f"the step doesn't run at tiny sizes (check=types skips that)\n{errors.strip()}"
                )
        files = (pathlib.Path(self.folder.name, f"{name}.pickle") for name in self.configs)
        return [pickle.loads(file.read_bytes()) for file in files]

    def verdict(self) -> str:
        """Blocks until the results are there. Returns a warning about generation, or "". Raises
        UserError that says what differs between the meshes, and from where on."""
        one, other = self.results()
        for function, arrays in one.items():
            if differ := numbers.differences(arrays, other[function]):
                break
        else:
            if differ := numbers.differences(one["forward"], one["generation"]):
                return (
                    f"tools.generate computes other logits than training, by {differ[0].split()[-1]} "
                    "of the largest: it computes one position at a time, so all mixing between "
                    "positions must happen in train.py's `attend`, and in its own"
                )
            return ""
        mesh, parts = self.configs["other"].mesh, self.configs["other"].training.microbatches
        more = [f"{len(differ) - 3} more"] if len(differ) > 3 else []
        raise UserError(
            f"the numbers of {function} depend on the mesh: at tiny sizes, in f32, on one device and "
            f"on {show_axes(vars(mesh))} with {parts} microbatches and loss chunks\n"
            f"    these differ: {', '.join([*differ[:3], *more])} (relative to the largest entry)\n"
            f"    {self.where(function)}"
        )

    def where(self, function: str) -> str:
        """Computes a function again, in one part, and returns the op where its values part."""
        hyper = self.configs["other"].training
        hyper.microbatches = hyper.loss_chunks = 1
        self.start(function)
        try:
            one, other = (made[function] for made in self.results(timeout=300))
        except (UserError, subprocess.TimeoutExpired):  # callbacks of many devices can block
            return "which op is the first to differ couldn't be found out"
        if not (found := numbers.first_difference(one, other)):
            return "in one part, the operands and results of all ops agree"
        before, first = found
        gradient = "the gradient of " if first.backward else ""
        lines = [f"the first to differ is {gradient}{first.what}"]
        if before:
            lines.append(f"the last that agrees before it is {gradient}{before.what}")
        return "\n    ".join(lines)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()


@contextlib.contextmanager
def checked(
    level: str, check_types: Callable[[], object], one: Any, other: Any, relevant: object
) -> Iterator[Callable[[], str]]:
    """Checks types, and numbers beside the block, as far as `level` asks for it: numbers, types or
    none. Yields a function that blocks until the numbers are checked. It raises UserError if they
    differ between meshes, and returns, and prints, a warning if generation differs from training.
    What has passed before, according to JAX's cache folder, isn't checked again."""
    skipped = {"none": "types and numbers are", "types": "numbers are", "numbers": ""}[level]
    if skipped:
        say(f"check={level}: {skipped} not checked")
    folder = cache_folder()
    mark = mark_of(folder, (level, relevant)) if folder else None
    due = level != "none" and not (mark and mark.exists())
    if due:
        check_types()
    # Numbers are the same on all hosts, so the first one checks for all.
    compares = due and level == "numbers" and jax.process_index() == 0
    running = Numbers(one, other) if compares else None

    def wait() -> str:
        warning = mark.read_text() if mark and mark.exists() else ""
        if running:
            say("comparing the numbers of two meshes ...")
            warning = running.verdict()
        if warning:
            say(f"warning: {warning}")
        if due and mark:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(warning)
        return warning

    try:
        yield wait
    finally:
        if running:
            running.close()
