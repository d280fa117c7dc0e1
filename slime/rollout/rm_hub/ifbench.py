"""``--rm-type ifbench``: whether a response follows all its instructions (IFBench, arXiv 2507.02833).

The metadata of a sample hold ``instruction_id_list`` and ``kwargs``, a mapping for each instruction, as in
the rows of the public data set.
"""

from collections.abc import Mapping
from typing import Any

from slime.config.rewards import RewardConfig
from slime.rollout.rm_hub.grading_pool import GraderError, grade_and_wait, grade_in_process
from slime.utils.types import Sample

_FOLLOWS_ALL = "slime.utils.grading.instructions.follows_all"


async def grade_instructions(response: str, metadata: Mapping[str, Any] | None) -> float:
    """1.0 if a response, its reasoning left out, follows every instruction, else 0.0.

    Raises:
        GraderError: there are no instructions, or unknown ones.
        GradingFailed: a check came to no end.
    """
    return float(await grade_in_process(_FOLLOWS_ALL, *_arguments(response, metadata)))


def compute_ifbench_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Computes the reward for plain code, which it keeps waiting. The label says nothing."""
    return float(grade_and_wait(_FOLLOWS_ALL, *_arguments(response, metadata)))


def _arguments(response: str | None, metadata: Mapping[str, Any] | None) -> tuple[str, list[str], list[Any]]:
    metadata = metadata or {}
    names = list(metadata.get("instruction_id_list") or [])
    if not names:
        raise GraderError("the sample has no instruction_id_list in its metadata (--metadata-key)")
    arguments = list(metadata.get("kwargs") or [{}] * len(names))
    return (response or "").rpartition("</think>")[2].strip(), names, arguments


async def score(args: RewardConfig, sample: Sample, response: str) -> float:
    return await grade_instructions(response, sample.metadata)
