"""What a model thinks, apart from what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is marked, and when a model reasons.

    ``toggle`` is the argument of the chat template that says so; without it ``default`` holds. ``forced``
    reads a response as reasoning although neither it nor the prompt says where that begins.
    """

    start: str = "<think>"
    end: str = "</think>"
    toggle: str | None = "enable_thinking"
    default: bool = True
    forced: bool | None = None
    calls_begin: str | None = None
    """What ends the reasoning too, and belongs to the answer."""

    def reasons(self, template: Mapping[str, Any]) -> bool:
        """Whether a chat asks for reasoning, as SGLang finds it."""
        given = template.get(self.toggle) if self.toggle is not None else None
        return given is not False if self.default else given is True

    def begins_in_reasoning(self, template: Mapping[str, Any], prompt_end: str) -> bool:
        opened = prompt_end.rstrip().endswith(self.start)
        return opened or (self.reasons(template) if self.forced is None else self.forced)


_CALL = "<tool_call>"
_ALWAYS = ReasoningFormat(toggle=None, forced=True)
_QWEN = ReasoningFormat(calls_begin=_CALL)
_QWEN_ALWAYS = ReasoningFormat(calls_begin=_CALL, forced=True)
FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": _ALWAYS,
    "deepseek-v3": ReasoningFormat(toggle="thinking", default=False, calls_begin=_CALL),
    "glm45": _QWEN,
    "interns1": _QWEN,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷", toggle=None, forced=False),
    "kimi_k2": ReasoningFormat(toggle="thinking", calls_begin="<|tool_calls_section_begin|>"),
    "mimo": ReasoningFormat(default=False, calls_begin=_CALL),
    "minimax": _QWEN_ALWAYS,
    "qwen3": _QWEN,
    "qwen3-thinking": _QWEN_ALWAYS,
    "step3": _ALWAYS,
}


def split(form: ReasoningFormat, inside: bool, text: str) -> tuple[str, str]:
    """Reasoning and answer of a whole response, which begins ``inside`` reasoning or not."""
    if not inside and form.start not in text:
        return "", text
    while text.startswith(form.start):
        text = text[len(form.start) :]
    for mark, kept in ((form.end, 0), (form.calls_begin, len(form.calls_begin or ""))):
        if mark is not None and (at := text.find(mark)) >= 0:
            return text[:at], text[at + len(mark) - kept :]
    return text, ""


class ReasoningStream:
    """Splits a response that is still growing; what may be part of a mark is held back.

    Args:
        in_one: give the reasoning when it has ended, in one piece.
    """

    def __init__(self, form: ReasoningFormat, inside: bool, in_one: bool) -> None:
        self._form = form
        self._in_one = in_one
        self._where: Literal["start", "inside", "outside", "answer"] = "start"
        self._inside_at_start = inside
        self._held = ""
        self._kept: list[str] = []

    def feed(self, delta: str, final: bool = False) -> tuple[str, str]:
        """What ``delta`` adds to reasoning and answer."""
        text, self._held = self._held + delta, ""
        reasoning = answer = ""
        if self._where == "start":
            if not final and len(text) < len(self._form.start) and self._form.start.startswith(text):
                self._held = text
                return "", ""
            self._where = "inside" if self._inside_at_start else "outside"
            if text.startswith(self._form.start):
                self._where, text = "inside", text[len(self._form.start) :]
        if self._where == "outside":
            answer, text, found = self._until((self._form.start,), text, final)
            if found:
                self._where, text = "inside", text[len(found) :]
        if self._where == "inside":
            marks = tuple(mark for mark in (self._form.end, self._form.calls_begin) if mark is not None)
            reasoning, text, found = self._until(marks, text, final)
            if found:
                self._where = "answer"
                text = text[len(found) :] if found == self._form.end else text
            reasoning = self._paced(reasoning, bool(found) or final)
        if self._where == "answer":
            answer += text
        return reasoning, answer

    def _until(self, marks: tuple[str, ...], text: str, final: bool) -> tuple[str, str, str]:
        """What is before the first mark, what is from it on, and the mark; holds back what may begin one."""
        at, mark = min(((text.find(m), m) for m in marks if m in text), default=(-1, ""))
        if mark:
            return text[:at], text[at:], mark
        sizes = range(min(max(map(len, marks)) - 1, len(text)), 0, -1)
        may_begin = (size for size in sizes if any(m.startswith(text[-size:]) for m in marks))
        hold = 0 if final else next(may_begin, 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], "", ""

    def _paced(self, reasoning: str, ended: bool) -> str:
        if not self._in_one:
            return reasoning
        self._kept.append(reasoning)
        if not ended:
            return ""
        whole, self._kept = "".join(self._kept), []
        return whole
