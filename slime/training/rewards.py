"""Turns what reward functions said into what advantages are made of."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import torch

from slime.config.advantages import ESTIMATORS
from slime.config.training import TrainingConfig
from slime.training.batch import BatchError
from slime.training.overlong import soft_overlong_punishment
from slime.utils.misc import is_finite_number, load_function
from slime.utils.types import Sample, name_samples

_STD_EPSILON = 1e-6

Group = list[list[int]]
"""The samples of a prompt as positions in the batch, a list for each execution."""


def post_process_rewards(config: TrainingConfig, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards, and those that the advantages are made of.

    With a group-based estimator and ``--rewards-normalization``: (r - mean) / (std + 1e-6) within the
    group of a prompt, std being the sample standard deviation (GRPO, arXiv 2402.03300, sec. 4.1.2); without
    ``grpo_std_normalization`` r - mean (Dr. GRPO, arXiv 2503.20783, sec. 3.2); with RLOO r less the mean of
    the others. Every execution has one vote, which the samples that it was split into share equally. The
    punishment of ``--overlong-buffer-len`` comes before all that.

    Raises:
        BatchError: a sample has no reward or no group.
    """
    if config.rewards.custom_reward_post_process_path:
        return _post_processed(config, config.rewards.custom_reward_post_process_path, samples)
    raw = [_reward_number(config, sample) for sample in samples]
    shaped = _less_overlong(config, samples, raw)
    estimator = ESTIMATORS[config.advantages.advantage_estimator]
    if not estimator.centred or not config.advantages.rewards_normalization:
        return raw, shaped
    groups = _groups(config, samples)
    if estimator.leaves_one_out:
        return raw, _against_others(shaped, groups)
    return raw, _centred(shaped, groups, estimator.scaled and config.advantages.grpo_std_normalization)


def _post_processed(config: TrainingConfig, path: str, samples: list[Sample]) -> tuple[Any, Any]:
    """Post-processes rewards by the user's function; any sequences of as many rewards as samples."""
    result = load_function(path)(config.flat, samples)
    try:
        raw, rewards = result
        lengths = len(raw), len(rewards)
    except (TypeError, ValueError):
        lengths = None
    if lengths != (len(samples), len(samples)):
        raise BatchError(
            f"{path}: returned {result!r:.200}, wanted (raw rewards, rewards) with {len(samples)} each"
        )
    return raw, rewards


