"""megatron-core's own layers, with our norms, attention and mixtures of experts in them."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.latent_attention import LatentAttention
from slime.backends.megatron_utils.layers import PackedAttention, RMSNorm
from slime.backends.megatron_utils.moe import MixtureOfExperts
from slime.config.model import ModelConfig
from slime.config.rope import RotaryConfig
from slime.config.run import filled


def layer_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage, as the shape in ``args`` wants them; layer specs of users call it."""
    model, rotary = filled(ModelConfig, args), filled(RotaryConfig, args)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    # Layers of a kind share one spec.
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        _adapt(model, rotary, config, layer)
    block.layer_norm = RMSNorm
    return block


def _adapt(model: ModelConfig, rotary: RotaryConfig, config: TransformerConfig, layer: ModuleSpec) -> None:
    parts: Any = layer.submodules
    if parts.mlp.module is MoELayer:
        parts.mlp = MixtureOfExperts
        # TransformerEngine has no layer that takes in this norm. So it keeps its name in checkpoints.
        parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if model.post_self_attn_layernorm or model.post_mlp_layernorm:
        layer.module = SandwichLayer
        layer.params |= {
            "after_attention": model.post_self_attn_layernorm,
            "after_mlp": model.post_mlp_layernorm,
        }
    if model.kv_lora_rank is not None:
        parts.self_attention = _latent_attention(model, rotary)
        return
    if model.attention_output_gate:
        parts.self_attention.module = GatedSelfAttention
    attention = parts.self_attention.submodules
    attention.core_attention = partial(
        PackedAttention,
        rope=rotary.rope,
        windows=model.attention_windows,
        local_rope=rotary.local_rope,
        sinks=model.softmax_type == "learnable",
    )
    if model.qk_norm_over_heads:
        attention.q_layernorm = _norm_over(config.num_attention_heads)
        attention.k_layernorm = _norm_over(config.num_query_groups)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _norm_over(heads: int | None) -> ModuleSpec:
    return ModuleSpec(module=NormOverHeads, params={"heads": heads})


def _latent_attention(model: ModelConfig, rotary: RotaryConfig) -> ModuleSpec:
    rotated = {"rotated_from": model.qk_head_dim, "rotated_width": model.qk_pos_emb_head_dim}
    assert rotary.rope is not None  # every family with latent attention has one
    scores = {"rope": rotary.rope, "score_factor": rotary.rope.score_factor}
    core = ModuleSpec(module=PackedAttention, params=rotated | scores)
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
        ),
    )


class GatedSelfAttention(SelfAttention):
    """megatron-core's, with the gates of this rank's heads.

    Where ranks share a key-value head, each rank computes a part of the rows of ``linear_qkv`` and gathers
    those of the others, backwards a reduce-scatter sums the gradients. megatron-core 0.16 then takes the
    queries of this rank's heads out of those of the group, and leaves the gates of all of them.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """(query, key, value, gate) with ``output_gate``, each [length, batch, heads, width]."""
        parts = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        groups = self.config.num_query_groups or 0
        if not output_gate or groups >= self.world_size:
            return parts
        query, key, value, gate = parts
        heads = query.size(2)
        first = self.tp_group.rank() % (self.world_size // groups) * heads
        return query, key, value, gate[:, :, first : first + heads]


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


AddResidual = Callable[[bool, bool], Callable[[Any, torch.Tensor, float], torch.Tensor]]


class SandwichLayer(TransformerLayer):
    """megatron-core's layer; what attention and MLP give is normed before it joins the residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        after_attention: bool,
        after_mlp: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        width, epsilon = config.hidden_size, config.layernorm_epsilon
        if after_attention:
            self.post_self_attn_layernorm = RMSNorm(config, width, epsilon)
            add = cast(AddResidual, vars(self)["self_attn_bda"])
            self.self_attn_bda = _normed(add, self.post_self_attn_layernorm)
        if after_mlp:
            self.post_mlp_layernorm = RMSNorm(config, width, epsilon)
            add = cast(AddResidual, vars(self)["mlp_bda"])
            self.mlp_bda = _normed(add, self.post_mlp_layernorm)


def _normed(add: AddResidual, norm: torch.nn.Module) -> AddResidual:
    """The function that adds a residual, of a normed output."""

    def build(training: bool, fused: bool) -> Callable[[Any, torch.Tensor, float], torch.Tensor]:
        def apply(output_and_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_and_bias
            output = norm(output if bias is None else output + bias)
            return add(training, fused)((output, None), residual, dropout)

        return apply

    return build
