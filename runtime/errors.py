"""Turns a user's mistake into a one-line message, on one host or several."""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from shardlib.errors import UserError


def tell(text: str, stream: TextIO) -> None:
    """Prints a line. The program goes on if the stream can no longer be written to."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:  # a pipe whose reader has ended, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout:
            tell(f"warning: standard output ends here: {error.strerror}", sys.stderr)


def _flush(end: str = "") -> None:
    """Writes all that was printed. Ends the program if standard output is a closed pipe; Python
    would report that on exit."""
    try:
        print(end=end, flush=True)
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)


def _unavailable(jax: Any, problem: str) -> str:
    """Returns a message if JAX has none of the devices that JAX_PLATFORMS names, or if the text of
    an error, `problem`, says that a backend failed, else ""."""
    if names := os.environ.get("JAX_PLATFORMS"):
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:  # it asserts that there is a plugin
            why = str(error).partition(" (set JAX_PLATFORMS")[0]
            why = why or "JAX has no plugin for it, or found no such device"
            return f"JAX_PLATFORMS={names} in the environment: {why}; unset it, or set it to cpu"
    elif problem.startswith("Unable to initialize backend"):
        why = problem.partition(" (set JAX_PLATFORMS")[0]
        return f"{why}; JAX_PLATFORMS=cpu in the environment uses the CPU"
    return ""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with `error: ...` and exit code 1 on a UserError or OSError, or if there is
    no memory, backend or device that JAX_PLATFORMS names. Any other exception is a bug and
    keeps its traceback. It ends quietly on Ctrl-C, with exit code 130, and if nobody reads its
    output any more, as with `| head -1`. Characters that the terminal's encoding lacks are printed
    as escapes.

    With several hosts the process exits without shutting JAX down: the shutdown waits for the other
    hosts, which may be waiting for this one. A failed step is also reported in one line there, as
    its usual cause is that another host was lost.
    """
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            if not __debug__:
                raise UserError("run Python without -O and PYTHONOPTIMIZE: zarr needs its asserts")
            yield
        except BrokenPipeError:
            _flush("\n")  # ends the program if the pipe is standard output
            raise
        finally:
            _flush()
    except KeyboardInterrupt:
        sys.exit(130)  # a loop in a shell then ends, too
    except Exception as error:
        jax: Any = sys.modules.get("jax")  # not imported here, as most tools don't need it
        several_hosts = jax and jax.distributed.is_initialized()
        if isinstance(error, UserError | OSError):
            message = f"error: {error}"
        elif isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED: "):
            message = f"error: not enough memory: {error}"
        elif jax and (problem := _unavailable(jax, str(error))):
            message = f"error: {problem}"
        elif several_hosts and isinstance(error, jax.errors.JaxRuntimeError):
            message = f"error: a step failed, perhaps because another host was lost: {error}"
        elif several_hosts:
            message = traceback.format_exc()
        else:
            raise
        if not several_hosts:
            sys.exit(message)
        print(message, file=sys.stderr, flush=True)
        os._exit(1)
