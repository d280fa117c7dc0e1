"""The model of a run on torch's meta device: its parameters, without memory for them and without ranks."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime.arguments.core.run_args import copied
from slime.backends.megatron_utils.model_config import transformer_config_from_args
from slime.backends.megatron_utils.model_provider import build_gpt
from slime.backends.megatron_utils.value_head import ValueHead
from slime.check.parameters import WholeParameter
from slime.models.mtp import trained_mtp_layers

# One rank has all, and nothing but the model is made.
_ALONE = dict.fromkeys(
    (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_tensor_parallel_size", "expert_model_parallel_size"),
    ),
    1,
)
_NOTHING = dict.fromkeys(
    (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "recompute_granularity"),
        *("virtual_pipeline_model_parallel_size", "spec", "recompute_method", "recompute_num_layers"),
    )
)
_OFF = dict.fromkeys(
    (
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("sequence_parallel", "moe_enable_deepep"),
    ),
    False,
)


def parameters(args: Namespace, role: str) -> list[WholeParameter]:
    """The parameters of the whole model as one rank would have them, of the experts of a layer the first.

    No layer spec of the user's is looked into.
    """
    alone = copied(args, **_ALONE, **_NOTHING, **_OFF)
    config = transformer_config_from_args(alone)
    config.expert_model_parallel_size = config.num_moe_experts or 1
    config.use_cpu_initialization = True  # the other way names a device
    config.init_method = config.output_layer_init_method = config.embedding_init_method = _leave
    further = trained_mtp_layers(args) if role == "actor" else 0
    with _first_of(config.expert_model_parallel_size), torch.device("meta"):
        model = build_gpt(alone, config, pre_process=True, post_process=True, mtp_layers=further)
        if role == "critic":
            with torch.device("cpu"):
                model.output_layer = ValueHead(config, seed=0)
        return [
            WholeParameter(name, parameter.numel(), getattr(parameter, "tensor_model_parallel", False))
            for name, parameter in model.named_parameters()
        ]


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


@contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    """Makes this process the first of so many expert-parallel ranks, of which there are no others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mpu.initialize_model_parallel(
            expert_model_parallel_size=ranks, expert_tensor_parallel_size=1, create_gloo_process_groups=False
        )
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
