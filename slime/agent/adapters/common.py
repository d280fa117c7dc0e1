"""What adapters share: a turn of a session from messages to tokens, to the engine and back."""

import functools
import logging
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
from slime.agent.adapters.open_sessions import OpenSessions
from slime.agent.adapters.policies import Policies, part_of
from slime.agent.adapters.prompts import Prompts
from slime.agent.adapters.rendering import Tools
from slime.agent.adapters.session import Prompt, Refused, Session, Turn, TurnRequest, sampling_of_turn
from slime.agent.adapters.stops import untold_stops, without_stop
from slime.agent.parsing import ParsedModelOutput, check_parsers, parse_model_output, thoughts_are_open
from slime.agent.trajectory import TurnRecord, flatten_content
from slime.backends.embedded_engine.grammar.wanted import FIELDS as GRAMMARS
from slime.utils.engine_meta import asks_for_nuclei
from slime.utils.http_utils import HttpStatusError

__all__ = ["BaseAdapter", "Refused", "Session", "TurnRecord", "call_sglang_generate", "flatten_content"]

logger = logging.getLogger(__name__)

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a body may raise that has the shape of a request: RecursionError of a thousand brackets."""
_TAIL = 32
"""Tokens at the end of a prompt in which a template may have opened the thoughts."""


class BaseAdapter(OpenSessions):
    """Turns of sessions. A kind of API adds routes to ``app``, which is served by whoever makes it.

    Every request to the engine begins with the very tokens that it made in earlier turns of the conversation,
    so that what is trained on is what was sampled.

    Args:
        sglang_url: of ``/generate``.
        policies: the same for each of several models, by the names that requests or sessions have for them.
        tool_parser, reasoning_parser: see `slime.agent.parsing.parse_model_output`.
        max_turns_per_sid: more are refused with 429.
        fork_threshold_tokens: see `TrajectoryManager`.
        debug_callback: called with the id of the session and its `TurnRecord` after each turn. What it raises
            is logged.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sglang_url: str,
        policies: Mapping[str, str] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[[str, TurnRecord], None] | None = None,
    ) -> None:
        super().__init__(max_turns_per_sid, fork_threshold_tokens, Policies(policies))
        check_parsers(tool_parser, reasoning_parser)
        self._tokenizer, self.sglang_url = tokenizer, sglang_url
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._prompts, self._debug = Prompts(tokenizer, self.trajectories), debug_callback
        self.app = web.Application(client_max_size=refusals.BODY_LIMIT, middlewares=[refusals.look_at_head])
        self.app[refusals.REFUSAL] = self.refusal
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/v1/models", self._models)

    def refusal(self, status: int, reason: str) -> web.Response:
        """The answer to what is refused, as clients of this API read it."""
        return web.json_response({"error": reason}, status=status)

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

    async def _take_turn(
        self, session: Session, asked: TurnRequest, follow: Follow | None, top_log_probs: int
    ) -> Turn:
        policy = self.policies.of(session, asked.model)
        part = part_of(asked.sid, policy)
        prompt = self._prompts.of(asked._replace(sid=part))
        body = self._request(session, asked, prompt.ids, top_log_probs)
        stops = untold_stops(body["sampling_params"], self._ends_with_call(asked))
        growing = GrowingAnswer(
            self._tokenizer,
            calls=bool(self._tool_parser and asked.tools),
            reasons=self._reasoning_parser is not None,
            stops=stops,
        )

        async def tell(triples: list[Any]) -> None:
            if follow and any(new := growing.more(triples)):
                await follow(*new)

        reads = functools.partial(self._parsed, asked.tools, self._thinks(prompt.ids))
        answer = await engine_answer(
            self.sglang_url if policy is None else self.policies.urls[policy],
            body,
            tell if follow else None,
            end=self._tokenizer.eos_token_id,
            text_of=self.text_of,
            goes_on=(lambda ids: not reads(self.text_of(ids)).has_whole_call) if asked.single_call else None,
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
        parsed = reads(without_stop(record.output_ids, meta, stops, self.text_of))
        record.ill_formed = parsed.ill_formed
        if follow and any(new := growing.rest(parsed)):
            await follow(*new)
        if not session.dropped:  # or it would come back after it was finished
            errors = sum(bool(message.get("is_error")) for message in prompt.heard) + parsed.ill_formed
            self._record(part, record, parsed, errors, prompt)
            self._tell_debugger(asked.sid, record)
        return Turn.of(parsed, record, asked.params)

    def prompt_tokens(self, asked: TurnRequest) -> int:
        """How many tokens the engine would get for this turn.

        Raises:
            Refused: the template fails on the messages, or they hold what is no text.
        """
        policy = self.policies.of(self.open_session_of(asked.sid, takes_turn=False), asked.model)
        return len(self._prompts.of(asked._replace(sid=part_of(asked.sid, policy)))[0])

    def _request(
        self, session: Session, asked: TurnRequest, prompt: Sequence[int], top_log_probs: int
    ) -> dict[str, Any]:
        """What the engine is asked."""
        sampling = sampling_of_turn(session, asked.params, len(prompt))
        if self._ends_with_call(asked):
            sampling = ended_by_call(sampling)
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        body |= asks_for_nuclei(sampling)
        if session.adapter is not None:
            body["lora_path"] = session.adapter
        if top_log_probs:
            body["top_logprobs_num"] = top_log_probs
        if self._reasoning_parser is not None and sampling.keys() & GRAMMARS.keys():
            # the grammar is of the answer, which the reasoning precedes
            body["require_reasoning"] = True
        return body

    def _ends_with_call(self, asked: TurnRequest) -> bool:
        return bool(asked.single_call and asked.tools and self._tool_parser)

    def _thinks(self, prompt: Sequence[int]) -> bool:
        """Whether an answer begins in thoughts, which the template has opened."""
        if self._reasoning_parser is None:
            return False
        return thoughts_are_open(self._tokenizer.decode(prompt[-_TAIL:]))

    def _parsed(self, tools: Tools, thinks: bool, text: str) -> ParsedModelOutput:
        return parse_model_output(
            text,
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

    def _tell_debugger(self, sid: str, record: TurnRecord) -> None:
        if self._debug is None:
            return
        try:
            self._debug(sid, record)
        except Exception:  # the user's code, which looks on: a fault of it costs no episode
            logger.exception("debug_callback failed on session %s", sid)

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

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        names = self.policies.urls or ("default",)
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
        )
