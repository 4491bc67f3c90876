"""What a user did wrong -> one line, on one host or several."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from shardlib.errors import UserError


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with `error: ...` and exit code 1 where a UserError or an OSError comes
    through; anything else is ours, and keeps its traceback.

    One of several hosts doesn't say goodbye to JAX: it would wait for the others, which may be
    waiting for it. There, a step that fails is an error of the other hosts' more often than ours.
    """
    try:
        yield
    except Exception as error:
        jax: Any = sys.modules.get("jax")  # not imported here: most tools have no need of it
        among_hosts = jax and jax.distributed.is_initialized()
        if isinstance(error, UserError | OSError):
            message = f"error: {error}"
        elif among_hosts and isinstance(error, jax.errors.JaxRuntimeError):
            message = f"error: a step failed, perhaps as another host is lost: {error}"
        else:
            raise
        if not among_hosts:
            sys.exit(message)
        print(message, file=sys.stderr, flush=True)
        os._exit(1)
