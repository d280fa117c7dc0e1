"""An environment: a class whose episodes a model plays in turns.

class Guess:
    def reset(self, task, seed):
        self.number = random.Random(seed).randrange(10)
        return "Guess my number, 0 to 9."

    def step(self, answer):
        right = answer.text.strip() == str(self.number)
        return Step("" if right else "no", reward=float(right), done=right)

`slime.rollout.episodes.Episodes` makes a generate function of such a class.
"""

import json
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LARGEST = 2**20
"""Bytes of an observation, or of the tools. What is larger fits no context, and keeps all others waiting."""
Message = Mapping[str, Any]
Observation = str | Sequence[Message]
"""Messages as chat templates have them. A text is one message: of a tool if the model has called one, else of
the user."""


@dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is what its JSON says."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "call_0"


@dataclass(frozen=True)
class Answer:
    """What the model said in a turn.

    Attributes:
        text: without thoughts and calls, and without the token that ended it.
        calls: those of tools on offer that can be read, in their order.
    """

    text: str
    calls: Sequence[Call] = ()
    thoughts: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Answer":
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**data, "calls": [Call(**call) for call in data["calls"]]})


@dataclass(frozen=True)
class Step:
    """What an environment says to a turn.

    Attributes:
        reward: added to those of the episode's other steps.
        done: the episode is over, and the observation is told to nobody.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Episodes, one after another. Methods may be plain or asynchronous.

    It may have ``tools`` beside these: the JSON schemas of functions on offer, read after each ``reset``; and
    ``close()``, called after each episode.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begins an episode, and says what the model hears first.

        Args:
            task: ``prompt``, ``label`` and ``metadata`` of the row of the data.
            seed: the same for all answers to a row of which rewards are compared.
        """

    def step(self, answer: Answer) -> Step | Awaitable[Step]:
        """What comes of a turn of the model."""


def messages_of(observation: Any, role: str = "user", **more: str) -> list[dict[str, Any]]:
    """Messages of an observation.

    Args:
        role, more: fields of the message that a text becomes.

    Raises:
        TypeError: it is neither text nor messages of text.
        ValueError: it is too large, or has text that is no Unicode.
    """
    if isinstance(observation, str):
        return _readable([{"role": role, **more, "content": observation}])
    listed = isinstance(observation, Sequence) and len(observation) > 0
    if not listed or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in observation):
        raise TypeError(f"observation {observation!r:.200} (wanted: a text, or messages with a role each)")
    return _readable([dict(message) for message in observation])


def _readable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that a model can be told; what fails later is not taken for the environment's fault."""
    for content in (message.get("content") for message in messages):
        if not _is_text(content):
            raise TypeError(f"observation with the content {content!r:.200} (wanted: text or parts of it)")
    _check_size("observation", messages)
    return messages


def _check_size(what: str, value: Any) -> None:
    """Raises TypeError if it is no JSON, ValueError if it is too large."""
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > LARGEST:
        raise ValueError(f"{what} of {size / 2**20:.1f} MiB (wanted: {LARGEST // 2**20} at most)")


def _is_text(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list | tuple) and all(
        isinstance(part.get("text") if isinstance(part, Mapping) else part, str) for part in content
    )


def checked_step(step: Any) -> Step:
    """Returns a step with plain numbers, which those of numpy are not.

    Raises:
        TypeError: it is no `Step`, or its observation none.
        ValueError: its reward is no finite number, or its observation cannot be told.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step returned {step!r:.200} (wanted: slime.environments.Step)")
    reward = float(step.reward)
    if not math.isfinite(reward):
        raise ValueError(f"step gave the reward {reward} (wanted: a finite number)")
    said = messages_of(step.observation)
    observation = step.observation if isinstance(step.observation, str) else said
    return Step(observation, reward, bool(step.done))


def tools_of(environment: Any) -> list[Any]:
    """The tools on offer.

    Raises:
        TypeError: they are no list of JSON objects.
        ValueError: they are too large.
    """
    tools = list(getattr(environment, "tools", None) or ())
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise TypeError(f"tools {tools!r:.200} (wanted: a list of JSON schemas)")
    _check_size("tools", tools)
    return tools
