"""Reading the answer of an engine while it passes, be it one JSON object or a stream of events."""

from collections.abc import Callable
from typing import Any

import orjson

_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_END = b"[DONE]"


class AnswerReader:
    """Hands a finished answer over once; errors and lists of answers are none.

    Args:
        found: gets the answer as ``/generate`` gives it. Chunks of a stream are cumulative: it is the last.
    """

    def __init__(self, found: Callable[[dict[str, Any]], None]) -> None:
        self._found = found
        self._good = self._streamed = False
        self._waiting = bytearray()

    def begin(self, status: int, content_type: bytes) -> None:
        self._good = status == 200
        self._streamed = content_type.startswith(b"text/event-stream")

    def feed(self, data: bytes, last: bool) -> None:
        if not self._good:
            return
        self._waiting += data
        if self._streamed:
            *events, rest = bytes(self._waiting).split(b"\n\n")
            self._waiting = bytearray(rest)
            for event in events:
                self._event(event)
        elif last:
            self._answer(bytes(self._waiting))

    def _event(self, event: bytes) -> None:
        data = event.strip().removeprefix(b"data:").strip()
        if data and data != _END and not any(mark in data for mark in _UNFINISHED):
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        answer = orjson.loads(data)
        if isinstance(answer, dict) and "text" in answer and answer.get("meta_info", {}).get("finish_reason"):
            self._found(answer)
