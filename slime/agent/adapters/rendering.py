"""Messages as the tokens that a chat template makes of them; where a conversation goes on, new ones alone."""

import secrets
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from slime.agent.adapters.plain_text import PlainText
from slime.agent.adapters.session import Messages, Refused
from slime.agent.trajectory import flatten_content

Tools = Sequence[Mapping[str, Any]] | None
_SYSTEM = ("system", "developer")
_SHAPES_KEPT = 1000
_ANY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "any", "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""Stands for a tool where a template has written all that it says of tools before the answer."""


class _Part(NamedTuple):
    """A conversation or less of it, where the answer stands in it, and tools."""

    messages: Messages
    at: int
    tools: Tools


class Rendering:
    """The chat template of a tokenizer. What others than the model wrote stays text (see `PlainText`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._plain = tokenizer, PlainText(tokenizer)
        self._mark = secrets.token_hex(16)
        self._enough: dict[Hashable, int] = {}
        self._options: Mapping[str, Any] = {}

    def with_options(self, options: Mapping[str, Any]) -> "Rendering":
        """Returns the same template, which is told this beside messages and tools."""
        other = copy(self)
        other._options, other._enough = options, {}
        return other

    def tokens(self, messages: Messages, tools: Tools) -> list[int]:
        """The whole conversation.

        Raises:
            Refused: the template fails on it.
        """
        return self._plain.encode(self._render(messages, tools))

    def tokens_after(self, messages: Messages, at: int, tools: Tools, last: int) -> list[int] | None:
        """What the template puts after the answer at this place; None if that cannot be told.

        Whatever it makes of the answer itself: some leave its thoughts out once there is another question.
        Where the template has no token that ends an answer, the model may have begun the next message.

        Args:
            last: the last token of the answer.
        """
        ended = last == self._tokenizer.eos_token_id
        begun = next((n for n, m in enumerate(messages) if m["role"] not in _SYSTEM), 0) + 1
        whole = _Part(messages, at, tools)
        parts = [whole]
        if at > begun:
            short = [*messages[:begun], *messages[at:]]
            parts = [_Part(short, begun, [_ANY_TOOL] if tools else tools), _Part(short, begun, tools), whole]
        text = self._after_alike(parts, _shape(messages, begun, at, tools, ended), ended)
        if text is None:
            return None
        ids = self._plain.encode(text)
        return ids[1:] if ids[:1] == [last] else ids

    def _after_alike(self, parts: Sequence[_Part], shape: Hashable, ended: bool) -> str | None:
        """What comes after an answer, by the least part of the conversation that shows it.

        Args:
            parts: from the least to the whole. Which will do is tried once for each shape.
        """
        if shape in self._enough:
            return self._after(*parts[self._enough[shape]], ended)
        text = self._after(*parts[-1], ended)
        if text is None:  # all parts are alike where the template fails on each
            return None
        if len(self._enough) >= _SHAPES_KEPT:
            self._enough.clear()
        alike = (n for n, part in enumerate(parts[:-1]) if self._after(*part, ended) == text)
        self._enough[shape] = next(alike, len(parts) - 1)
        return text

    def _after(self, messages: Messages, at: int, tools: Tools, ended: bool) -> str | None:
        end = self._tokenizer.eos_token
        marked = {"role": messages[at]["role"], "content": self._mark}
        calls = {key: messages[at][key] for key in ("tool_calls",) if key in messages[at]}
        for answer in ({**marked, **calls}, marked):  # some write calls in the place of text
            with suppress(Refused):
                text = self._render([*messages[:at], answer, *messages[at + 1 :]], tools)
                _, found, after = text.rpartition(self._mark)
                if found and end and end in after:
                    return after.partition(end)[2] if ended else after[after.index(end) :]
                if found:
                    return after
        return None

    def _render(self, messages: Messages, tools: Tools) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [self._guarded(message) for message in messages],
                tools=self._plain.guarded_in(list(tools)) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception as error:  # templates are programs of third parties, messages those of an agent
            told = f"messages: the chat template fails on these: {error}"
            raise Refused(400, f"{told} (wanted: some that it takes)") from error

    def _guarded(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leaves the messages of the model as they are: what looks like a control token there is one."""
        if message["role"] == "assistant":
            return message
        return {
            name: value if name == "role" else self._plain.guarded_in(value)
            for name, value in message.items()
        }


def _shape(messages: Messages, begun: int, at: int, tools: Tools, ended: bool) -> Hashable:
    """What templates look at beside texts: roles, which fields there are, and odd or even places."""
    told = (*messages[:begun], messages[at - 1], *messages[at:])
    fields = tuple((m["role"], bool(m["content"]), len(m.get("tool_calls") or ()), len(m)) for m in told)
    return fields, min(at - begun, 1), begun, (at - begun) % 2, len(tools or ()), ended


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is text.

    What is no text, an image for instance, would be missing in what the model reads.
    """
    content = message.get("content")
    if isinstance(content, str):
        return message
    if not isinstance(content, list | tuple | None):
        raise Refused(400, f"content {content!r:.200} (wanted: text or parts of it)")
    for part in content or ():
        if not isinstance(part, str) and not isinstance(part.get("text"), str):
            raise Refused(400, f"content: a part {part!r:.200} (wanted: of type text)")
    return {**message, "content": flatten_content(content)}
