"""What adapters share: sessions, and a turn from messages to tokens, to the engine and back."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from aiohttp import web
from transformers import PreTrainedTokenizerBase

from slime.agent.adapters import refusals
from slime.agent.adapters.engine import call_sglang_generate, engine_answer, tokens_of
from slime.agent.adapters.forced import ended_by_call
from slime.agent.adapters.growing import Follow, GrowingAnswer, refused_by
from slime.agent.adapters.rendering import Rendering, Tools, with_text
from slime.agent.adapters.session import (
    Messages,
    Prompt,
    Refused,
    Session,
    Turn,
    TurnRequest,
    hashes_of,
    sampling_of_turn,
)
from slime.agent.parsing import ParsedModelOutput, check_parsers, parse_model_output, thoughts_are_open
from slime.agent.trajectory import (
    Chain,
    TrajectoryManager,
    TurnRecord,
    flatten_content,
    plain_messages,
)
from slime.backends.embedded_engine.grammar.wanted import FIELDS as GRAMMARS
from slime.utils.engine_meta import asks_for_nuclei
from slime.utils.http_utils import HttpStatusError
from slime.utils.types import Sample

__all__ = ["BaseAdapter", "Refused", "Session", "TurnRecord", "call_sglang_generate", "flatten_content"]

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a body raises that is no request: RecursionError of a thousand brackets."""
_FORK_THRESHOLD = 1024
_ENDED_KEPT = 10_000
_POLL_S = 0.02
_TAIL = 32
"""Tokens at the end of a prompt in which a template may have opened the thoughts."""


