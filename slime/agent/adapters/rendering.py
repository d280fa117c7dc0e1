"""Messages as the tokens that a chat template makes of them; where a conversation goes on, new ones alone."""

import secrets
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime.agent.adapters.plain_text import PlainText
from slime.agent.adapters.session import Messages, Refused
from slime.agent.trajectory import flatten_content

Tools = Sequence[Mapping[str, Any]] | None
_SYSTEM = ("system", "developer")
_SHAPES_KEPT = 1000


class Rendering:
    """The chat template of a tokenizer. What others than the model wrote stays text (see `PlainText`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._plain = tokenizer, PlainText(tokenizer)
        self._mark = secrets.token_hex(16)
        self._alike: dict[Hashable, bool] = {}

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
        left_out = at - begun
        if left_out < 1:
            text = self._after(messages, at, tools, ended)
        else:
            short = [*messages[:begun], *messages[at:]]
            shape = _shape(messages, begun, at, tools, ended)
            if self._alike.get(shape):
                text = self._after(short, begun, tools, ended)
            else:
                text = self._after(messages, at, tools, ended)
                if shape not in self._alike:
                    self._note(shape, text == self._after(short, begun, tools, ended))
        if text is None:
            return None
        ids = self._plain.encode(text)
        return ids[1:] if ids[:1] == [last] else ids

    def _note(self, shape: Hashable, alike: bool) -> None:
        """Whether what comes after an answer is the same where the middle of the conversation is left out."""
        if len(self._alike) >= _SHAPES_KEPT:
            self._alike.clear()
        self._alike[shape] = alike

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
            )
        except Exception as error:  # templates are programs of third parties, messages those of an agent
            raise Refused(400, f"the chat template fails on these messages: {error}") from error

    def _guarded(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leaves the messages of the model as they are: what looks like a control token there is one."""
        if message["role"] == "assistant":
            return message
        return {**message, "content": self._plain.guarded(message["content"])}


def _shape(messages: Messages, begun: int, at: int, tools: Tools, ended: bool) -> Hashable:
    """What templates look at beside texts: roles, which fields there are, and odd or even places."""
    told = (*messages[:begun], messages[at - 1], *messages[at:])
    fields = tuple((m["role"], bool(m["content"]), len(m.get("tool_calls") or ()), len(m)) for m in told)
    return fields, begun, (at - begun) % 2, bool(tools), ended


def with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is text.

    What is no text, an image for instance, would be missing in what the model reads.
    """
    content = message.get("content")
    if isinstance(content, str):
        return message
    for part in content if isinstance(content, list | tuple) else ():
        if not isinstance(part, str) and not isinstance(part.get("text"), str):
            raise Refused(400, f"a part of type {part.get('type')!r} (wanted: text)")
    return {**message, "content": flatten_content(content)}
