"""Runs the check that the mesh doesn't change the numbers, and remembers what has passed."""

import contextlib
import functools
import hashlib
import os
import pathlib
import pickle
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

import jax

from runtime.config import ROOT
from runtime.run import say
from shardlib import numbers
from shardlib.devices import QUICK_COMPILES, show_axes
from shardlib.errors import UserError


def cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined,no-any-return]


# Runs tools.tiny with another module in the place of train.py. It ends soon, and collecting garbage
# would take a tenth of its time.
RUN_TINY = """
import gc, importlib, sys
gc.disable()
sys.modules["train"] = importlib.import_module(sys.argv.pop(1))
from tools import tiny
tiny.main()
"""


class Numbers:
    """Computes the same at tiny sizes on several meshes, beside the program. Each gets a process of
    its own, whose only devices are the mesh's: CPUs, whatever the program trains on. See
    tools/tiny.py.

    configs: the tiny configs. The others are compared with the first.
    """

    def __init__(self, configs: list[Any]):
        # What runs as a program may be a copy of train.py.
        program: Any = sys.modules["__main__"]
        name = type(configs[0]).__module__
        self.module = pathlib.Path(program.__file__).stem if name == "__main__" else name
        self.folder = tempfile.TemporaryDirectory(prefix="tiny_")
        self.start(configs)

    def start(self, configs: list[Any], *record: str) -> None:
        self.configs = configs
        self.processes = [self._process(i, *record) for i in range(len(configs))]

    def _process(self, number: int, *record: str) -> subprocess.Popen[str]:
        config, file = self.configs[number], pathlib.Path(self.folder.name, str(number))
        file.with_suffix(".yaml").write_text(config.to_yaml())
        settings = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK_COMPILES,
        }
        if folder := cache_folder():
            settings |= {"JAX_COMPILATION_CACHE_DIR": folder}
        return subprocess.Popen(
            [sys.executable, "-c", RUN_TINY, self.module, str(file), *record],
            cwd=ROOT,
            env=os.environ | settings,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches the program alone
        )

    def results(self, timeout: float | None = None) -> list[Any]:
        """Returns what the processes have computed. Raises UserError if one couldn't."""
        made = []
        for number, process in enumerate(self.processes):
            _, errors = process.communicate(timeout=timeout)
            if process.returncode:
                raise UserError(
                    f"the step doesn't run at tiny sizes (check=types skips that)\n{errors.strip()}"
                )
            made.append(
                pickle.loads(pathlib.Path(self.folder.name, f"{number}.pickle").read_bytes())
            )
        return made

    def verdict(self) -> str:
        """Blocks until the results are there. Returns a warning about generation, or "". Raises
        UserError that says what differs between the meshes, and from where on."""
        first, *others = self.results()
        for config, other in zip(self.configs[1:], others, strict=True):
            for function, arrays in other.items():
                if differ := numbers.differences(first[function], arrays):
                    raise UserError(self._explain(function, config, differ))
        if differ := numbers.differences(first["forward"], first["generation"]):
            return (
                f"tools.generate computes other logits than training ({differ[0]}): it takes one "
                "position at a time, so all mixing between positions must happen in `attend`"
            )
        return ""

    def _explain(self, function: str, config: Any, differ: list[str]) -> str:
        def shown(config: Any) -> str:
            hyper = config.training
            parts = {"microbatches": hyper.microbatches, "loss_chunks": hyper.loss_chunks}
            sizes = config.mesh.axes | parts
            return show_axes(sizes) if max(sizes.values()) > 1 else "one device"

        more = [f"{len(differ) - 3} more"] if len(differ) > 3 else []
        return (
            f"the numbers of {function} change, at tiny sizes in f32,\n"
            f"    from {shown(self.configs[0])} to {shown(config)}:\n"
            f"    {', '.join([*differ[:3], *more])}, relative to the largest entry\n"
            f"    {self._where(function, config)}"
        )

    def _where(self, function: str, config: Any) -> str:
        """Computes a function again, in one part, and returns the op where its values part."""
        if function == "init_state":
            return "the values of a fresh state may depend on nothing but the config"
        whole = config.changed({"training.microbatches": 1, "training.loss_chunks": 1})
        self.start([self.configs[0], whole], function)
        try:
            one, other = (made[function] for made in self.results(timeout=300))
        except (UserError, subprocess.TimeoutExpired):  # callbacks of many devices can block
            return "which op is the first to differ couldn't be found out"
        if not (found := numbers.first_difference(one, other)):
            parts = "" if whole == config else " with one microbatch and one loss chunk"
            return f"no op's operand or result differs{parts}"
        before, first = found
        gradient = "the gradient of " if first.backward else ""
        lines = [f"the first to differ is {gradient}{first.what}"]
        if before:
            lines.append(f"the last that agrees before it is {gradient}{before.what}")
        return "\n    ".join(lines)

    def close(self) -> None:
        for process in self.processes:
            with process:  # closes its pipe
                process.kill()
        self.folder.cleanup()


