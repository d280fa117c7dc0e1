"""Log-prob and entropy of tokens whose logits are split over the tensor-parallel group.

Works through a few rows at a time and keeps no tensor of the size of the logits but those themselves: with
a vocabulary of 150,000 they are most of a trainer's memory. The backward pass computes the softmax again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.utils.accelerator import chunk_elements

# Logit of a padding row of the vocabulary: its probability is exactly 0.
_NEVER = -1e30


def vocab_parallel_log_prob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    entropy_gradient: bool,
    rows: torch.Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, per row.

    Args:
        logits: [T, V / tp], this rank's slice of the vocabulary, of any floating dtype.
        targets: [N] int64 token ids.
        entropy_gradient: whether the entropy is differentiated.
        rows: [N] int64, those of the logits that are used, each once; all if not given.
        vocab_size: tokens that exist; what the logits have beyond them has probability 0. V if not given.
        chunk_size: rows at a time; 0 for as many as suit the device.

    Returns:
        log-probs and entropies, [N] float32 (float64 of float64 logits) each, natural logarithms.
    """
    width = logits.size(-1)
    start = width * (dist.get_rank(tp_group) if tp_group is not None else 0)
    part = _Slice(
        tp_group,
        temperature,
        width if vocab_size is None else min(max(vocab_size - start, 0), width),
        chunk_size if chunk_size > 0 else max(chunk_elements() // width, 1),
    )
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    return _LogProbEntropy.apply(logits, rows, targets - start, part, entropy_gradient)


@dataclass(frozen=True)
class _Slice:
    """This rank's part of the vocabulary, and how to go through the rows.

    Attributes:
        real: columns that are tokens; the rest are padding.
        chunk_size: rows at a time.
    """

    tp_group: dist.ProcessGroup | None
    temperature: float
    real: int
    chunk_size: int

    def chunks(self, logits: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(positions among the rows, their logits / temperature [n, V / tp] at least float32, a copy)."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        for at in range(0, len(rows), self.chunk_size):
            here = slice(at, min(at + self.chunk_size, len(rows)))
            scaled = logits.index_select(0, rows[here]).to(dtype)
            if self.temperature != 1:
                scaled /= self.temperature
            scaled[:, self.real :] = _NEVER
            yield here, scaled

    def maxima(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """[N], of each row over all slices; None where this slice is all, and `chunks` will show them."""
        if self.tp_group is None:
            return None
        largest = [z.amax(-1) for _, z in self.chunks(logits, rows)]
        found = torch.cat([*largest, logits.new_empty(0)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.tp_group)
        return found


class _LogProbEntropy(torch.autograd.Function):
    """With z the logits less their maximum, S the sum of e^z, p = e^z / S:

    log p_target = z_target - log S;  H = log S - sum p z.
    Gradients: (1_target - p) for log p_target;  p (sum p z - z) for H.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        part: _Slice,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mine = (targets >= 0) & (targets < logits.size(-1))
        local = targets.where(mine, 0)
        # S, the sum of e^z z, and z_target.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        sums = torch.empty(3, len(rows), dtype=dtype, device=logits.device)
        known = part.maxima(logits, rows)
        largest = torch.empty_like(sums[0]) if known is None else known
        for here, z in part.chunks(logits, rows):
            if known is None:
                largest[here] = z.amax(-1)
            z -= largest[here, None]
            sums[2, here] = z.gather(-1, local[here, None])[:, 0] * mine[here]
            exp = z.exp()
            sums[0, here] = exp.sum(-1)
            sums[1, here] = torch.linalg.vecdot(exp, z)
        if part.tp_group is not None:
            dist.all_reduce(sums, group=part.tp_group)
        total, weighted, z_target = sums
        log_total, mean_z = total.log(), weighted / total
        entropy = log_total - mean_z
        ctx.save_for_backward(logits, rows, local, mine, largest, total, mean_z)
        ctx.part, ctx.entropy_gradient = part, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return z_target - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: torch.Tensor, entropy_gradient: torch.Tensor) -> Any:
        logits, rows, local, mine, largest, total, mean_z = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        of_target = log_prob_gradient * mine
        for here, z in ctx.part.chunks(logits, rows):
            z -= largest[here, None]
            if ctx.entropy_gradient:
                p = z.exp().div_(total[here, None])
                of_entropy = z.sub_(mean_z[here, None]).mul_(p).mul_(-entropy_gradient[here, None])
            else:
                p = z.exp_().div_(total[here, None])
            p *= -log_prob_gradient[here, None]
            p.scatter_add_(-1, local[here, None], of_target[here, None])
            if ctx.entropy_gradient:
                p += of_entropy
            if ctx.part.temperature != 1:
                p /= ctx.part.temperature
            gradient.index_add_(0, rows[here], p.to(logits.dtype))
        return gradient, None, None, None, None
