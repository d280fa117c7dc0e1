"""What an agent said to a model and heard from it, turn by turn, as samples to train on.

An agent that is no code of ours sends whole conversations, each with everything that was said before. A turn
whose conversation goes on where an earlier one ended belongs to the same chain; any other begins a chain of
its own: a second try, a helper of the agent, a history that was summarised. Each chain becomes a sample, and
each turn is trained on in one of them, but for what a later request puts in other words near its end.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from slime.utils.engine_meta import log_probs_within, nuclei_of_first
from slime.utils.types import Sample

Message = Mapping[str, Any]
_OF_ANY_PART = ("weight_version", "weight_versions", "finish_reason")
"""What an answer's ``meta_info`` says that holds for its first tokens too."""
_TOLD_TWICE = ("output_token_logprobs", "output_top_logprobs")
"""What it says that the record of a turn has as well, or that is not trained on."""
_CLOSES = "</think>"
_STATUS = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


class DriftKind(Enum):
    """How the tokens of a request compare with those that its chain holds."""

    CLEAN = "clean"
    """They go on where these end."""
    REALIGN = "realign"
    """They differ near the end: what differs is replaced, and not trained on any more."""
    FORK = "fork"
    """They differ before that: a chain of its own."""


@dataclass
class TurnRecord:
    """One answer of an engine.

    Attributes:
        prompt_ids: the whole conversation, as the engine got it.
        finish_reason: stop, length or abort.
        output_log_probs: the engine's, one for each of ``output_ids``.
        ill_formed: the answer has a call of a tool that cannot be read.
        meta_info: of the engine's answer; the version of its weights is in there.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float] = field(default_factory=list)
    ill_formed: bool = False
    meta_info: Mapping[str, Any] = field(default_factory=dict)


class PlainMessage(NamedTuple):
    """What of a message tells whether two are the same; not its thoughts, which agents rewrite."""

    role: str
    content: str
    calls: list[tuple[str, Any]]


class _Piece(NamedTuple):
    """Tokens that came together: of the model if they have an answer, else of the agent."""

    length: int
    turn: TurnRecord | None = None


@dataclass
class Chain:
    """Turns that continue one another.

    Attributes:
        messages: what was said, the last answer included.
        tokens: all of them, as the model knows them.
        pieces: of the tokens: the first prompt, then answers and what came between them.
        realigned: how many tokens were replaced, as requests rendered them otherwise.
        tool_errors: calls that cannot be read, and results that the agent says are errors.
        tools: hashes of those that the tokens tell of.
    """

    messages: list[PlainMessage]
    tokens: list[int]
    pieces: list[_Piece]
    turns: int = 0
    realigned: int = 0
    tool_errors: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: frozenset[int] = frozenset()

    def add(self, ids: Sequence[int], turn: TurnRecord | None = None) -> None:
        """Goes on with these tokens."""
        self.tokens += ids
        self.pieces.append(_Piece(len(ids), turn))

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens. An answer that loses a part of itself is not trained on."""
        self.realigned += len(self.tokens) - length
        del self.tokens[length:]
        kept: list[_Piece] = []
        for piece in self.pieces:
            if length >= piece.length:
                kept.append(piece)
            elif length > 0:
                kept.append(_Piece(length))
            length -= piece.length
        self.pieces = [piece for piece in kept if piece.length]


