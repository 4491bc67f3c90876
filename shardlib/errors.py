"""What a user did wrong."""


class UserError(ValueError):
    """A mistake outside the source: in a config, a dataset, a file, the machine.

    Its message is one line that names the thing and the cure; a program prints it and exits with 1.
    """
