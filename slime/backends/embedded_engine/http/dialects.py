"""The two forms of ``/v1``: completions and chats."""

import time
import uuid
from typing import Any

from slime.backends.embedded_engine.http.answers import AnswerStream, Part, Reading
from slime.backends.embedded_engine.http.openai_objects import (
    chat_logprobs,
    completion_logprobs,
    finish_fields,
    usage,
)
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sequence import Progress, Sequence
from slime.backends.embedded_engine.tokenizer import Tokenizer


class Dialect:
    """What differs between completions and chat: names, and where text and log-probs sit."""

    name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"
    ids_name = "token_ids"
    chunks_have_usage = True
    """Whether chunks name token counts without having any, and leave out what no count is known of."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        logprobs: bool,
        echo: bool = False,
        token_ids: bool = False,
        prompt_token_ids: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.echo = echo
        self._token_ids = token_ids
        self._prompt_token_ids = prompt_token_ids

    def ids(self, sequence: Sequence, start: int, end: int) -> dict[str, Any]:
        """Ids that were asked for; those of the prompt only with the first of the response."""
        found: dict[str, Any] = {}
        if self._token_ids:
            found[self.ids_name] = sequence.output_ids[start:end]
        if self._prompt_token_ids and start == 0:
            found["prompt_token_ids"] = sequence.prompt_ids
        return found

    def head(self, state: ServerState, chunk: bool, model: str | None) -> dict[str, Any]:
        return {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.chunk_name if chunk else self.name,
            "created": int(time.time()),
            "model": model or state.served_model_name,
            **({"usage": None} if chunk and self.chunks_have_usage else {}),
        }

    def final_usage(self, sequences: list[Sequence], prompts: int) -> dict[str, Any]:
        """Token counts after the last chunk."""
        counts = usage(sequences, prompts)
        return {k: v for k, v in counts.items() if v is not None or not self.chunks_have_usage}

    def prefix(self, sequence: Sequence) -> str:
        return self.tokenizer.decode(sequence.prompt_ids) if self.echo else ""

    def choice(
        self, sequence: Sequence, index: int, part: Part, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        logprobs = None
        if self.logprobs:
            prompt = self.echo and start == 0
            logprobs = completion_logprobs(sequence, self.tokenizer, start, end, prompt)
        ids, reason = self.ids(sequence, start, end), finish_fields(sequence, progress)
        return {"index": index, "text": part.text, "logprobs": logprobs, **reason, **ids}

    def whole(self, text: str) -> Part:
        """Reads a complete response."""
        return Part(text)

    def stream(self) -> AnswerStream:
        """Reads a response that is still growing."""
        return AnswerStream(Reading({}))


class ChatDialect(Dialect):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    ids_name = "response_token_ids"
    chunks_have_usage = False

    def __init__(self, tokenizer: Tokenizer, reading: Reading, **options: bool) -> None:
        super().__init__(tokenizer, **options)
        self._reading = reading
        self._calling: set[int] = set()
        """Choices that have called a tool."""

    def choice(
        self, sequence: Sequence, index: int, part: Part, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        # A chunk that says nothing brings no log-probs, those of a stop string's tokens for instance.
        says = part.text or part.reasoning or part.calls
        with_logprobs = self.logprobs and (says or not chunk)
        logprobs = chat_logprobs(sequence, self.tokenizer, start, end) if with_logprobs else None
        message: dict[str, Any] = {"content": part.text, "reasoning_content": part.reasoning or None}
        if part.calls:
            message["tool_calls"] = part.calls
        if not chunk or start == 0:
            message = {"role": "assistant", **message}
        key = "delta" if chunk else "message"
        if part.calls:
            self._calling.add(index)
        reason = finish_fields(sequence, progress)
        if index in self._calling and reason["finish_reason"] == "stop":
            reason = {"finish_reason": "tool_calls", "matched_stop": None}
        ids = self.ids(sequence, start, end)
        return {"index": index, key: message, "logprobs": logprobs, **reason, **ids}

    def whole(self, text: str) -> Part:
        return self._reading.whole(text)

    def stream(self) -> AnswerStream:
        return AnswerStream(self._reading)
