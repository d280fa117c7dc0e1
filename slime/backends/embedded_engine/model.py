"""The forward pass of decoders in the manner of Llama."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from slime.backends.embedded_engine.adapters import Adapter
from slime.backends.embedded_engine.linear import linear
from slime.backends.embedded_engine.mlp import ExpertWeights
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import LayerWeights, Parameters
from slime.backends.embedded_engine.routes import RouteRecorder
from slime.models.rope import Rope, inverse_frequencies

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(layer, q, k, v)``: q ``[B, T, heads, D]``, k and v ``[B, T, kv_heads, D]`` after rotation;
stores k and v and returns the attention output ``[B, T, heads * D]``."""


class CausalLM:
    """A decoder whose attention, and with it the KV cache, is the caller's.

    Attributes:
        adapter: what is added to its products, by their weights' offsets in the buffer of all weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        context_length: int,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self.recorder = recorder
        self.adapter: Adapter | None = None
        shape = config.shape
        tables = rotation_tables(shape.rope, shape.kv_channels, context_length, config.dtype)
        self._cos, self._sin = (table.to(config.device) for table in tables)
        kinds = [0] * shape.num_attention_heads + [1] * shape.num_query_groups
        self._norm_of_head = torch.tensor(kinds, device=config.device)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """ids, positions: ``[B, T]`` int64; returns normalised hidden states ``[B, T, hidden]``."""
        c = self.config.shape
        shape = (c.hidden_size,)
        x = F.embedding(ids, self.parameters.embedding)
        cos = self._cos[positions].unsqueeze(2)
        sin = self._sin[positions].unsqueeze(2)
        for index, layer in enumerate(self.parameters.layers):
            normed = F.rms_norm(x, shape, layer.input_norm, c.norm_epsilon)
            attended = attend(index, *self._qkv(layer, normed, cos, sin))
            x = x + self._project(attended, layer.output, layer.output_bias)
            normed = F.rms_norm(x, shape, layer.post_norm, c.norm_epsilon)
            if self.recorder is not None and isinstance(layer.mlp, ExpertWeights):
                x = x + layer.mlp.forward(normed, self._project, partial(self.recorder.note, index))
            else:
                x = x + layer.mlp.forward(normed, self._project)
        return F.rms_norm(x, shape, self.parameters.final_norm, c.norm_epsilon)

    def _project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = linear(x, weight, bias)
        part = self.adapter.parts.get(weight.storage_offset()) if self.adapter else None
        return out if part is None else out + part(x)

    def _qkv(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projects, normalises and rotates; queries and keys are treated as one stack of heads."""
        c = self.config.shape
        heads = self._project(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, c.kv_channels))
        qk, v = heads.split([c.num_attention_heads + c.num_query_groups, c.num_query_groups], 2)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (c.kv_channels,), None, c.norm_epsilon) * layer.qk_norm[self._norm_of_head]
        qk = torch.addcmul(qk * cos, torch.roll(qk, c.kv_channels // 2, -1), sin)
        q, k = qk.split([c.num_attention_heads, c.num_query_groups], 2)
        return q, k, v

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` to ``[N, vocab]`` float32."""
        return linear(hidden, self.parameters.head).float()


def rotation_tables(
    rope: Rope, head_dim: int, positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)``, each ``[positions, head_dim]``, for ``x * cos + roll(x, head_dim / 2) * sin``.

    On the host. The sign of the rotated first half lives in ``sin``, which saves a negation per layer.
    """
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