def _less_overlong(config: TrainingConfig, samples: Sequence[Sample], rewards: list[float]) -> list[float]:
    """Rewards after the punishment of long responses, if ``--overlong-buffer-len`` asks for it."""
    buffer = config.rewards.overlong_buffer_len
    if buffer is None:
        return rewards
    limit = config.rollout.rollout_max_response_len
    if limit is None:
        raise BatchError("--overlong-buffer-len: needs --rollout-max-response-len")
    factor = config.rewards.overlong_penalty_factor
    lengths = [sample.response_length for sample in samples]
    return [
        reward + factor * soft_overlong_punishment(length, limit, buffer)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def _reward_number(config: TrainingConfig, sample: Sample) -> float:
    reward = sample.get_reward_value(config.rewards)
    if reward is None:
        raise BatchError(f"{name_samples(sample)} ({sample.status.value}) has no reward")
    if isinstance(reward, dict):
        raise BatchError(f"{name_samples(sample)}: reward is a dict, pass --reward-key: {reward!r:.200}")
    if not is_finite_number(reward):
        raise BatchError(f"{name_samples(sample)}: reward is {reward!r:.200}, wanted a finite number")
    return float(reward)


def _groups(config: TrainingConfig, samples: Sequence[Sample]) -> list[Group]:
    """Groups samples by ``group_index``, and in each group by ``rollout_id``.

    A sample without one is an execution.
    """
    groups: dict[int, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, index in enumerate(_group_indices(config, samples)):
        rollout_id = samples[position].rollout_id
        groups[index][("alone", position) if rollout_id is None else rollout_id].append(position)
    return [list(executions.values()) for executions in groups.values()]


def name_groups(config: TrainingConfig, groups: Sequence[Any], samples: Sequence[Sample]) -> None:
    """Gives samples of an irregular rollout that have no ``group_index`` that of the list in which they came.

    Lists of one are left alone: whether they are groups, or every sample came in a list, they do not tell.

    Args:
        groups: what the rollout function returned.
        samples: those in it.
    """
    if _is_regular(config, samples) or any(sample.group_index is not None for sample in samples):
        return
    if all(isinstance(group, list) for group in groups) and any(len(group) > 1 for group in groups):
        for number, group in enumerate(groups):
            for sample in _nested(group):
                sample.group_index = number


def _nested(item: Any) -> Iterator[Sample]:
    if isinstance(item, list):
        yield from chain.from_iterable(map(_nested, item))
    else:
        yield item


def _is_regular(config: TrainingConfig, samples: Sequence[Sample]) -> bool:
    return len(samples) == config.batches.n_samples_per_prompt * config.batches.rollout_batch_size


def _group_indices(config: TrainingConfig, samples: Sequence[Sample]) -> list[int]:
    """Returns the group of each sample.

    Where no sample has one, groups of ``--n-samples-per-prompt`` follow one another.
    """
    indices = [sample.group_index for sample in samples if sample.group_index is not None]
    if len(indices) == len(samples):
        return indices
    if indices or not _is_regular(config, samples):
        without = [sample for sample in samples if sample.group_index is None]
        raise BatchError(
            f"{name_samples(without)} have no group_index, by which rewards are compared: set one number on "
            "all samples of a prompt; it may be left out only by all samples of a rollout of "
            f"{config.batches.n_samples_per_prompt * config.batches.rollout_batch_size}, found {len(samples)}"
        )
    return [position // config.batches.n_samples_per_prompt for position in range(len(samples))]


def _centred(rewards: Sequence[float], groups: Sequence[Group], scaled: bool) -> list[float]:
    """Rewards less the mean vote of their group and, if ``scaled``, over the deviation of its votes."""
    by_votes: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        by_votes[len(group)].append(group)
    result = [0.0] * len(rewards)
    for alike in by_votes.values():
        for group, (mean, divisor) in zip(alike, _statistics(rewards, alike, scaled), strict=True):
            for position in chain.from_iterable(group):
                result[position] = (rewards[position] - mean) / divisor
    return result


def _against_others(rewards: Sequence[float], groups: Sequence[Group]) -> list[float]:
    """Rewards less the mean vote of the other executions of the prompt (RLOO, arXiv 2402.14740, eq. 8).

    0 in a group of one execution, which has no other.
    """
    result = [0.0] * len(rewards)
    for group in (group for group in groups if len(group) > 1):
        votes = [fmean(rewards[i] for i in execution) for execution in group]
        for number, execution in enumerate(group):
            baseline = fmean(votes[:number] + votes[number + 1 :])
            for i in execution:
                result[i] = rewards[i] - baseline
    return result


def _statistics(
    rewards: Sequence[float], groups: Sequence[Group], scaled: bool
) -> Iterator[tuple[float, float]]:
    """Mean and divisor of each of some groups with equally many votes.

    In float32 the mean of equal rewards may be a little off, and the division by a deviation of about zero
    would make advantages of that.
    """
    votes = torch.tensor(
        [[fmean(rewards[i] for i in execution) for execution in group] for group in groups],
        dtype=torch.float64,
    )
    means = votes.mean(dim=-1, keepdim=True)
    if not scaled or votes.size(1) == 1:  # a single vote has no deviation
        yield from ((mean, 1.0) for mean in means[:, 0].tolist())
        return
    deviations = (votes - means).std(dim=-1)
    for group, mean, deviation in zip(groups, means[:, 0].tolist(), deviations.tolist(), strict=True):
        yield mean, math.hypot(deviation, _within(rewards, group)) + _STD_EPSILON


def _within(rewards: Sequence[float], group: Group) -> float:
    """What rewards that differ within an execution add to the deviation of a group's votes."""
    total = 0.0
    for execution in group:
        vote = fmean(rewards[i] for i in execution)
        total += fmean((rewards[i] - vote) ** 2 for i in execution)
    return math.sqrt(total / (len(group) - 1))
