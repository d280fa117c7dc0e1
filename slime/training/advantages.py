"""Advantages and returns of a rollout's samples (last pipeline stage only)."""

import torch

from slime.config.advantages import ESTIMATORS
from slime.config.estimation import EstimationConfig
from slime.training.estimators.distillation import apply_opd_kl_to_advantages
from slime.training.estimators.result import Estimates
from slime.training.kl import compute_approx_kl
from slime.training.parallel import ParallelContext
from slime.utils.distributed_utils import distributed_masked_whiten
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch


def compute_advantages_and_returns(
    config: EstimationConfig, rollout_data: RolloutBatch, context: ParallelContext | None = None
) -> None:
    """Adds ``kl``, ``advantages`` and ``returns`` to ``rollout_data``: per sample [R] float32.

    Raises:
        ValueError: a custom function did not set what it has to.
    """
    policy = rollout_data.get("rollout_log_probs" if config.off_policy.use_rollout_logprobs else "log_probs")
    rollout_data["kl"] = _kl(config, rollout_data, policy)
    if config.advantages.custom_advantage_function_path:
        load_function(config.advantages.custom_advantage_function_path)(config.flat, rollout_data)
        missing = {"advantages", "returns"} - rollout_data.keys()
        if missing:
            path = config.advantages.custom_advantage_function_path
            raise ValueError(f"--custom-advantage-function-path {path}: did not set {', '.join(missing)}")
    else:
        _estimate(config, rollout_data)
    if config.distillation.use_opd:
        rollout_data["advantages"] = list(rollout_data["advantages"])
        apply_opd_kl_to_advantages(config.distillation, rollout_data, rollout_data["advantages"], policy)
    if config.advantages.normalize_advantages:
        lengths = [len(a) for a in rollout_data["advantages"]]
        whitened = distributed_masked_whiten(
            torch.cat(rollout_data["advantages"]),
            torch.cat(rollout_data["loss_masks"]),
            process_group=(context or ParallelContext.current()).dp_group,
        )
        rollout_data["advantages"] = list(whitened.split(lengths))


def _kl(
    config: EstimationConfig, rollout_data: RolloutBatch, policy: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    """Per token KL of the policy to the reference, zero if the reward has no KL term."""
    if config.kl.kl_coef == 0 or policy is None:
        return [torch.zeros_like(mask, dtype=torch.float32) for mask in rollout_data["loss_masks"]]
    return [
        compute_approx_kl(log_probs, ref, config.kl.kl_loss_type)
        for log_probs, ref in zip(policy, rollout_data["ref_log_probs"], strict=True)
    ]


def _estimate(config: EstimationConfig, rollout_data: RolloutBatch) -> None:
    estimate = load_function(ESTIMATORS[config.advantages.advantage_estimator].returns)
    estimated = estimate(config, rollout_data)
    if not isinstance(estimated, Estimates):
        estimated = Estimates([returns.clone() for returns in estimated], estimated)
    rollout_data["returns"], rollout_data["advantages"] = estimated.returns, estimated.advantages
