"""Errors for a user's mistakes, and the lines of the user's source that they are about."""

import functools
import os
import sysconfig
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
LIBRARIES = (
    *(os.path.dirname(jax.__file__), "<frozen "),
    *map(sysconfig.get_path, ("stdlib", "platlib", "purelib")),
)


@functools.cache  # each equation of a step asks for some files
def is_users(file: str) -> bool:
    return not file.startswith((*BEHIND_OPS, *LIBRARIES))


def source_line(trace: Any) -> str:
    """The user's innermost frame of a JAX traceback, with its function's
    name: `train.py:253 block`. Empty if there is none."""
    for frame in trace.frames if trace else ():
        if is_users(frame.file_name):
            function = frame.function_name.split(".<locals>.<")[0].rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} {function}"
    return ""
