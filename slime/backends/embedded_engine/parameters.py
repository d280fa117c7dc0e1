"""Weights of decoders in the manner of Llama, fused as the computation wants them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.backends.embedded_engine.adapters import LinearLayer
from slime.backends.embedded_engine.mlp import ExpertWeights, MlpWeights
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.named_weights import ALIGNMENT, NamedWeights


@dataclass
class LayerWeights:
    """Weights of one decoder layer, ``[out, in]``; q, k and v are stacked."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp: MlpWeights | ExpertWeights
    qk_norm: torch.Tensor | None
    """``[2, head_dim]``: the norm of queries, then that of keys."""


class Parameters(NamedWeights):
    """The weights, and where they are in layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        shape = config.shape
        self._element_size = torch.empty(0, dtype=config.dtype).element_size()
        self._size = 0
        self._pending: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        self.embedding = self._reserve(shape.vocab_size, shape.hidden_size)
        self.layers = [self._reserve_layer(number) for number in range(shape.num_layers)]
        self.final_norm = self._reserve(shape.hidden_size)
        tied = not shape.untie_embeddings_and_output_weights
        self.head = self.embedding if tied else self._reserve(shape.vocab_size, shape.hidden_size)
        self.flat = torch.zeros(self._size, dtype=config.dtype, device=config.device)
        self._bind()
        self._name()

    def _reserve(self, *shape: int) -> torch.Tensor:
        """A tensor that gets its place in the flat buffer once the total size is known."""
        tensor = torch.empty(0, dtype=self.config.dtype, device=self.config.device)
        self._pending.append((tensor, self._size, shape))
        step = ALIGNMENT // self._element_size
        self._size += -(-torch.Size(shape).numel() // step) * step
        return tensor

    def _reserve_layer(self, number: int) -> LayerWeights:
        c = self.config.shape
        qkv_rows = (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels
        # In the order in which a trainer of megatron-core sends them: a bucket can be received as it is.
        return LayerWeights(
            input_norm=self._reserve(c.hidden_size),
            output=self._reserve(c.hidden_size, c.num_attention_heads * c.kv_channels),
            output_bias=self._reserve(c.hidden_size) if c.add_output_bias else None,
            qkv=self._reserve(qkv_rows, c.hidden_size),
            qkv_bias=self._reserve(qkv_rows) if c.add_qkv_bias else None,
            qk_norm=self._reserve(2, c.kv_channels) if c.qk_layernorm else None,
            post_norm=self._reserve(c.hidden_size),
            mlp=self._reserve_mlp(number),
        )

    def _reserve_mlp(self, layer: int) -> MlpWeights | ExpertWeights:
        c, moe = self.config.shape, self.config.shape.moe
        if moe is not None and moe.moe_layer_freq[layer]:
            return ExpertWeights(
                shape=moe,
                router=self._reserve(moe.num_experts, c.hidden_size),
                gate_up=self._reserve(moe.num_experts, 2 * moe.moe_ffn_hidden_size, c.hidden_size),
                down=self._reserve(moe.num_experts, c.hidden_size, moe.moe_ffn_hidden_size),
            )
        return MlpWeights(
            gate_up=self._reserve(2 * c.ffn_hidden_size, c.hidden_size),
            gate_up_bias=self._reserve(2 * c.ffn_hidden_size) if c.add_mlp_bias else None,
            down=self._reserve(c.hidden_size, c.ffn_hidden_size),
            down_bias=self._reserve(c.hidden_size) if c.add_mlp_bias else None,
        )

    def _bind(self) -> None:
        for tensor, offset, shape in self._pending:
            strides = torch.empty(shape, device="meta").stride()
            tensor.set_(self.flat.untyped_storage(), offset, shape, strides)
        self._pending.clear()

    def _name(self) -> None:
        c = self.config.shape
        self._give("embedding.word_embeddings.weight", [self.embedding])
        self._give("decoder.final_layernorm.weight", [self.final_norm])
        if c.untie_embeddings_and_output_weights:
            self._give("output_layer.weight", [self.head])
        rows = [width * c.kv_channels for width in (c.num_attention_heads, *[c.num_query_groups] * 2)]
        for index, layer in enumerate(self.layers):
            prefix = f"decoder.layers.{index}."
            attention = prefix + "self_attention."
            self._give(prefix + "input_layernorm.weight", [layer.input_norm])
            self._give(prefix + "pre_mlp_layernorm.weight", [layer.post_norm])
            self._give_linear(attention + "linear_qkv.weight", layer.qkv.split(rows), layer.qkv_bias)
            self._give_linear(attention + "linear_proj.weight", [layer.output], layer.output_bias)
            self._name_mlp(prefix + "mlp.", layer.mlp)
            if layer.qk_norm is not None:
                self._give(attention + "q_layernorm.weight", [layer.qk_norm[0]])
                self._give(attention + "k_layernorm.weight", [layer.qk_norm[1]])

    def _name_mlp(self, prefix: str, mlp: MlpWeights | ExpertWeights) -> None:
        if isinstance(mlp, MlpWeights):
            self._give_linear(prefix + "linear_fc1.weight", mlp.gate_up.chunk(2), mlp.gate_up_bias)
            self._give_linear(prefix + "linear_fc2.weight", [mlp.down], mlp.down_bias)
            return
        self._give(prefix + "router.weight", [mlp.router])
        for number, (gate_up, down) in enumerate(zip(mlp.gate_up, mlp.down, strict=True)):
            expert = f"{prefix}experts.local_experts.{number}."
            self._give_linear(expert + "linear_fc1.weight", gate_up.chunk(2))
            self._give_linear(expert + "linear_fc2.weight", [down])

    def _give_linear(
        self, parameter: str, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None
    ) -> None:
        """Gives the weights of one product, to which adapters may add; it is known by its offset."""
        self._give(parameter, parts, bias)
        start, key, outputs = 0, parts[0].storage_offset(), sum(map(len, parts))
        for name, part in zip(self._rules.rule_for(parameter).hf_names, parts, strict=True):
            shape = (part.size(0), part.size(1))
            self.linear_layers[name.removesuffix(".weight")] = LinearLayer(key, start, outputs, shape)
            start += len(part)

    def _give(self, parameter: str, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> None:
        """Puts parts, and biases, under the HF names that the family has for a parameter of the trainer."""
        names = self._rules.rule_for(parameter).hf_names
        self.named.update(zip(names, parts, strict=True))
        if bias is not None:
            biases = bias.split([len(part) for part in parts])
            stems = [name.removesuffix(".weight") for name in names]
            self.named.update((f"{stem}.bias", part) for stem, part in zip(stems, biases, strict=True))
