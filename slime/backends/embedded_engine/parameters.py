"""Weights: one flat buffer, fused as the computation wants them, with a view per HF name.

A weight update copies into the views, so the model object never changes and no memory is allocated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import ModelConfig

_ALIGNMENT = 64


@dataclass
class LayerWeights:
    """Weights of one decoder layer, ``[out, in]``; q, k and v, and gate and up, are stacked."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """``[2, head_dim]``: the norm of queries, then that of keys."""


class Parameters:
    """All weights of a model; ``named`` maps HF names to views into ``flat``."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.named: dict[str, torch.Tensor] = {}
        self._element_size = torch.empty(0, dtype=config.dtype).element_size()
        self._size = 0
        self._pending: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        self._backup: torch.Tensor | None = None
        self.embedding = self._reserve(config.vocab_size, config.hidden_size)
        self.layers = [self._reserve_layer() for _ in range(config.num_layers)]
        self.final_norm = self._reserve(config.hidden_size)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else self._reserve(config.vocab_size, config.hidden_size)
        )
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

    def _reserve_layer(self) -> LayerWeights:
        c = self.config
        qkv_rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        return LayerWeights(
            input_norm=self._reserve(c.hidden_size),
            post_norm=self._reserve(c.hidden_size),
            qkv=self._reserve(qkv_rows, c.hidden_size),
            qkv_bias=self._reserve(qkv_rows) if c.qkv_bias else None,
            output=self._reserve(c.hidden_size, c.num_heads * c.head_dim),
            output_bias=self._reserve(c.hidden_size) if c.output_bias else None,
            gate_up=self._reserve(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=self._reserve(2 * c.intermediate_size) if c.mlp_bias else None,
            down=self._reserve(c.hidden_size, c.intermediate_size),
            down_bias=self._reserve(c.hidden_size) if c.mlp_bias else None,
            qk_norm=self._reserve(2, c.head_dim) if c.qk_norm else None,
        )

    def _bind(self) -> None:
        for tensor, offset, shape in self._pending:
            strides = [1] if len(shape) == 1 else [shape[1], 1]
            tensor.set_(self.flat.untyped_storage(), offset, shape, strides)
        self._pending.clear()

    def _name(self) -> None:
        c, named = self.config, self.named
        named["model.embed_tokens.weight"] = self.embedding
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            named[prefix + "input_layernorm.weight"] = layer.input_norm
            named[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            rows = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self._name_parts(attention, ("q_proj", "k_proj", "v_proj"), rows, layer.qkv, layer.qkv_bias)
            self._name_parts(attention, ("o_proj",), [c.hidden_size], layer.output, layer.output_bias)
            halves = [c.intermediate_size] * 2
            self._name_parts(mlp, ("gate_proj", "up_proj"), halves, layer.gate_up, layer.gate_up_bias)
            self._name_parts(mlp, ("down_proj",), [c.hidden_size], layer.down, layer.down_bias)
            if layer.qk_norm is not None:
                named[attention + "q_norm.weight"], named[attention + "k_norm.weight"] = layer.qk_norm
        named["model.norm.weight"] = self.final_norm
        if not c.tie_word_embeddings:
            named["lm_head.weight"] = self.head

    def _name_parts(
        self,
        prefix: str,
        names: tuple[str, ...],
        rows: list[int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        for name, part in zip(names, weight.split(rows), strict=True):
            self.named[f"{prefix}{name}.weight"] = part
        if bias is not None:
            for name, part in zip(names, bias.split(rows), strict=True):
                self.named[f"{prefix}{name}.bias"] = part

    def require_memory(self) -> None:
        """Reading or writing the views of a released buffer would end the process.

        Raises:
            BadRequest: the buffer is released.
        """
        if self.flat.untyped_storage().nbytes() == 0:
            raise BadRequest("the memory of the weights is released: /resume_memory_occupation comes first")

    def destination(self, name: str, shape: Iterable[int]) -> torch.Tensor | None:
        """Where a tensor of a checkpoint goes; None for names that carry no weight of this model.

        Raises:
            BadRequest: no such weight, or another shape.
        """
        target = self.named.get(name)
        if target is None:
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":
                return None
            raise BadRequest(f"weight {name!r}: this {self.config.model_type} model has none of that name")
        if tuple(shape) != tuple(target.shape):
            raise BadRequest(f"weight {name!r}: shape {list(shape)} (wanted: {list(target.shape)})")
        return target

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors in under their HF names; nothing is copied if one of them does not fit."""
        self.require_memory()
        placed = [(self.destination(name, tensor.shape), tensor) for name, tensor in tensors]
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
