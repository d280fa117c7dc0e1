"""Samples whose grader failed: out of the loss, without a say in their group, and counted.

Such a sample is ``FAILED``, is removed from the loss, and its metadata say why. Nothing is known of its
answer, so its reward becomes the mean of the others of its prompt: it moves no baseline, and no filter or
conversion meets a hole. A group in which nothing could be graded is no group to train on.
"""

from collections.abc import Sequence
from numbers import Real
from statistics import fmean
from typing import Any

from slime.utils.types import Sample

FAILURE = "grading_failure"
"""Key of the metadata that says why a sample could not be graded."""


def mark_ungraded(sample: Sample, why: object) -> None:
    """Nothing is known of this sample's answer."""
    sample.reward = None
    sample.status = Sample.Status.FAILED
    sample.remove_sample = True
    sample.metadata = {**sample.metadata, FAILURE: str(why)}


def is_ungraded(sample: Sample) -> bool:
    return FAILURE in sample.metadata


def fill_ungraded(samples: Sequence[Sample]) -> None:
    """Give the ungraded samples of a prompt the mean reward of the others; None if there are no others."""
    graded = [sample.reward for sample in samples if not is_ungraded(sample)]
    if not graded:
        return
    for sample in samples:
        if is_ungraded(sample):
            sample.reward = _mean(graded)


def _mean(rewards: Sequence[Any]) -> Any:
    """The mean of numbers; of dicts a dict of means, with None where there are no numbers."""
    if all(isinstance(reward, dict) for reward in rewards):
        keys = dict.fromkeys(key for reward in rewards for key in reward)
        return {key: _mean([reward.get(key) for reward in rewards]) for key in keys}
    numbers = [float(reward) for reward in rewards if isinstance(reward, Real)]
    return fmean(numbers) if len(numbers) == len(rewards) else None


def nothing_is_graded(group: Any) -> bool:
    """Whether every sample of a group, fan-out included, is ungraded."""
    if isinstance(group, list):
        return bool(group) and all(map(nothing_is_graded, group))
    return isinstance(group, Sample) and is_ungraded(group)
