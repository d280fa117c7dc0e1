"""Exact match of short answers, as SQuAD's evaluation has it (arXiv 1606.05250)."""

from collections.abc import Iterable
from typing import Any

from slime.rollout.rm_hub.f1 import normalize_answer


def is_exact_match(answer: str, targets: Iterable[str]) -> bool:
    return normalize_answer(answer) in {normalize_answer(target) for target in targets}


def targets_of(label: Any) -> list[str]:
    """The right answers: a text, a list of them, or ``{"ground_truth": {"target": ...}}`` around either.

    Raises:
        ValueError: the label is none of that.
    """
    for key in ("ground_truth", "target"):
        if isinstance(label, dict) and key in label:
            label = label[key]
    if isinstance(label, str):
        return [label]
    if isinstance(label, list | tuple) and label and all(isinstance(item, str) for item in label):
        return list(label)
    raise ValueError(f"label {label!r:.100}: wanted a text, a list of texts or a dict with target")
