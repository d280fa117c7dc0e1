"""``/generate``, ``/tokenize``, ``/detokenize``."""

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import (
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    read_body,
    read_json,
    validated,
)
from slime.backends.embedded_engine.http.prompts import check_unsupported, make_generation
from slime.backends.embedded_engine.http.responses import ResponseBuilder, final_text
from slime.backends.embedded_engine.http.running import run_to_end
from slime.backends.embedded_engine.http.state import ServerState, state_of
from slime.backends.embedded_engine.http.streaming import DONE, error_event, stream_generation
from slime.backends.embedded_engine.tokenizer import Tokenizer

router = APIRouter()


def json_response(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request) -> Response:
    data = await read_json(request)
    check_unsupported(data)
    body = validated(GenerateBody, data)
    state = state_of(request)
    try:
        generation = await state.beside(lambda: make_generation(state, body), body.text)
        await state.constrain(generation.sequences, bool(body.require_reasoning))
    except BadRequest as error:
        if not body.stream or error.kind == BadRequest.CONTRACT:
            raise
        return StreamingResponse(iter([error_event(error), DONE]), media_type="text/event-stream")
    builders = [
        ResponseBuilder(
            sequence,
            state.tokenizer,
            bool(body.return_text_in_logprobs),
            bool(body.return_prompt_token_ids),
        )
        for sequence in generation.sequences
    ]
    if body.stream:
        events = stream_generation(state, generation, builders)
        return StreamingResponse(events, media_type="text/event-stream")
    await run_to_end(state, request, generation.sequences)
    version = state.engine.scheduler.weight_version
    answers = [
        builder.build(final_text(sequence, state.tokenizer), version)
        for builder, sequence in zip(builders, generation.sequences, strict=True)
    ]
    return json_response(answers[0] if generation.single else answers)


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    tokens = await state.beside(
        lambda: [tokenizer.encode(text, body.add_special_tokens) for text in texts], texts
    )
    counts = [len(ids) for ids in tokens]
    single = isinstance(body.prompt, str)
    return json_response(
        {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": state.context_length,
        }
    )


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    state = state_of(request)
    tokenizer = _tokenizer(state)
    lists: list[Any] = body.tokens
    single = not lists or isinstance(lists[0], int)
    rows = [lists] if single else lists
    if any(not 0 <= token < state.config.shape.vocab_size for row in rows for token in row):
        raise BadRequest(f"tokens: wanted ids in [0, {state.config.shape.vocab_size})")
    texts = await state.beside(
        lambda: [tokenizer.decode(row, body.skip_special_tokens) for row in rows], rows
    )
    return json_response({"text": texts[0] if single else texts})


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.tokenizer is None:
        raise BadRequest("the server runs with --skip-tokenizer-init")
    return state.tokenizer
