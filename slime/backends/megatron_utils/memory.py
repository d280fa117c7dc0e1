"""Where megatron-core keeps the weights, gradients and optimizer state that a sleeping trainer gives up."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from slime.training.memory import TrainerMemory


def trainer_memory(model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> TrainerMemory:
    """The memory of one rank."""

    def drop_gradients() -> None:
        for chunk in model:
            chunk.offload_grad_buffers()

    def restore_gradients() -> None:
        for chunk in model:
            chunk.restore_grad_buffers()

    return TrainerMemory(
        lambda: (parameter for chunk in model for parameter in chunk.parameters()),
        lambda: _optimizer_tensors(optimizer),
        drop_gradients,
        restore_gradients,
    )


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A rank without parameters of some kind has no optimizer for them.
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
