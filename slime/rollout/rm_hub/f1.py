"""``--rm-type f1``: token overlap of answers to questions (SQuAD)."""

import re
import string
from collections import Counter

from slime.config.rewards import RewardConfig
from slime.utils.types import Sample

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


def normalize_answer(s: str) -> str:
    """Lower case, without articles, punctuation and repeated spaces."""
    text = s.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the prediction's words; a yes/no/noanswer must match exactly."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, wanted = normalize_answer(prediction), normalize_answer(str(ground_truth))
    if predicted != wanted and {predicted, wanted} & _CLOSED_ANSWERS:
        return 0.0, 0.0, 0.0
    common = sum((Counter(predicted.split()) & Counter(wanted.split())).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted.split()), common / len(wanted.split())
    return 2 * precision * recall / (precision + recall), precision, recall


async def score(args: RewardConfig, sample: Sample, response: str) -> float:
    return f1_score(response, sample.label)[0]
