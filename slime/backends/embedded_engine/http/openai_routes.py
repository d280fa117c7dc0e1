"""``/v1/completions`` and ``/v1/chat/completions``."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import GenerateBody, read_json, validated
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.openai_bodies import ChatBody, CompletionBody, sampling_params_of
from slime.backends.embedded_engine.http.openai_objects import (
    chat_logprobs,
    completion_logprobs,
    finish_fields,
    usage,
)
from slime.backends.embedded_engine.http.prompts import Generation, make_generation
from slime.backends.embedded_engine.http.responses import final_text
from slime.backends.embedded_engine.http.running import run_streaming, run_to_end
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

    def __init__(self, tokenizer: Tokenizer, logprobs: bool, echo: bool = False) -> None:
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.echo = echo

    def head(self, state: ServerState, chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id_prefix + uuid.uuid4().hex,
            "object": self.chunk_name if chunk else self.name,
            "created": int(time.time()),
            "model": state.served_model_name,
        }

    def prefix(self, sequence: Sequence) -> str:
        return self.tokenizer.decode(sequence.prompt_ids) if self.echo else ""

    def choice(
        self, sequence: Sequence, index: int, text: str, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        logprobs = completion_logprobs(sequence, self.tokenizer, start, end) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, **finish_fields(sequence, progress)}


class ChatDialect(Dialect):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(
        self, sequence: Sequence, index: int, text: str, start: int, progress: Progress, chunk: bool
    ) -> dict[str, Any]:
        end = progress.end
        logprobs = chat_logprobs(sequence, self.tokenizer, start, end) if self.logprobs else None
        message: dict[str, Any] = {"content": text}
        if not chunk or start == 0:
            message = {"role": "assistant", **message}
        if not chunk:
            message |= {"reasoning_content": None, "tool_calls": None}
        key = "delta" if chunk else "message"
        return {"index": index, key: message, "logprobs": logprobs, **finish_fields(sequence, progress)}


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    data = await read_json(request)
    body = validated(CompletionBody, data)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    texts = isinstance(body.prompt, str) or (bool(body.prompt) and isinstance(body.prompt[0], str))
    generation = make_generation(
        state,
        validated(
            GenerateBody,
            {
                "text" if texts else "input_ids": body.prompt,
                "sampling_params": sampling_params_of(data, body.max_tokens, body.seed),
                "return_logprob": body.logprobs is not None,
                "top_logprobs_num": body.logprobs,
                "rid": body.rid,
            },
        ),
    )
    dialect = Dialect(tokenizer, body.logprobs is not None, bool(body.echo))
    prompts = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
    return await _answer(request, body, dialect, generation, prompts)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """The response may fill the context unless ``max_tokens`` says otherwise."""
    data = await read_json(request)
    body = validated(ChatBody, data)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    if not body.messages or not all(isinstance(m.get("role"), str) for m in body.messages):
        raise BadRequest("messages: wanted at least one, each with a role")
    ids = tokenizer.render_chat(body.messages, **(body.chat_template_kwargs or {}))
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if limit is None:
        limit = max(min(state.context_length, state.max_total_tokens) - len(ids), 1)
    generation = make_generation(
        state,
        validated(
            GenerateBody,
            {
                "input_ids": ids,
                "sampling_params": sampling_params_of(data, limit, body.seed),
                "return_logprob": body.logprobs,
                "top_logprobs_num": body.top_logprobs,
                "rid": body.rid,
            },
        ),
    )
    return await _answer(request, body, ChatDialect(tokenizer, bool(body.logprobs)), generation, 1)


async def _answer(
    request: Request,
    body: CompletionBody | ChatBody,
    dialect: Dialect,
    generation: Generation,
    prompts: int,
) -> Response:
    state, sequences = state_of(request), generation.sequences
    if body.stream:
        with_usage = bool((body.stream_options or {}).get("include_usage"))
        events = _events(state, dialect, sequences, prompts if with_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")
    await run_to_end(state, request, sequences)
    choices = []
    for index, sequence in enumerate(sequences):
        text = dialect.prefix(sequence) + (final_text(sequence, dialect.tokenizer) or "")
        choices.append(dialect.choice(sequence, index, text, 0, sequence.progress, False))
    metadata = {"weight_version": state.engine.scheduler.weight_version}
    head = dialect.head(state, chunk=False)
    return json_response(
        {**head, "choices": choices, "usage": usage(sequences, prompts), "metadata": metadata}
    )


async def _events(
    state: ServerState, dialect: Dialect, sequences: list[Sequence], usage_prompts: int | None
) -> AsyncIterator[bytes]:
    """Chunks with what is new of each choice, and token counts at the end if they are wanted."""
    head = dialect.head(state, chunk=True)
    texts = [TextStream(state, s) for s in sequences]
    sent = [0] * len(sequences)
    async for index, progress in run_streaming(state, sequences):
        if not progress.finished and progress.end == sent[index]:
            continue
        sequence, start = sequences[index], sent[index]
        text = texts[index].delta(progress) or ""
        if start == 0:
            text = dialect.prefix(sequence) + text
        yield event({**head, "choices": [dialect.choice(sequence, index, text, start, progress, True)]})
        sent[index] = progress.end
    if usage_prompts is not None:
        yield event({**head, "choices": [], "usage": usage(sequences, usage_prompts)})
    yield DONE


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise BadRequest("the server runs with --skip-tokenizer-init, which leaves only /generate")
    return state.tokenizer
