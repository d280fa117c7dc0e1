"""The norm of queries or keys over all heads of a token, which tensor parallelism splits."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class NormOverHeads(torch.nn.Module):
    """RMSNorm over the features of all heads; this rank has those of its own heads, and their weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int) -> None:
        """``hidden_size`` is that of one head, ``heads`` counts those of all tensor-parallel ranks."""
        super().__init__()
        self._group = mpu.get_tensor_model_parallel_group()
        self._width, self._eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(
            torch.ones(self._width // self._group.size(), dtype=config.params_dtype)
        )
        vars(self.weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., heads of this rank, features]; computes in float32."""
        rows = x.flatten(-2).float()
        squares = _SumOverRanks.apply(rows.square().sum(-1, keepdim=True), self._group)
        normed = rows * torch.rsqrt(squares / self._width + self._eps)
        return (normed.to(x.dtype) * self.weight).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the state for megatron-core's checkpoints, which hold the whole weight."""
        groups = {"tp_group": self._group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        values = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(values, prefix, {"weight": 0}, sharded_offsets, **groups)


class _SumOverRanks(torch.autograd.Function):
    """Each rank uses the sum, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
