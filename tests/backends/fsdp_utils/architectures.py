"""Tiny random models of several architectures, most of which no part of slime knows."""

from argparse import Namespace
from pathlib import Path

import torch
import transformers

from slime.config.run import run_config
from slime.training.inputs import PackedInputs
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
from tests.run_args import with_groups

_SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "Qwen3": {**_SMALL, **_HEADS},
    "GPTNeoX": {**_SMALL, "num_attention_heads": 4, "max_position_embeddings": 64},
    "GPT2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Gemma": {**_SMALL, **_HEADS},
    "Mistral": {**_SMALL, **_HEADS, "sliding_window": 4},
    "Gemma2": {**_SMALL, **_HEADS, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    "Qwen3Moe": {**_SMALL, **_HEADS, **_MOE},
    # In training it would choose experts by noisy inputs.
    "Mixtral": {**_SMALL, **_HEADS, "num_local_experts": 4, "router_jitter_noise": 0.5},
    "Bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
"""The values of their configs, by the name of the architecture."""


def save(path: Path | str, architecture: str) -> str:
    """Writes a model whose attention is far from uniform; returns its path."""
    config = getattr(transformers, f"{architecture}Config")(**ARCHITECTURES[architecture])
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 and "norm" not in name:
                param.mul_(4)
    model.save_pretrained(path)
    return str(path)


def model_args(path: str, **overrides) -> Namespace:
    """What building and loading a model reads of ``args``."""
    defaults = dict(
        hf_checkpoint=path,
        trust_remote_code=False,
        gradient_checkpointing=False,
        fsdp_cpu_offload=False,
        params_dtype=torch.float32,
        seed=1,
        only_train_params_name_list=None,
        freeze_params_name_list=None,
        freeze_indexer=False,
    )
    return with_groups({**defaults, **overrides})


def load(args: Namespace):
    """In a rank: the model of ``args`` with its weights."""
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.model import build_model

    mesh, _ = init(run_config(args))
    model = build_model(run_config(args), mesh)
    load_hf_weights(args, model, args.hf_checkpoint)
    return model


LENGTHS = [5, 11, 2, 7]


def rows() -> list[torch.Tensor]:
    """Sequences of various lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(96, (length,), generator=generator) for length in LENGTHS]


def packed_row(context: ParallelContext | None = None) -> PackedInputs:
    """Puts the sequences into one row, or a rank's part of it."""
    return PackedInputs.of([*map(SequenceInputs, rows())], context or ParallelContext())
