"""What adapters ask an engine for: answers that go on over updates of its weights, and over its end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any, Protocol

from slime.agent.adapters.session import OPENAI_PARAMS, Session, sampling_of_turn
from slime.agent.parsing import CALL_ENDS
from slime.agent.trajectory import TurnRecord
from slime.backends.embedded_engine.grammar.wanted import FIELDS as GRAMMARS
from slime.utils.cut_stops import PER_TOKEN, StopsAcrossCuts, TextOf
from slime.utils.engine_counters import PrefixCacheInfo, recomputed_tokens
from slime.utils.engine_meta import VersionSpans, merge_top_p, merge_versions
from slime.utils.http_utils import RETRY_PAUSE_S, BrokenAnswer, HttpStatusError, post, stream
from slime.utils.weight_clock import clock

FollowTokens = Callable[[list[Any]], Awaitable[None]]
"""Is told of the log-prob triples of all tokens so far."""
GoesOn = Callable[[Sequence[int]], bool]
"""Whether an answer with these tokens is not at its end, though the end of a call stands there."""

_RETRIES = 20
_BROKE_OFF = {"type": "abort", "message": "the engine broke off"}
_ADDED_UP = ("completion_tokens", "e2e_latency", "num_retractions")
_OF_THE_PROMPT = ("prompt_tokens", "cached_tokens")


async def engine_answer(
    url: str,
    body: Mapping[str, Any],
    follow: FollowTokens | None = None,
    *,
    end: int | None = None,
    goes_on: GoesOn | None = None,
    text_of: TextOf | None = None,
    headers: dict[str, str] | None = None,
) -> Any:
    """The engine's answer to a request; for what an update of the weights cuts off, it is asked again.

    So it is for the rest of a stream that breaks, as another engine may be there for it. What follows a
    grammar is asked for anew, as engines take none up in its middle; so ``follow``, which takes nothing
    back, is told nothing of it. What something else has ended stays aborted.

    Args:
        text_of: finds stop strings that an update cuts in two, of which no engine sees both parts.
        end: the token that ends an answer, which an abort may come upon.
        goes_on: where the end of a call has stopped it, whether that is none: then it is asked again too.

    Raises:
        HttpStatusError: the engine refuses, maybe in the middle of a stream, or breaks off again and again.
        httpx.TransportError: it cannot be reached.
    """
    parts, constrained = list[Any](), bool(body["sampling_params"].keys() & GRAMMARS.keys())
    in_vain = 0
    follow = None if constrained else follow
    stops = StopsAcrossCuts(body["sampling_params"].get("stop"), text_of)
    while True:
        so_far = [triple for part in parts for triple in tokens_of(part)]
        updates, updating = clock.updates, clock.updating
        asked = {**_rest(body, len(so_far)), **clock.cache_key()}
        asked["input_ids"] = body["input_ids"] + _ids(so_far) if so_far else body["input_ids"]
        answer = await _ask(url, asked, _behind(so_far, follow, stops), headers)
        stops.note(_ids(so_far), answer)
        if _is_aborted(answer):
            _note_end(answer["meta_info"], asked["sampling_params"], end)
        if goes_on and _stopped_by_call(answer) and goes_on(_ids([*so_far, *tokens_of(answer)])):
            if _has_room(asked, answer):
                parts.append(answer)
                continue
            answer["meta_info"]["finish_reason"] = {"type": "length", "length": len(tokens_of(answer))}
        broke_off = answer["meta_info"].get("finish_reason") == _BROKE_OFF
        interrupted = broke_off or updating or clock.updates != updates
        if not (_is_aborted(answer) and interrupted):
            return _joined([*parts, answer])
        if not constrained and (tokens_of(answer) or not broke_off):
            parts.append(answer)
        if broke_off:
            in_vain = await _pause_after(url, answer, in_vain)
        await clock.settled()


async def _pause_after(url: str, answer: Mapping[str, Any], in_vain: int) -> int:
    """Waits where an engine broke off without a token: it may be listed for a while yet.

    Returns:
        How often in a row that was so, by how often it was before.

    Raises:
        HttpStatusError: too often.
    """
    if tokens_of(answer):
        return 0
    if in_vain == _RETRIES:
        raise HttpStatusError("POST", url, 502, f"the answer broke off {in_vain + 1} times in a row")
    await asyncio.sleep(RETRY_PAUSE_S)
    return in_vain + 1


def tokens_of(answer: Mapping[str, Any]) -> list[Any]:
    """The log-prob, the id and the text of each token of an answer."""
    return answer["meta_info"].get("output_token_logprobs") or []


def _ids(triples: Sequence[Any]) -> list[int]:
    return [triple[1] for triple in triples]


def _stopped_by_call(answer: Mapping[str, Any]) -> bool:
    return (answer["meta_info"].get("finish_reason") or {}).get("matched") == CALL_ENDS


def _has_room(asked: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    most = asked["sampling_params"].get("max_new_tokens")
    return most is None or most > len(tokens_of(answer))


def _rest(body: Mapping[str, Any], made: int) -> dict[str, Any]:
    """The request for what is left of an answer that has so many tokens."""
    sampling = dict(body["sampling_params"])
    for name in ("max_new_tokens", "min_new_tokens"):
        if sampling.get(name) is not None:
            sampling[name] = max(sampling[name] - made, 0)
    return {**body, "sampling_params": sampling}


def _behind(so_far: list[Any], follow: FollowTokens | None, stops: StopsAcrossCuts) -> FollowTokens | None:
    """Tells ``follow`` of tokens with those before them."""
    if follow is None:
        return None

    async def tell(triples: list[Any]) -> None:
        found = stops.find(_ids(so_far), _ids(triples))
        await follow([*so_far, *triples[: found[0] if found else None]])

    return tell


def _is_aborted(answer: Mapping[str, Any]) -> bool:
    return (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort"


def _note_end(meta: dict[str, Any], sampling: Mapping[str, Any], end: int | None) -> None:
    """Gives an answer the reason by which its last token ended it, if the abort came upon that one."""
    ids = [triple[1] for triple in meta.get("output_token_logprobs") or []]
    if ids and ids[-1] == end and not sampling.get("ignore_eos"):
        meta["finish_reason"] = {"type": "stop", "matched": end}
    elif ids and len(ids) == sampling.get("max_new_tokens"):
        meta["finish_reason"] = {"type": "length", "length": len(ids)}


def _joined(parts: Sequence[Any]) -> Any:
    """One answer of those of which each goes on where the one before it was ended."""
    if len(parts) == 1:
        return parts[0]
    metas = [part["meta_info"] for part in parts]
    counts = [len(tokens_of(part)) for part in parts]
    meta = {**metas[-1], **{name: metas[0][name] for name in _OF_THE_PROMPT if name in metas[0]}}
    for name in PER_TOKEN:
        if name in meta:
            meta[name] = [row for each in metas for row in each[name]]
    for name in _ADDED_UP:
        if name in meta:
            meta[name] = sum(each.get(name, 0) for each in metas)  # what broke off knows no latency
    return {"meta_info": {**meta, **_joined_versions(metas, counts), **_joined_nuclei(metas, counts)}}


def _joined_versions(metas: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """Which weights made which tokens, and how many tokens were computed again for that."""
    made, spans, counters = 0, VersionSpans(), PrefixCacheInfo()
    for number, (meta, count) in enumerate(zip(metas, counts, strict=True)):
        spans, made = merge_versions(spans, made, meta, count), made + count
        counters.recomputed_tokens += recomputed_tokens(meta)
        if number:
            counters.add_resumed(meta)
    ends = accumulate(count for _, count in spans)
    versions = [
        {"version": version, "start": end - count, "end": end}
        for (version, count), end in zip(spans, ends, strict=True)
    ]
    return {"weight_versions": versions, "recomputed_tokens": counters.recomputed_tokens}


def _joined_nuclei(metas: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The nuclei of all tokens, where they are told in the manner of the original's SGLang."""
    keys, nuclei = ("top_p_token_ids", "top_p_token_offsets"), (list[int](), [0])
    if any(key not in meta for key in keys for meta in metas):
        return {}
    for meta, count in zip(metas, counts, strict=True):
        nuclei = merge_top_p(nuclei, meta, count) or nuclei
    return dict(zip(keys, nuclei, strict=True))


