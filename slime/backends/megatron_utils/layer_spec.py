"""megatron-core's own layers, with our norms, attention and mixtures of experts in them."""

from argparse import Namespace
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.gated_attention import GatedSelfAttention
from slime.backends.megatron_utils.latent_attention import LatentAttention
from slime.backends.megatron_utils.layers import PackedAttention, RMSNorm
from slime.backends.megatron_utils.moe import MixtureOfExperts
from slime.backends.megatron_utils.qk_norm import NormOverHeads
from slime.backends.megatron_utils.sandwich_norms import SandwichLayer


def layer_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage, as the shape in ``args`` wants them."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    # Layers of a kind share one spec.
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        _adapt(args, config, layer)
    block.layer_norm = RMSNorm
    return block


def _adapt(args: Namespace, config: TransformerConfig, layer: ModuleSpec) -> None:
    parts: Any = layer.submodules
    if parts.mlp.module is MoELayer:
        parts.mlp = MixtureOfExperts
        # TransformerEngine has no layer that takes in this norm. So it keeps its name in checkpoints.
        parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if args.post_self_attn_layernorm or args.post_mlp_layernorm:
        layer.module = SandwichLayer
        layer.params |= {
            "after_attention": args.post_self_attn_layernorm,
            "after_mlp": args.post_mlp_layernorm,
        }
    if args.multi_latent_attention:
        parts.self_attention = _latent_attention(args)
        return
    if args.attention_output_gate:
        parts.self_attention.module = GatedSelfAttention
    attention = parts.self_attention.submodules
    attention.core_attention = partial(
        PackedAttention,
        rope=args.rope,
        windows=args.attention_windows,
        local_rope=args.local_rope,
        sinks=args.softmax_type == "learnable",
    )
    if args.qk_norm_over_heads:
        attention.q_layernorm = _norm_over(config.num_attention_heads)
        attention.k_layernorm = _norm_over(config.num_query_groups)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _norm_over(heads: int | None) -> ModuleSpec:
    return ModuleSpec(module=NormOverHeads, params={"heads": heads})


def _latent_attention(args: Namespace) -> ModuleSpec:
    rotated = {"rotated_from": args.qk_head_dim, "rotated_width": args.qk_pos_emb_head_dim}
    scores = {"rope": args.rope, "score_factor": args.rope.score_factor}
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