@functools.cache
def source_digest() -> str:
    """A hash of JAX's and Python's versions and of the source: every file of this repository, and
    every imported module that is not an installed package. Ignores modules whose file doesn't
    exist, such as some of PyTorch's."""
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platlib", "purelib"))
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    files |= {str(file) for pattern in ("*.py", "[!.]*/*.py") for file in ROOT.glob(pattern)}
    texts = [
        pathlib.Path(file).read_bytes()
        for file in sorted(files)
        if file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
    versions = f"{version('jax')} {sys.version}".encode()
    return hashlib.sha256(b"".join([versions, *texts])).hexdigest()


class Mark:
    """Remembers, in the folder of JAX's cache, that a check has passed with this source and
    whatever else is relevant, and what it said."""

    def __init__(self, *relevant: object):
        digest = hashlib.sha256(repr((source_digest(), relevant)).encode()).hexdigest()
        folder = cache_folder()
        local = folder and "://" not in folder
        self.file = pathlib.Path(str(folder), f"checked-{digest}") if local else None
        # None: it has not passed.
        self.said = self.file.read_text() if self.file and self.file.exists() else None

    def write(self, text: str) -> None:
        if self.file:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(text)
            except OSError as error:
                say(f"warning: the next start will check again: {error}")


@contextlib.contextmanager
def checked(
    config: Any, sections: Iterable[str], check_types: Callable[[], object], tiny: Any
) -> Iterator[Callable[[], str]]:
    """Checks types, and numbers beside the block, as far as `config.check` asks for it: numbers,
    types or none. Yields a function that blocks until the numbers are checked. It raises UserError
    if they differ between meshes, and returns, and prints, a warning if generation differs from
    training. What has passed before isn't checked again.

    tiny: makes the configs with which numbers are compared.
    sections: those of the config that the numbers depend on.
    """
    level = config.check
    if level != "numbers":
        say(f"check={level}: {'' if level == 'types' else 'types and '}numbers are not checked")
    relevant = {key: value for key, value in vars(config).items() if key not in ("paths", "check")}
    types = Mark("types", relevant)
    running, mark = None, None

    def wait() -> str:
        warning = (mark and mark.said) or ""
        if running and mark:
            say("comparing the numbers of two meshes ...")
            mark.write(warning := running.verdict())
        if warning:
            say(f"warning: {warning}")
        return warning

    with contextlib.ExitStack() as stack:
        if level == "numbers":  # begins first, as it takes longest
            configs = tiny()
            mark = Mark("numbers", [getattr(configs[-1], section) for section in sections])
            # Numbers are the same on all hosts, so the first one checks for all.
            if mark.said is None and jax.process_index() == 0:
                running = stack.enter_context(contextlib.closing(Numbers(configs)))
        if level != "none" and types.said is None:
            check_types()
            types.write("")
        yield wait
