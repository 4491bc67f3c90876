"""The error for mistakes of the user."""


class UserError(ValueError):
    """A mistake in a config, a dataset, a file or the machine's setup, or an edit of the source
    that fails the type check.

    The message names what is wrong and the cure, in one line unless it is about an edit. A program
    prints it and exits with status 1.
    """
