"""The forward passes before the optimizer steps of a rollout, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.arguments.views import TrainingView
from slime.training.backend import Head, Outputs
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
    head: Head
    when: Callable[[TrainingView, int], bool]


def log_probs(args: TrainingView, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``log_probs`` of the responses."""
    return {"log_probs": response_log_probs(args, logits, batch)[0]}


def log_probs_and_entropy(args: TrainingView, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``log_probs``, and ``entropy`` where it is asked for."""
    values, entropy = response_log_probs(args, logits, batch)
    return {"log_probs": values, **({"entropy": entropy} if args.use_rollout_entropy else {})}


def values(args: TrainingView, outputs: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    """``values`` of the responses, by a critic."""
    return {"values": response_values(outputs, batch)}


def needs_reference(args: TrainingView, num_steps: int = 1) -> bool:
    """Whether the reward or the loss has a KL to a reference model."""
    return args.kl_coef != 0 or args.use_kl_loss


def needs_teacher(args: TrainingView, num_steps: int = 1) -> bool:
    """Whether the trainer asks a teacher of its own."""
    return args.use_opd and args.opd_type == "megatron"


def _of_trained(args: TrainingView, num_steps: int) -> bool:
    return needs_own_log_probs(args, num_steps) and not args.keep_old_actor


def _of_old_actor(args: TrainingView, num_steps: int) -> bool:
    return needs_own_log_probs(args, num_steps) and args.keep_old_actor


def needs_own_log_probs(args: TrainingView, num_steps: int) -> bool:
    """Whether the policy's log-probs are computed before training.

    Not if the engine's are used; nor if the loss can take its own, detached, because there is a single
    optimizer step, and nothing before it reads them or waits for the pass. ``--ci-test`` compares the two.
    """
    if args.use_rollout_logprobs and not args.get_mismatch_metrics:
        return False
    reusable = (
        num_steps == 1
        and args.loss_type == "policy_loss"
        and args.kl_coef == 0
        and not args.get_mismatch_metrics
        and not args.tis_needs_mean
        and not args.use_opd
        and not args.keep_old_actor
        and not args.records_routes
        and not args.use_rollout_entropy
        and not args.ci_test
        and not args.custom_advantage_function_path
        and not args.rollout_data_postprocess_path
        and not args.custom_megatron_before_log_prob_hook_path
    )
    return not reusable


ACTOR_PASSES = (
    Pass("ref_log_probs", REFERENCE, "ref_", log_probs, needs_reference),
    Pass("teacher_log_probs", TEACHER, "teacher_", log_probs, needs_teacher),
    Pass("log_probs", OLD_ACTOR, "", log_probs_and_entropy, _of_old_actor),
    Pass("log_probs", TRAINED, "", log_probs_and_entropy, _of_trained),
)
CRITIC_PASSES = (Pass("values", TRAINED, "", values, lambda args, num_steps: True),)
