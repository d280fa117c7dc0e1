"""The policy loss of GRPO, GSPO, CISPO and REINFORCE++ with its corrections.

Log-probs are natural logarithms, float32, of response tokens; a mask is 1 where a token counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.arguments.views import TrainingView
from slime.training.kl import compute_approx_kl, ratio_of, sequence_kl
from slime.training.log_probs import response_log_probs
from slime.training.losses.corrections import compute_opsm_mask
from slime.training.losses.reducers import LossOutput, Reducer, pg_reducer_of, reducer_of
from slime.training.parallel import ParallelContext
from slime.utils.misc import load_function

Tensors = list[torch.Tensor]
OWN_LOG_PROBS = "own_log_probs"
"""The metric that stands for those of a pass which a loss made needless: ``rollout/log_probs``."""


def policy_loss_function(
    args: TrainingView,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """loss = policy gradient - entropy_coef * entropy + kl_loss_coef * KL to the reference.

    Without old log-probs in the batch the old policy is the current one, detached: the case of one
    optimizer step per rollout.

    Args:
        batch: a micro-batch with ``advantages`` and, as far as they apply, ``log_probs``,
            ``rollout_log_probs`` and ``ref_log_probs``: per sample [R] float32.
        logits: [1, T / cp, V / tp].

    Returns:
        The loss, and its metrics as scalars reduced by ``sum_of_sample_mean``.
    """
    new, entropies = response_log_probs(args, logits, batch, context, entropy_gradient=args.entropy_coef != 0)
    new = _trained_alone(new, batch["loss_masks"])
    old = _old_log_probs(args, batch, new)
    pg, ppo_kl, clipped, dropped = _policy_gradient(args, batch, new, old)
    reduce = reduce_pg = sum_of_sample_mean
    corrections: dict[str, torch.Tensor] = {}
    if args.use_tis or args.get_mismatch_metrics:
        pg, masks, corrections = _correct_for_engine(args, batch, new, pg, ppo_kl)
        reduce_pg = reducer_of(args, batch, masks)
    else:
        masks = batch["loss_masks"]
    pg_loss = pg_reducer_of(args, batch, masks, reduce_pg)(pg)
    entropy = reduce(torch.cat(entropies))
    loss = pg_loss - args.entropy_coef * entropy
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy,
        "pg_clipfrac": reduce_pg(clipped),
        "ppo_kl": reduce_pg(ppo_kl),
        **{name: reduce(value) for name, value in _engine_gap(args, batch, new, old).items()},
    }
    if args.use_kl_loss:
        metrics["kl_loss"] = reduce(_kl_to_reference(args, batch, new, old))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    metrics |= {name: reduce(value) for name, value in corrections.items()}
    if "log_probs" not in batch:
        metrics[OWN_LOG_PROBS] = reduce(torch.cat(new))
    if dropped is not None:
        metrics["opsm_clipfrac"] = reduce(dropped.float())
    metrics = {"loss": loss, **metrics}
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def _trained_alone(tensors: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> Tensors:
    """Returns the same values, with a gradient only where the mask is 1: elsewhere it may be 0 times
    infinity.
    """
    return [
        torch.where(mask != 0, values, values.detach()) for values, mask in zip(tensors, masks, strict=True)
    ]


def _old_log_probs(args: TrainingView, batch: Mapping[str, Any], new: Tensors) -> Tensors:
    if args.use_rollout_logprobs:
        return batch["rollout_log_probs"]
    return batch.get("log_probs") or [log_probs.detach() for log_probs in new]


def _policy_gradient(
    args: TrainingView, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Per token: loss, old minus new log-probs, 1.0 where clipped, and where OPSM drops it, if it does."""
    advantages, masks = torch.cat(batch["advantages"]), batch["loss_masks"]
    if args.advantage_estimator == "gspo":
        ppo_kl = compute_gspo_kl(new, old, new, masks)
    else:
        ppo_kl = torch.cat(old) - torch.cat(new)
    clip_range = args.eps_clip, args.eps_clip_high
    if args.advantage_estimator == "cispo":
        loss, clipped = compute_cispo_loss(ppo_kl, torch.cat(new), advantages, *clip_range)
    else:
        loss, clipped = compute_policy_loss(ppo_kl, advantages, *clip_range, args.eps_clip_c)
    dropped = None
    if args.use_opsm:
        dropped = compute_opsm_mask(args, new, old, batch["advantages"], masks)[0] == 0
        loss = torch.where(dropped, 0.0, loss)
    return loss, ppo_kl, clipped, dropped


