"""What a client did wrong, as opposed to what the server did wrong."""

from typing import ClassVar

_MAX_CHARACTERS = 2000
"""The most characters of a message, which may quote a value of many megabytes."""


class BadRequest(ValueError):
    """A request that cannot be honoured; its text goes to the client with this HTTP status.

    Attributes:
        status: HTTP status.
        kind: SGLang's name for what is wrong; ``/generate`` phrases each kind in its own way.
    """

    VALUE: ClassVar[str] = "BadRequestError"
    BODY: ClassVar[str] = "Bad Request"
    """The body is not JSON, or a field has a wrong type."""
    CONTRACT: ClassVar[str] = "contract"
    """The body has a name that SGLang does not know."""

    def __init__(self, message: str, status: int = 400, kind: str = VALUE) -> None:
        super().__init__(message if len(message) <= _MAX_CHARACTERS else message[:_MAX_CHARACTERS] + "...")
        self.status = status
        self.kind = kind
