"""Turns a ``/generate`` body into sequences."""

import uuid
from dataclasses import dataclass, replace
from typing import Any

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import GenerateBody
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sampling_params import (
    AS_MANY_AS_FIT,
    SamplingParams,
    parse_sampling_params,
)
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs

MAX_SEQUENCES = 8192
_KEPT_FREE = 6
"""Tokens of the context that prompts leave free."""
_UNUSED = 2
"""Tokens of the context that prompt and response leave free."""
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "custom_logit_processor",
    "session_id",
    "session_params",
    "return_hidden_states",
    "sampling_logprobs_mode",
    "return_entropy",
    "return_indexer_topk",
    "max_thinking_tokens",
    "bootstrap_room",
)


@dataclass(frozen=True)
class Generation:
    """Sequences of one request; ``single`` if the answer is an object rather than an array."""

    sequences: list[Sequence]
    single: bool


def check_unsupported(data: dict[str, Any]) -> None:
    refused = [name for name in _UNSUPPORTED if data.get(name) not in (None, False, [], {}, "")]
    if refused:
        raise BadRequest(f"not supported by the embedded engine: {', '.join(refused)}")


def make_generation(state: ServerState, body: GenerateBody) -> Generation:
    """One sequence per prompt and sample, prompt by prompt.

    Raises:
        BadRequest: a field that does not fit the others, the model or its context.
    """
    prompts, single = _prompts(state, body)
    count = len(prompts)
    params = _params(state, body, count)
    fitted = [fit_to_context(state, *pair) for pair in zip(prompts, params, strict=True)]
    options = _logprob_options(state, body, [ids for ids, _ in fitted])
    rids = _rids(body.rid, count, single)
    routes_from = _routes_from(state, body, min(len(ids) for ids, _ in fitted))
    sequences = []
    masks = _masks(state, body, params)
    adapters = _adapters(body, count, single)
    for (ids, param), option, rid, mask, name in zip(fitted, options, rids, masks, adapters, strict=True):
        prompt = SequenceInputs(ids)
        for sample in range(param.n):
            own_rid = rid if param.n == 1 else f"{rid}_{sample}"
            seed = state.noise_seed(param.sampling_seed, sample)
            sequence = Sequence(own_rid, prompt, param, option, seed, routes_from=routes_from, lora_path=name)
            sequence.tells_mask = mask
            sequences.append(sequence)
    if len({s.rid for s in sequences}) < len(sequences):
        raise BadRequest("rid: two responses of this request would have the same id")
    taken = [s.rid for s in sequences if s.rid in state.live_rids]
    if taken:
        raise BadRequest(f"rid {taken[0]!r} is in use")
    return Generation(sequences, single and len(sequences) == 1)


def fit_to_context(
    state: ServerState, prompt: list[int], params: SamplingParams
) -> tuple[list[int], SamplingParams]:
    """Checks a prompt; cuts it and its response to the context only under ``--allow-auto-truncate``."""
    if not prompt:
        raise BadRequest("input_ids: the prompt is empty")
    vocab, context = state.config.shape.vocab_size, state.context_length
    if min(prompt) < 0 or max(prompt) >= vocab:
        wrong = next(token for token in prompt if not 0 <= token < vocab)
        raise BadRequest(f"input_ids: token id {wrong} is not in [0, {vocab})")
    limit = min(context, state.max_total_tokens)
    if not state.args.allow_auto_truncate:
        return prompt, _fitted(params, len(prompt), context, limit)
    if len(prompt) + params.max_new_tokens <= limit and len(prompt) < context:
        return prompt, params
    prompt = prompt[: limit - 1]
    return prompt, _shortened(params, limit - len(prompt))


def _fitted(params: SamplingParams, length: int, context: int, limit: int) -> SamplingParams:
    """Fits a response into the context as SGLang does: it keeps some tokens free, and ends a response before
    the last two of the context.
    """
    if length >= limit - _KEPT_FREE:
        raise BadRequest(
            f"{length} prompt tokens: too many for a context of {limit} tokens, of which {_KEPT_FREE} stay "
            f"free (wanted: fewer than {limit - _KEPT_FREE})"
        )
    if params.max_new_tokens != AS_MANY_AS_FIT and length + params.max_new_tokens > context:
        raise BadRequest(
            f"{length} prompt tokens and max_new_tokens {params.max_new_tokens} exceed the context of "
            f"{context} tokens"
        )
    return _shortened(params, limit - _UNUSED - length)


def _shortened(params: SamplingParams, room: int) -> SamplingParams:
    if params.max_new_tokens <= room:
        return params
    return replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))


