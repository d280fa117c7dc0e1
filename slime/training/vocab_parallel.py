"""Log-prob and entropy of tokens whose logits are split over the tensor-parallel group."""

from typing import Any

import torch
import torch.distributed as dist


def vocab_parallel_log_prob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits)[target] and the entropy of softmax(logits), per row.

    Args:
        logits: [N, V / tp] float32, this rank's slice of the vocabulary.
        targets: [N] int64 token ids.
        entropy_gradient: whether the entropy is differentiated; it costs one more [N, V / tp] tensor.

    Returns:
        log-probs and entropies, [N] float32 each.
    """
    rank = dist.get_rank(tp_group) if tp_group is not None else 0
    return _VocabParallelLogProbEntropy.apply(
        logits, targets - rank * logits.size(-1), tp_group, entropy_gradient
    )


class _VocabParallelLogProbEntropy(torch.autograd.Function):
    """With z the logits less their maximum, S the sum of e^z, p = e^z / S:

    log p_target = z_target - log S;  H = log S - sum p z.
    Gradients: (1_target - p) for log p_target;  p (sum p z - z) for H.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        tp_group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        largest = logits.amax(-1)
        _reduce(largest, tp_group, dist.ReduceOp.MAX)
        z = logits - largest[:, None]
        exp = z.exp()
        here = (targets >= 0) & (targets < z.size(-1))
        local = targets.where(here, 0)
        z_target = z.gather(-1, local[:, None])[:, 0] * here
        # One reduction for the three sums; [3, N].
        sums = torch.stack([exp.sum(-1), torch.linalg.vecdot(exp, z), z_target])
        _reduce(sums, tp_group, dist.ReduceOp.SUM)
        total, weighted, z_target = sums.unbind()
        log_total = total.log()
        mean_z = weighted / total
        softmax = exp.div_(total[:, None])
        ctx.save_for_backward(softmax, local, here, mean_z, *([z] if entropy_gradient else []))
        return z_target - log_total, log_total - mean_z

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        log_prob_gradient, entropy_gradient = gradients
        softmax, local, here, mean_z, *rest = ctx.saved_tensors
        gradient = softmax * -log_prob_gradient[:, None]
        gradient.scatter_add_(-1, local[:, None], (log_prob_gradient * here)[:, None])
        if rest:
            (z,) = rest
            gradient += softmax * (mean_z[:, None] - z) * entropy_gradient[:, None]
        return gradient, None, None, None


def _reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, op: Any) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
