"""Builds the GPT model of this rank."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.lora import attach_adapters
from slime.backends.megatron_utils.model_config import transformer_config
from slime.backends.megatron_utils.mtp import MtpLayers
from slime.backends.megatron_utils.named_params import named_params
from slime.backends.megatron_utils.value_head import ValueHead, is_of_value_head
from slime.config.backend import BackendConfig
from slime.config.trainer import TrainerConfig
from slime.models import family_of
from slime.models.families.deepseek_v32 import is_of_indexer
from slime.models.mtp import trained_mtp_layers
from slime.utils.misc import load_function

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EMBEDDING = "embedding.word_embeddings.weight"


def get_model(
    config: BackendConfig, role: str = "actor", device: torch.device | None = None
) -> list[torch.nn.Module]:
    """The model chunks of this rank on its device: one for each of its virtual pipeline stages, or one.

    The chunks are bare GPTModels with random weights; wrapping them in Float16Module and DDP is up to the
    caller. Frozen parameters (``--freeze-params-name-list``) have ``requires_grad=False``, and so have all
    but those of adapters (``--lora-rank``), of which a critic has none. A critic has a value head in the
    place of the output layer, which is new and always trains.

    Args:
        config: of the run.
        role: "actor" or "critic".
        device: another one than its own.

    Raises:
        ValueError: freezing flags that leave nothing to train.
    """
    core = transformer_config(config)
    virtual = config.parallelism.virtual_pipeline_model_parallel_size
    with device or contextlib.nullcontext():
        chunks = [_chunk(config, core, role, stage) for stage in (range(virtual) if virtual else [None])]
    freeze_model_params(config.trainer, chunks)
    if role == "actor" and config.lora.adapts:
        attach_adapters(chunks, config.lora, config.model, config.trainer.seed)
    for head in filter(is_of_value_head, chain.from_iterable(chunk.parameters() for chunk in chunks)):
        head.requires_grad = True
    if config.megatron.recompute_granularity is not None:
        _let_gradients_pass(chunks)
    return [chunk.to(device or torch.cuda.current_device()) for chunk in chunks]


def _let_gradients_pass(chunks: Sequence[torch.nn.Module]) -> None:
    """Lets gradients pass to the embedding, even a frozen one: what is recomputed trains only if its input
    has a gradient.

    Without one megatron-core gives their parameters none, or fails where it computes norms again.
    """
    for embedding in filter(None, (getattr(chunk, "embedding", None) for chunk in chunks)):
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


def _chunk(
    config: BackendConfig, core: TransformerConfig, role: str, vp_stage: int | None
) -> torch.nn.Module:
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if path := config.trainer.custom_model_provider_path:
        model = load_function(path)(first, last, vp_stage=vp_stage)
    else:
        mtp_layers = trained_mtp_layers(config.mtp) if role == "actor" else 0  # a critic has none
        model = build_gpt(config, core, first, last, vp_stage, mtp_layers)
    if role == "critic" and last:
        model.output_layer = ValueHead(get_model_config(model), config.trainer.seed)
    return model


def build_gpt(
    config: BackendConfig,
    core: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    mtp_layers: int = 0,
) -> GPTModel:
    """One pipeline stage, or one of its virtual stages.

    ``pre_process`` adds the embedding, ``post_process`` the final norm, the head and, as ``model.mtp``, the
    ``mtp_layers`` MTP layers.

    Logits stay split over the tensor-parallel group along the vocabulary.
    """
    shape = config.model
    layers = load_function(_spec_path(config))(config.flat, core, vp_stage)
    model = GPTModel(
        config=core,
        transformer_layer_spec=layers,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
        # PackedAttention applies the rotary embedding.
        position_embedding_type="none",
        vp_stage=vp_stage,
    )
    if pre_process and shape.embedding_factor != 1:
        # Rounded first, as transformers does.
        dtype = config.precision.params_dtype
        factor = float(torch.tensor(shape.embedding_factor, dtype=dtype, device="cpu"))
        model.embedding.register_forward_hook(lambda module, inputs, output: output * factor)
    if post_process and mtp_layers:
        model.mtp = MtpLayers(core, layers, mtp_layers, shape.vocab_size, vp_stage)
        model.mtp.watch(model.decoder)
    return model


def _spec_path(config: BackendConfig) -> str:
    given = config.layer_variants.spec
    return ".".join(given) if given else family_of(config.model.model_type).layer_spec


def freeze_model_params(config: TrainerConfig, model: Sequence[torch.nn.Module]) -> None:
    """Freezes by regular expressions over the parameters' global names (``re.search``). Collective.

    Where the output layer shares the embedding's weight, both copies go by the name of the embedding. With
    ``freeze_indexer`` those are frozen beside what patterns say.

    Raises:
        ValueError: both lists are given, a pattern matches nothing in the whole model, nothing trains, or the
            first layer that trains does so on some expert-parallel ranks only.
    """
    only = config.only_train_params_name_list
    frozen = config.freeze_params_name_list
    if only and frozen:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list exclude each other")
    patterns, indexers = only or frozen or (), config.freeze_indexer
    if not patterns and not indexers:
        return
    params = list(_names_to_match(model))
    for name, param in params:
        wanted = not patterns or _any_match(patterns, name) == bool(only)
        param.requires_grad = wanted and not (indexers and is_of_indexer(name))
    if not patterns:
        return
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    _check_freezing(flag, patterns, params)


def _check_freezing(
    flag: str, patterns: Sequence[str], params: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Refuses patterns that match nothing on any rank, on all ranks together: one alone may have no match."""
    matches = [sum(_any_match([pattern], name) for name, _ in params) for pattern in patterns]
    trained = [name for name, param in params if param.requires_grad]
    total, apart, *matches = _sum_over_ranks([len(trained), not _begin_together(trained), *matches])
    for pattern, count in zip(patterns, matches, strict=True):
        if not count:
            raise ValueError(
                f"{flag} {pattern!r}: matches no parameter (wanted: a regular expression for names such as "
                "decoder.layers.0.mlp.linear_fc1.weight)"
            )
    if not total:
        raise ValueError(f"{flag} {' '.join(map(repr, patterns))}: leaves no parameter to train")
    if apart:
        raise ValueError(
            f"{flag} {' '.join(map(repr, patterns))}: the first layer that trains has an expert to train on "
            "some ranks only (wanted: the same for all experts of a layer, or its router too)"
        )


def _begin_together(trained: Sequence[str]) -> bool:
    """Whether backward passes end in the same layer on all expert-parallel ranks: they exchange gradients."""
    layers = [int(match[1]) for name in trained if (match := _LAYER.match(name))]
    first = -1 if _EMBEDDING in trained else min(layers, default=2**31)
    ends = torch.tensor([first, -first], device=torch.cuda.current_device())
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=mpu.get_expert_model_parallel_group())
    return int(ends.sum()) == 0


def _names_to_match(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """`named_params`, where a tied weight has the same name on both stages that keep a copy of it."""
    tied = getattr(model[0], "share_embeddings_and_output_weights", False)
    for name, param in named_params(model):
        yield (_EMBEDDING if tied and name == "output_layer.weight" else name), param


def _sum_over_ranks(counts: Sequence[int]) -> list[int]:
    total = torch.tensor(counts, device=torch.cuda.current_device())
    dist.all_reduce(total)
    return total.tolist()


def _any_match(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
