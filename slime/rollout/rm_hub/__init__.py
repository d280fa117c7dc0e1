"""Rewards: which function scores a sample, by dotted path or by ``--rm-type``."""

import asyncio
import inspect
import logging
import random
from collections.abc import Callable, Mapping, Set
from typing import Any

from slime.arguments.groups.rewards import RM_TYPES, needs_no_grade
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.base_types import GradingFailed, RolloutError, blame, describe, name_samples
from slime.rollout.checks import check_reward
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.grading_pool import grade_in_process
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_utils import extract_answer, extract_boxed_answer, grade_answer_verl
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.ungraded import mark_ungraded
from slime.utils.async_utils import gather_or_cancel
from slime.utils.grading.boxes import boxed_answer
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_BOXED_PREFIX = "boxed_"

__all__ = [
    "GradingFailed",
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_ifbench_reward",
    "extract_answer",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "grade_in_process",
    "grouped_async_rm",
    "remote_rm",
]


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of a sample.

    In order of precedence: ``sample.custom_rm_path``, ``--custom-rm-path``, ``rm_type`` in the sample's
    metadata, ``--rm-type``. None if the grader failed on this answer (``GradingFailed``); the sample is
    marked as ungraded then.

    Raises:
        RolloutError: the function failed or returned what is no finite number; a missing reward is never 0.
        NotImplementedError: no reward function is named, or an unknown type.
    """
    try:
        return await _reward(filled(GenerationConfig, args), sample, **kwargs)
    except GradingFailed as failure:
        logger.warning("%s could not be graded: %s", name_samples(sample), failure)
        mark_ungraded(sample, failure)
        return None


async def _reward(config: GenerationConfig, sample: Sample, **kwargs: Any) -> Any:
    path = sample.custom_rm_path or config.rewards.custom_rm_path
    if path:
        function = load_function(path)
        with blame(function, sample):
            reward = await _call_off_loop(function, config.flat, sample, **kwargs)
        check_reward(config, describe(function), sample, reward)
        return reward
    rm_type = sample.metadata.get("rm_type") or config.rewards.rm_type
    with blame(score_by_type, sample):
        reward = await score_by_type(config.flat, sample, rm_type)
    check_reward(config, f"--rm-type {rm_type}", sample, reward)
    return reward


async def score_by_type(args: Any, sample: Sample, rm_type: str | None) -> Any:
    """Score a sample by a named type; ``boxed_<type>`` scores the content of its last ``\\boxed{}``.

    Raises:
        NotImplementedError: no such type, or none given.
    """
    name = (rm_type or "").strip()
    response = sample.response
    if name.startswith(_BOXED_PREFIX):
        name = name.removeprefix(_BOXED_PREFIX)
        response = boxed_answer(response) or ""
    if name not in RM_TYPES:
        raise NotImplementedError(
            f"--rm-type {rm_type}: expected one of {', '.join(RM_TYPES)} (or boxed_...)"
        )
    if sample.label is None and needs_no_grade(args, rm_type):
        return 0.0
    return await load_function(RM_TYPES[name])(args, sample, response)


async def score_at_random(args: Any, sample: Sample, response: str) -> int:
    """Scores for ``--rm-type random``."""
    return random.randint(0, 1)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """One reward per sample; ``--custom-rm-path`` gets the whole list in one call.

    Raises:
        RolloutError: as for ``async_rm``, or the number of rewards is wrong.
    """
    if not samples:
        return []
    config = filled(GenerationConfig, args)
    if not config.rewards.custom_rm_path or any(sample.custom_rm_path for sample in samples):
        return await gather_or_cancel(async_rm(args, sample, **kwargs) for sample in samples)
    function = load_function(config.rewards.custom_rm_path)
    rewards = await _rewards_at_once(function, args, samples, samples, **kwargs)
    if rewards is None:
        return [None] * len(samples)
    if len(rewards) != len(samples):
        raise RolloutError(
            f"{describe(function)} returned {rewards!r:.200} for {name_samples(samples)}, "
            f"expected {len(samples)} rewards"
        )
    for sample, reward in zip(samples, rewards, strict=True):
        check_reward(config, describe(function), sample, reward)
    return rewards


async def grouped_async_rm(args: Any, group: list[Sample | list[Sample]]) -> list[Any]:
    """One reward per sample of a group in order, by one call; for ``--group-rm``.

    ``--custom-rm-path`` gets the group as it is: a sample that was split is a list in it. What it returns for
    such a list may be a list too, or one reward for all of it; or it returns one reward for each sample.

    Raises:
        RolloutError: as for ``batched_async_rm``.
    """
    samples = [sample for item in group for sample in (item if isinstance(item, list) else [item])]
    config = filled(GenerationConfig, args)
    own = any(sample.custom_rm_path for sample in samples)
    if own or not config.rewards.custom_rm_path or not any(isinstance(item, list) for item in group):
        return await batched_async_rm(args, samples)
    function = load_function(config.rewards.custom_rm_path)
    answer = await _rewards_at_once(function, args, group, samples)
    if answer is None:
        return [None] * len(samples)
    rewards = answer if len(answer) == len(samples) else _spread(group, answer)
    if len(rewards) != len(samples):
        raise RolloutError(
            f"{describe(function)} returned {answer!r:.200} for {name_samples(samples)}, expected "
            f"{len(group)} rewards, a list or a number for each list in the group, or {len(samples)}"
        )
    for sample, reward in zip(samples, rewards, strict=True):
        check_reward(config, describe(function), sample, reward)
    return rewards


async def _rewards_at_once(
    function: Callable[..., Any], args: Any, asked: list[Any], samples: list[Sample], **kwargs: Any
) -> list[Any] | None:
    """What a function answers for a list of samples; None, with all of them marked, if its grader failed."""
    try:
        with blame(function, samples):
            answer = await _call_off_loop(function, args, asked, **kwargs)
            if answer is None or isinstance(answer, Mapping | Set | str):
                raise TypeError(f"it returned {answer!r:.100}, expected a list of rewards")
            return list(answer)
    except GradingFailed as failure:
        logger.warning("%s could not be graded: %s", name_samples(samples), failure)
        for sample in samples:
            mark_ungraded(sample, failure)
        return None


def _spread(group: list[Sample | list[Sample]], answer: list[Any]) -> list[Any]:
    """A reward for each sample; none if the answer does not fit the group."""
    if len(answer) != len(group):
        return []
    rewards: list[Any] = []
    for item, given in zip(group, answer, strict=True):
        count = len(item) if isinstance(item, list) else 1
        own = given if isinstance(given, list) else [given] * count
        if len(own) != count:
            return []
        rewards += own
    return rewards


async def _call_off_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a plain one in a thread, since it would stall all generation."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
