"""The trainer's memory, out of the way while engines generate on the same GPU.

Storages are emptied and filled again in place. All views of them stay valid: megatron-core's parameters
are slices of one buffer, and in float32 its optimizer updates slices of that same buffer. Moving a tensor
by ``tensor.data = tensor.cpu()`` would part the two, and the weights would stop learning.
"""

from collections.abc import Callable, Iterable

import torch

from slime.utils.accelerator import host_buffer, on_device, synchronize


class TrainerMemory:
    """Weights, gradients and optimizer state of one rank.

    They leave in two steps: an engine that takes its weights back, to be given new ones, needs room while
    the trainer still needs its own.

    Args:
        weights: the parameters.
        optimizer_tensors: what the optimizer holds; tensors that share memory with weights stay with them.
        drop_gradients: frees the gradients.
        restore_gradients: makes room for them again, zeros.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[torch.Tensor]],
        optimizer_tensors: Callable[[], Iterable[torch.Tensor]],
        drop_gradients: Callable[[], None],
        restore_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights, self._optimizer_tensors = weights, optimizer_tensors
        self._drop_gradients, self._restore_gradients = drop_gradients, restore_gradients
        self._on_host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._has_training_state = self._has_weights = True

    def offload_training_state(self) -> None:
        """Copies optimizer state to the host and frees it here; gradients are dropped.

        Only the weights may be read then, until `onload`. Does nothing if the state is away already.
        """
        if not self._has_training_state:
            return
        self._has_training_state = False
        self._drop_gradients()
        weights = {storage.data_ptr() for storage in _distinct(self._weights())}
        self._move(s for s in _distinct(self._optimizer_tensors()) if s.data_ptr() not in weights)

    def offload(self) -> None:
        """Moves the weights away too. Does nothing if they are away already."""
        self.offload_training_state()
        if self._has_weights:
            self._has_weights = False
            self._move(_distinct(self._weights()))

    def require_all(self, what: str) -> None:
        """Raises RuntimeError if anything is away: reading it would be a segfault."""
        self.require_weights(what)
        if not self._has_training_state:
            raise RuntimeError(f"{what}: the optimizer state is offloaded (wanted: wake_up first)")

    def require_weights(self, what: str) -> None:
        """Raises RuntimeError if the weights are away."""
        if not self._has_weights:
            raise RuntimeError(f"{what}: the weights are offloaded (wanted: wake_up first)")

    def onload(self) -> None:
        """Brings back what `offload` has moved away; gradients are zero."""
        for storage, copy in self._on_host:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        synchronize()
        self._on_host = []
        self._restore_gradients()
        self._has_training_state = self._has_weights = True

    def _move(self, storages: Iterable[torch.UntypedStorage]) -> None:
        moved = [(storage, _copy_to_host(storage)) for storage in storages]
        synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._on_host += moved


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once, without those that are on the host of a GPU anyway."""
    storages = (tensor.untyped_storage() for tensor in tensors if on_device(tensor))
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _copy_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    return host_buffer(storage.nbytes()).copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
