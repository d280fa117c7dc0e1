"""``/v1/completions`` and ``/v1/chat/completions``."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.grammar.wanted import FIELDS as GRAMMARS
from slime.backends.embedded_engine.http.answers import Reading
from slime.backends.embedded_engine.http.bodies import GenerateBody, read_json, validated
from slime.backends.embedded_engine.http.chat_messages import calls_within, chat_messages, split_final
from slime.backends.embedded_engine.http.chat_tools import ToolUse, tool_use
from slime.backends.embedded_engine.http.dialects import ChatDialect, Dialect
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.openai_bodies import ChatBody, CompletionBody, sampling_params_of
from slime.backends.embedded_engine.http.openai_objects import usage
from slime.backends.embedded_engine.http.prompts import Generation, make_generation
from slime.backends.embedded_engine.http.responses import final_text, version_spans
from slime.backends.embedded_engine.http.running import failure_of, run_streaming, run_to_end
from slime.backends.embedded_engine.http.state import ServerState, state_of
from slime.backends.embedded_engine.http.streaming import DONE, TextStream, event
from slime.backends.embedded_engine.reasoning import FORMATS as REASONING
from slime.backends.embedded_engine.sequence import Sequence
from slime.backends.embedded_engine.tokenizer import Tokenizer

router = APIRouter()
_LOOK_BACK = 16
"""Tokens at the end of a prompt that may open the reasoning."""


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
                "lora_path": body.lora_path,
            },
        ),
    )
    ids = bool(body.return_token_ids)
    dialect = Dialect(tokenizer, body.logprobs is not None, bool(body.echo), ids, ids)
    prompts = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
    await state.constrain(generation.sequences)
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
    tools = tool_use(data)
    ids = await _chat_ids(state, tokenizer, body, tools)
    reading = _reading(state, tokenizer, body, tools, ids)
    sampling = sampling_params_of(data, body, _limit(body))
    forcing = tools.params(state.args.tool_call_parser)
    if tools.forced and any(sampling.get(name) for name in GRAMMARS):
        raise BadRequest("tool_choice: a forced call beside response_format or another grammar (wanted: one)")
    if tools.active:
        # the marks of calls may be special tokens
        sampling["skip_special_tokens"] = False
    if not any(sampling.get(name) for name in GRAMMARS):
        sampling |= forcing
    generation = make_generation(
        state,
        validated(
            GenerateBody,
            {
                "input_ids": ids,
                "sampling_params": sampling,
                "return_logprob": body.logprobs,
                "top_logprobs_num": body.top_logprobs,
                "rid": body.rid,
                "lora_path": body.lora_path,
            },
        ),
    )
    dialect = ChatDialect(
        tokenizer,
        reading,
        logprobs=bool(body.logprobs),
        token_ids=ids_wanted[0],
        prompt_token_ids=ids_wanted[1],
    )
    await state.constrain(generation.sequences, _reasons(state, body))
    return await _answer(request, body, dialect, generation, 1)


def _limit(body: ChatBody) -> int | None:
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def _template(body: ChatBody) -> dict[str, Any]:
    """Arguments of the chat template."""
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
    return template


def _reading(
    state: ServerState, tokenizer: Tokenizer, body: ChatBody, tools: ToolUse, prompt: list[int]
) -> Reading:
    """How the response is to be read, which the prompt may have begun."""
    parser, reasoning = state.args.tool_call_parser, None
    if body.separate_reasoning:
        reasoning = REASONING.get(state.args.reasoning_parser or "")
    end = tokenizer.decode(prompt[-_LOOK_BACK:], skip_special_tokens=False)
    return Reading(
        tools=tools.functions,
        calls=tools.format(parser),
        reasoning=reasoning,
        begins_in_reasoning=reasoning is not None and reasoning.begins_in_reasoning(_template(body), end),
        reasoning_in_one=not body.stream_reasoning,
        numbers_ids=parser == "kimi_k2",
        calls_before=calls_within(body.messages),
    )


def _reasons(state: ServerState, body: ChatBody) -> bool:
    """Whether the model reasons before it answers."""
    form = REASONING.get(state.args.reasoning_parser or "")
    return form is not None and form.reasons(_template(body))


async def _generation(state: ServerState, body: GenerateBody) -> Generation:
    return await state.beside(lambda: make_generation(state, body), body.text)


async def _chat_ids(state: ServerState, tokenizer: Tokenizer, body: ChatBody, tools: ToolUse) -> list[int]:
    """The prompt of a conversation."""
    messages = chat_messages(body.messages, tokenizer.chat_takes_parts)
    messages, prefix = split_final(messages, bool(body.continue_final_message))
    texts = [str(message["content"]) for message in messages]
    template = {**_template(body), "tools": list(tools.callable) or None}
    return await state.beside(lambda: tokenizer.render_chat(messages, prefix, **template), [*texts, prefix])


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
        head = dialect.head(state, True, body.model)
        events = _events(state, dialect, head, sequences, prompts if with_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")
    await run_to_end(state, request, sequences)
    choices = []
    for index, sequence in enumerate(sequences):
        text = dialect.prefix(sequence) + (final_text(sequence, dialect.tokenizer) or "")
        part = await state.beside(partial(dialect.whole, text), text)
        choices.append(dialect.choice(sequence, index, part, 0, sequence.progress, False))
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
    answers = [dialect.stream() for _ in sequences]
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
        feed = partial(answers[index].feed, text, progress.finished)
        part = await state.aside(feed, answers[index].pending + len(text))
        if text and part.empty and not progress.finished:
            continue  # held back: what it is part of tells of its tokens
        yield event({**head, "choices": [dialect.choice(sequence, index, part, start, progress, True)]})
        sent[index] = progress.end
    if usage_prompts is not None:
        yield event({**head, "choices": [], "usage": dialect.final_usage(sequences, usage_prompts)})
    yield DONE


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise BadRequest("the server runs with --skip-tokenizer-init, which leaves only /generate")
    return state.tokenizer
