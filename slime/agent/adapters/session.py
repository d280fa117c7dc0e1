"""An agent at work, and what it is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from slime.agent.parsing import ParsedModelOutput
from slime.agent.trajectory import Chain, TurnRecord

Messages = Sequence[Mapping[str, Any]]
OPENAI_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}
"""Fields of OpenAI's requests, and the engine's sampling parameters that they are."""


class Refused(Exception):
    """A request that is not answered: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Session:
    """An agent at work.

    Attributes:
        responses: those that are kept, by their ids.
        adapter: with which engines answer, where the task that opened it has named one.
        policy: that answers all turns, where there are several; None for those that requests name.
        closed: no turn begins any more.
        dropped: nor is one recorded.
        running: turns under way.
        aborted: the engine gave up on one of its turns, so what the agent made is not whole.
    """

    sampling: dict[str, Any]
    max_context_tokens: int
    adapter: str | None = None
    policy: str | None = None
    responses: "dict[str, KeptResponse]" = field(default_factory=dict)
    closed: bool = False
    dropped: bool = False
    aborted: bool = False
    running: int = 0


class KeptResponse(NamedTuple):
    """One of OpenAI's responses.

    Attributes:
        told: what the agent was told.
        said: the conversation with the answer, for a request that goes on with it.
    """

    told: dict[str, Any]
    said: list[dict[str, Any]]


class TurnRequest(NamedTuple):
    """Whose turn it is, and what the request says.

    Attributes:
        single_call: the answer may call one tool at most.
        thinks: what the chat template is told of thoughts; None for what it does by itself.
        model: the policy that is asked, where there are several and the session is of none.
    """

    sid: str
    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None
    params: Mapping[str, Any]
    single_call: bool = False
    thinks: bool | None = None
    model: str | None = None


class Prompt(NamedTuple):
    """What the engine gets for a turn.

    Attributes:
        heard: messages that no earlier turn had.
        begins_with: the chain whose tokens it begins with, and how many turns that had.
        tools: hashes of those on offer.
    """

    ids: list[int]
    messages: Messages
    heard: Messages
    begins_with: tuple[Chain, int] | None
    tools: frozenset[int]


@dataclass
class Turn:
    """What the agent is told of an answer.

    Attributes:
        log_probs: of each token, with its id.
        top_log_probs: of the likeliest in the place of each token, if asked for.
        stop_string: of those that the request has, the one that ended it, if one did.
    """

    output: ParsedModelOutput
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    log_probs: list[tuple[float, int]] = field(default_factory=list)
    top_log_probs: list[list[tuple[float, int]]] = field(default_factory=list)
    cached_tokens: int = 0
    stop_string: str | None = None

    @classmethod
    def of(cls, parsed: ParsedModelOutput, record: TurnRecord, params: Mapping[str, Any]) -> "Turn":
        """What is told of an answer of the engine to a request with these sampling parameters."""
        meta, asked = record.meta_info, params.get("stop") or ()
        matched = (meta.get("finish_reason") or {}).get("matched")
        return cls(
            parsed,
            record.finish_reason,
            len(record.prompt_ids),
            len(record.output_ids),
            list(zip(record.output_log_probs, record.output_ids, strict=True)),
            [[(p, token) for p, token, *_ in row] for row in meta.get("output_top_logprobs") or []],
            meta.get("cached_tokens", 0),
            matched if matched in ([asked] if isinstance(asked, str) else asked) else None,
        )


def hashes_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Tells tools apart by all that is said of them, and holds none of it for each conversation."""
    return frozenset(hash(orjson.dumps(tool, option=orjson.OPT_SORT_KEYS)) for tool in tools)


def reminder(text: str) -> dict[str, str]:
    """A system message in the middle of a chat, where templates do not want one, as the user's."""
    return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}


def sampling_of_turn(session: Session, params: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """What a request asks for and the session's own, which wins; the smallest bound of new tokens counts.

    Raises:
        Refused: the prompt leaves no room, or the request has no number of tokens at most or no stop strings
            where it says some.
    """
    if type(asked := params.get("max_new_tokens", 1)) is not int or asked < 1:
        raise Refused(400, f"max_new_tokens {asked!r:.200} (wanted: at least 1)")
    _check_stop(params.get("stop", []))
    own = {key: value for key, value in session.sampling.items() if value is not None}
    limits = [found["max_new_tokens"] for found in (own, params) if "max_new_tokens" in found]
    if session.max_context_tokens:
        limits.append(session.max_context_tokens - prompt_tokens)
        if limits[-1] <= 0:
            told = f"{prompt_tokens} tokens > {session.max_context_tokens} maximum context length"
            raise Refused(400, f"prompt is too long: {told} (wanted: fewer)")  # in words that agents look for
    return {**params, **own, **({"max_new_tokens": min(limits)} if limits else {})}


def _check_stop(stop: Any) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(text and isinstance(text, str) for text in texts):
        raise Refused(400, f"stop {stop!r:.200} (wanted: a text or a list of texts, none of them empty)")
