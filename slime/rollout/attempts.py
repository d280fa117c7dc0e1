"""A group between two attempts to generate it: how old it is, and how it begins again."""

from typing import Any

from slime.rollout.copies import copied
from slime.rollout.ungraded import FAILURE
from slime.utils.types import EARLIER_TOKENS, Sample

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
_FRESH = Sample()
_OF_THE_ANSWER = (
    *("response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "remove_sample"),
    *("teacher_log_probs", "status", "non_generation_time", "spec_info", "prefix_cache_info"),
    *("version_spans", "request_times"),
)


def flatten(nested: list[Any]) -> list[Sample]:
    """The samples of a group, those of split ones included."""
    return [s for item in nested for s in (flatten(item) if isinstance(item, list) else [item])]


def is_finished(group: list[Any]) -> bool:
    """Whether every sample has its answer and its reward."""
    return all(sample.status in FINISHED and sample.reward is not None for sample in flatten(group))


def was_finished(group: list[Any]) -> bool:
    """Whether an earlier rollout did; a data source of the user's may bring answers of its own."""
    return all("start_rollout_id" in sample.metadata for sample in flatten(group)) and is_finished(group)


def without_answers(group: list[Sample]) -> list[Sample]:
    """Copies with their prompts alone."""
    fresh: list[Sample] = copied(group)
    for sample in fresh:
        sample.tokens = sample.tokens[: len(sample.tokens) - sample.response_length]
        for name in _OF_THE_ANSWER:
            setattr(sample, name, copied(getattr(_FRESH, name)))
        for name in (EARLIER_TOKENS, FAILURE):
            sample.metadata.pop(name, None)
    return fresh


def can_go_on(group: list[Any]) -> bool:
    """Whether an interrupted group can be taken up: a sample that was split cannot."""
    return all(isinstance(item, Sample) for item in group)


def oldest_version(group: list[Any]) -> int | None:
    """Returns the oldest version of the weights that made any token of the group.

    None where none is known by number.
    """
    versions = {
        version
        for sample in flatten(group)
        for version in (*sample.weight_versions, *(version for version, _ in sample.version_spans))
    }
    return min((int(v) for v in versions if v is not None and v.isdecimal()), default=None)
