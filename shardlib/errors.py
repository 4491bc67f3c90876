"""What a user did wrong."""


class UserError(ValueError):
    """A mistake outside the source, in a config, a dataset, a file, the machine; or an edit of the
    source that the check of its types refuses.

    Its message names the thing and the cure, in one line but for an edit's; a program prints it and
    exits with 1.
    """
