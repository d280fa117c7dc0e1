"""What stands between the attentions of a decoder: a gated MLP, or a mixture of several."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.backends.embedded_engine.linear import linear
from slime.config.model import MoeShape

Project = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``project(x, weight, bias)``, as `linear`."""


@dataclass
class MlpWeights:
    """``[out, in]``; gate and up are stacked."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def forward(self, x: torch.Tensor, project: Project = linear) -> torch.Tensor:
        """``project`` computes the products, with what adapters add to them."""
        gate, up = project(x, self.gate_up, self.gate_up_bias).chunk(2, -1)
        return project(F.silu(gate).mul_(up), self.down, self.down_bias)


@dataclass
class ExpertWeights:
    """``router`` ``[experts, in]``; ``gate_up`` and ``down`` of all experts, ``[experts, out, in]``."""

    shape: MoeShape
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def forward(
        self,
        x: torch.Tensor,
        project: Project = linear,
        note: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """The chosen experts' outputs, weighted (Shazeer et al. 2017, eq. 1), ``[..., hidden]``.

        A row's sum is taken in the order of its experts' numbers, so that it is the same in any company.
        ``note`` is told of the experts of each row, ``[N, chosen]``.
        """
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self._route(rows)
        if note is not None:
            note(chosen)
        out = torch.zeros_like(rows)
        for number in range(self.shape.num_experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                expert = MlpWeights(self.gate_up[number], None, self.down[number], None)
                out.index_add_(0, row, expert.forward(rows[row], project) * weights[row, place, None])
        return out.view(x.shape)

    def _route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(weights, experts)``, each ``[N, chosen]``."""
        shares = linear(rows, self.router).float().softmax(-1)
        weights, chosen = shares.topk(self.shape.moe_router_topk)
        if not self.shape.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(rows.dtype), chosen
