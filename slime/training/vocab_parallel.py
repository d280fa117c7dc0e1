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

from slime.training.nucleus_rows import Nuclei, NucleusLogProbs
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
    nuclei: Nuclei | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, per row.

    Args:
        logits: [T, V / tp], this rank's slice of the vocabulary, of any floating dtype.
        targets: [N] int64 token ids.
        entropy_gradient: whether the entropy is differentiated.
        rows: [N] int64, those of the logits that are used, each once; all if not given.
        vocab_size: tokens that exist; what the logits have beyond them has probability 0. V if not given.
        chunk_size: rows at a time; 0 for as many as suit the device.
        nuclei: of the N rows: log-probs are those within a row's nucleus, if it has one. Entropies are not.

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
    nuclei = None if nuclei is None else nuclei.of_slice(start, part.real)
    return _LogProbEntropy.apply(logits, rows, targets - start, part, entropy_gradient, nuclei)


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

    def reduce(self, largest: torch.Tensor, sums: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """Reduces over the slices, in place.

        Args:
            largest: [N], the maximum of each row in its slice.
            sums: [3, N], S, the sum of e^z z and z_target of `_LogProbEntropy`, z relative to that maximum.
            mine: [N], whether the target is in the slice.

        Returns:
            [N], e to the slice's maximum less that of all.
        """
        if self.tp_group is None:
            return torch.ones_like(largest)
        shift = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tp_group)
        shift -= largest
        scale = shift.exp()
        total, weighted, z_target = sums
        weighted.addcmul_(shift, total).mul_(scale)
        total *= scale
        z_target.add_(shift).mul_(mine)
        dist.all_reduce(sums, group=self.tp_group)
        return scale


class _LogProbEntropy(torch.autograd.Function):
    """Log-probs and entropies with their gradients. With z the logits less their maximum, S the sum of e^z, p
    = e^z / S:

    log p_target = z_target - log S;  H = log S - sum p z.
    Gradients: (1_target - p) for log p_target;  p (sum p z - z) for H.

    q is the softmax of a slice as torch computes it, in one go, of which p is a multiple. In float32 its sum
    of e^z is coarse where the vocabulary is large; that the sum of q is not quite 1 makes up for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        part: _Slice,
        entropy_gradient: bool,
        nuclei: Nuclei | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mine = (targets >= 0) & (targets < logits.size(-1))
        local = targets.where(mine, 0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        values = torch.empty(5, len(rows), dtype=dtype, device=logits.device)
        largest, unit, sums = values[0], values[1], values[2:]
        within = None if nuclei is None else NucleusLogProbs(nuclei, local, mine, dtype)
        for here, z in part.chunks(logits, rows):
            if within is not None:
                within.add(here, z)
            largest[here] = z.amax(-1)
            z -= largest[here, None]
            q = z.softmax(-1)
            unit[here] = q.amax(-1)  # where e^z is 1
            sums[0, here] = q.sum(-1)
            sums[1, here] = torch.linalg.vecdot(q, z)
            sums[2, here] = z.gather(-1, local[here, None])[:, 0]
        sums[:2] /= unit
        scale = part.reduce(largest, sums, mine)
        total, weighted, z_target = sums
        log_total, mean_z = total.log(), weighted / total
        entropy = log_total - mean_z
        p_of_q = scale / (unit * total)
        ctx.save_for_backward(logits, rows, local, mine, largest, mean_z, p_of_q)
        ctx.part, ctx.entropy_gradient = part, entropy_gradient
        ctx.nuclei, ctx.within = nuclei, within
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        log_probs = z_target - log_total
        if nuclei is not None and within is not None:
            log_probs = torch.where(nuclei.recorded, within.finish(part.tp_group), log_probs)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: torch.Tensor, entropy_gradient: torch.Tensor) -> Any:
        logits, rows, local, mine, largest, mean_z, p_of_q = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        outer = log_prob_gradient / ctx.part.temperature
        whole = outer if ctx.nuclei is None else outer.masked_fill(ctx.nuclei.recorded, 0.0)
        of_target, of_p = whole * mine, whole * -p_of_q
        of_entropy = entropy_gradient * -p_of_q / ctx.part.temperature
        for here, z in ctx.part.chunks(logits, rows):
            of_nuclei = ctx.within and ctx.within.gradient(here, z, outer[here])
            q = z.softmax(-1)
            if ctx.entropy_gradient:
                z.sub_(largest[here, None]).sub_(mean_z[here, None]).mul_(of_entropy[here, None])
                q *= z.add_(of_p[here, None])
            else:
                q *= of_p[here, None]
            q.scatter_add_(-1, local[here, None], of_target[here, None])
            if of_nuclei is not None:
                *at, values = of_nuclei
                q.index_put_(tuple(at), values, accumulate=True)
            gradient.index_copy_(0, rows[here], q.to(logits.dtype))
        return gradient, None, None, None, None, None
