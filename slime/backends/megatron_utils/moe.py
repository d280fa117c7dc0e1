"""Mixtures of experts: megatron-core's layer, where packed batches of RL need it otherwise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_default_pg_collection,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from slime.training.inputs import PackedInputs


@dataclass(frozen=True)
class GroupLimitedChoice:
    """Takes the place of megatron-core's replay of routes, as the one that is asked for a token's experts.

    megatron-core's own choice ranks groups by as many of their experts as a token takes from each on average.
    """

    counted: int

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, default: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, experts) [tokens, topk] of the best experts in the best groups (DeepSeek-V3, 2.1.2)."""
        grouped = scores.unflatten(1, (num_groups, -1))
        best = grouped.topk(self.counted, dim=-1)[0].sum(-1).topk(group_topk, dim=-1)[1]
        open_groups = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        open_groups.scatter_(1, best, True)
        return grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(1).topk(topk, dim=1)


class Router(TopKRouter):
    """A router whose losses are means over the real tokens of a micro-batch, all tensor-parallel ranks
    together.

    Their gradients enter a step as the mean over its micro-batches, see `router_losses`.

    Attributes:
        router_replay: who chooses the experts of tokens, if not megatron-core.
    """

    router_replay: Any

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        # Else they are multiplied by the row's tokens, but divided by those that the policy's loss counts.
        self.calculate_per_token_loss = False
        if config.moe_router_num_groups:
            # DeepSeek-V3 (with biases) ranks groups by their two best experts, DeepSeek-V2 by the best one.
            self.router_replay = GroupLimitedChoice(2 if config.moe_router_enable_expert_bias else 1)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Counts the real tokens of each expert, once for each step's forward pass.

        megatron-core's takes its mask [tokens] for one of [experts].
        """
        mask = None if padding_mask is None else padding_mask[:, None]
        super()._apply_expert_bias(routing_map, mask)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Counts the experts that tokens are sent to, where these are not the router's choice of today."""
        chosen = getattr(self.router_replay, "chosen", None)
        if chosen is not None:
            real = routing_map.any(-1, keepdim=True)  # megatron-core has taken padding out
            routing_map = torch.zeros_like(routing_map, dtype=torch.bool).scatter(1, chosen, True) & real
        return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, with_padding_mask)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attaches the z-loss (Zoph et al. 2022, ST-MoE, eq. 5) to logits [tokens, experts].

        megatron-core's takes the mean of the ranks' means, which differs where one of them has the padding.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        real = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares)
        count = real.sum()
        dist.all_reduce(count, group=self.tp_cp_group)
        loss = (squares * real).sum() / count
        layers, group = self.config.num_layers, self.tp_cp_group
        save_to_aux_losses_tracker("z_loss", loss, self.layer_number, layers, reduce_group=group)
        return MoEAuxLossAutoScaler.apply(logits, coefficient * loss)


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """megatron-core's, for rows of different lengths: each rank pads its own to the longest one's."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._rows = len(tokens)
        longest = torch.tensor(self._rows, device=tokens.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        padding = (0, 0, 0, int(longest) - self._rows)
        self.routing_map = F.pad(routing_map, padding)  # to no expert
        return F.pad(tokens, padding), F.pad(probs, padding)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().combine_postprocess(hidden_states[: self._rows])


class MixtureOfExperts(MoELayer):
    """The layer. Experts have an optimizer of their own in every layout, so that checkpoints fit all."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        parts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts).submodules
        super().__init__(config, replace(parts, router=Router), layer_number, groups)
        if config.moe_token_dispatcher_type == "allgather":
            self.token_dispatcher = AllGatherDispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )
        if config.add_bias_linear:
            _mend_biases(self.experts)
        for parameter in self.experts.parameters():
            # megatron-core says so at an expert-parallel size above 1 only. But where experts are split
            # over fewer ranks than attention is, their gradients have other ranks to be summed over too.
            vars(parameter)["allreduce"] = False


def _mend_biases(experts: Any) -> None:
    """What megatron-core gets wrong of the last bias of an expert that is not split over ranks.

    It adds it in place to what a sum over one rank has passed on as it is, which autograd refuses, sums its
    gradient over the ranks of attention too, and leaves out of the gradient's norm what the second of these
    ranks have of it.
    """
    for expert in experts.local_experts:
        expert.linear_fc2.explicit_expert_comm = True
        own = {"sequence_parallel": False, "tensor_model_parallel": True}
        vars(expert.linear_fc2.bias).update(own, partition_dim=0, partition_stride=1)


