"""Plug-ins import the formulas of policy optimisation from here."""

from slime.training.estimators.gae import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns,
    get_advantages_and_returns_batch,
    vanilla_gae,
)
from slime.training.estimators.grpo import get_grpo_returns
from slime.training.estimators.reinforce_plus_plus import (
    discounted_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    reinforce_plus_plus_returns,
)
from slime.training.kl import KL_TYPES, compute_approx_kl, sequence_kl
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.losses.corrections import compute_opsm_mask, icepop_function, vanilla_tis_function
from slime.training.losses.mis import compute_mis_weights, gap_metrics, mis_function
from slime.training.losses.policy import compute_cispo_loss, compute_gspo_kl, compute_policy_loss
from slime.training.losses.value import compute_value_loss

__all__ = [
    "KL_TYPES",
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_mis_weights",
    "compute_opsm_mask",
    "compute_policy_loss",
    "compute_value_loss",
    "discounted_returns",
    "gap_metrics",
    "get_advantages_and_returns",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "icepop_function",
    "mis_function",
    "reinforce_plus_plus_returns",
    "sequence_kl",
    "vanilla_gae",
    "vanilla_tis_function",
]