def _prompts(state: ServerState, body: GenerateBody) -> tuple[list[list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("wanted one of text and input_ids")
    if body.text is not None:
        if state.tokenizer is None:
            raise BadRequest("text: the server runs with --skip-tokenizer-init (wanted: input_ids)")
        texts = [body.text] if isinstance(body.text, str) else body.text
        _check_count(len(texts))
        prompts = [state.tokenizer.encode(text) for text in texts]
        single = isinstance(body.text, str)
    else:
        ids: list[Any] = body.input_ids or []
        if not ids:
            raise BadRequest("input_ids: the prompt is empty")
        single = isinstance(ids[0], int)
        prompts = [ids] if single else ids
    if not prompts:
        raise BadRequest("text: no prompts")
    _check_count(len(prompts))
    return prompts, single


def _check_count(responses: int) -> None:
    if responses > MAX_SEQUENCES:
        raise BadRequest(f"n: {responses} responses in one request (wanted: at most {MAX_SEQUENCES})")


def _routes_from(state: ServerState, body: GenerateBody, shortest: int) -> int | None:
    """The first token whose experts are told; no prompt has less than ``shortest``."""
    if not body.return_routed_experts:
        return None
    if not state.args.enable_return_routed_experts:
        raise BadRequest(
            "return_routed_experts: not recorded (wanted: a server with --enable-return-routed-experts)"
        )
    start = body.routed_experts_start_len or 0
    if start < 0:
        raise BadRequest(f"routed_experts_start_len {start}: wanted 0 or more")
    if start > shortest:
        raise BadRequest(f"routed_experts_start_len {start}: wanted at most {shortest}, the prompt's length")
    return start


def _adapters(body: GenerateBody, count: int, single: bool) -> list[str | None]:
    """The name of the adapter of each prompt."""
    if single and isinstance(body.lora_path, list):
        raise BadRequest("lora_path: a list, but there is a single prompt (wanted: a string)")
    return _per_prompt("lora_path", body.lora_path, count)


def _masks(state: ServerState, body: GenerateBody, params: list[SamplingParams]) -> list[bool]:
    """Whether the response to each prompt tells which tokens it was drawn among."""
    asked = [
        bool(mask) for mask in _per_prompt("return_sampling_mask", body.return_sampling_mask, len(params))
    ]
    most = state.args.sampling_mask_max_tokens
    for wanted, param in zip(asked, params, strict=True):
        if wanted and not (param.greedy or 1 < param.top_k <= most):
            raise BadRequest(f"return_sampling_mask: top_k {param.top_k} (wanted: 1 to {most})")
    return asked


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt, from one for all of them or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{name}: {len(value)} entries (wanted: {count}, one per prompt)")
    return value


def _params(state: ServerState, body: GenerateBody, count: int) -> list[SamplingParams]:
    raws = _per_prompt("sampling_params", body.sampling_params, count)
    params = [parse_sampling_params(raw or {}, state.config.shape.vocab_size) for raw in raws]
    _check_count(sum(p.n for p in params))
    _check_samples(body, {p.n for p in params})
    if state.tokenizer is None and any(p.stop or p.stop_regex for p in params):
        raise BadRequest("stop: the server runs with --skip-tokenizer-init (wanted: stop_token_ids)")
    return params


def _check_samples(body: GenerateBody, counts: set[int]) -> None:
    """Checks that, as in SGLang, a batch has one ``n``, and options of single prompts go with an ``n``
    of 1.
    """
    if len(counts) > 1:
        raise BadRequest(f"sampling_params: n is {' and '.join(map(str, sorted(counts)))} (wanted: one n)")
    if counts == {1}:
        return
    lists = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    given = [name for name in lists if isinstance(getattr(body, name), list)]
    if any(isinstance(entry, list) for entry in body.token_ids_logprob or []):
        given.append("token_ids_logprob")
    if given:
        raise BadRequest(f"{given[0]}: a list beside an n above 1 (wanted: one value for all prompts)")


def _rids(rid: str | list[str] | None, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if single:
        raise BadRequest("rid: a list, but there is a single prompt (wanted: a string)")
    if len(rid) != count or len(set(rid)) != count:
        raise BadRequest(f"rid: wanted {count} distinct ids, one per prompt")
    return rid


def _logprob_options(
    state: ServerState, body: GenerateBody, prompts: list[list[int]]
) -> list[LogprobOptions]:
    count = len(prompts)
    wanted = _per_prompt("return_logprob", body.return_logprob, count)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, count)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, count)
    ids: list[Any] = list(body.token_ids_logprob or [])
    nested = any(isinstance(entry, list) or entry is None for entry in ids)
    token_ids = _per_prompt("token_ids_logprob", ids, count) if nested else [ids] * count
    options = []
    for prompt, want, start, top, chosen in zip(prompts, wanted, starts, tops, token_ids, strict=True):
        options.append(_options(state, len(prompt), bool(want), start, top or 0, tuple(chosen or ())))
    return options


def _options(
    state: ServerState, length: int, wanted: bool, start: int | None, top: int, ids: tuple[int, ...]
) -> LogprobOptions:
    vocab = state.config.shape.vocab_size
    start = -1 if start is None else start
    if not -1 <= start <= length:
        raise BadRequest(f"logprob_start_len {start}: wanted -1 to {length}, the length of the prompt")
    if not 0 <= top <= vocab:
        raise BadRequest(f"top_logprobs_num {top}: wanted 0 to {vocab}")
    if any(not 0 <= token < vocab for token in ids):
        raise BadRequest(f"token_ids_logprob: wanted ids in [0, {vocab})")
    prompt_start = start if wanted and 0 <= start < length else None
    return LogprobOptions(wanted, prompt_start, top, ids)
