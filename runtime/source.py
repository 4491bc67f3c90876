"""Finds the lines of the user's source that a traceback, an op or an instruction is about."""

import functools
import os
import sysconfig
from typing import Any

import jax

from runtime.config import ROOT

# Our own files and folders: errors and audits name the user's line that led into them.
OURS = "shardlib/ kernels/attention kernels/flash_attention checks/layout checks/numbers"
BEHIND_OPS = [f"{ROOT}/{each}" for each in OURS.split()]
LIBRARIES = (
    *(os.path.dirname(jax.__file__), "<frozen "),
    *map(sysconfig.get_path, ("stdlib", "platlib", "purelib")),
)


@functools.cache  # each equation of a step asks for some files
def is_users(file: str) -> bool:
    return not file.startswith((*BEHIND_OPS, *LIBRARIES))


def source_line(trace: Any) -> str:
    """The user's innermost frame of a JAX traceback, with its function's name, such as
    `train.py:253 block`. Empty if there is none."""
    for frame in trace.frames if trace else ():
        if is_users(frame.file_name):
            function = frame.function_name.split(".<locals>.<")[0].rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} {function}"
    return ""
