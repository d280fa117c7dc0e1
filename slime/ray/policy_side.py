"""The rollout side as the trainer of one policy sees it."""

from slime.ray.rollout_group import RolloutGroup
from slime.utils.types import EngineEndpoint


class PolicySide:
    """The part of the rollout side that is one policy's: its engines, and its share of a rollout."""

    def __init__(self, rollout: RolloutGroup, policy: str) -> None:
        self._rollout, self._policy = rollout, policy

    def check(self) -> None:
        self._rollout.check()

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        self._rollout.set_train_parallel_config(config, self._policy)

    def updatable_engines(self, suspicious: bool = False) -> tuple[list[EngineEndpoint], int]:
        return self._rollout.updatable_engines(suspicious, self._policy)

    def weights_updated(self, version: int) -> None:
        self._rollout.weights_updated(version, self._policy)

    def probe_tokens(self) -> list[int]:
        return self._rollout.probe_tokens(self._policy)

    def check_policy(self, tokens: list[int], expected: list[float], adapter: str | None = None) -> None:
        self._rollout.check_policy(tokens, expected, adapter, self._policy)
