"""Attention whose softmax has a sink: a learned score of each head, beside those of the keys."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig


def sink_parameter(config: TransformerConfig) -> torch.nn.Parameter:
    """One number for each head of this tensor-parallel rank."""
    heads = (config.num_attention_heads or 0) // mpu.get_tensor_model_parallel_world_size()
    parameter = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return parameter


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Weighted sums of values; the weights of a query's keys and of the head's sink sum up to 1.

    Args:
        query: [segments, heads, length, dim].
        key, value: [segments, groups, keys, dim].
        sinks: [heads].
        mask: [segments, 1, length, keys] bool, True where a query sees a key; None for causal attention.
        scale: of the scores, not of the sinks.
    """
    ratio = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(ratio, 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.type_as(value) @ value
