"""What a run of the simulator names by dotted path, as users do: a data source, a reward and a filter."""

import asyncio
import pickle  # of what this process made itself
from typing import Any

from slime.rollout.data_source import Group, RolloutDataSourceWithBuffer
from slime.utils.types import Sample


class WatchedSource(RolloutDataSourceWithBuffer):
    """Tells the rules which groups leave it and come back."""

    keeps_books = True
    rules: Any = None

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.rules.source = self

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = super().get_samples(num_samples)
        self.rules.given_out(groups)
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        self.rules.taken_back(samples)
        super().add_samples(samples)

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)
        self.rules.saved(rollout_id)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(pickle.loads(pickle.dumps(state)))  # noqa: S301 - as Ray does
        self.rules.restored(state)

    def load(self, rollout_id: int | None = None) -> None:
        super().load(rollout_id)
        self.rules.loaded(rollout_id)


def worth(sample: Sample) -> float:
    return float((sample.index or 0) * 7919 % 11)


async def reward(args: Any, sample: Sample) -> float:
    await asyncio.sleep(0.01 * ((sample.index or 0) * 31 % 17))
    return worth(sample)


def keeps(args: Any, group: list[Any]) -> bool:
    return group[0].group_index % 4 != 3
