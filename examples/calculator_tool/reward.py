"""``--custom-rm-path examples.calculator_tool.reward.reward``: is the last boxed answer right?"""

from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub.answers import boxed_answer
from slime.utils.types import Sample


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1.0 if the last ``\\boxed{}`` of the model's last turn is the label, letter by letter; else 0.0.

    A box in an earlier turn does not count: the model could guess first and ask the tool afterwards.
    """
    last_turn = sample.metadata["turns"][-1]
    answer = boxed_answer(last_turn)
    return float(answer is not None and answer.strip() == sample.label.strip())
