"""Builds the GPT model of this rank from ``args``."""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.layers import PackedAttention, RMSNorm
from slime.backends.megatron_utils.model_config import transformer_config_from_args
from slime.backends.megatron_utils.named_params import named_params
from slime.backends.megatron_utils.value_head import ValueHead
from slime.models import family_of
from slime.utils.misc import load_function

_EMBEDDING = "embedding.word_embeddings.weight"


def get_model(args: Namespace, role: str = "actor") -> list[torch.nn.Module]:
    """The model chunks of this rank on its device: one, as virtual pipeline stages are not supported.

    The chunks are bare GPTModels with random weights; wrapping them in Float16Module and DDP is up to the
    caller. Frozen parameters (``--freeze-params-name-list``) have ``requires_grad=False``. A critic has a
    value head in the place of the output layer.

    Raises:
        ValueError: freezing flags that leave nothing to train.
    """
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    if getattr(args, "custom_model_provider_path", None):
        model = load_function(args.custom_model_provider_path)(first, last, vp_stage=None)
    else:
        model = build_gpt(args, transformer_config_from_args(args), first, last)
    if role == "critic" and last:
        model.output_layer = ValueHead(get_model_config(model), args.seed)
    freeze_model_params(args, model)
    return [model.to(torch.cuda.current_device())]


def build_gpt(args: Namespace, config: TransformerConfig, pre_process: bool, post_process: bool) -> GPTModel:
    """One pipeline stage; ``pre_process`` adds the embedding, ``post_process`` the final norm and the head.

    Logits stay split over the tensor-parallel group along the vocabulary.
    """
    return GPTModel(
        config=config,
        transformer_layer_spec=load_function(family_of(args.model_type).layer_spec)(args, config),
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
    """Freezes by regular expressions over the parameters' global names (``re.search``). Collective.

    Where the output layer shares the embedding's weight, both copies go by the name of the embedding.

    Raises:
        ValueError: both lists are given, a pattern matches nothing in the whole model, or nothing trains.
    """
    only = getattr(args, "only_train_params_name_list", None)
    frozen = getattr(args, "freeze_params_name_list", None)
    if only and frozen:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list exclude each other")
    patterns = only or frozen
    if not patterns:
        return
    params = list(_names_to_match(model))
    for name, param in params:
        param.requires_grad = _any_match(patterns, name) == bool(only)
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    _check_freezing(flag, patterns, params)


def _check_freezing(
    flag: str, patterns: Sequence[str], params: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Over all model-parallel ranks: a stage may have no match, and none may give up alone."""
    matches = [sum(_any_match([pattern], name) for name, _ in params) for pattern in patterns]
    trained, *matches = _model_parallel_sum([sum(param.requires_grad for _, param in params), *matches])
    for pattern, count in zip(patterns, matches, strict=True):
        if not count:
            raise ValueError(
                f"{flag} {pattern!r}: matches no parameter (wanted: a regular expression for names such as "
                "decoder.layers.0.mlp.linear_fc1.weight)"
            )
    if not trained:
        raise ValueError(f"{flag} {' '.join(map(repr, patterns))}: leaves no parameter to train")


def _names_to_match(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """`named_params`, where a tied weight has the same name on both stages that keep a copy of it."""
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    for name, param in named_params([model]):
        yield (_EMBEDDING if tied and name == "output_layer.weight" else name), param


def _model_parallel_sum(counts: Sequence[int]) -> list[int]:
    total = torch.tensor(counts, device=torch.cuda.current_device())
    dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.tolist()


def _any_match(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
