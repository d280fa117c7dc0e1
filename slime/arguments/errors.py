"""The one error that bad input raises."""


class UsageError(ValueError):
    """A flag, a file or a path given by the user cannot be honoured.

    The message is one line that names the flag, the value found and the value wanted.
    """
