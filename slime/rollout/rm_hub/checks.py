"""What may not be a reward."""

from typing import Any

from slime.arguments.views import RolloutView
from slime.rollout.base_types import RolloutError, name_samples
from slime.utils.misc import is_finite_number
from slime.utils.types import Sample


def check_reward(args: RolloutView, origin: str, sample: Sample, reward: Any) -> None:
    """Refuses a reward that is no finite number; of a dict, what ``--reward-key`` and its like name.

    Args:
        origin: who gave it, for the message.

    Raises:
        RolloutError: names origin and sample.
    """
    value = reward
    if isinstance(reward, dict):
        keys = [key for key in (args.reward_key, args.eval_reward_key) if key in reward]
        value = next((reward[key] for key in keys if not is_finite_number(reward[key])), 0)
    if not is_finite_number(value):
        raise RolloutError(
            f"{origin} returned {reward!r:.200} for {name_samples(sample)}, "
            "expected a finite number as the reward"
        )
