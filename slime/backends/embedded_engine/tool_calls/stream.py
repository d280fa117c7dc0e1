"""Calls in a text that is still growing."""

from slime.backends.embedded_engine.tool_calls.base import Parsed, ToolFormat, Tools


class CallStream:
    """Takes a response piece by piece, and gives what is certain of it.

    However it is cut, the pieces add up to what ``ToolFormat.parse`` makes of the whole, but for
    blanks around the text. A call is given when it is complete.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._held = ""
        """What may be the beginning of a marker."""
        self._begun = False
        self._in_calls = False
        self._block: list[str] | None = None
        self._tail = ""
        """The end of the block, in which the beginning of its end marker may be."""
        self.pending = 0
        """Characters that are held back."""

    def feed(self, delta: str, final: bool = False) -> Parsed:
        """What ``delta`` adds; with ``final`` it is the last of the response."""
        found = Parsed()
        while delta or self._held:
            if self._block is None:
                delta, more = self._outside(delta, final, found)
            else:
                delta, more = self._inside(delta, found), True
            if not more or (not delta and not self._held):
                break
        if final and self._block is not None:
            rest = self._form.read_rest("".join(self._block), self._tools)
            found.text += rest.text
            found.calls += rest.calls
            self._block = None
        self.pending = len(self._held) + sum(map(len, self._block or ()))
        return found

    def _outside(self, delta: str, final: bool, found: Parsed) -> tuple[str, bool]:
        """Goes to the next marker; returns what is left from it on, and whether there is one."""
        text, self._held = self._held + delta, ""
        start = self._start(text)
        if start < 0:
            hold = 0 if final else self._may_begin(text)
            self._held = text[len(text) - hold :]
            self._tell(text[: len(text) - hold], found)
            return "", False
        self._tell(text[:start], found)
        self._block, self._tail, self._in_calls = [], "", True
        return text[start:], True

    def _tell(self, text: str, found: Parsed) -> None:
        self._begun = self._begun or bool(text)
        if not self._in_calls:
            found.text += text

    def _start(self, text: str) -> int:
        if not self._begun and self._form.at_start and text.startswith(self._form.at_start):
            return 0
        return min((at for marker in self._form.begins if (at := text.find(marker)) >= 0), default=-1)

    def _may_begin(self, text: str) -> int:
        """How many characters at the end may be the beginning of a marker."""
        longest = max(map(len, self._form.begins)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(marker.startswith(text[-size:]) for marker in self._form.begins):
                return size
        return 0

    def _inside(self, delta: str, found: Parsed) -> str:
        """Goes to the end of the block; returns what is behind it."""
        assert self._block is not None
        end = self._form.end
        at = -1 if end is None else (self._tail + delta).find(end)
        if end is None or at < 0:
            self._block.append(delta)
            self._tail = (self._tail + delta)[-len(end) + 1 :] if end else ""
            return ""
        cut = at + len(end) - len(self._tail)
        block = "".join([*self._block, delta[:cut]])
        found.calls += self._form.read_leniently(block, self._tools)
        self._block = None
        return delta[cut:]
