"""Plug-ins import losses from here."""

from slime.training.estimators.distillation import apply_opd_kl_to_advantages
from slime.training.log_probs import response_log_probs
from slime.training.loss_plugins import build_topp_keep_mask as _build_topp_keep_mask
from slime.training.loss_plugins import (
    compute_advantages_and_returns,
    get_log_probs_and_entropy,
    get_values,
    policy_loss_function,
    sft_loss_function,
    value_loss_function,
)
from slime.training.losses.corrections import icepop_function, vanilla_tis_function
from slime.training.losses.scaling import loss_function

__all__ = [
    "_build_topp_keep_mask",
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "response_log_probs",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]
