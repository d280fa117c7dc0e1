"""Weights: one flat buffer, fused as the computation wants them, with a view per HF name.

A weight update copies into the views, so the model object never changes and no memory is allocated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.mlp import ExpertWeights, MlpWeights
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.models import family_of

_ALIGNMENT = 64


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


class Parameters:
    """All weights of a model; ``named`` maps HF names to views into ``flat``."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, shape = config, config.shape
        self.named: dict[str, torch.Tensor] = {}
        self._weights = family_of(shape.model_type).weights
        self._element_size = torch.empty(0, dtype=config.dtype).element_size()
        self._size = 0
        self._pending: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        self._backup: torch.Tensor | None = None
        self.embedding = self._reserve(shape.vocab_size, shape.hidden_size)
        self.layers = [self._reserve_layer(number) for number in range(shape.num_layers)]
        self.final_norm = self._reserve(shape.hidden_size)
        tied = not shape.untie_embeddings_and_output_weights
        self.head = self.embedding if tied else self._reserve(shape.vocab_size, shape.hidden_size)
        self.flat = torch.zeros(self._size, dtype=config.dtype)
        self._bind()
        self._name()

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self._element_size

    def _reserve(self, *shape: int) -> torch.Tensor:
        """A tensor that gets its place in the flat buffer once the total size is known."""
        tensor = torch.empty(0, dtype=self.config.dtype)
        self._pending.append((tensor, self._size, shape))
        step = _ALIGNMENT // self._element_size
        self._size += -(-torch.Size(shape).numel() // step) * step
        return tensor

    def _reserve_layer(self, number: int) -> LayerWeights:
        c = self.config.shape
        qkv_rows = (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels
        return LayerWeights(
            input_norm=self._reserve(c.hidden_size),
            post_norm=self._reserve(c.hidden_size),
            qkv=self._reserve(qkv_rows, c.hidden_size),
            qkv_bias=self._reserve(qkv_rows) if c.add_qkv_bias else None,
            output=self._reserve(c.hidden_size, c.num_attention_heads * c.kv_channels),
            output_bias=self._reserve(c.hidden_size) if c.add_output_bias else None,
            mlp=self._reserve_mlp(number),
            qk_norm=self._reserve(2, c.kv_channels) if c.qk_layernorm else None,
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
            self._give(attention + "linear_qkv.weight", layer.qkv.split(rows), layer.qkv_bias)
            self._give(attention + "linear_proj.weight", [layer.output], layer.output_bias)
            self._name_mlp(prefix + "mlp.", layer.mlp)
            if layer.qk_norm is not None:
                self._give(attention + "q_layernorm.weight", [layer.qk_norm[0]])
                self._give(attention + "k_layernorm.weight", [layer.qk_norm[1]])

    def _name_mlp(self, prefix: str, mlp: MlpWeights | ExpertWeights) -> None:
        if isinstance(mlp, MlpWeights):
            self._give(prefix + "linear_fc1.weight", mlp.gate_up.chunk(2), mlp.gate_up_bias)
            self._give(prefix + "linear_fc2.weight", [mlp.down], mlp.down_bias)
            return
        self._give(prefix + "router.weight", [mlp.router])
        for number, (gate_up, down) in enumerate(zip(mlp.gate_up, mlp.down, strict=True)):
            expert = f"{prefix}experts.local_experts.{number}."
            self._give(expert + "linear_fc1.weight", gate_up.chunk(2))
            self._give(expert + "linear_fc2.weight", [down])

    def _give(self, parameter: str, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> None:
        """Puts parts, and biases, under the HF names that the family has for a parameter of the trainer."""
        names = self._weights.rule_for(parameter).hf_names
        self.named.update(zip(names, parts, strict=True))
        if bias is not None:
            biases = bias.split([len(part) for part in parts])
            stems = [name.removesuffix(".weight") for name in names]
            self.named.update((f"{stem}.bias", part) for stem, part in zip(stems, biases, strict=True))

    def require_memory(self) -> None:
        """Reading or writing the views of a released buffer would end the process.

        Raises:
            BadRequest: the buffer is released.
        """
        if self.flat.untyped_storage().nbytes() == 0:
            raise BadRequest("the memory of the weights is released: /resume_memory_occupation comes first")

    def destination(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Where a tensor of a checkpoint goes; None for names that carry no weight of this model.

        Raises:
            BadRequest: no such weight, another shape, or numbers that are no floats.
        """
        target = self.named.get(name)
        if target is None:
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":
                return None
            raise BadRequest(
                f"weight {name!r}: this {self.config.shape.model_type} model has none of that name"
            )
        if tuple(shape) != tuple(target.shape):
            raise BadRequest(f"weight {name!r}: shape {list(shape)} (wanted: {list(target.shape)})")
        if not dtype.is_floating_point:
            raise BadRequest(f"weight {name!r}: {dtype} (wanted: a floating point dtype)")
        return target

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors in under their HF names; nothing is copied if one of them does not fit."""
        self.require_memory()
        placed = [(self.destination(name, tensor.shape, tensor.dtype), tensor) for name, tensor in tensors]
        with torch.no_grad():
            for target, tensor in placed:
                if target is not None:
                    target.copy_(tensor)

    def copy(self) -> dict[str, torch.Tensor]:
        self.require_memory()
        return {name: tensor.clone() for name, tensor in self.named.items()}

    def restore(self, copies: Mapping[str, torch.Tensor]) -> None:
        self.update(copies.items())

    def release(self, keep_backup: bool) -> None:
        """Frees the buffer; the views stay and come back to life with ``resume``."""
        self._backup = self.flat.clone() if keep_backup else None
        self.flat.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocates the buffer again; without a backup the weights are zero until the next update."""
        self.flat.untyped_storage().resize_(self.num_bytes)
        if self._backup is None:
            self.flat.zero_()
        else:
            self.flat.copy_(self._backup)
            self._backup = None
