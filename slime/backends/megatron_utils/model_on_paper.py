"""The model of a run on torch's meta device: its parameters, without memory for them and without ranks."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime.arguments.core.run_args import copied
from slime.backends.megatron_utils.lora import attach_adapters
from slime.backends.megatron_utils.model_config import transformer_config
from slime.backends.megatron_utils.model_provider import build_gpt
from slime.backends.megatron_utils.value_head import ValueHead
from slime.check.parameters import WholeParameter
from slime.config.backend import BackendConfig
from slime.config.run import filled
from slime.models.mtp import trained_mtp_layers

_SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
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
    config = filled(BackendConfig, copied(args, **_ALONE, **_NOTHING, **_OFF))
    core = transformer_config(config)
    core.expert_model_parallel_size = core.num_moe_experts or 1
    core.use_cpu_initialization = True  # the other way names a device
    core.perform_initialization = False
    further = trained_mtp_layers(config.mtp) if role == "actor" else 0
    with _first_of(core.expert_model_parallel_size), torch.device("meta"):
        model = build_gpt(config, core, pre_process=True, post_process=True, mtp_layers=further)
        if role == "actor" and config.lora.adapts:
            attach_adapters([model], config.lora, config.model, seed=0)
        if role == "critic":
            with torch.device("cpu"):
                model.output_layer = ValueHead(core, seed=0)
        split = _split(model)
        return [
            WholeParameter(name, parameter.numel(), parameter in split)
            for name, parameter in model.named_parameters()
        ]


def _split(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters that tensor-parallel ranks share; megatron-core marks weights only as it fills them."""
    weights = {module.weight for module in model.modules() if isinstance(module, _SPLIT)}
    marked = {p for p in model.parameters() if getattr(p, "tensor_model_parallel", False)}
    # One whose norm is to be counted on each rank may say so and have no dimension that is split.
    return weights | {p for p in marked if vars(p)["partition_dim"] >= 0}


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
