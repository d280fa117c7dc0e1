"""``--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp``.

Change `compute_mis_weights` here to try weights of your own; as it stands it is ``--tis-type mis`` with its
flags. Engine and trainer compute one policy with different kernels, so their log-probs differ; tokens that
the engine drew are weighted with how likely they are for the trainer.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from slime.utils.ppo_utils import compute_mis_weights as weights_by_flags

Tensors = list[torch.Tensor]


def compute_mis_weights(
    args: Namespace,
    *,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[Tensors, Tensors, dict[str, Tensors]]:
    """Returns, of whole responses and per sample [R]: weights without a gradient, loss masks, and metrics."""
    return weights_by_flags(
        args,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
    )


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The weighted policy-gradient loss, the masks of what is still trained on, and metrics per token.

    Written for trainers that hold a part of each response as well: it gathers whole ones, whose weights may
    depend on all tokens, and cuts its results. Where responses are whole, both leave them as they are.
    """
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    lengths = list(zip(total_lengths, response_lengths, strict=True))

    def whole(values: Sequence[torch.Tensor]) -> Tensors:
        return [all_gather_with_cp(v, *length) for v, length in zip(values, lengths, strict=True)]

    def own(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [slice_log_prob_with_cp(v, *length) for v, length in zip(values, lengths, strict=True)]
        )

    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=whole(train_log_probs),
        rollout_log_probs=whole(rollout_log_probs),
        loss_masks=loss_masks,
    )
    return pg_loss * own(weights), masks, {f"mis_{name}": own(values) for name, values in metrics.items()}
