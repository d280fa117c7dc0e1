"""The task: a number lies on a shelf that the model cannot see, and a tool tells what is on one.

    user       k
    assistant  <tool_call>k</tool_call>
    tool       37
    assistant  \\boxed{37}

``run.yaml`` names the two functions of this file that a run calls: ``task.generate`` and ``task.reward``.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.rollout.conversation import converse
from slime.utils.types import Sample

MAX_TURNS = 3
_CALL = re.compile(r"<tool_call>([a-z])</tool_call>")
_ANSWER = re.compile(r"\\boxed\{([0-9]+)\}")


def answer_call(text: str, shelves: Mapping[str, str]) -> str | None:
    """The tool: what lies on the shelf that the model asked for; None where it asked for none.

    The text of a model is read, never evaluated.
    """
    call = _CALL.search(text)
    return None if call is None else shelves.get(call[1], "nothing")


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The environment: a conversation with the tool. What is on the shelves is in the row of the data."""
    shelves = sample.metadata["shelves"]
    return await converse(args, sample, sampling_params, lambda text: answer_call(text, shelves), MAX_TURNS)


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """0.1 for an answer at all, the rest for the share of its digits that are right.

    Partial credit gives a group of answers something to differ in before any of them is right.
    """
    return score(sample.metadata["turns"][-1], str(sample.label))


def score(last_turn: str, label: str) -> float:
    """The reward of what the model said last."""
    answer = _ANSWER.search(last_turn)
    if answer is None or len(answer[1]) != len(label):
        return 0.0
    right = sum(found == wanted for found, wanted in zip(answer[1], label, strict=True))
    return 0.1 + 0.9 * right / len(label)
