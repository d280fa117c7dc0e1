"""The one error that bad input raises."""

from collections.abc import Iterable


class UsageError(ValueError):
    """A flag, a file or a path given by the user cannot be honoured.

    Attributes:
        messages: one line for each mistake, which names the flag, the value found and the value wanted.
        unknown: names of ``args`` that have no value because of it; None if whoever raised it does not say.
    """

    def __init__(self, *messages: str, unknown: Iterable[str] | None = None) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages
        self.unknown = None if unknown is None else tuple(unknown)


class NotKnownError(Exception):
    """A rule asks for a value that was given wrongly, so it has nothing to say."""
