"""What an estimator gives where advantages are not returns."""

from typing import NamedTuple

import torch


class Estimates(NamedTuple):
    """Per sample [R] float32 each."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
