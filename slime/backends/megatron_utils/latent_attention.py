"""Multi-latent attention (DeepSeek-V2, section 2.1) over packed batches."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.backends.megatron_utils.layers import RMSNorm

_EPSILON = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps says


class ReplicatedLinear(torch.nn.Linear):
    """A projection without bias that every tensor-parallel rank has whole, for its own part of the tokens."""

    def __init__(self, config: MLATransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(self.weight)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class LatentAttention(MultiLatentAttention):
    """megatron-core's, with down-projections that are not split, which its own gradients get wrong, and with
    the rotary embedding left to the core attention, which knows the packed batch's layout."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, groups)
        self.recompute_up_proj = False

        def up(module: Any, inputs: int, features: int) -> torch.nn.Module:
            linear: torch.nn.Module = build_module(
                module,
                inputs,
                config.num_attention_heads * features,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=groups.tp,
            )
            return linear

        rank = config.q_lora_rank
        if rank is None:
            self.linear_q_proj = up(submodules.linear_q_proj, config.hidden_size, self.q_head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, rank)
            self.q_layernorm = RMSNorm(config, rank, _EPSILON)
            self.linear_q_up_proj = up(submodules.linear_q_up_proj, rank, self.q_head_dim)
        latent = config.kv_lora_rank
        width = latent + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, width)
        self.kv_layernorm = RMSNorm(config, latent, _EPSILON)
        features = config.qk_head_dim + config.v_head_dim
        self.linear_kv_up_proj = up(submodules.linear_kv_up_proj, latent, features)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        """Computes queries, keys and values of hidden states [length, batch, hidden], which sequence
        parallelism splits along the length.

        Returns query, key and value [..., heads, features], ... being the tokens of a packed batch, else
        length and batch. The features that are to be rotated are the last ones of queries and keys. Next
        comes the latent vector that queries are made of, if there is one, for this rank's part of the length.
        """
        config = self.config
        latent, rotated = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        if config.sequence_parallel:
            rotated = gather_from_sequence_parallel_region(rotated, group=self.tp_group)
        both = self._heads(self.linear_kv_up_proj(self.kv_layernorm(latent))[0])
        key, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        rotated = rotated.unsqueeze(-2).expand(*key.shape[:-1], -1)
        (query, query_latent), key = self._query(hidden_states), torch.cat([key, rotated], dim=-1)
        if packed_seq_params is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        return query, key, value, query_latent, None

    def _query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.config.q_lora_rank is None:
            return self._heads(self.linear_q_proj(hidden_states)[0]), None
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        return self._heads(self.linear_q_up_proj(latent)[0]), latent

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_attention_heads_per_partition, -1))