class BaseAdapter:
    """Sessions and their turns. A kind of API adds routes to ``app``, which is served by whoever makes it.

    Every request to the engine begins with the very tokens that it made in earlier turns of the conversation,
    so that what is trained on is what was sampled.

    Args:
        sglang_url: of ``/generate``.
        tool_parser, reasoning_parser: see `slime.agent.parsing.parse_model_output`.
        max_turns_per_sid: more are refused with 429.
        fork_threshold_tokens: see `TrajectoryManager`.
        debug_callback: called with the id of the session and its `TurnRecord` after each turn.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[str, TurnRecord], None] | None = None,
    ) -> None:
        check_parsers(tool_parser, reasoning_parser)
        self._tokenizer, self.sglang_url = tokenizer, sglang_url
        self._rendering = Rendering(tokenizer)
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._max_turns, self._debug = max_turns_per_sid, debug_callback
        threshold = _FORK_THRESHOLD if fork_threshold_tokens is None else fork_threshold_tokens
        self.trajectories = TrajectoryManager(fork_threshold_tokens=threshold)
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # in the order of their ends
        self.app = web.Application(client_max_size=refusals.BODY_LIMIT, middlewares=[refusals.look_at_head])
        self.app[refusals.REFUSAL] = self.refusal
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/v1/models", self._models)

    def refusal(self, status: int, reason: str) -> web.Response:
        """The answer to what is refused, as clients of this API read it."""
        return web.json_response({"error": reason}, status=status)

    def open_session(
        self, sid: str, *, sampling_defaults: Mapping[str, Any] | None = None, max_context_tokens: int = 0
    ) -> None:
        """Requests with this id are answered from now on.

        Args:
            sampling_defaults: parameters of every turn. A request adds to them and changes none, or an
                agent's temperature would make it sample from another distribution than is trained; the
                smaller ``max_new_tokens`` counts.
            max_context_tokens: of prompt and answer together; 0 for any number.

        Raises:
            ValueError: it is open already.
        """
        if sid in self._sessions:
            raise ValueError(f"session {sid!r} is open already")
        self._ended.pop(sid, None)
        self._sessions[sid] = Session(dict(sampling_defaults or {}), max_context_tokens)

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Closes a session and returns its samples; none if it had no turn, or was finished before.

        A session that an abort cut through gives ``base_sample`` back, ABORTED. An update of the weights does
        not: its turns go on.

        Args:
            wait_timeout: seconds that turns under way have; later ones are not recorded.
        """
        session = self._sessions.get(sid)
        if session is None:
            return []
        session.closed = True
        deadline = time.monotonic() + wait_timeout
        while session.running and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        samples = self.trajectories.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
        )
        self.drop_session(sid)
        if session.aborted:
            base_sample.status = Sample.Status.ABORTED
            return [base_sample]
        return samples

    def drop_session(self, sid: str) -> None:
        """Forgets a session with all that was said; turns under way are not recorded."""
        session = self._sessions.pop(sid, None)
        if session is not None:
            session.closed = True
            self._ended[sid] = None
            if len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]
        self.trajectories.drop_session(sid)

    async def turn(self, asked: TurnRequest, follow: Follow | None = None, top_log_probs: int = 0) -> Turn:
        """Asks the engine for the next message of a conversation.

        Args:
            follow: is told of the answer while it is written; calls of tools are known only at its end.
            top_log_probs: how many tokens' to tell in the place of each.

        Raises:
            Refused: nobody knows the session or it is closed, it has had its turns or has no room left, the
                engine gave up or does not take what was asked for.
        """
        session = self.open_session_of(asked.sid)
        session.running += 1
        try:
            return await self._take_turn(session, asked, follow, top_log_probs)
        except (HttpStatusError, httpx.TransportError) as error:
            raise refused_by(error, asked.params) from error
        finally:
            session.running -= 1

    def open_session_of(self, sid: str, takes_turn: bool = True) -> Session:
        """Known from the head of a request, before its body is read.

        Raises:
            Refused: it is not open, or has had its turns and shall take one.
        """
        session = self._sessions.get(sid)
        if session is None and sid not in self._ended:
            raise Refused(401, "no session has this key (wanted: the id of one that is open)")
        if session is None or session.closed:
            raise Refused(503, f"session {sid!r} is closed")
        taken = self.trajectories.turn_count(sid) + session.running
        if takes_turn and self._max_turns is not None and taken >= self._max_turns:
            raise Refused(429, f"session {sid!r} has had its {self._max_turns} turns")
        return session

    async def _take_turn(
        self, session: Session, asked: TurnRequest, follow: Follow | None, top_log_probs: int
    ) -> Turn:
        prompt = self._prompt_of(asked)
        body = self._request(session, asked, prompt.ids, top_log_probs)
        growing = GrowingAnswer(
            self._tokenizer,
            calls=bool(self._tool_parser and asked.tools),
            reasons=self._reasoning_parser is not None,
        )

        async def tell(triples: list[Any]) -> None:
            if follow and any(new := growing.more(triples)):
                await follow(*new)

        reads = functools.partial(self._parsed, asked.tools, self._thinks(prompt.ids))
        answer = await engine_answer(
            self.sglang_url,
            body,
            tell if follow else None,
            end=self._tokenizer.eos_token_id,
            text_of=self.text_of,
            goes_on=(lambda ids: not reads(ids).has_whole_call) if asked.single_call else None,
        )
        meta = answer["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type", "stop")
        if reason == "abort":
            session.aborted = True
            raise Refused(503, "the engine stopped generating")
        triples = tokens_of(answer)
        record = TurnRecord(
            prompt_ids=prompt.ids,
            output_ids=[triple[1] for triple in triples],
            finish_reason=reason,
            output_log_probs=[triple[0] for triple in triples],
            meta_info=meta,
        )
        parsed = reads(record.output_ids)
        record.ill_formed = parsed.ill_formed
        if follow and any(new := growing.rest(parsed)):
            await follow(*new)
        if not session.closed:  # or it would come back after it was finished
            errors = sum(bool(message.get("is_error")) for message in prompt.heard) + parsed.ill_formed
            self._record(asked.sid, record, parsed, errors, prompt)
        return Turn.of(parsed, record, asked.params)

    def prompt_tokens(self, asked: TurnRequest) -> int:
        """How many tokens the engine would get for this turn.

        Raises:
            Refused: the template fails on the messages, or they hold what is no text.
        """
        return len(self._prompt_of(asked)[0])

    def _prompt_of(self, asked: TurnRequest) -> Prompt:
        """The prompt of a turn."""
        messages = [with_text(message) for message in asked.messages]
        plain = plain_messages(messages)
        chain = self.trajectories.continued(asked.sid, plain)
        heard = messages[len(chain.messages) if chain else 0 :]
        tools = hashes_of(asked.tools or ())
        tells_them = chain is not None and tools <= chain.tools
        held = self._held_ids(chain, messages, asked.tools) if chain and tells_them else None
        ids = self._rendering.tokens(messages, asked.tools) if held is None else held
        return Prompt(ids, plain, heard, (chain, chain.turns) if chain and held else None, tools)

    def _request(
        self, session: Session, asked: TurnRequest, prompt: Sequence[int], top_log_probs: int
    ) -> dict[str, Any]:
        """What the engine is asked."""
        sampling = sampling_of_turn(session, asked.params, len(prompt))
        if asked.single_call and asked.tools and self._tool_parser:
            sampling = ended_by_call(sampling)
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        body |= asks_for_nuclei(sampling)
        if top_log_probs:
            body["top_logprobs_num"] = top_log_probs
        if self._reasoning_parser is not None and sampling.keys() & GRAMMARS.keys():
            # the grammar is of the answer, which the reasoning precedes
            body["require_reasoning"] = True
        return body

    def _thinks(self, prompt: Sequence[int]) -> bool:
        """Whether an answer begins in thoughts, which the template has opened."""
        if self._reasoning_parser is None:
            return False
        return thoughts_are_open(self._tokenizer.decode(prompt[-_TAIL:]))

    def _parsed(self, tools: Tools, thinks: bool, ids: Sequence[int]) -> ParsedModelOutput:
        return parse_model_output(
            self.text_of(ids),
            tools_schema=tools,
            tool_parser_name=self._tool_parser,
            reasoning_parser_name=self._reasoning_parser,
            thinks=thinks,
        )

    def _record(
        self,
        sid: str,
        record: TurnRecord,
        parsed: ParsedModelOutput,
        tool_errors: int,
        prompt: Prompt,
    ) -> None:
        said: dict[str, bool] = {}
        if parsed.tool_calls:
            said["use_tool"] = True
        if parsed.ill_formed:
            said["ill_formed"] = True
        if record.finish_reason == "length":
            said["truncated"] = True
        self.trajectories.record_turn(
            sid,
            turn=record,
            prompt_messages=prompt.messages,
            response_message=self.reply_message(parsed),
            metadata=said,
            tool_errors=tool_errors,
            begins_with=prompt.begins_with,
            tools=prompt.tools,
        )
        if self._debug is not None:
            self._debug(sid, record)

    def reply_message(self, parsed: ParsedModelOutput) -> dict[str, Any]:
        """The answer as a message of a chat, which the agent will send back in its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": vars(call)}
                for call in parsed.tool_calls
            ]
        return message

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of an answer, without the token that ends it."""
        end = self._tokenizer.eos_token_id
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] == end else ids)

    def _held_ids(self, chain: Chain, messages: Messages, tools: Tools) -> list[int] | None:
        """A conversation that goes on as tokens: those that are held, then new ones; None if it cannot be."""
        at, last = len(chain.messages) - 1, chain.tokens[-1]
        after = self._rendering.tokens_after(messages, at, tools, last)
        return None if after is None else chain.tokens + after

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "default", "object": "model"}]})
