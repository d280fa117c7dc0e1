"""Environments of Gymnasium in words: ``pip install 'slime[gymnasium]'``.

generate = Episodes(
    "slime.environments.gymnasium_text.GymnasiumText",
    {"id": "FrozenLake-v1", "options": {"render_mode": "ansi"}, "actions": ["left", "down", "right", "up"]},
    processes=4,
)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from slime.environments.protocol import Answer, Step

_HIGHLIGHT = re.compile(r"\x1b\[\d+m(.)\x1b\[0m")
_WORD = re.compile(r"[\w-]+")


class GymnasiumText:
    """An environment with discrete or textual actions, whose model reads and writes text.

    It sees the environment's rendering where the render mode is ``ansi``, else the observation as text. A
    discrete action is the last word of a turn that names one; a textual one is the turn. A turn with no
    action is told so, and changes nothing.

    Args:
        id: of `gymnasium.make`; ``module:Name-v0`` imports the module first.
        options: of `gymnasium.make`, by name.
        actions: names of the discrete actions, in their order; without them they are numbers.
        instructions: said first.
        no_action_reward: of a turn with no action.
    """

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instructions: str = "",
        no_action_reward: float = 0.0,
    ) -> None:
        self._env = gymnasium.make(id, **(options or {}))
        self._instructions, self._no_action_reward = instructions, no_action_reward
        self._actions = self._named_actions(id, actions)

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begins an episode; ``seed`` and ``options`` in the metadata of the row come before those here."""
        given = task["metadata"]
        observation, _ = self._env.reset(seed=given.get("seed", seed), options=given.get("options"))
        return "\n".join(filter(None, [self._instructions, self._shown(observation)]))

    def step(self, answer: Answer) -> Step:
        """Takes the action of a turn."""
        action = self._action_in(answer.text)
        if action is None:
            return Step(self._wanted(), self._no_action_reward)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(self._shown(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        self._env.close()

    def _named_actions(self, id: str, names: Sequence[str]) -> Mapping[str, Any]:
        """Actions by what the model calls them; none if they are texts."""
        space = self._env.action_space
        if isinstance(space, gymnasium.spaces.Text) and not names:
            return {}
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id}: its actions are {space} (wanted: Discrete, or Text without names)")
        if names and len(names) != space.n:
            raise ValueError(f"{id}: {len(names)} names for {space.n} actions (wanted: one for each)")
        numbers = range(int(space.start), int(space.start + space.n))
        return {
            name.lower(): number for name, number in zip(names or map(str, numbers), numbers, strict=True)
        }

    def _action_in(self, text: str) -> Any:
        if not self._actions:
            return text if text in self._env.action_space else None
        named = [word for word in _WORD.findall(text.lower()) if word in self._actions]
        return self._actions[named[-1]] if named else None

    def _wanted(self) -> str:
        if not self._actions:
            return f"That is no action (wanted: {self._env.action_space})."
        return f"That is no action (wanted: {', '.join(self._actions)})."

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode != "ansi":
            return str(observation)
        return _HIGHLIGHT.sub(r"[\1]", str(self._env.render())).strip()
