"""The warnings that a rollout cannot teach what it should, though nothing has failed."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from slime.config.advantages import ESTIMATORS
from slime.config.training import TrainingConfig
from slime.observability.alert import FAULTY_PART
from slime.utils.misc import is_finite_number, plain_number
from slime.utils.types import Sample

_SHOWN = 300  # characters of a response and of its label
Look = Callable[[TrainingConfig, Sequence[Sample]], str | None]


def flat_rewards(config: TrainingConfig, samples: Sequence[Sample]) -> str | None:
    """What a user should know of rewards that do not differ; None where they do, or need not.

    They need not where something else than the reward teaches: SFT, a custom loss or advantage function,
    distillation, rewards that a function of the user's makes others of. Rewards of one prompt's samples are
    looked at where the estimator compares them, those of the whole rollout always.
    """
    if _taught_otherwise(config) or len(samples) < 2:
        return None
    rewards = [
        None if s.reward is None else plain_number(s.get_reward_value(config.rewards)) for s in samples
    ]
    if not all(map(is_finite_number, rewards)):
        return None
    found = _flatness(config, samples, rewards)
    return f"{found}, so nothing is learned from them. {_example(samples[0], rewards[0])}" if found else None


def _taught_otherwise(config: TrainingConfig) -> bool:
    return bool(
        config.loss.loss_type != "policy_loss"
        or config.distillation.use_opd
        or not config.advantages.compute_advantages_and_returns
        or config.advantages.custom_advantage_function_path
        or config.rewards.custom_reward_post_process_path
        or config.batches.custom_convert_samples_to_train_data_path
    )


def _flatness(config: TrainingConfig, samples: Sequence[Sample], rewards: Sequence[Any]) -> str | None:
    if len(set(rewards)) == 1:
        return f"all {len(rewards)} rewards of this rollout are {rewards[0]}"
    if (
        not ESTIMATORS[config.advantages.advantage_estimator].centred
        or not config.advantages.rewards_normalization
    ):
        return None
    groups: dict[int | None, list[Any]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        groups[sample.group_index].append(reward)
    compared = [group for group in groups.values() if len(group) > 1]
    if None in groups or not compared or any(len(set(group)) > 1 for group in compared):
        return None
    return f"the rewards are equal within each of the {len(compared)} prompts of this rollout"


def _example(sample: Sample, reward: object) -> str:
    response, label = (_short(repr(value)) for value in (sample.response, sample.label))
    return (
        f"One of them: response {response}, label {label}, reward {reward}. A response ends with the text of "
        "special tokens, as of <|im_end|>, unless --rollout-skip-special-tokens leaves them out: one that "
        "compares exactly has to strip them"
    )


def _short(text: str) -> str:
    """Beginning and end; what spoils a comparison is often at the end."""
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}"


class SilentRollouts:
    """Tells of each fault once for a row of rollouts that have it."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._told: set[Look] = set()

    def warnings(self, samples: Sequence[Sample]) -> list[str]:
        """What a user should be told of a rollout."""
        found = {look: text for look in LOOKS if (text := look(self._config, samples))}
        new = [text for look, text in found.items() if look not in self._told]
        self._told = set(found)
        return new


def cut_off(config: TrainingConfig, samples: Sequence[Sample]) -> str | None:
    """Responses that reached their longest length, before what a reward looks for at their end."""
    cut = sum(sample.status == Sample.Status.TRUNCATED for sample in samples)
    if config.loss.loss_type != "policy_loss" or cut < max(1, FAULTY_PART * len(samples)):
        return None
    return (
        f"{cut} of {len(samples)} responses were cut off before the model ended them, so a reward that reads "
        "their end finds nothing (wanted: a larger --rollout-max-response-len, or turns that end)"
    )


def untrained(config: TrainingConfig, samples: Sequence[Sample]) -> str | None:
    """Responses without a token that is trained on."""
    empty = sum(sample.effective_response_length == 0 for sample in samples)
    if empty < max(1, FAULTY_PART * len(samples)):
        return None
    of_chats = " (--loss-mask-type names the family of the chat template)"
    return (
        f"{empty} of {len(samples)} responses have an empty loss mask, so nothing is learned from them"
        f"{of_chats if config.loss.loss_type == 'sft_loss' else ''}"
    )


LOOKS: tuple[Look, ...] = (flat_rewards, cut_off, untrained)
