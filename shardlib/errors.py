"""Errors for a user's mistakes."""


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
