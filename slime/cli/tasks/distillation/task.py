"""The task: say a word backwards.

    user       pot
    assistant  \\boxed{top}

``run.yaml`` names the two functions of this file that a run calls: ``task.reward`` measures how good the
answers are, and ``task.measured_only`` keeps that from teaching, so that all is learned from the teacher.
"""

import re
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

_ANSWER = re.compile(r"\\boxed\{([a-z]+)\}")


def measured_only(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The rewards as they are reported, and those that are learned from: none. Without it both teach."""
    rewards = [float(sample.reward or 0.0) for sample in samples]
    return rewards, [0.0] * len(rewards)


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The verifier: 0.1 for an answer of the right length, the rest for its letters at the right places.

    Partial credit gives a group of answers something to differ in before any of them is right.
    """
    return score(sample.response, str(sample.label))


def score(response: str, label: str) -> float:
    """The reward of a response."""
    answer = _ANSWER.search(response)
    if answer is None or len(answer[1]) != len(label):
        return 0.0
    right = sum(found == wanted for found, wanted in zip(answer[1], label, strict=True))
    return 0.1 + 0.9 * right / len(label)