class TrajectoryManager:
    """The chains of each session.

    Args:
        fork_threshold_tokens: how many tokens at the end of a chain may be replaced where a request renders
            the same conversation otherwise.
    """

    def __init__(self, *, fork_threshold_tokens: int = 1024) -> None:
        self._threshold = fork_threshold_tokens
        self._sessions: dict[str, list[Chain]] = {}

    def has_session(self, sid: str) -> bool:
        return sid in self._sessions

    def turn_count(self, sid: str) -> int:
        return sum(chain.turns for chain in self._sessions.get(sid, ()))

    def drop_session(self, sid: str) -> None:
        """Forget it; one that is unknown is forgotten already."""
        self._sessions.pop(sid, None)

    def continued(self, sid: str, messages: Sequence[Message | PlainMessage]) -> Chain | None:
        """The longest chain whose messages these begin with; of several the last, which was heard last."""
        chains = [c for c in self._sessions.get(sid, ()) if _begin_with(messages, c.messages)]
        return max(reversed(chains), key=lambda chain: len(chain.messages), default=None)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Message | PlainMessage],
        response_message: Message,
        metadata: Mapping[str, Any] | None = None,
        tool_errors: int = 0,
        begins_with: tuple[Chain, int] | None = None,
        tools: frozenset[int] = frozenset(),
    ) -> DriftKind:
        """Adds a turn to the chain that it goes on with, or begins one.

        Args:
            begins_with: a chain with whose tokens the prompt begins, and its turns when it was made of them.
            tool_errors: how many calls of it cannot be read, and results that came with it are errors.
            tools: hashes of those on offer.

        Raises:
            ValueError: the answer has another number of log-probs than of tokens.
        """
        if len(turn.output_log_probs) != len(turn.output_ids):
            raise ValueError(
                f"session {sid}: {len(turn.output_ids)} tokens but {len(turn.output_log_probs)} log-probs"
            )
        chains = self._sessions.setdefault(sid, [])
        held, turns = begins_with or (None, 0)
        unchanged = held is not None and held.turns == turns
        alone = unchanged and len(chains) == 1 and chains[0] is held  # then the messages need no second look
        chain, kind = held if alone else self.continued(sid, prompt_messages), DriftKind.FORK
        known = unchanged and chain is held
        if chain is not None:
            kind = self._align(chain, turn.prompt_ids, len(chain.tokens) if known else None)
        if chain is None or kind is DriftKind.FORK:
            chain = Chain([], list(turn.prompt_ids), [_Piece(len(turn.prompt_ids))])
            chains.append(chain)
        chain.add(turn.output_ids, _without_repetition(turn))
        chain.messages += plain_messages([*prompt_messages[len(chain.messages) :], response_message])
        chain.turns += 1
        chain.tools = chain.tools if known else tools
        chain.tool_errors += tool_errors
        chain.metadata |= metadata or {}
        return kind

    def _align(self, chain: Chain, prompt_ids: Sequence[int], common: int | None) -> DriftKind:
        """Makes the chain hold the prompt, if they are close enough; ``common`` if it is known how far."""
        held = chain.tokens
        common = _shared_length(held, prompt_ids) if common is None else common
        kind = DriftKind.CLEAN if common == len(held) else DriftKind.REALIGN
        if kind is DriftKind.REALIGN:
            if len(held) - common > self._threshold or common < chain.pieces[0].length:
                return DriftKind.FORK
            chain.cut(common)
        if rest := prompt_ids[common:]:
            chain.add(rest)
        return kind

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """A sample for each chain, in the order in which they began; none without a turn.

        Several samples share the index of ``base_sample`` as their execution.

        Args:
            base_sample: what they are copies of; its own response is left out.
            max_sample_tokens: longer ones are cut off, and TRUNCATED; 0 for any length.
        """
        chains = self._sessions.get(sid, [])
        samples = [_sample_of(chain, base_sample, max_sample_tokens) for chain in chains]
        for at, (sample, chain) in enumerate(zip(samples, chains, strict=True)):
            sample.reward = reward
            sample.metadata |= _counts(chain, chains[:at]) | chain.metadata | dict(extra_metadata or {})
            if len(samples) > 1:
                sample.rollout_id = base_sample.index
        return samples


def _counts(chain: Chain, earlier: Sequence[Chain]) -> dict[str, int]:
    """What metrics say of a chain beside its turns, where there is any of it."""
    shared = max((_shared_length(chain.tokens, other.tokens) for other in earlier), default=0)
    counts = {
        "realigned_tokens": chain.realigned,
        "duplicated_prefix_tokens": shared,
        "tool_errors": chain.tool_errors,
    }
    return {name: count for name, count in counts.items() if count}


