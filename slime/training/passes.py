"""The forward passes before the optimizer steps of a rollout, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.config.training import TrainingConfig
from slime.training.backend import Outputs
from slime.training.log_probs import response_log_probs
from slime.training.values import response_values
from slime.training.versions import OLD_ACTOR, REFERENCE, TEACHER, TRAINED


@dataclass(frozen=True)
class Pass:
    """One forward pass over a rank's shard.

    Attributes:
        name: of its time among the metrics.
        tag: the version of the weights that it enters.
        prefix: goes before the names of what it adds to the batch.
        head: what is computed.
        when: whether a rollout of so many optimizer steps needs it.
    """

    name: str
    tag: str
    prefix: str
    head: Callable[[TrainingConfig, torch.Tensor, Mapping[str, Any]], Outputs]
    when: Callable[[TrainingConfig, int], bool]


def log_probs(config: TrainingConfig, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``log_probs`` of the responses."""
    return {"log_probs": response_log_probs(config.logits, logits, batch)[0]}


def log_probs_and_entropy(config: TrainingConfig, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``log_probs``, and ``entropy`` where it is asked for."""
    values, entropy = response_log_probs(config.logits, logits, batch)
    return {"log_probs": values, **({"entropy": entropy} if config.off_policy.use_rollout_entropy else {})}


def values(config: TrainingConfig, outputs: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``values`` of the responses, by a critic."""
    return {"values": response_values(outputs, batch)}


def needs_reference(config: TrainingConfig, num_steps: int = 1) -> bool:
    """Whether the reward or the loss has a KL to a reference model."""
    return config.kl.kl_coef != 0 or config.kl.use_kl_loss


def needs_teacher(config: TrainingConfig, num_steps: int = 1) -> bool:
    """Whether the trainer asks a teacher of its own."""
    return config.distillation.use_opd and config.distillation.opd_type == "megatron"


def _of_trained(config: TrainingConfig, num_steps: int) -> bool:
    return needs_own_log_probs(config, num_steps) and not config.off_policy.keep_old_actor


def _of_old_actor(config: TrainingConfig, num_steps: int) -> bool:
    return needs_own_log_probs(config, num_steps) and config.off_policy.keep_old_actor


def needs_own_log_probs(config: TrainingConfig, num_steps: int) -> bool:
    """Whether the policy's log-probs are computed before training.

    Not if the engine's are used; nor if the loss can take its own, detached, because there is a single
    optimizer step, and nothing before it reads them or waits for the pass. ``--ci-test`` compares the two.
    """
    if config.off_policy.use_rollout_logprobs and not config.off_policy.get_mismatch_metrics:
        return False
    reusable = (
        num_steps == 1
        and config.loss.loss_type == "policy_loss"
        and config.kl.kl_coef == 0
        and not config.off_policy.get_mismatch_metrics
        and not config.off_policy.tis_needs_mean
        and not config.distillation.use_opd
        and not config.off_policy.keep_old_actor
        and not config.off_policy.records_routes
        and not config.off_policy.use_rollout_entropy
        and not config.ci.ci_test
        and not config.advantages.custom_advantage_function_path
        and not config.hooks.rollout_data_postprocess_path
        and not config.hooks.custom_megatron_before_log_prob_hook_path
    )
    return not reusable


ACTOR_PASSES = (
    Pass("ref_log_probs", REFERENCE, "ref_", log_probs, needs_reference),
    Pass("teacher_log_probs", TEACHER, "teacher_", log_probs, needs_teacher),
    Pass("log_probs", OLD_ACTOR, "", log_probs_and_entropy, _of_old_actor),
    Pass("log_probs", TRAINED, "", log_probs_and_entropy, _of_trained),
)
BEFORE, AFTER = (
    Pass("recorded_log_probs", TRAINED, prefix, log_probs, lambda config, num_steps: False)
    for prefix in ("before_", "after_")
)
"""The policy before and after the optimizer steps, for a recording alone: training is the same without."""
CRITIC_PASSES = (Pass("values", TRAINED, "", values, lambda config, num_steps: True),)
