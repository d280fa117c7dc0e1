"""What a rank of SGLang 0.5.23 has after it has loaded a checkpoint, written down without code of ours.

As its layers' loaders do it: `QKVParallelLinear`, `MergedColumnParallelLinear`, `RowParallelLinear`,
`VocabParallelEmbedding`, and of experts `FusedMoE` as its Triton kernels want them.
"""

from collections.abc import Mapping
from typing import Any

import torch

State = Mapping[str, torch.Tensor]


def rank_of_sglang(state: State, config: Mapping[str, Any], rank: int, size: int) -> dict[str, torch.Tensor]:
    """The parameters of one of so many ranks, by name.

    Args:
        state: the tensors of a checkpoint.
        config: its config.json.
    """
    found = {"model.norm.weight": state["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state and not (name.startswith("lm_head") and config["tie_word_embeddings"]):
            found[name] = _vocabulary(state[name], rank, size)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        found |= {prefix + name: tensor for name, tensor in _layer(own, config, rank, size).items()}
    return found


def _layer(own: State, config: Mapping[str, Any], rank: int, size: int) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in own.items() if "norm" in name or name == "mlp.gate.weight"}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q, k, v = (own[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            heads = config["num_key_value_heads"]
            at = (rank, size) if heads >= size else (rank // (size // heads), heads)
            found[f"self_attn.qkv_proj.{kind}"] = torch.cat(
                [_narrowed(q, 0, rank, size), _narrowed(k, 0, *at), _narrowed(v, 0, *at)]
            )
    found["self_attn.o_proj.weight"] = _narrowed(own["self_attn.o_proj.weight"], 1, rank, size)
    if "mlp.gate_proj.weight" in own:
        halves = [_narrowed(own[f"mlp.{part}_proj.weight"], 0, rank, size) for part in ("gate", "up")]
        found["mlp.gate_up_proj.weight"] = torch.cat(halves)
        found["mlp.down_proj.weight"] = _narrowed(own["mlp.down_proj.weight"], 1, rank, size)
        return found
    count = sum(name.endswith("gate_proj.weight") for name in own)
    experts = [f"mlp.experts.{number}." for number in range(count)]
    first = [
        torch.cat([_narrowed(own[f"{one}{part}_proj.weight"], 0, rank, size) for part in ("gate", "up")])
        for one in experts
    ]
    found["mlp.experts.w13_weight"] = torch.stack(first)
    second = [_narrowed(own[f"{one}down_proj.weight"], 1, rank, size) for one in experts]
    found["mlp.experts.w2_weight"] = torch.stack(second)
    return found


def _narrowed(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    part = tensor.size(dim) // size
    return tensor.narrow(dim, rank * part, part)


def _vocabulary(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    unit = 64
    if -(-len(tensor) // unit) * unit % size:
        unit *= size
    padded = torch.zeros(-(-len(tensor) // unit) * unit, tensor.size(1), dtype=tensor.dtype)
    padded[: len(tensor)] = tensor
    return _narrowed(padded, 0, rank, size)
