"""Single parameters between megatron-core and Hugging Face, as plug-ins of the original ask for them.

Names are those of its layers with TransformerEngine: norms belong to the projections behind them, and experts
are numbered weights of one grouped projection. What `slime.models` knows of a family decides the rest.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from slime.models import FAMILIES
from slime.models.rules import Rule

_NAMES = (
    (r"^(module\.)*(language_model\.)?", ""),
    (
        r"\.mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$",
        r".mlp.experts.local_experts.\3.linear_fc\1.\2",
    ),
    (r"\.self_attention\.linear_(qkv|q_proj|q_down_proj)\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.self_attention\.linear_q_up_proj\.layer_norm_weight$", ".self_attention.q_layernorm.weight"),
    (r"\.self_attention\.linear_kv_up_proj\.layer_norm_weight$", ".self_attention.kv_layernorm.weight"),
)
"""What parameters are called there, and what here."""
_OF_HF = re.compile(
    r"decoder\.layers\.(\d+)\.self_attention\.((?:linear_attn|self_attn|input_layernorm)\..+)"
)
"""Modules that are transformers' own, under their names."""


class Reader(Protocol):
    """What gives the tensors of a checkpoint, whole."""

    def get_tensor(self, name: str) -> torch.Tensor: ...


def to_hf(*model_types: str) -> Callable[[Any, str, torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """fn(args, name, param): the Hugging Face tensors of a whole parameter of megatron-core.

    Args:
        model_types: the families whose rules are tried, in order.
    """

    def convert(args: Any, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        rule = _rule(model_types, name, getattr(args, "num_layers", 0))
        parts = rule.split(param, _shape(args, getattr(args, "vocab_size", None) or len(param)))
        return list(zip(rule.hf_names, parts, strict=True))

    return convert


def from_hf(*model_types: str) -> Callable[[str, Reader, Any], torch.Tensor]:
    """fn(name, reader, hf_config): a parameter of megatron-core, whole and without padding."""

    def read(name: str, reader: Reader, hf_config: Any) -> torch.Tensor:
        config = getattr(hf_config, "text_config", None) or hf_config
        rule = _rule(model_types, name, getattr(config, "num_hidden_layers", 0))
        tensors = [reader.get_tensor(hf_name) for hf_name in rule.hf_names]
        if rule.expert is not None:
            tensors = [tensor[rule.expert] for tensor in tensors]
        shape = Namespace(
            num_attention_heads=getattr(config, "num_attention_heads", None),
            num_query_groups=getattr(config, "num_key_value_heads", None),
            hidden_size=getattr(config, "hidden_size", None),
            kv_channels=getattr(config, "head_dim", None),
        )
        return rule.merge(tensors, _shape(shape, 0))

    return read


def _rule(model_types: Sequence[str], name: str, num_layers: int) -> Rule:
    """Return the rule of the first of these families that has such a parameter."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    *others, last = (FAMILIES[model_type].weights for model_type in model_types)
    if match := _OF_HF.fullmatch(name):
        return Rule((last.prefix.outer(last.layer_prefix.format(match[1]) + match[2]),))
    for weights in others:
        with suppress(ValueError):
            return weights.rule_for(name, num_layers)
    return last.rule_for(name, num_layers)


def _shape(given: Any, vocab_size: int) -> Any:
    """What rules read of a model's shape, where plug-ins have less than all of it."""
    heads = getattr(given, "num_attention_heads", None)
    groups, size = getattr(given, "num_query_groups", None), getattr(given, "kv_channels", None)
    hidden = getattr(given, "hidden_size", None)
    shape = Namespace(**vars(given)) if isinstance(given, Namespace) else Namespace()
    shape.num_attention_heads, shape.num_query_groups = heads, groups or heads
    shape.kv_channels = size or (hidden // heads if hidden and heads else None)
    shape.vocab_size, shape.padded_vocab_size = vocab_size, 0
    return shape
