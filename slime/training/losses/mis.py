"""MIS: importance sampling between trainer and engine at three levels, with bounds, rejection and veto.

The rollout's tokens were drawn from the engine's policy; the trainer's differs by rounding, kernels or age.
With d = train - rollout log-probs of a token, e^d is its importance weight; a sequence has the product of its
tokens' weights (level "sequence") or their geometric mean (level "geometric"). The formulas are those of the
original's ``train_infer_mismatch_helper``.
"""

from collections.abc import Sequence
from typing import Any

import torch

from slime.config.off_policy import OffPolicyConfig
from slime.training.kl import MAX_LOG_RATIO
from slime.training.losses.corrections import Corrected

Tensors = list[torch.Tensor]
_SMALLEST_MEAN = 1e-8
# Of a perplexity: the sum of those of a step is a finite number of float64 up to here.
_MAX_LOG_PPL = 700.0


def mis_function(
    args: OffPolicyConfig,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    mean_weight: Sequence[float] | None = None,
    **_: Any,
) -> Corrected:
    """`compute_mis_weights` as a correction; metrics have the prefix ``mis_``."""
    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
        mean_weight=mean_weight,
    )
    named = {f"mis_{name}": torch.cat(values) for name, values in metrics.items()}
    return pg_loss * torch.cat(weights), masks, named


def compute_mis_weights(
    args: OffPolicyConfig,
    *,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    mean_weight: Sequence[float] | None = None,
) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
    """Weights without a gradient, the loss masks less what is rejected, and metrics: per sample [R].

    Args:
        mean_weight: by which ``--tis-batch-normalize`` divides, per sample; by default the mean over these
            samples.
    """
    differences = [
        (train - rollout).detach() for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)
    ]
    low, high = args.tis_lower_bound, args.tis_upper_bound
    before = [weight_of(d, mask, args.tis_level) for d, mask in zip(differences, loss_masks, strict=True)]
    weights = [bounded(weight, args.tis_mode, low, high) for weight in before]
    if args.tis_batch_normalize:
        if mean_weight is None:
            total, count = weight_sums(weights, loss_masks, args.tis_level)
            mean_weight = [mean_of(total, count)] * len(weights)
        weights = [weight / mean for weight, mean in zip(weights, mean_weight, strict=True)]
    kept = [_kept(args, d, mask) for d, mask in zip(differences, loss_masks, strict=True)]
    if args.tis_mode == "mask":
        kept = [keep & (w >= low) & (w <= high) for keep, w in zip(kept, before, strict=True)]
    masks = [mask * keep for mask, keep in zip(loss_masks, kept, strict=True)]
    metrics = {
        **gap_metrics(train_log_probs, rollout_log_probs, loss_masks),
        "tis_weight_before_bound": before,
        "tis_weight_after_bound": weights,
        "tis_above_fraction": [(weight > high).float() for weight in before],
        "tis_below_fraction": [(weight < low).float() for weight in before],
        "masked_fraction": [(~keep).float() for keep in kept],
    }
    if args.use_rs and args.rs_veto_threshold is not None:
        metrics["veto_fraction"] = [
            _is_vetoed(d, mask, args.rs_veto_threshold).float().expand_as(d)
            for d, mask in zip(differences, loss_masks, strict=True)
        ]
    return weights, masks, metrics


def weight_of(difference: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Importance weights [R] at a level: e to the power of a log-ratio that is cut at 20 on both sides."""
    if level != "token":
        difference = torch.where(mask != 0, difference, 0.0)
        divisor = mask.float().sum().clamp(min=1) if level == "geometric" else 1
        difference = (difference.sum() / divisor).expand_as(difference)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded(weight: torch.Tensor, mode: str, low: float, high: float) -> torch.Tensor:
    """Truncated (above alone), clipped (on both sides), or for "mask" 0 out of bounds."""
    if mode == "truncate":
        return weight.clamp(max=high)
    if mode == "clip":
        return weight.clamp(low, high)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def _kept(args: OffPolicyConfig, difference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Where ``--use-rs`` leaves the loss mask as it is: bool [R]."""
    if not args.use_rs:
        return torch.ones_like(difference, dtype=torch.bool)
    weight = weight_of(difference, mask, args.rs_level)
    kept = (weight >= args.rs_lower_bound) & (weight <= args.rs_upper_bound)
    if args.rs_veto_threshold is not None:
        kept = kept & ~_is_vetoed(difference, mask, args.rs_veto_threshold)
    return kept


def _is_vetoed(difference: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether a trained token is less than ``threshold`` times as likely as the engine thought: a scalar."""
    return ((mask != 0) & (difference < torch.tensor(threshold).log())).any()


def weight_sums(
    weights: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], level: str
) -> tuple[float, float]:
    """Sum and number of the weights of trained tokens or, above the token's level, of trained sequences."""
    total = count = 0.0
    for weight, mask in zip(weights, masks, strict=True):
        own = weight[mask != 0].double()
        own = own if level == "token" else own[:1]
        total, count = total + float(own.sum()), count + len(own)
    return total, count


def mean_of(total: float, count: float) -> float:
    """The mean by which weights are divided; 1 where it is none."""
    mean = total / count if count else 1.0
    return mean if mean > _SMALLEST_MEAN else 1.0


def gap_metrics(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> dict[str, Tensors]:
    """How far two policies are apart on the engine's tokens, per sample [R].

    ``kl`` and ``k3_kl`` estimate KL(engine || trainer) per token; log-perplexities are those of a sequence.
    Perplexities and their ratio are float64, cut at e^700: a policy that is far off has more than float32
    holds.
    """
    metrics: dict[str, Tensors] = {}
    for train, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        difference = (train - rollout).detach()
        training, engine = (_log_ppl(values.detach().double(), mask) for values in (train, rollout))
        cut = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        of_sample = {
            "kl": -difference,
            "k3_kl": cut.exp() - cut - 1,
            "training_log_ppl": training,
            "training_ppl": _exp(training),
            "rollout_log_ppl": engine,
            "rollout_ppl": _exp(engine),
            "log_ppl_diff": engine - training,
            "log_ppl_abs_diff": (engine - training).abs(),
            "ppl_ratio": _exp(training - engine),
        }
        for name, value in of_sample.items():
            metrics.setdefault(name, []).append(value.expand_as(difference))
    return metrics


def _exp(log_ppl: torch.Tensor) -> torch.Tensor:
    return log_ppl.clamp(max=_MAX_LOG_PPL).exp()


def _log_ppl(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -torch.where(mask != 0, log_probs, 0.0).sum() / mask.float().sum().clamp(min=1)
