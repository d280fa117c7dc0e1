"""How megatron-core parameters correspond to Hugging Face tensors: one table for both directions.

A rule belongs to one megatron-core parameter and names the HF tensors that it holds. ``merge`` makes the full
parameter (before tensor-parallel sharding) from them, ``split`` gives them back.

Names are global and without wrappers: ``decoder.layers.<layer of the whole model>.mlp.linear_fc1.weight``.
"""

import re
from argparse import Namespace
from dataclasses import dataclass

import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rule:
    """One to one."""

    hf_names: tuple[str, ...]

    def merge(self, tensors: list[torch.Tensor], args: Namespace) -> torch.Tensor:
        return tensors[0]

    def split(self, param: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
        return [param]

    def shard(self, full: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
        """The part of tensor-parallel rank ``rank`` of ``size``, cut along ``dim``."""
        return full.chunk(size, dim)[rank]

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat(shards, dim)


@dataclass(frozen=True)
class VocabRule(Rule):
    """Embedding and head: megatron-core's have padding rows at the end, which are zero here."""

    def merge(self, tensors: list[torch.Tensor], args: Namespace) -> torch.Tensor:
        rows, width = tensors[0].shape
        return torch.cat([tensors[0], tensors[0].new_zeros(max(0, args.padded_vocab_size - rows), width)])

    def split(self, param: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
        return [param[: args.vocab_size]]


@dataclass(frozen=True)
class QkvRule(Rule):
    """Query, key and value in one; per query group the rows are [its query heads, its key, its value]."""

    def merge(self, tensors: list[torch.Tensor], args: Namespace) -> torch.Tensor:
        rest = tensors[0].shape[1:]
        grouped = [t.reshape(args.num_query_groups, -1, *rest) for t in tensors]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)

    def split(self, param: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
        rest, head = param.shape[1:], args.kv_channels
        grouped = param.reshape(args.num_query_groups, -1, *rest)
        query_rows = args.num_attention_heads // args.num_query_groups * head
        return [part.reshape(-1, *rest) for part in grouped.split([query_rows, head, head], dim=1)]


@dataclass(frozen=True)
class GateUpRule(Rule):
    """Gate over up. Each tensor-parallel rank holds its part of both, so each is sharded on its own."""

    def merge(self, tensors: list[torch.Tensor], args: Namespace) -> torch.Tensor:
        return torch.cat(tensors)

    def split(self, param: torch.Tensor, args: Namespace) -> list[torch.Tensor]:
        return list(param.chunk(2))

    def shard(self, full: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
        return torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim)


def _qkv(kind: str) -> QkvRule:
    return QkvRule(tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"))


_MODEL_RULES: dict[str, Rule] = {
    "embedding.word_embeddings.weight": VocabRule(("model.embed_tokens.weight",)),
    "output_layer.weight": VocabRule(("lm_head.weight",)),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
}

# HF names within ``model.layers.<i>.``
_LAYER_RULES: dict[str, Rule] = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",)),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": GateUpRule(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",)),
}


def rule_for(name: str) -> Rule:
    """The rule of a global parameter name, its HF names complete.

    Raises:
        ValueError: no rule covers the parameter.
    """
    match = _LAYER.fullmatch(name)
    rule = _LAYER_RULES.get(match[2]) if match else _MODEL_RULES.get(name)
    if rule is None:
        raise ValueError(f"parameter {name!r}: no Hugging Face counterpart is known")
    if match is None:
        return rule
    return type(rule)(tuple(f"model.layers.{match[1]}.{hf_name}" for hf_name in rule.hf_names))


def hf_names(args: Namespace) -> set[str]:
    """The names of all tensors of the model that ``args`` describes."""
    optional = {
        "self_attention.linear_qkv.bias": args.add_qkv_bias,
        "self_attention.q_layernorm.weight": args.qk_layernorm,
        "self_attention.k_layernorm.weight": args.qk_layernorm,
    }
    names = [name for name in _MODEL_RULES if name != "output_layer.weight"]
    if args.untie_embeddings_and_output_weights:
        names.append("output_layer.weight")
    in_layer = [name for name in _LAYER_RULES if optional.get(name, True)]
    names += [f"decoder.layers.{layer}.{name}" for layer in range(args.num_layers) for name in in_layer]
    return {hf_name for name in names for hf_name in rule_for(name).hf_names}
