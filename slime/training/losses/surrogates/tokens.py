"""What a surrogate is given, and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slime.config.loss import LossConfig

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class PolicyTokens:
    """The response tokens of a micro-batch, per sample [R] float32.

    Attributes:
        new: log-probs under the policy that is trained; these have a gradient.
        old: log-probs under the policy that ratios are relative to.
        masks: 1 where a token is trained.
    """

    new: Tensors
    old: Tensors
    advantages: Tensors
    masks: Tensors


class Surrogate(NamedTuple):
    """Values of all tokens, the samples one after the other.

    Attributes:
        loss: the negated objective.
        log_ratio: old minus new log-probs, or what stands for it: the importance ratio is e^-log_ratio.
        clipped: 1.0 where clipping took effect.
    """

    loss: torch.Tensor
    log_ratio: torch.Tensor
    clipped: torch.Tensor


SurrogateFunction = Callable[[LossConfig, PolicyTokens], Surrogate]


def with_trained_gradient(tensors: Tensors, masks: Tensors) -> list[torch.Tensor]:
    """Returns the values, with a gradient only where the mask is 1: elsewhere it may be 0 times infinity."""
    return [
        torch.where(mask != 0, values, values.detach()) for values, mask in zip(tensors, masks, strict=True)
    ]
