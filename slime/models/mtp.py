"""Multi-token prediction (MTP) layers: how checkpoints name what they consist of.

megatron-core's layer projects the norm of the next token's embedding beside the norm of the hidden state
(DeepSeek-V3, arXiv:2412.19437, eq. 21), in this order; some families have it the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.model import ModelConfig
from slime.config.mtp import MtpConfig
from slime.models.rules import Rule, joined

if TYPE_CHECKING:
    import torch

_INNER = "transformer_layer."
_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(transformer_layer\.)?(.+)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")


def trained_mtp_layers(config: MtpConfig) -> int:
    """How many such layers a run trains, by ``--mtp-num-layers`` and ``--enable-mtp-training``."""
    return (config.mtp_num_layers or 0) if config.enable_mtp_training else 0


def is_copy(name: str) -> bool:
    """Whether a tensor of a checkpoint is DeepSeek-V3's copy of embedding or head in such a layer."""
    return _COPY.fullmatch(name) is not None


def behind_last_layer(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer that counts on from the last one, where DeepSeek-V3 has its MTP."""
    match = _HF_LAYER.match(name)
    return match is not None and int(match[1]) >= num_layers


@dataclass(frozen=True)
class MtpRules:
    """Rules of ``mtp.layers.<number>.*``; each of these layers has a decoder layer within it.

    Attributes:
        own: by the parameter's name within such a layer, of what is beside the decoder layer.
        prefix: what HF puts before these names, {} standing for the layer's number.
        layer_prefix: the same for the names of the decoder layer, which is one as the decoder's last.
        counted_on: whether HF counts these layers on from the decoder's last one.
    """

    own: Mapping[str, Rule]
    prefix: str
    layer_prefix: str
    counted_on: bool = False

    def rule_for(self, name: str, num_layers: int, inner: Callable[[str], Rule | None]) -> Rule | None:
        """The rule of a global parameter name, its HF names complete; None for other parameters.

        Args:
            num_layers: of the decoder.
            inner: gives the rule of a name within a decoder layer.
        """
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        number = int(match[1]) + (num_layers if self.counted_on else 0)
        rule = inner(match[3]) if match[2] else self.own.get(match[3])
        prefix = self.layer_prefix if match[2] else self.prefix
        return None if rule is None else rule.under(prefix.format(number))

    def names(self, layers: int, in_layer: Sequence[str]) -> list[str]:
        """Yields the names of all parameters of so many layers, ``in_layer`` being those within the decoder
        layer.
        """
        each = [*self.own, *(_INNER + name for name in in_layer)]
        return [f"mtp.layers.{layer}.{name}" for layer in range(layers) for name in each]


@dataclass(frozen=True)
class HiddenFirstRule(Rule):
    """A projection of [hidden state, embedding], whose columns megatron-core has as [embedding, hidden]."""

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        return _swapped(tensors[0])

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return [_swapped(param)]


def _swapped(matrix: torch.Tensor) -> torch.Tensor:
    first, second = matrix.chunk(2, dim=1)
    return joined([second, first], dim=1)


DEEPSEEK_MTP = MtpRules(
    own={
        "enorm.weight": Rule(("enorm.weight",)),
        "hnorm.weight": Rule(("hnorm.weight",)),
        "eh_proj.weight": Rule(("eh_proj.weight",)),
        "final_layernorm.weight": Rule(("shared_head.norm.weight",)),
    },
    prefix="model.layers.{}.",
    layer_prefix="model.layers.{}.",
    counted_on=True,
)
"""There its copies of embedding and head are beside them, which readers of checkpoints do without."""

MIMO_MTP = MtpRules(
    own={
        "enorm.weight": Rule(("token_layernorm.weight",)),
        "hnorm.weight": Rule(("hidden_layernorm.weight",)),
        "eh_proj.weight": HiddenFirstRule(("input_proj.weight",)),
        "final_layernorm.weight": Rule(("final_layernorm.weight",)),
    },
    prefix="model.mtp_layers.{}.",
    layer_prefix="model.mtp_layers.{}.",
)

QWEN_MTP = MtpRules(
    own={
        "enorm.weight": Rule(("pre_fc_norm_embedding.weight",)),
        "hnorm.weight": Rule(("pre_fc_norm_hidden.weight",)),
        "eh_proj.weight": Rule(("fc.weight",)),
        "final_layernorm.weight": Rule(("norm.weight",)),
    },
    prefix="mtp.",
    layer_prefix="mtp.layers.{}.",
)
"""Rules of one MTP layer: all but the decoder layer has no number there."""
