"""What a client did wrong, as opposed to what the server did wrong."""


class BadRequest(ValueError):
    """A request that cannot be honoured; its text goes to the client with this HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
