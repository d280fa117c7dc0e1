"""A transport whose other end is the test."""

import asyncio
import socket
from typing import Any


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.paused, self.aborted, self.closed = b"", False, False, False

    def write(self, data: bytes) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return socket.socket() if name == "socket" else default
