"""Mixtures of experts: how they are trained and where they are."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """How experts are trained and where they are."""

    expert_model_parallel_size: int = flag(
        1, above=0, help="expert parallel size: ranks that the experts of a layer are dealt out to"
    )
    expert_tensor_parallel_size: int | None = flag(
        above=0,
        help="ranks that each expert is split over; default that of attention, or 1 for those with biases",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather", help="how tokens travel to their experts; flex is taken as alltoall"
    )
    moe_enable_deepep: bool = flag(False, help="DeepEP's kernels for --moe-token-dispatcher-type flex")
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(help="number format of the router's scores")
    moe_router_load_balancing_type: list[str] | None = flag(
        same_as_default=(["aux_loss"],), help="how the router balances experts: aux_loss (default) or none"
    )
    moe_aux_loss_coeff: list[float] | None = flag(
        at_least=0, same_as_default=([0.0],), help="weight of the balancing loss; 0 if left out"
    )
    moe_z_loss_coeff: float | None = flag(
        at_least=0, same_as_default=(0.0,), help="weight of the loss that keeps the router's logits small"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, at_least=0, at_most=1, help="how far a step moves expert biases towards a balance"
    )
    moe_grouped_gemm: bool = flag(False, help="one kernel for all experts of a rank (no effect here)")
    moe_permute_fusion: bool = flag(False, help="fused sorting of tokens by expert (no effect here)")