async def _ask(
    url: str, body: Mapping[str, Any], follow: FollowTokens | None, headers: dict[str, str] | None = None
) -> Any:
    """The engine's answer to one request; ``follow`` gets the log-prob triples so far as they come.

    What is there of a stream that breaks is an answer with the reason ``_BROKE_OFF``.

    Raises:
        HttpStatusError: the engine refuses, maybe in the middle of a stream.
        httpx.TransportError: it cannot be reached.
    """
    if follow is None:
        return await post(url, body, _RETRIES, headers)
    answer: Any = {"meta_info": {}}
    chunks = stream(url, {**body, "stream": True}, _RETRIES, headers)
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                answer = _checked(url, chunk)
                await follow(tokens_of(answer))
    except BrokenAnswer:
        pass
    except HttpStatusError as error:
        # Without a single token whoever opened it has tried again.
        if not (tokens_of(answer) and error.retryable):
            raise
    if answer["meta_info"].get("finish_reason"):
        return answer
    return {**answer, "meta_info": {**answer["meta_info"], "finish_reason": dict(_BROKE_OFF)}}


def _checked(url: str, chunk: Any) -> Any:
    """A chunk of an answer; the HTTP status of a stream that fails is 200 all the same."""
    error = chunk.get("error") if isinstance(chunk, dict) else None
    if error:
        told = error if isinstance(error, dict) else {"message": error}
        code = told.get("code")  # some servers give a name here
        status = code if isinstance(code, int) and code else 500
        raise HttpStatusError("POST", url, status, str(told.get("message", told)))
    if not isinstance(chunk, dict) or not isinstance(chunk.get("meta_info"), dict):
        raise HttpStatusError("POST", url, 502, f"found {chunk!r:.200} in its stream (wanted: meta_info)")
    return chunk


