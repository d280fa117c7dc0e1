"""The trainer's memory, out of the way while engines generate on the same GPU.

Storages are emptied and filled again in place. All views of them stay valid: megatron-core's parameters
are slices of one buffer, and in float32 its optimizer updates slices of that same buffer. Moving a tensor
by ``tensor.data = tensor.cpu()`` would part the two, and the weights would stop learning.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from slime.utils.accelerator import has_gpu, synchronize


class TrainerMemory:
    """Weights, gradients and optimizer state of one rank."""

    def __init__(self, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._on_host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def is_offloaded(self) -> bool:
        return bool(self._on_host)

    def offload(self) -> None:
        """Copies weights and optimizer state to the host and frees them here; gradients are dropped.

        Nothing may read or write them until `onload`. Does nothing if they are offloaded already.
        """
        if self.is_offloaded:
            return
        for chunk in self._model:
            chunk.offload_grad_buffers()
        self._on_host = [(storage, _copy_to_host(storage)) for storage in _distinct(self._tensors())]
        synchronize()
        for storage, _ in self._on_host:
            storage.resize_(0)

    def require(self, what: str) -> None:
        """Raises RuntimeError if the memory that ``what`` needs is away: reading it would be a segfault."""
        if self.is_offloaded:
            raise RuntimeError(f"{what}: the trainer's memory is offloaded (wanted: wake_up first)")

    def onload(self) -> None:
        """Undoes `offload`; gradients are zero."""
        for storage, copy in self._on_host:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        synchronize()
        self._on_host = []
        for chunk in self._model:
            chunk.restore_grad_buffers()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._model:
            yield from chunk.parameters()
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            # A rank without parameters of some kind has no optimizer for them.
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once, without those that are on the host of a GPU anyway."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda or not has_gpu())
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _copy_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=has_gpu())
    return host.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
