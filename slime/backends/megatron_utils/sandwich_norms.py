"""Layers with norms behind attention and MLP as well as before them."""

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.backends.megatron_utils.layers import RMSNorm

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
