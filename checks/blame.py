"""The lines of the user's source that led to an error."""

import itertools
import os
import traceback

import jax

from runtime.source import LIBRARIES, is_users
from shardlib.errors import ShardTypeError


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
            message += "\n    use ops.varying(x, axes), not jax.lax.pcast(x, axes, to='varying')"
        if "LinearizeTracer" in message or "JVPTracer" in message:
            message += (
                "\n    does `loss` use a value from outside that has a gradient? Pass it through "
                "`unembedding`"
            )
        # If no line is the user's, it is our bug, or a leaked tracer, whose message has the lines.
        if not own and not isinstance(error, jax.errors.UnexpectedTracerError):
            own = [f for f in frames if not f.filename.startswith(LIBRARIES)][-1:]
    lines = (f"{os.path.basename(f.filename)}:{f.lineno}, in {f.name}\n    {f.line}" for f in own)
    return "\n".join([*dict.fromkeys(lines), message])
