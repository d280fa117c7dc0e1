"""Multi-token prediction (MTP) layers, trained beside the policy without touching it.

The parameters are those of megatron-core's multi-token prediction, under its names. The forward pass is ours.
megatron-core's sends a message between context-parallel ranks for each sample of a packed row, knows no
contiguous split, wants labels in every pass, lets the loss change embedding, head and decoder, and does not
recompute several layers at a time.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers import RMSNorm
from slime.backends.megatron_utils.moe import padding_of_rank
from slime.training.inputs import PackedInputs
from slime.training.mtp import ShiftedRows, shifted_rows
from slime.training.parallel import ParallelContext
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy


class MtpLayer(MultiTokenPredictionLayer):
    """One depth: h' = decoder layer(projection of [norm of the embedding, norm of h]) (eqs 21 and 22)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if isinstance(self.transformer_layer.mlp, MoELayer):
            # Else it would be counted among the decoder's in metrics, where it has no place.
            self.transformer_layer.mlp.router.layer_number = None

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        params: PackedSeqParams,
        padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, 1, hidden] or, with sequence parallelism, this rank's part of it."""
        compute = partial(self._compute, params=params, padding_mask=padding_mask)
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(compute, False, hidden, embedded)
        return compute(hidden, embedded)

    def _compute(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        params: PackedSeqParams,
        padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        joined = gather_from_tensor_model_parallel_region(self.eh_proj(both)[0])
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined)
        out, _ = self.transformer_layer(
            hidden_states=joined,
            attention_mask=None,
            packed_seq_params=params,
            padding_mask=padding_mask,
        )
        return self.final_layernorm(out)


class MtpLayers(MultiTokenPredictionBlock):
    """The MTP layers of a model, on its last pipeline stage, as ``model.mtp``.

    Attributes:
        hidden: what the decoder gave last in training, its gradient cut off.
        embedding: this rank's part of the embedding, while a step lasts and the model chunk has none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        decoder: TransformerBlockSubmodules,
        number: int,
        vocab_size: int,
        vp_stage: int | None,
    ) -> None:
        """``number`` layers, their decoder layers as ``decoder`` has its last one."""
        parts = MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=tensor_parallel.ColumnParallelLinear,
            transformer_layer=decoder.layer_specs[-1],
            layer_norm=RMSNorm,
        )
        layers = [ModuleSpec(module=MtpLayer, submodules=parts)] * number
        super().__init__(config, MultiTokenPredictionBlockSubmodules(layers), vp_stage)
        self._vocab_size = vocab_size
        self.hidden: torch.Tensor | None = None
        self.embedding: torch.Tensor | None = None

    def watch(self, decoder: torch.nn.Module) -> None:
        """Takes the hidden states of training passes, those behind the decoder's last norm."""

        def remember(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if module.training:
                self.hidden = output.detach()

        decoder.register_forward_hook(remember)

    def losses(self, model: GPTModel, batch: Mapping[str, Any], context: ParallelContext) -> torch.Tensor:
        """[depths] sums of -log p over this rank's predictions that count (eq. 24), of the last forward pass.

        Their gradients end in these layers: embedding, head and hidden states are constants to them.

        Args:
            batch: of that pass, see `get_batch`.
        """
        assert self.hidden is not None
        # A recomputation gives no gradients if nothing that goes in wants one.
        hidden, self.hidden = self.hidden.requires_grad_(), None
        embedding, head = self._embedding_of(model).detach(), _head_of(model).detach()
        sums = []
        for depth, layer in enumerate(self.layers, start=1):
            shifted = shifted_rows(batch, depth)
            embedded = _embed(shifted.tokens, embedding, self.config.sequence_parallel)
            uncounted = padding_of_rank(self.config, _uncounted(batch, depth, shifted))
            hidden = layer(hidden, embedded, batch["packed_seq_params"], uncounted)
            logits, _ = model.output_layer(hidden, weight=head)
            log_probs, _ = vocab_parallel_log_prob_entropy(
                logits[:, 0],
                shifted.targets,
                context.tp_group,
                entropy_gradient=False,
                rows=shifted.rows,
                vocab_size=self._vocab_size,
            )
            sums.append(-log_probs.sum())
        return torch.stack(sums)

    def _embedding_of(self, model: GPTModel) -> torch.Tensor:
        if model.pre_process:
            weight: torch.Tensor = model.embedding.word_embeddings.weight
            return weight
        if model.share_embeddings_and_output_weights:
            return _head_of(model)
        assert self.embedding is not None
        return self.embedding


def _uncounted(batch: Mapping[str, Any], depth: int, shifted: ShiftedRows) -> torch.Tensor:
    """[1, T / cp] bool, the rows that do not count in the means of a router of this depth.

    Where no sample is long enough for a row, those of all tokens do: a mean over none would be NaN.
    """
    longest = max(map(len, batch["unconcat_tokens"]))
    inputs: PackedInputs = batch["inputs"]
    return shifted.missing if longest > depth else inputs.padding


def _head_of(model: GPTModel) -> torch.Tensor:
    """Returns the output head, on the last pipeline stage."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight: torch.Tensor = model.output_layer.weight
    return weight


@torch.no_grad()
def _embed(tokens: torch.Tensor, embedding: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """Embeddings [T, 1, hidden] of tokens [1, T], or this rank's part of them; ranks share the vocabulary."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    local = tokens.transpose(0, 1) - rank * len(embedding)
    mine = (local >= 0) & (local < len(embedding))
    rows = F.embedding(local.where(mine, 0), embedding) * mine[..., None]
    if size == 1:
        return rows
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(rows)
    return reduce_from_tensor_model_parallel_region(rows)
