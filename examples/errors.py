"""The error that a person at the command line can mend."""


class UserError(ValueError):
    """Something that the person at the command line can mend.

    `examples.common.run` prints its message without a traceback and exits
    with status 1.
    """
