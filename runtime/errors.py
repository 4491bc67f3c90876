"""Turns a user's mistake into a one-line message, on one host or several."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from shardlib.errors import UserError


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with `error: ...` and exit code 1 on a UserError or OSError. Any other
    exception is a bug and keeps its traceback.

    With several hosts the process exits without shutting JAX down: the shutdown waits for the other
    hosts, which may be waiting for this one. A failed step is also reported in one line there, as
    its usual cause is that another host was lost.
    """
    try:
        yield
    except Exception as error:
        jax: Any = sys.modules.get("jax")  # not imported here, as most tools don't need it
        several_hosts = jax and jax.distributed.is_initialized()
        if isinstance(error, UserError | OSError):
            message = f"error: {error}"
        elif several_hosts and isinstance(error, jax.errors.JaxRuntimeError):
            message = f"error: a step failed, perhaps because another host was lost: {error}"
        else:
            raise
        if not several_hosts:
            sys.exit(message)
        print(message, file=sys.stderr, flush=True)
        os._exit(1)
