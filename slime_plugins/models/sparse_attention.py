"""Sparse attention (DeepSeek-V3.2, section 2.1): latent attention to the keys that indexers choose."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.backends.megatron_utils.latent_attention import LatentAttention
from slime.backends.megatron_utils.layers import PackedAttention
from slime.training.packed_layout import PackedLayout
from slime.utils.accelerator import has_packed_attention
from slime_plugins.models.lightning_indexer import Choice, IndexerSizes, LightningIndexer, left_by


class SparseCoreAttention(PackedAttention):
    """Attention to chosen keys. It is computed with a mask: sparse in what is read, not in what it costs."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        choice: Choice,
    ) -> torch.Tensor:
        """[rows, heads, width] each, keys and values of this rank's rows; returns [rows, heads * width]."""
        if choice.is_everything:
            return self._packed(query, key, value, layout, has_packed_attention(query)).flatten(1)

        def mask_of(number: int) -> torch.Tensor | None:
            return choice.mask(number, layout)

        return self._packed(query, key, value, layout, False, mask_of).flatten(1)


class SparseLatentAttention(LatentAttention):
    """Latent attention whose queries read the keys that this layer's indexer chooses.

    A layer without one reads those of the last layer that has one, which leaves them on the layout of the
    packed batch.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        indexers: IndexerSizes,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, groups)
        layer = layer_number - 1
        self._leaves = indexers.is_shared(layer)
        self._source = indexers.source(layer)
        self.indexer = LightningIndexer(config, indexers, groups) if indexers.kinds[layer] else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [rows, 1, hidden] of a packed batch, which sequence parallelism splits."""
        del attention_mask
        if packed_seq_params is None:
            raise ValueError("sparse attention: wanted a packed batch")
        layout = PackedLayout.of(packed_seq_params)
        query, key, value, query_latent, _kv = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params
        )
        choice = self._choice(hidden_states, query_latent, layout)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.core_attention.attend(*tensors, layout, choice)
            return out

        if self.checkpoint_core_attention and self.training:
            out = checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        projected: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(out[:, None])
        return projected

    def _choice(
        self, hidden_states: torch.Tensor, query_latent: torch.Tensor | None, layout: PackedLayout
    ) -> Choice:
        if self.indexer is None:
            found: Choice = layout.left[left_by(self._source)]
            return found
        choice: Choice = self.indexer(hidden_states, query_latent, layout)
        if self._leaves:
            layout.left[left_by(self._source)] = choice
        return choice