class Float16Chunk(Float16Module):
    """Float16Module whose logits stay in 16 bits.

    megatron-core makes float32 copies of all logits and of their gradient, which with a vocabulary of 150,000
    are most of a step's memory. Losses widen the rows that they work on, with the same results.
    """

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        return super().forward(*inputs, fp32_output=False, **options)


def in_half(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Chunk:
    """The chunk with parameters in 16 bits; biases of experts, and the counts that move them, stay float32.

    megatron-core widens the biases again when they are used, but what their rounding has lost is lost: they
    are larger than the differences between scores that they decide about. Counts it leaves in 16 bits, which
    stop counting single tokens at 256 or 2,048.
    """
    names = ("expert_bias", "local_tokens_per_expert")
    modules = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    kept = [(module, name, getattr(module, name)) for module in modules for name in names]
    wrapped = Float16Chunk(config, chunk)
    for module, name, value in kept:
        setattr(module, name, value)
    return wrapped


def kept_biases(model: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Puts the biases of experts back to what they are now.

    megatron-core moves them with the gradients, before it is known whether the step is skipped.
    """
    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
    biases = [router.expert_bias for router in routers if router.expert_bias is not None]
    before = [bias.clone() for bias in biases]

    def restore() -> None:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)

    return restore


def padding_mask(model: torch.nn.Module, inputs: PackedInputs) -> torch.Tensor | None:
    """[1, T] bool, True for padding, of the tokens that this rank routes; None for dense models.

    Experts are chosen for padding too, but it must not count in the losses of routers.
    """
    config = get_model_config(model)
    if not config.num_moe_experts:
        return None
    # megatron-core splits it over the ranks on the first pipeline stage only.
    first = unwrap_model(model).pre_process
    return inputs.padding if first else padding_of_rank(config, inputs.padding)


def padding_of_rank(config: TransformerConfig, mask: torch.Tensor) -> torch.Tensor | None:
    """Returns a layer's padding of a mask [1, T]: with sequence parallelism a rank routes a part of the
    row.
    """
    if not config.num_moe_experts:
        return None
    if not config.sequence_parallel:
        return mask
    return mask.chunk(mpu.get_tensor_model_parallel_world_size(), 1)[mpu.get_tensor_model_parallel_rank()]


@contextmanager
def router_losses(model: Sequence[torch.nn.Module], weight: float) -> Iterator[None]:
    """Around a step's passes: what the losses of routers weigh beside that of the policy.

    megatron-core scales their gradients by 1 / (micro-batches x data-parallel ranks), or, with
    ``--calculate-per-token-loss``, by 1 / (tokens that all ranks have counted in the step), where ``weight``
    must be the quotient of the two.
    """
    config = get_model_config(model[0])
    before = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    config.moe_aux_loss_coeff = before[0] * weight
    config.moe_z_loss_coeff = before[1] and before[1] * weight
    try:
        yield
    finally:
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = before


def router_metrics(model: Sequence[torch.nn.Module], num_microbatches: int) -> dict[str, float]:
    """Collective. Means over layers and micro-batches since the last call, not yet times coefficients."""
    config = get_model_config(model[0])
    if not config.num_moe_experts:
        return {}
    coefficients = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    names = [name for name, coefficient in coefficients.items() if coefficient]
    if not names:
        return {}
    tracker = get_moe_layer_wise_logging_tracker()
    # A pipeline stage may have no such layer.
    sums = [tracker[name]["values"].sum() if name in tracker else torch.zeros(()) for name in names]
    totals = torch.stack([value.to(torch.cuda.current_device()) for value in sums])
    replicas = mpu.get_data_parallel_group()
    for group in (
        mpu.get_pipeline_model_parallel_group(),
        mpu.get_tensor_and_context_parallel_group(),
        replicas,
    ):
        dist.all_reduce(totals, group=group)
    clear_aux_losses_tracker()
    count = sum(config.moe_layer_freq) * num_microbatches * replicas.size()
    return {f"moe_{name}": value / count for name, value in zip(names, totals.tolist(), strict=True)}
