"""Gradients that are kept for each adapter until its optimizer step, whatever others do in between."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.named_adapters import MegatronAdapters
from slime.backends.megatron_utils.optimizer import real_parts
from slime.backends.megatron_utils.step import TrainState, forget_gradients, gradients
from slime.config.backend import BackendConfig
from slime.training.backend import Adam
from slime.training.losses.reducers import LossFunction
from slime.training.micro_batches import DataIterator
from slime.training.parallel import ParallelContext


class TenantSteps:
    """A `slime.training.backend.TenantSteps` on megatron-core.

    Gradients are kept as they are after their reduction over the ranks; of the distributed optimizer each
    rank then uses its own part.
    """

    def __init__(self, config: BackendConfig, state: TrainState, context: ParallelContext) -> None:
        if state.named is None:
            raise ValueError("tenants: adapters have no names here (wanted: --lora-adapters)")
        self._config, self._state, self._context = config, state, context
        self._named: MegatronAdapters = state.named
        self._sums: dict[str, list[torch.Tensor]] = {}

    def accumulate(
        self, data: DataIterator, keys: Sequence[str], loss: LossFunction, num_microbatches: int
    ) -> None:
        forget_gradients(self._state)
        gradients(self._config, self._state, data, keys, loss, num_microbatches, 1, self._context)
        found = [buffer.clone() for buffer in self._buffers()]
        before = self._sums.get(self._named.live)
        if before is None:
            self._sums[self._named.live] = found
            return
        for total, added in zip(before, found, strict=True):
            total.add_(added)

    def apply(self, adam: Adam) -> bool:
        forget_gradients(self._state)
        for buffer, total in zip(self._buffers(), self._sums.pop(self._named.live), strict=True):
            buffer.copy_(total)
        self._set(adam)
        succeeded, _, _ = self._state.optimizer.step()
        return bool(succeeded)

    def _buffers(self) -> Iterator[torch.Tensor]:
        for chunk in self._state.model:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data

    def _set(self, adam: Adam) -> None:
        """Settings of the steps of whichever adapter is in place; weight decay where the run has any."""
        parts = real_parts(self._state.optimizer)
        for part in [self._state.optimizer, *parts]:
            part.config.clip_grad = adam.grad_clip_norm
        for part in parts:
            for group in part.optimizer.param_groups:
                decays = group.get("wd_mult", 1.0)
                group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
                group["weight_decay"] = adam.weight_decay * decays

    def snapshot(self) -> dict[str, Any]:
        self._named.select_optimizer()
        return self._named.snapshot()

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._named.select_optimizer()
        self._named.restore(snapshot)
        self._sums.pop(self._named.live, None)
