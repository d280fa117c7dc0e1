"""Builds the GPT model of this rank from ``args``."""

import re
from argparse import Namespace
from collections.abc import Iterable
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers import PackedAttention, RMSNorm
from slime.backends.megatron_utils.model_config import transformer_config_from_args
from slime.utils.misc import load_function


def get_model(args: Namespace, role: str = "actor") -> list[torch.nn.Module]:
    """The model chunks of this rank on its device: one, as virtual pipeline stages are not supported.

    The chunks are bare GPTModels with random weights; wrapping them in Float16Module and DDP is up to the
    caller. Frozen parameters (``--freeze-params-name-list``) have ``requires_grad=False``.

    Raises:
        ValueError: a role without a model, or freezing flags that leave nothing to train.
    """
    if role != "actor":
        raise ValueError(f"model role {role!r}: not supported (wanted: actor)")
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    if getattr(args, "custom_model_provider_path", None):
        model = load_function(args.custom_model_provider_path)(first, last, vp_stage=None)
    else:
        model = build_gpt(args, transformer_config_from_args(args), first, last)
    freeze_model_params(args, model)
    return [model.to(torch.cuda.current_device())]


def build_gpt(args: Namespace, config: TransformerConfig, pre_process: bool, post_process: bool) -> GPTModel:
    """One pipeline stage; ``pre_process`` adds the embedding, ``post_process`` the final norm and the head.

    Logits stay split over the tensor-parallel group along the vocabulary.
    """
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args, config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        # PackedAttention applies the rotary embedding.
        position_embedding_type="none",
    )


def layer_spec(args: Namespace, config: TransformerConfig) -> TransformerBlockSubmodules:
    """megatron-core's own layers, with our norms and attention in them."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    attention = partial(
        PackedAttention,
        rotary_base=args.rotary_base,
        rope_scaling_factor=args.rope_scaling_factor if args.use_rope_scaling else None,
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        parts = layer.submodules.self_attention.submodules
        parts.core_attention = attention
        if config.qk_layernorm:
            parts.q_layernorm = parts.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


def freeze_model_params(args: Namespace, model: torch.nn.Module) -> None:
    """Freezes by regular expressions over parameter names (``re.search``).

    Raises:
        ValueError: both lists are given.
    """
    only = getattr(args, "only_train_params_name_list", None)
    frozen = getattr(args, "freeze_params_name_list", None)
    if only and frozen:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list exclude each other")
    if not only and not frozen:
        return
    for name, param in model.named_parameters():
        param.requires_grad = _any_match(only, name) if only else not _any_match(frozen or (), name)


def _any_match(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
