"""What the server behind middleware refuses of HTTP/1.1 that h11 puts up with.

Somebody in front who reads such a request in another way would take a part of it for another request
(RFC 9112, sections 2.2, 5.2 and 6.1).
"""

import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOOSE_LINE = re.compile(rb"(?<!\r)\n|\r\n[ \t]")
_END_OF_HEAD = b"\r\n\r\n"


class StrictConnection(h11.Connection):
    """Refuses two lengths, lines without a carriage return, and folded headers."""

    def next_event(self) -> Any:
        """
        Raises:
            RemoteProtocolError: the head of a request is one of those.
        """
        if self.their_state is h11.IDLE:
            waiting, _closed = self.trailing_data
            if _LOOSE_LINE.search(waiting.partition(_END_OF_HEAD)[0]):
                raise h11.RemoteProtocolError("a line without CR LF, or a folded header")
        event = super().next_event()
        if isinstance(event, h11.Request):
            lengths = {name for name, _ in event.headers} & {b"content-length", b"transfer-encoding"}
            if len(lengths) > 1:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding")
        return event


class StrictProtocol(H11Protocol):
    """uvicorn's, with such a connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or 2**16)
