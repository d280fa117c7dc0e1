"""What a response says apart from what it thinks and what it calls."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from slime.backends.embedded_engine.reasoning import ReasoningFormat, ReasoningStream, split
from slime.backends.embedded_engine.tool_calls.base import Call, ToolFormat, Tools
from slime.backends.embedded_engine.tool_calls.stream import CallStream


@dataclass
class Part:
    """A response, or a piece of one."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.text or self.reasoning or self.calls)


@dataclass(frozen=True)
class Reading:
    """How the responses of a request are read.

    ``reasoning`` is None where it is not set apart; ``calls_before`` counts the calls in the conversation.
    """

    tools: Tools
    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False
    reasoning_in_one: bool = False
    numbers_ids: bool = False
    calls_before: int = 0

    def whole(self, text: str) -> Part:
        """Reads a complete response."""
        reasoning = ""
        if self.reasoning is not None:
            reasoning, text = split(self.reasoning, self.begins_in_reasoning, text)
        if self.calls is None:
            return Part(text, reasoning)
        found = self.calls.parse(text, self.tools)
        return Part(found.text, reasoning, self.call_objects(found.calls, 0))

    def call_objects(self, calls: list[Call], first: int) -> list[dict[str, Any]]:
        """Calls as the API gives them, of which ``first`` is the number of the first one."""
        objects = []
        for index, call in enumerate(calls, first):
            name = f"functions.{call.name}:{self.calls_before + index}" if self.numbers_ids else None
            function = {"name": call.name, "arguments": call.arguments}
            identity = name or f"call_{uuid.uuid4().hex[:24]}"
            objects.append({"id": identity, "index": index, "type": "function", "function": function})
        return objects


class AnswerStream:
    """Reads a response that is still growing."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._reasoning = None
        if reading.reasoning is not None:
            self._reasoning = ReasoningStream(
                reading.reasoning, reading.begins_in_reasoning, reading.reasoning_in_one
            )
        self._calls = CallStream(reading.calls, reading.tools) if reading.calls is not None else None
        self.called = 0

    @property
    def pending(self) -> int:
        """Characters that may be worked on with the next piece."""
        return self._calls.pending if self._calls is not None else 0

    def feed(self, delta: str, final: bool) -> Part:
        reasoning, text = "", delta
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(delta, final)
        if self._calls is None:
            return Part(text, reasoning)
        found = self._calls.feed(text, final)
        calls = self._reading.call_objects(found.calls, self.called)
        self.called += len(calls)
        return Part(found.text, reasoning, calls)