def _sample_of(chain: Chain, base_sample: Sample, longest: int) -> Sample:
    first, *others = chain.pieces
    sample, end = deepcopy(base_sample), first.length
    sample.tokens, sample.response, sample.response_length = chain.tokens[:end], "", 0
    sample.loss_mask = sample.rollout_log_probs = None
    sample.weight_versions, sample.version_spans = [], []
    cut = False
    for piece in others:
        start, end = end, end + piece.length
        room = longest - len(sample.tokens) if longest else piece.length
        cut = cut or room < piece.length
        _append(sample, chain.tokens[start : min(end, start + max(room, 0))], piece.turn)
    last = next((piece.turn for piece in reversed(others) if piece.turn), None)
    reason = last.finish_reason if last else "stop"
    sample.status = Sample.Status.TRUNCATED if cut else _STATUS.get(reason, Sample.Status.COMPLETED)
    sample.metadata = {**sample.metadata, "round_number": sum(piece.turn is not None for piece in others)}
    return sample


def _append(sample: Sample, ids: list[int], turn: TurnRecord | None) -> None:
    if not ids:
        return
    if turn is None:
        sample.append_response_tokens(tokens=ids, trainable=False)
        return
    meta, log_probs = turn.meta_info, turn.output_log_probs
    if len(ids) < len(turn.output_ids):  # what is said of each token of the answer does not fit a part of it
        log_probs = list(log_probs_within(meta, log_probs))[: len(ids)]
        kept = {key: meta[key] for key in _OF_ANY_PART if key in meta}
        meta = {**kept, **nuclei_of_first(meta, len(ids))}
    sample.append_response_tokens(tokens=ids, log_probs=log_probs, meta_info=meta)


def _without_repetition(turn: TurnRecord) -> TurnRecord:
    """What a chain keeps of a turn: neither its prompt, which the chain holds, nor its tokens a second time.

    Those of all turns would be the square of a conversation, and the engine has a list for each token, all of
    which Python's garbage collector would go through again and again.
    """
    meta = {name: value for name, value in turn.meta_info.items() if name not in _TOLD_TWICE}
    ids, log_probs = list(turn.output_ids), list(turn.output_log_probs)  # who is told of the turn has its own
    return replace(turn, prompt_ids=[], output_ids=ids, output_log_probs=log_probs, meta_info=meta)


def _begin_with(messages: Sequence[Message | PlainMessage], said: Sequence[PlainMessage]) -> bool:
    return len(said) <= len(messages) and all(map(_is_said, messages, said))


def _is_said(message: Message | PlainMessage, said: PlainMessage) -> bool:
    """Whether a message is this one. No object is made of it: each turn has the whole history."""
    if isinstance(message, PlainMessage):
        return message == said
    return message["role"] == said.role and _text(message) == said.content and _calls(message) == said.calls


def plain_messages(messages: Sequence[Message | PlainMessage]) -> list[PlainMessage]:
    """Role, text and calls of tools of each."""
    return [m if isinstance(m, PlainMessage) else plain_message(m) for m in messages]


def plain_message(message: Message) -> PlainMessage:
    """Role, text and calls of tools."""
    return PlainMessage(message["role"], _text(message), _calls(message))


def _text(message: Message) -> str:
    """What was said, without the thoughts before it."""
    content = flatten_content(message.get("content"))
    return content.rpartition(_CLOSES)[2].strip() if message["role"] == "assistant" else content


def _calls(message: Message) -> list[tuple[str, Any]]:
    called = message.get("tool_calls")
    return [_plain_call(call) for call in called] if called else []


def _plain_call(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and arguments, which are JSON text or what that means; ids are made up by whoever passes it on."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return function.get("name", ""), arguments


def _shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long the beginning is that both have."""
    longest = min(len(one), len(other))
    if one[:longest] == other[:longest]:
        return longest
    # parts are compared as lists are: token by token in Python costs as much as a turn at 32k of them
    lengths = range(1, longest + 1)
    return bisect_left(lengths, True, key=lambda n: one[:n] != other[:n])


def flatten_content(c: Any) -> str:
    """The text of a message's content, which may be text or a list of parts."""
    if c is None:
        return ""
    if isinstance(c, str):
        return c
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in c)
