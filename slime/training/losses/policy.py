"""The policy loss: a surrogate, its corrections, entropy and KL.

Log-probs are natural logarithms, float32, of response tokens; a mask is 1 where a token counts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from slime.config.policy import PolicyConfig
from slime.training.kl import compute_approx_kl, ratio_of
from slime.training.log_probs import capture_log_probs, response_log_probs
from slime.training.losses.corrections import compute_opsm_mask
from slime.training.losses.reducers import LossOutput, Reducer, pg_reducer_of, reducer_of
from slime.training.losses.surrogates.tokens import PolicyTokens, SurrogateFunction, with_trained_gradient
from slime.training.parallel import ParallelContext
from slime.utils.misc import load_function

Tensors = list[torch.Tensor]
OWN_LOG_PROBS = "own_log_probs"
"""The metric that stands for those of a pass which a loss made needless: ``rollout/log_probs``."""


def policy_loss_function(
    config: PolicyConfig,
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
    new, entropies = response_log_probs(
        config.logits, logits, batch, context, entropy_gradient=config.loss.entropy_coef != 0
    )
    capture_log_probs(new)
    new = with_trained_gradient(new, batch["loss_masks"])
    old = _old_log_probs(config, batch, new)
    pg, ppo_kl, clipped, dropped = _policy_gradient(config, batch, new, old)
    reduce = reduce_pg = sum_of_sample_mean
    corrections: dict[str, torch.Tensor] = {}
    if config.off_policy.use_tis or config.off_policy.get_mismatch_metrics:
        pg, masks, corrections = _correct_for_engine(config, batch, new, pg, ppo_kl)
        reduce_pg = reducer_of(config.loss, batch, masks)
    else:
        masks = batch["loss_masks"]
    pg_loss = pg_reducer_of(config.loss, batch, masks, reduce_pg)(pg)
    entropy = reduce(torch.cat(entropies))
    loss = pg_loss - config.loss.entropy_coef * entropy
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy,
        "pg_clipfrac": reduce_pg(clipped),
        "ppo_kl": reduce_pg(ppo_kl),
        **{name: reduce(value) for name, value in _engine_gap(config, batch, new, old).items()},
    }
    if config.kl.use_kl_loss:
        metrics["kl_loss"] = reduce(_kl_to_reference(config, batch, new, old))
        loss = loss + config.kl.kl_loss_coef * metrics["kl_loss"]
    metrics |= {name: reduce(value) for name, value in corrections.items()}
    if "log_probs" not in batch:
        metrics[OWN_LOG_PROBS] = reduce(torch.cat(new))
    if dropped is not None:
        metrics["opsm_clipfrac"] = reduce(dropped.float())
    metrics = {"loss": loss, **metrics}
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def _old_log_probs(config: PolicyConfig, batch: Mapping[str, Any], new: Tensors) -> Tensors:
    if config.off_policy.use_rollout_logprobs:
        return batch["rollout_log_probs"]
    return batch.get("log_probs") or [log_probs.detach() for log_probs in new]


def _policy_gradient(
    config: PolicyConfig, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Per token: loss, old minus new log-probs, 1.0 where clipped, and where OPSM drops it, if it does."""
    tokens = PolicyTokens(new, old, batch["advantages"], batch["loss_masks"])
    surrogate: SurrogateFunction = load_function(config.loss.surrogate_function_path)
    loss, log_ratio, clipped = surrogate(config.loss, tokens)
    dropped = None
    if config.off_policy.use_opsm:
        dropped = compute_opsm_mask(config.off_policy, new, old, tokens.advantages, tokens.masks)[0] == 0
        loss = torch.where(dropped, 0.0, loss)
    return loss, log_ratio, clipped, dropped


def _correct_for_engine(
    config: PolicyConfig, batch: Mapping[str, Any], new: Tensors, pg: torch.Tensor, ppo_kl: torch.Tensor
) -> tuple[torch.Tensor, Tensors, dict[str, torch.Tensor]]:
    """Importance correction for the gap between trainer and engine, or its metrics alone.

    Raises:
        ValueError: the batch has no log-probs of the engine, or a custom correction gives another number of
            values than it got.
    """
    if "rollout_log_probs" not in batch:
        raise ValueError("--use-tis, --get-mismatch-metrics: the rollout has no log-probs of the engine")
    function = load_function(config.off_policy.tis_function_path)
    corrected, masks, metrics = function(
        args=config.flat if config.off_policy.custom_tis_function_path else config.off_policy,
        pg_loss=pg,
        train_log_probs=batch.get("log_probs") or [log_probs.detach() for log_probs in new],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **({"mean_weight": batch["mean_weight"]} if config.off_policy.tis_needs_mean else {}),
    )
    if corrected.shape != pg.shape:
        found, wanted = list(corrected.shape), list(pg.shape)
        raise ValueError(f"{config.off_policy.tis_function_path}: pg_loss {found}, wanted {wanted} as given")
    metrics = {"ois": ratio_of(-ppo_kl), **metrics}
    if config.off_policy.use_tis or config.off_policy.custom_tis_function_path:
        return corrected, masks, metrics
    return pg, batch["loss_masks"], metrics


def _engine_gap(
    config: PolicyConfig, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> dict[str, torch.Tensor]:
    if "rollout_log_probs" not in batch:
        return {}
    trainer = new if config.off_policy.use_rollout_logprobs else old
    gap = (torch.cat(trainer) - torch.cat(batch["rollout_log_probs"])).abs()
    return {"train_rollout_logprob_abs_diff": gap}


def _kl_to_reference(
    config: PolicyConfig, batch: Mapping[str, Any], new: Tensors, old: Tensors
) -> torch.Tensor:
    policy = torch.cat(new)
    ratio = ratio_of(policy - torch.cat(old)) if config.kl.use_unbiased_kl else None
    return compute_approx_kl(policy, torch.cat(batch["ref_log_probs"]), config.kl.kl_loss_type, ratio)
