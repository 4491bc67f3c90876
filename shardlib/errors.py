"""Errors for a user's mistakes, and the lines of the user's source that they are about."""

import functools
import itertools
import os
import sysconfig
import traceback
from typing import Any

import jax


class UserError(ValueError):
    """A mistake in a config, a dataset, a file or the machine's setup, or an edit of the source
    that fails the type check.

    The message names the problem and the cure, in one line unless it is about an edit. A program
    prints it and exits with status 1.
    """


class ShardTypeError(TypeError):
    """A value that doesn't match its type, or an op that can't do what its string says."""


class SpecError(ShardTypeError):
    """A type string that can't be read."""


# Our own files and folders: errors and audits name the user's line that led into them.
BEHIND_OPS = [os.path.dirname(__file__)]
_LIBRARIES = (
    *(os.path.dirname(jax.__file__), "<frozen "),
    *map(sysconfig.get_path, ("stdlib", "platlib", "purelib")),
)


@functools.cache  # each equation of a step asks for some files
def is_users(file: str) -> bool:
    return not file.startswith((*BEHIND_OPS, *_LIBRARIES))


def source_line(trace: Any) -> str:
    """The user's innermost frame of a JAX traceback, with its function's
    name: `train.py:253 block`. Empty if there is none."""
    for frame in trace.frames if trace else ():
        if is_users(frame.file_name):
            function = frame.function_name.split(".<locals>.<")[0].rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} {function}"
    return ""


def caller() -> str:
    """The user's innermost line of the call stack, like `source_line`."""
    for frame in reversed(traceback.extract_stack()):
        if is_users(frame.filename):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
    return ""


def explain(error: Exception) -> str:
    """Formats an error raised while tracing a function: the lines of the user's code in that
    function that led to it, then the message."""

    frames, message = traceback.extract_tb(error.__traceback__), str(error)
    # If the backward pass can't be built, the line to blame is in the error's cause.
    cause = traceback.extract_tb(getattr(error.__cause__, "__traceback__", None))
    # The function runs within typed_shard_map.
    inside = itertools.dropwhile(lambda f: not f.filename.endswith("shardlib/types.py"), frames)
    own = [f for f in inside if is_users(f.filename)]
    own += [f for f in cause if is_users(f.filename)][-1:]
    if not isinstance(error, ShardTypeError):
        message = f"{type(error).__name__}: {message}"
        if "'NoneType'" in message:
            message += "\n    is it an optional field, declared `X | None`, that is None here?"
        if "jax.lax.pcast(" in message:
            message += "\n    here jax.lax.pcast(x, axes, to='varying') is ops.varying(x, axes)"
        if "LinearizeTracer" in message or "JVPTracer" in message:
            message += (
                "\n    does `loss` use a value from outside that has a gradient? Pass it through "
                "`unembedding`"
            )
        # If no line is the user's, it is our bug, or a leaked tracer, whose message has the lines.
        if not own and not isinstance(error, jax.errors.UnexpectedTracerError):
            own = [f for f in frames if not f.filename.startswith(_LIBRARIES)][-1:]
    lines = (f"{os.path.basename(f.filename)}:{f.lineno}, in {f.name}\n    {f.line}" for f in own)
    return "\n".join([*dict.fromkeys(lines), message])
