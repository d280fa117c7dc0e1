"""What user code hands over: samples that are samples, and numbers that are numbers.

The errors name the function and the sample, since nobody finds either in a loss of NaN.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from slime.config.generation import GenerationConfig
from slime.rollout.base_types import RolloutError, name_samples
from slime.utils.misc import is_finite_number
from slime.utils.notes import note
from slime.utils.types import Sample

_KINDS = {"status": Sample.Status, "metadata": dict, "response": str, "response_length": Integral}
_STATUSES = {status.value for status in Sample.Status}
_HIGHEST_LOG_PROB = 0.01
"""Above 0 by rounding errors alone: what is higher is no logarithm of a probability."""


def check_samples(origin: str, samples: Sequence[Any]) -> None:
    """Whether these are samples, each an object of its own, with log-probs that are some.

    Args:
        origin: who made them, for messages.

    Raises:
        RolloutError: one is not.
    """
    first: dict[int, int] = {}
    for position, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise RolloutError(f"{origin} returned {sample!r:.100} among its samples, expected a Sample")
        if id(sample) in first:
            raise RolloutError(
                f"{origin} returned one Sample object as its samples {first[id(sample)]} and {position} "
                f"({name_samples(sample)}), expected an object for each (copy.deepcopy makes one)"
            )
        first[id(sample)] = position
        _check_kinds(origin, sample)
        _check_log_probs(origin, sample)


def _check_kinds(origin: str, sample: Sample) -> None:
    """Checks the types of what everybody reads and nobody could do without. A status may come as its text."""
    if isinstance(sample.status, str) and sample.status in _STATUSES:
        name = sample.status.upper()
        note(f"{origin} sets status to text: {sample.status!r}, taken as Sample.Status.{name}")
        sample.status = Sample.Status(sample.status)
    for name, kind in _KINDS.items():
        value = getattr(sample, name)
        if not isinstance(value, kind):
            raise RolloutError(
                f"{origin}: {name} of {name_samples(sample)} is {value!r:.100}, expected {kind.__name__}"
            )


def _check_log_probs(origin: str, sample: Sample) -> None:
    log_probs = sample.rollout_log_probs
    if log_probs is None:
        return
    try:
        # A sum is finite only if all its terms are, and costs a fraction of looking at each.
        if math.isfinite(sum(log_probs)) and (len(log_probs) == 0 or max(log_probs) <= _HIGHEST_LOG_PROB):
            return
        wrong = next(i for i, v in enumerate(log_probs) if not (math.isfinite(v) and v <= _HIGHEST_LOG_PROB))
    except TypeError as error:
        raise RolloutError(
            f"{origin}: rollout_log_probs of {name_samples(sample)} are {log_probs!r:.100}, expected numbers"
        ) from error
    raise RolloutError(
        f"{origin}: rollout_log_probs of {name_samples(sample)} are {log_probs[wrong]} at position {wrong} "
        f"of {len(log_probs)}, expected finite logarithms, none above 0"
    )


def check_reward(config: GenerationConfig, origin: str, sample: Sample, reward: Any) -> None:
    """Refuses a reward that is no finite number; of a dict, what ``--reward-key`` and its like name.

    Where user code makes numbers of the rewards, anything will do but None.

    Args:
        origin: who gave it, for messages.

    Raises:
        RolloutError: names origin and sample.
    """
    if reward is None:
        raise RolloutError(f"{origin} returned None for {name_samples(sample)}, expected a reward")
    rewards = config.rewards
    if rewards.custom_reward_post_process_path or config.batches.custom_convert_samples_to_train_data_path:
        return
    values = [reward]
    if isinstance(reward, Mapping):
        values = [reward[key] for key in (rewards.reward_key, rewards.eval_reward_key) if key in reward]
    if not all(map(is_finite_number, values)):
        raise RolloutError(
            f"{origin} returned {reward!r:.200} for {name_samples(sample)}, expected a finite number, "
            "or a dict with one under --reward-key"
        )