class HasEngine(Protocol):
    """An adapter."""

    sglang_url: str


async def call_sglang_generate(
    prompt_ids: Sequence[int],
    session: Session,
    body: Mapping[str, Any],
    *,
    adapter: HasEngine,
    session_id: str | None = None,
) -> TurnRecord:
    """Asks the engine for what follows these tokens; an adapter of one's own records the turn.

    Args:
        adapter: whose ``text_of``, if it has that, finds stop strings that an update cuts in two.
        session: whose sampling parameters come before those of ``body``.
        body: a request in OpenAI's API.
        session_id: routers send requests with the same one to the same engine.

    Raises:
        Refused: the prompt leaves no room for an answer.
        HttpStatusError: the engine refuses.
    """
    params = {ours: body[name] for name, ours in OPENAI_PARAMS.items() if body.get(name) is not None}
    sampling = sampling_of_turn(session, params, len(prompt_ids))
    request = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
    headers = {"X-SMG-Routing-Key": session_id} if session_id else None
    text_of = getattr(adapter, "text_of", None)
    answer = await engine_answer(adapter.sglang_url, request, text_of=text_of, headers=headers)
    meta, triples = answer["meta_info"], tokens_of(answer)
    return TurnRecord(
        prompt_ids=list(prompt_ids),
        output_ids=[triple[1] for triple in triples],
        finish_reason=(meta.get("finish_reason") or {}).get("type", "stop"),
        output_log_probs=[triple[0] for triple in triples],
        meta_info=meta,
    )
