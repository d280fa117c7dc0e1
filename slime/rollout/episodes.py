"""Generate functions that let a model play an environment.

generate = Episodes(Guess, max_turns=4)     # --custom-generate-function-path my_task.generate
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from slime.agent.adapters.engine import engine_answer
from slime.agent.adapters.rendering import Rendering, with_text
from slime.agent.parsing import ParsedModelOutput, check_parsers, parse_model_output, thoughts_are_open
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.environments.protocol import Answer, Call, Environment, Step, messages_of
from slime.rollout.base_types import GradingFailed, RolloutError, accepted, name_samples
from slime.rollout.conversation import without_answer
from slime.rollout.environment_hosts import Episode, Hosts, Processes, Threads
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import policy_url, read_output_tokens, routing_headers, wanted_of_tokens
from slime.rollout.ungraded import FAILURE, mark_ungraded
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

LIMIT_S = 30.0
_OWN = ("turns", "step_rewards", "round_number", FAILURE)
"""What an episode leaves in the metadata of its sample, and a later attempt's environment does not get."""
_TAIL = 32
"""Tokens at the end of a prompt in which a template may have opened the thoughts."""


class Episodes:
    """A generate function: the model and an environment in turns, and the sum of the steps' rewards.

    ``max_new_tokens`` holds for a turn, ``--rollout-max-context-len`` (in an evaluation
    ``--eval-max-context-len``) for the whole episode. What the model said is trained on with the tokens and
    log-probs of the engine, what the environment said is not. A turn that was cut off is no step: it ends the
    episode, TRUNCATED, as the last of ``max_turns`` does.

    An episode in which the environment raises, gives what is no `Step` or lets its time pass is of unknown
    worth: the sample is FAILED and out of the loss, as one whose grader failed (`slime.rollout.ungraded`).
    One that does not begin is ABORTED, and its group is given up. An engine that fails ends the run. None of
    these is a reward of 0.

    Args:
        environment: a class, or its dotted path.
        options: given to the class by name. In processes they have to be JSON. In a thread a class with a
            parameter ``args`` is given the run's, to ask other models for instance.
        processes: run environments in so many processes of their own, for one episode at a time each; 0 for
            threads of this one, which share its network and keys, and cannot be killed.
        limit_s: seconds for each call of the environment.
        tool_parser, reasoning_parser: see `slime.agent.parsing.parse_model_output`.
    """

    def __init__(
        self,
        environment: type[Environment] | str,
        options: Mapping[str, Any] | None = None,
        *,
        max_turns: int = 10,
        processes: int = 0,
        limit_s: float = LIMIT_S,
        tool_parser: str | None = "hermes",
        reasoning_parser: str | None = None,
    ) -> None:
        check_parsers(tool_parser, reasoning_parser)
        if max_turns < 1 or limit_s <= 0 or processes < 0:
            given = f"max_turns={max_turns}, limit_s={limit_s}, processes={processes}"
            raise ValueError(f"{given} (wanted: at least 1, above 0, at least 0)")
        self.max_turns, self._options = max_turns, dict(options or {})
        self._parsers = {"tool_parser_name": tool_parser, "reasoning_parser_name": reasoning_parser}
        self._hosts = _hosts_of(environment, self._options, processes, limit_s)

    async def __call__(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample:
        """Plays an episode; an earlier attempt at it is forgotten."""
        config = filled(GenerationConfig, args)
        without_answer(sample)
        sample.metadata = {key: value for key, value in sample.metadata.items() if key not in _OWN}
        number = sample.index if sample.group_index is None else sample.group_index
        seed = config.rollout.rollout_seed + (number or 0)
        task = {"prompt": sample.prompt, "label": sample.label, "metadata": dict(sample.metadata)}
        try:
            async with self._hosts.episode(config.flat) as episode:
                talk = _Talk(config, sample, sampling_params, evaluation, self._parsers)
                await talk.begin(episode, task, seed)
                await self._play(talk, episode)
        except GradingFailed as failure:
            logger.warning("%s: %s", name_samples(sample), failure)
            if sample.response_length:
                mark_ungraded(sample, failure)
            else:  # there is nothing to leave out of the loss
                sample.status = Sample.Status.ABORTED
        return sample

    async def _play(self, talk: "_Talk", episode: Episode) -> None:
        sample, rewards = talk.sample, list[float]()
        for turn in range(1, self.max_turns + 1):
            answer = await talk.speak()
            if answer is None:
                break
            step = await talk.outside(episode.step(answer))
            rewards.append(step.reward)
            sample.metadata |= {"step_rewards": rewards}
            if step.done:
                break
            if turn == self.max_turns or not talk.hear(step):
                sample.status = Sample.Status.TRUNCATED
                break
        if sample.status is not Sample.Status.ABORTED:
            sample.reward = sum(rewards)


class _Talk:
    """What model and environment said so far, as messages and as the tokens of a sample."""

    def __init__(
        self,
        config: GenerationConfig,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        evaluation: bool,
        parsers: Mapping[str, str | None],
    ) -> None:
        self.sample = sample
        self._config, self._evaluation, self._parsers = config, evaluation, parsers
        self._params = {name: value for name, value in sampling_params.items() if value is not None}
        self._state = GenerateState(config.flat)
        self._rendering = _rendering_of(self._state.tokenizer)
        self._messages: list[Mapping[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._turns: list[str] = []
        own, training = config.evaluation.eval_max_context_len, config.rollout.rollout_max_context_len
        self._longest = own if evaluation else training

    async def begin(self, episode: Episode, task: Mapping[str, Any], seed: int) -> None:
        """Hears what the environment says first."""
        opening = await self.outside(episode.begin(task, seed))
        self._messages, self._tools = [*map(with_text, opening.messages)], opening.tools
        self.sample.tokens = self._rendering.tokens(self._messages, self._tools or None)

    async def outside(self, call: Any) -> Any:
        """Waits for the environment, and counts how long."""
        begun = time.monotonic()
        try:
            return await call
        finally:
            self.sample.non_generation_time += time.monotonic() - begun

    async def speak(self) -> Answer | None:
        """Adds a turn of the model; None unless the model ended it itself."""
        sample = self.sample
        if self._state.aborted:
            sample.status = Sample.Status.ABORTED
            return None
        if (room := self._room()) <= 0:
            sample.status = Sample.Status.TRUNCATED
            return None
        answer = await self._ask(room)
        ids, log_probs = read_output_tokens(answer)
        text = self._state.tokenizer.decode(ids)
        sample.append_response_tokens(
            self._config.flat, tokens=ids, log_probs=log_probs, meta_info=answer["meta_info"], text=text
        )
        self._turns.append(text)
        sample.metadata |= {"turns": self._turns, "round_number": len(self._turns)}
        return self._heard_of(ids) if sample.status is Sample.Status.COMPLETED else None

    def _room(self) -> int:
        """How many tokens the next turn may have."""
        room: int = self._params["max_new_tokens"]
        return room if self._longest is None else min(room, self._longest - len(self.sample.tokens))

    async def _ask(self, room: int) -> dict[str, Any]:
        """The engine's answer to all that was said, which goes on over updates of its weights."""
        router, tokenizer = self._config.router, self._state.tokenizer
        body = {
            "input_ids": self.sample.tokens,
            "sampling_params": {**self._params, "max_new_tokens": room},
            **wanted_of_tokens(self._config.flat, self._evaluation),
        }
        answer: dict[str, Any] = await engine_answer(
            policy_url(self._config, self.sample),
            body,
            end=tokenizer.eos_token_id,
            text_of=tokenizer.decode,
            headers=routing_headers(router, self.sample),
        )
        return answer

    def _heard_of(self, ids: list[int]) -> Answer:
        """What the environment hears of a turn with these tokens; it becomes a message, too."""
        tokenizer, tokens = self._state.tokenizer, self.sample.tokens
        before, ended = tokens[: len(tokens) - len(ids)], ids[-1:] == [tokenizer.eos_token_id]
        reasons = self._parsers["reasoning_parser_name"] is not None
        parsed = parse_model_output(
            tokenizer.decode(ids[:-1] if ended else ids),
            tools_schema=self._tools,
            thinks=reasons and thoughts_are_open(tokenizer.decode(before[-_TAIL:])),
            **self._parsers,
        )
        calls = _calls_of(parsed)
        self._messages.append(_message_of(parsed.text, calls))
        return Answer(parsed.text, calls, parsed.reasoning)

    def hear(self, step: Step) -> bool:
        """Adds what the environment said to the last turn; False where there is no room for it."""
        calls = self._messages[-1].get("tool_calls")
        of_tool = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        said = messages_of(step.observation, **of_tool)
        at = len(self._messages) - 1
        self._messages += map(with_text, said)
        tools, last = self._tools or None, self.sample.tokens[-1]
        ids = self._rendering.tokens_after(self._messages, at, tools, last)
        if ids is None:
            raise RolloutError(
                f"{name_samples(self.sample)}: the chat template does not show what comes after an answer "
                f"(role of what follows: {said[0]['role']})"
            )
        if self._longest is not None and len(self.sample.tokens) + len(ids) >= self._longest:
            return False
        text = self._state.tokenizer.decode(ids)
        self.sample.append_response_tokens(self._config.flat, tokens=ids, trainable=False, text=text)
        return True


def _calls_of(parsed: ParsedModelOutput) -> list[Call]:
    return [Call(use["name"], use["input"], f"call_{number}") for number, use in enumerate(parsed.tool_uses)]


def _message_of(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """A turn of the model as chat templates have it."""
    called = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in calls]
    listed = [{"id": number, "type": "function", "function": function} for number, function in called]
    return {"role": "assistant", "content": text, **({"tool_calls": listed} if listed else {})}


@cache
def _rendering_of(tokenizer: Any) -> Rendering:
    return Rendering(tokenizer)


def _hosts_of(
    environment: type[Environment] | str, options: Mapping[str, Any], processes: int, limit_s: float
) -> Hosts:
    path = (
        environment
        if isinstance(environment, str)
        else f"{environment.__module__}.{environment.__qualname__}"
    )
    if not processes:
        return Threads(partial(_made, environment, options), path, limit_s)
    if "<locals>" in path or path.startswith("__main__."):
        raise ValueError(f"environment {path} (wanted: a class at the top of a module that can be imported)")
    return Processes(path, options, processes, limit_s)


def _made(environment: type[Environment] | str, options: Mapping[str, Any], args: Any) -> Environment:
    kind: Any = load_function(environment) if isinstance(environment, str) else environment
    made: Environment = kind(**{**accepted(kind, {"args": args}), **options})
    return made
