"""Losses: functions of a micro-batch and its logits, named by ``--loss-type``.

A loss is called with (args, batch, logits, sum_of_sample_mean) and returns a scalar and its metrics.
"""

from argparse import Namespace

from slime.training.losses.policy import policy_loss_function
from slime.training.losses.reducers import LossFunction, LossOutput, Reducer, get_sum_of_sample_mean
from slime.training.losses.sft import sft_loss_function
from slime.utils.misc import load_function

__all__ = [
    "LOSSES",
    "LossFunction",
    "LossOutput",
    "Reducer",
    "get_sum_of_sample_mean",
    "policy_loss_function",
    "select_loss",
    "sft_loss_function",
]

LOSSES: dict[str, LossFunction] = {
    "policy_loss": policy_loss_function,
    "sft_loss": sft_loss_function,
}


def select_loss(args: Namespace) -> LossFunction:
    """The loss of ``--loss-type``, the user's own for custom_loss."""
    if args.loss_type == "custom_loss" and args.custom_loss_function_path:
        return load_function(args.custom_loss_function_path)
    if args.loss_type not in LOSSES:
        wanted = ", ".join(LOSSES)
        raise ValueError(f"--loss-type {args.loss_type}: wanted {wanted} or custom_loss with its path")
    return LOSSES[args.loss_type]
