"""``--custom-rm-path examples.retool.reward.reward --reward-key score``: is the boxed answer right?"""

from argparse import Namespace
from typing import Any

from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.utils.types import Sample

_FREE_CALLS = 2
_WORTH_OF_A_CALL = 0.05
_BEST_WRONG = -0.6


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """DAPO's score by the last box: 1 or -1; a wrong answer that called the tool often is a little less bad.

    Each call after the second is worth 0.05, up to a score of -0.6.
    """
    result = compute_score(sample.response, str(sample.label), strict_box_verify=True)
    if result["score"] < 0:
        calls = sample.metadata.get("tool_calls", 0)
        result["score"] = min(_BEST_WRONG, result["score"] + (calls - _FREE_CALLS) * _WORTH_OF_A_CALL)
    return result | {"pred": result["pred"] or "", "tool_calls": sample.metadata.get("tool_calls", 0)}
