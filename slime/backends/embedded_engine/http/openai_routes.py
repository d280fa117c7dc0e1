"""``/v1/completions`` and ``/v1/chat/completions``."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import GenerateBody, read_json, validated
from slime.backends.embedded_engine.http.chat_messages import chat_messages, split_final
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.openai_bodies import ChatBody, CompletionBody, sampling_params_of
from slime.backends.embedded_engine.http.openai_objects import (
    chat_logprobs,
    completion_logprobs,
    finish_fields,
    usage,
)
from slime.backends.embedded_engine.http.prompts import Generation, make_generation
from slime.backends.embedded_engine.http.responses import final_text, version_spans
from slime.backends.embedded_engine.http.running import failure_of, run_streaming, run_to_end
from slime.backends.embedded_engine.http.state import ServerState, state_of
from slime.backends.embedded_engine.http.streaming import DONE, TextStream, event
from slime.backends.embedded_engine.sequence import Progress, Sequence
from slime.backends.embedded_engine.tokenizer import Tokenizer

router = APIRouter()


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
        self, sequence: Sequence, index: int, text: str, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        logprobs = None
        if self.logprobs:
            prompt = self.echo and start == 0
            logprobs = completion_logprobs(sequence, self.tokenizer, start, end, prompt)
        ids, reason = self.ids(sequence, start, end), finish_fields(sequence, progress)
        return {"index": index, "text": text, "logprobs": logprobs, **reason, **ids}


class ChatDialect(Dialect):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    ids_name = "response_token_ids"
    chunks_have_usage = False

    def choice(
        self, sequence: Sequence, index: int, text: str, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        # A chunk without text brings no log-probs, those of a stop string's tokens for instance.
        with_logprobs = self.logprobs and (text or not chunk)
        logprobs = chat_logprobs(sequence, self.tokenizer, start, end) if with_logprobs else None
        message: dict[str, Any] = {"content": text, "reasoning_content": None}
        if not chunk or start == 0:
            message = {"role": "assistant", **message}
        key = "delta" if chunk else "message"
        ids, reason = self.ids(sequence, start, end), finish_fields(sequence, progress)
        return {"index": index, key: message, "logprobs": logprobs, **reason, **ids}


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    data = await read_json(request)
    body = validated(CompletionBody, data)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    texts = isinstance(body.prompt, str) or (bool(body.prompt) and isinstance(body.prompt[0], str))
    generation = await _generation(
        state,
        validated(
            GenerateBody,
            {
                "text" if texts else "input_ids": body.prompt,
                "sampling_params": sampling_params_of(data, body, body.max_tokens),
                "return_logprob": body.logprobs is not None,
                "logprob_start_len": 0 if body.echo and body.logprobs else -1,
                "top_logprobs_num": body.logprobs,
                "rid": body.rid,
            },
        ),
    )
    ids = bool(body.return_token_ids)
    dialect = Dialect(tokenizer, body.logprobs is not None, bool(body.echo), ids, ids)
    prompts = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
    return await _answer(request, body, dialect, generation, prompts)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """The response may fill the context unless ``max_tokens`` says otherwise."""
    data = await read_json(request)
    body = validated(ChatBody, data)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    ids_wanted = bool(body.return_token_ids), bool(body.return_token_ids or body.return_prompt_token_ids)
    if body.stream and any(ids_wanted):
        raise BadRequest("return_token_ids and return_prompt_token_ids: not supported with streaming")
    ids = await _chat_ids(state, tokenizer, body)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    generation = make_generation(
        state,
        validated(
            GenerateBody,
            {
                "input_ids": ids,
                "sampling_params": sampling_params_of(data, body, limit),
                "return_logprob": body.logprobs,
                "top_logprobs_num": body.top_logprobs,
                "rid": body.rid,
            },
        ),
    )
    dialect = ChatDialect(tokenizer, bool(body.logprobs), False, *ids_wanted)
    return await _answer(request, body, dialect, generation, 1)


async def _generation(state: ServerState, body: GenerateBody) -> Generation:
    return await state.beside(lambda: make_generation(state, body), body.text)


async def _chat_ids(state: ServerState, tokenizer: Tokenizer, body: ChatBody) -> list[int]:
    """The prompt of a conversation."""
    messages = chat_messages(body.messages, tokenizer.chat_takes_parts)
    messages, prefix = split_final(messages, bool(body.continue_final_message))
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
    texts = [str(message["content"]) for message in messages]
    return await state.beside(lambda: tokenizer.render_chat(messages, prefix, **template), [*texts, prefix])


async def _answer(
    request: Request,
    body: CompletionBody | ChatBody,
    dialect: Dialect,
    generation: Generation,
    prompts: int,
) -> Response:
    state, sequences = state_of(request), generation.sequences
    await state.constrain(sequences)
    if body.stream:
        with_usage = bool((body.stream_options or {}).get("include_usage"))
        head = dialect.head(state, True, body.model)
        events = _events(state, dialect, head, sequences, prompts if with_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")
    await run_to_end(state, request, sequences)
    choices = []
    for index, sequence in enumerate(sequences):
        text = dialect.prefix(sequence) + (final_text(sequence, dialect.tokenizer) or "")
        choices.append(dialect.choice(sequence, index, text, 0, sequence.progress, False))
    metadata = {
        "weight_version": state.engine.scheduler.weight_version,
        "weight_versions": version_spans(sequences[0]),
    }
    head = dialect.head(state, False, body.model)
    return json_response(
        {**head, "choices": choices, "usage": usage(sequences, prompts), "metadata": metadata}
    )


async def _events(
    state: ServerState,
    dialect: Dialect,
    head: dict[str, Any],
    sequences: list[Sequence],
    usage_prompts: int | None,
) -> AsyncIterator[bytes]:
    """Chunks with what is new of each choice, and token counts at the end if they are wanted."""
    texts = [TextStream(state, s) for s in sequences]
    sent = [0] * len(sequences)
    async for index, progress in run_streaming(state, sequences):
        if not progress.finished and progress.end == sent[index]:
            continue
        sequence, start = sequences[index], sent[index]
        if progress.finished and (failure := failure_of(sequence)) is not None:
            error = {"object": "error", "message": str(failure), "type": failure.kind, "param": None}
            yield event({"error": {**error, "code": failure.status}})
            continue
        text = texts[index].delta(progress) or ""
        if start == 0:
            text = dialect.prefix(sequence) + text
        yield event({**head, "choices": [dialect.choice(sequence, index, text, start, progress, True)]})
        sent[index] = progress.end
    if usage_prompts is not None:
        yield event({**head, "choices": [], "usage": dialect.final_usage(sequences, usage_prompts)})
    yield DONE


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise BadRequest("the server runs with --skip-tokenizer-init, which leaves only /generate")
    return state.tokenizer
