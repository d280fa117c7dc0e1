"""Losses: functions of a micro-batch and its logits, registered in ``slime.arguments.loss``.

A loss is called with (args, batch, logits, sum_of_sample_mean) and returns a scalar and its metrics.
"""

from slime.training.losses.policy import policy_loss_function
from slime.training.losses.reducers import LossFunction, LossOutput, Reducer, get_sum_of_sample_mean
from slime.training.losses.sft import sft_loss_function
from slime.training.losses.value import compute_value_loss, value_loss_function

__all__ = [
    "LossFunction",
    "LossOutput",
    "Reducer",
    "compute_value_loss",
    "get_sum_of_sample_mean",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
]
