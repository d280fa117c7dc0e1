"""Adapters of one base whose passes, steps, syncs and states are asked for one by one, from outside the run.

A datum is a dict: ``tokens`` [L], and for each of the last R of them ``advantages`` (of cross entropy the
weights) and ``log_probs`` (of those who sampled them; zeros for cross entropy).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime.config.training import TrainingConfig
from slime.training.backend import Adam, TrainBackend
from slime.training.log_probs import response_log_probs
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.micro_batches import DataIterator, tensorize
from slime.training.schedule import dp_schedule
from slime.training.weights import ADAPTER, NamedTensors, TensorInfo, Weights
from slime.utils.types import RolloutBatch

Datum = Mapping[str, Any]
Told = dict[int, tuple[float, list[float]]]
"""By the number of a datum its loss and the log-probs of its R tokens."""

LOSSES = ("cross_entropy", "importance_sampling", "ppo")
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""The ratios between which ``ppo`` does not clip the gradient."""
_KEYS = ("advantages", "rollout_log_probs", "sample_indices")


def token_losses(
    kind: str,
    clips: Mapping[str, float],
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
) -> torch.Tensor:
    """The losses [R] of a datum's tokens, whose sum is trained on; 0 where the advantage is."""
    if kind == "cross_entropy":
        losses = -new * advantages
    else:
        ratios = torch.exp(new - old)
        losses = -ratios * advantages
        if kind == "ppo":
            clipped = ratios.clamp(clips["clip_low_threshold"], clips["clip_high_threshold"])
            losses = torch.maximum(losses, -clipped * advantages)
    return torch.where(advantages != 0, losses, 0.0)


def shard_of(config: TrainingConfig, layout: Mapping[str, int], data: Sequence[Datum]) -> RolloutBatch:
    """This rank's part of the data, filled up with some that train nothing to one for each rank."""
    stages = layout["microbatch_group_size_per_vp_stage"] if layout["vpp_size"] > 1 else 1
    missing = max(0, layout["dp_size"] * stages - len(data))
    nothing = {**data[0], "advantages": [0.0] * len(data[0]["advantages"])}
    filled = [*data, *[nothing] * missing]
    lengths = [len(datum["tokens"]) for datum in filled]
    size, ids = len(filled), range(len(filled))
    cut = dp_schedule(
        config.batches, config.model, layout, lengths, global_batch_size=size, rollout_indices=ids
    )
    own = cut.partitions[layout["dp_rank"]]
    return {
        "tokens": [filled[i]["tokens"] for i in own],
        "advantages": [filled[i]["advantages"] for i in own],
        "rollout_log_probs": [filled[i]["log_probs"] for i in own],
        "response_lengths": [len(filled[i]["advantages"]) for i in own],
        "loss_masks": [[1] * len(filled[i]["advantages"]) for i in own],
        "sample_indices": own,
        "raw_reward": [0.0] * size,
        "total_lengths": lengths,
        "partition": own,
        "micro_batch_indices": cut.micro_batch_indices[layout["dp_rank"]],
        "num_microbatches": cut.num_microbatches,
    }


class Sent:
    """The weights of an adapter as they were when that was asked last, for engines that come later too."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self.ranks, self.rounding = weights, weights.ranks, 0.0
        self._kept: list[NamedTensors] | None = None

    def manifest(self) -> Sequence[TensorInfo]:
        return self._weights.manifest()

    def forget(self) -> None:
        """Has the next update take them anew."""
        self._kept = None

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        if self._kept is None:
            found = self._weights.buckets(max_bytes)
            self._kept = [[(name, tensor.detach().to("cpu", copy=True)) for name, tensor in b] for b in found]
        yield from self._kept


class Tenants:
    """What a rank does for the tenants. Methods are collective over all ranks."""

    def __init__(self, config: TrainingConfig, backend: TrainBackend, rank: int) -> None:
        self._config, self._backend, self._rank = config, backend, rank
        self._steps = backend.tenant_steps()
        self._sent: dict[str, Sent] = {}

    def sent(self, name: str | None) -> Sent:
        """What engines are given of a tenant."""
        assert name is not None  # adapters have names here
        self._sent[name] = Sent(self._backend.weights(ADAPTER, name))
        return self._sent[name]

    def publish(self, name: str) -> None:
        """Has engines given, by the next update, the weights that the tenant has now."""
        self._sent[name].forget()

    def forward_backward(
        self, name: str, data: Sequence[Datum], kind: str, clips: Mapping[str, float]
    ) -> Told:
        """Adds the gradients of the sum of the losses to the tenant's.

        Returns:
            Of this rank's data, on the last pipeline stage.
        """
        backend, told = self._backend, Told()
        layout = backend.parallel_config()
        batch = tensorize(shard_of(self._config, layout, data), backend.device)
        iterator = DataIterator(batch, batch["micro_batch_indices"])
        backend.select(name)
        loss = partial(self._loss, kind, CLIPS | dict(clips), told)
        self._steps.accumulate(iterator, _KEYS, loss, batch["num_microbatches"][0])
        return {number: found for number, found in told.items() if number < len(data)}

    def _loss(
        self,
        kind: str,
        clips: Mapping[str, float],
        told: Told,
        batch: Mapping[str, Any],
        logits: torch.Tensor,
        reducer: Reducer,
    ) -> LossOutput:
        config = self._config.logits
        found, _ = response_log_probs(
            config, logits, batch, entropy_gradient=False, temperature=1.0, whole_vocabulary=True
        )
        total = logits.new_zeros(())
        rows = batch["sample_indices"], found, batch["rollout_log_probs"], batch["advantages"]
        for number, new, old, advantages in zip(*rows, strict=True):
            given = torch.as_tensor(advantages, dtype=torch.float32, device=new.device)
            losses = token_losses(kind, clips, new, old, given)
            total = total + losses.sum()
            told[number] = float(losses.detach().sum()), new.detach().tolist()
        return total, {"loss": total.detach().clone()}

    def optim_step(self, name: str, adam: Adam) -> bool:
        """Takes a step with the tenant's gradients; False, without one, if they are not finite."""
        self._backend.select(name)
        return self._steps.apply(adam)

    def save_state(self, name: str, directory: str) -> None:
        """Writes this rank's part of the tenant's weights and optimizer state."""
        self._backend.select(name)
        path = _part(directory, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".partial")
        torch.save(self._steps.snapshot(), unfinished)
        os.replace(unfinished, path)

    def load_state(self, name: str, directory: str) -> None:
        """Goes on from what `save_state` has written, of the tenant or of another one."""
        self._backend.select(name)
        self._steps.restore(torch.load(_part(directory, self._rank), weights_only=True))


def _part(directory: str, rank: int) -> Path:
    return Path(directory, f"rank_{rank}.pt")
