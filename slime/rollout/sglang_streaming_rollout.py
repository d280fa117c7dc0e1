"""A generate function that reads the answer as it grows.

``--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`` gives the same
samples as the default one. What differs is when: a sample holds its tokens from the moment they were made, so
that an abort or a connection that breaks loses none of them.
"""

import asyncio
import copy
from contextlib import aclosing
from dataclasses import fields
from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import (
    GENERATE_RETRIES,
    get_model_url,
    policy_url,
    prepare_request,
    routing_headers,
    take_answer,
)
from slime.utils.http_utils import RETRY_PAUSE_S, BrokenAnswer, HttpStatusError, stream
from slime.utils.types import Sample

_ABORT = {"type": "abort"}
_FIELDS = tuple(field.name for field in fields(Sample))


async def generate_streaming(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Let the engine answer a prompt, or go on with a response that was aborted, token by token.

    Returns early, with status ABORTED and what there is, when the rollout is aborted. After a connection that
    broke it asks for the rest; the sample is ABORTED if that breaks again and again.
    """
    config = filled(GenerationConfig, args)
    for _ in range(GENERATE_RETRIES + 1):
        payload = prepare_request(config, sample, sampling_params, evaluation)
        if payload is None:
            return sample
        whole = await _stream_answer(config, sample, payload, sampling_params)
        if whole or GenerateState(args).aborted:
            return sample
    return sample


async def _stream_answer(
    config: GenerationConfig, sample: Sample, payload: dict[str, Any], sampling_params: dict[str, Any]
) -> bool:
    """Follow one stream; whether the engine ended it with a finish reason. If not, the sample is ABORTED."""
    before, state = _Before(sample), GenerateState(config.flat)
    chunk: dict[str, Any] | None = None
    chunks = stream(
        policy_url(config, sample),
        payload | {"stream": True},
        GENERATE_RETRIES,
        routing_headers(config.router, sample),
    )
    try:
        async with aclosing(chunks):
            async for event in chunks:
                chunk = _checked(config, event)
                before.restore()
                take_answer(config.flat, sample, chunk, sampling_params)
                if chunk["meta_info"].get("finish_reason"):
                    return True
                if state.aborted:
                    break
    except BrokenAnswer:
        pass
    except HttpStatusError as error:
        # Without a single token there is nothing to go on from, and whoever opened it has tried again.
        if chunk is None or not error.retryable:
            raise
    before.restore()
    if chunk is None:
        sample.status = Sample.Status.ABORTED
        await asyncio.sleep(0 if state.aborted else RETRY_PAUSE_S)  # its engine may be listed for a while yet
    else:
        meta = {**chunk["meta_info"], "finish_reason": _ABORT}
        take_answer(config.flat, sample, {**chunk, "meta_info": meta}, sampling_params)
    return False


class _Before:
    """A sample as it was before the call. Chunks repeat what came before, so each is added to that.

    Lists grow in place, and whoever holds one is to see it grow: so they are cut back, not replaced.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._values = {name: getattr(sample, name) for name in _FIELDS}
        self._lengths = {name: len(value) for name, value in self._values.items() if isinstance(value, list)}

    def restore(self) -> None:
        for name, value in self._values.items():
            if name in self._lengths:
                del value[self._lengths[name] :]
            setattr(self._sample, name, value)
        self._sample.spec_info = copy.copy(self._sample.spec_info)
        self._sample.prefix_cache_info = copy.copy(self._sample.prefix_cache_info)


def _checked(config: GenerationConfig, event: dict[str, Any]) -> dict[str, Any]:
    """A chunk of an answer; the HTTP status of a stream that fails is 200 all the same."""
    if error := event.get("error"):
        status = int(error.get("code") or 500)
        raise HttpStatusError("POST", get_model_url(config.router), status, str(error.get("message", error)))
    return event