def _correct_for_engine(
    args: TrainingView, batch: Mapping[str, Any], new: Tensors, pg: torch.Tensor, ppo_kl: torch.Tensor
) -> tuple[torch.Tensor, Tensors, dict[str, torch.Tensor]]:
    """Importance correction for the gap between trainer and engine, or its metrics alone.

    Raises:
        ValueError: the batch has no log-probs of the engine, or a custom correction gives another number of
            values than it got.
    """
    if "rollout_log_probs" not in batch:
        raise ValueError("--use-tis, --get-mismatch-metrics: the rollout has no log-probs of the engine")
    function = load_function(args.tis_function_path)
    corrected, masks, metrics = function(
        args=args,
        pg_loss=pg,
        train_log_probs=batch.get("log_probs") or [log_probs.detach() for log_probs in new],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **({"mean_weight": batch["mean_weight"]} if args.tis_needs_mean else {}),
    )
    if corrected.shape != pg.shape:
        found, wanted = list(corrected.shape), list(pg.shape)
        raise ValueError(f"{args.tis_function_path}: pg_loss {found}, wanted {wanted} as given")
    metrics = {"ois": ratio_of(-ppo_kl), **metrics}
    if args.use_tis or args.custom_tis_function_path:
        return corrected, masks, metrics
    return pg, batch["loss_masks"], metrics


def _engine_gap(
    args: TrainingView, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> dict[str, torch.Tensor]:
    if "rollout_log_probs" not in batch:
        return {}
    trainer = new if args.use_rollout_logprobs else old
    gap = (torch.cat(trainer) - torch.cat(batch["rollout_log_probs"])).abs()
    return {"train_rollout_logprob_abs_diff": gap}


def _kl_to_reference(
    args: TrainingView, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> torch.Tensor:
    policy = torch.cat(new)
    ratio = ratio_of(policy - torch.cat(old)) if args.use_unbiased_kl else None
    return compute_approx_kl(policy, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate per token (arXiv 1707.06347, eq. 7), with dual clip (arXiv 1912.09729).

    Args:
        ppo_kl: old minus new log-probs; the ratio is e^-ppo_kl.
        eps_clip_c: for negative advantages the loss does not exceed ``-eps_clip_c * advantage``.

    Returns:
        The loss, and 1.0 where clipping changed it.

    Raises:
        ValueError: ``eps_clip_c`` is not above 1.
    """
    ratio = ratio_of(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c {eps_clip_c}: wanted a value above 1")
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, clip_fraction


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO per token (arXiv 2506.13585, eq. 4): the clipped ratio weights REINFORCE, without a gradient.

    Returns:
        The loss, and 1.0 where the ratio was clipped.
    """
    ratio = ratio_of(-ppo_kl)
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped.detach() * advantages * log_probs, (clipped != ratio).float()


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """GSPO's negated log-ratio (arXiv 2507.18071, eq. 7): each sequence's `sequence_kl` at all its tokens.

    Args:
        local_log_probs: give the lengths of the result; responses come whole, so these are the full ones.
    """
    samples = zip(full_log_probs, full_old_log_probs, local_log_probs, strict=True)
    spread = [
        sequence_kl(old, new, mask).expand_as(local)
        for (new, old, local), mask in zip(samples, loss_masks, strict=True)
    ]
    return torch.cat(_trained_alone(spread, loss_masks))
