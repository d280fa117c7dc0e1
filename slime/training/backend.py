"""What the rest of the project knows about a trainer: the weights of one role on one rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from slime.training.losses.reducers import LossFunction
from slime.training.micro_batches import DataIterator
from slime.training.parallel import ParallelContext
from slime.training.save_attempts import Outcome
from slime.training.versions import WeightVersions
from slime.training.weights import FULL, Weights
from slime.utils.types import RolloutBatch

Outputs = dict[str, list[torch.Tensor]]
"""Per sample values [R] float32 under the names of batch fields; empty before the last pipeline stage."""

Head = Callable[[torch.Tensor, Mapping[str, Any]], Outputs]
"""What a forward pass is for: (logits [1, T, V / tp], micro-batch) -> values of its samples."""


@dataclass(frozen=True)
class Start:
    """The point at which a run begins.

    Attributes:
        rollout_id: the first rollout.
        common: what `TrainBackend.save` was given along; empty for a new run.
    """

    rollout_id: int = 0
    common: Mapping[str, Any] = field(default_factory=dict)


class Memory(Protocol):
    """Weights, gradients and optimizer state, which leave the device in two steps."""

    def offload_training_state(self) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def require_all(self, what: str) -> None: ...

    def require_weights(self, what: str) -> None: ...


class Adam(NamedTuple):
    """What an optimizer step of a tenant is taken with; a ``grad_clip_norm`` of 0 clips nothing."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class TenantSteps(Protocol):
    """Gradients and steps of the adapter that is selected; collective over all ranks."""

    def accumulate(
        self, data: DataIterator, keys: Sequence[str], loss: LossFunction, num_microbatches: int
    ) -> None:
        """Adds the gradients of the sum of the losses of all micro-batches to those since the last step."""

    def apply(self, adam: Adam) -> bool:
        """Takes a step with these gradients, which are forgotten; False if they were not finite."""

    def snapshot(self) -> dict[str, Any]:
        """Copies what the adapter has of its own on this rank: weights and optimizer state."""

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from a `snapshot` of this layout, without gradients."""


class TrainBackend(Protocol):
    """A model with its optimizer. Methods are collective over the ranks of the role.

    A backend is a class called with (args, role name); see `slime.config.trainers`.

    Attributes:
        context: the parallel layout.
        device: where this rank computes.
        versions: other weights (a reference, say) beside the trained ones, under their tags.
    """

    context: ParallelContext
    device: torch.device
    versions: WeightVersions
    memory: Memory

    def load(self) -> Start:
        """Joins the process group that RANK, WORLD_SIZE and MASTER_* describe, builds and loads the model."""

    def load_version(self, tag: str, path: str, step: int | None = None) -> None:
        """Keeps the weights at ``path`` under ``tag``, or newer ones of that tag in a resumed checkpoint.

        Args:
            step: the iteration, if ``path`` holds several; by default the latest.
        """

    def parallel_config(self) -> dict[str, int]:
        """What splitting a rollout over the ranks needs to know, and this rank's share (``dp_rank``)."""

    def select(self, adapter: str) -> None:
        """Makes the model that of one of ``--lora-adapters``, for what follows: passes, steps, weights.

        Raises:
            ValueError: this trainer has no adapter of that name.
        """

    def tenant_steps(self) -> TenantSteps:
        """How adapters train whose gradients are asked for one by one.

        Raises:
            ValueError: this trainer has no named adapters.
        """

    def forward(self, batch: RolloutBatch, data: DataIterator, head: Head, prefix: str) -> Outputs:
        """Values of all samples of this rank's shard without gradients, ``prefix`` before their names.

        With ``--use-routing-replay`` those without a prefix record the routes that are replayed in training.
        """

    def training(self) -> AbstractContextManager[None]:
        """Around the optimizer steps of a rollout."""

    def step(
        self,
        rollout_id: int,
        step_id: int,
        data: DataIterator,
        keys: Sequence[str],
        loss: LossFunction,
        num_microbatches: int,
        step_global_batch_size: int,
    ) -> dict[str, float]:
        """One optimizer step over the next micro-batches; its metrics without a prefix, on the last stage.

        Args:
            keys: fields that ``loss`` finds in a micro-batch.
            step_global_batch_size: rollouts of the step over all ranks.
        """

    def reset_optimizer(self) -> None:
        """Forgets what the optimizer has learnt about the gradients."""

    def require_finite(self, what: str) -> None:
        """Refuses weights with NaN or infinity; ``what`` they were to be used for comes first in the message.

        Raises:
            RuntimeError: names the first such parameter of this rank.
        """

    def weights(self, form: str = FULL, adapter: str | None = None) -> Weights:
        """The trained weights as they are when the result is iterated.

        Args:
            adapter: of several; it is selected then.

        Raises:
            ValueError: this trainer does not have them in that form.
        """

    def save(
        self,
        rollout_id: int,
        common: Mapping[str, Any],
        versions: Sequence[str],
        wait: bool,
        memory: str | None = None,
    ) -> list[Outcome]:
        """Writes a checkpoint to ``--save``.

        Args:
            common: plain values, the same on every rank; `Start` brings them back.
            versions: tags whose weights are saved along.
            wait: return only when it is complete.
            memory: a directory in which a snapshot is written in its place: with all state, whatever flags
                leave out of checkpoints, and complete on return.

        Returns:
            How the saves ended of which that was not known yet: with ``--async-save`` the one before this, or
            both if it waits.
        """

    def poll(self) -> None:
        """Makes a checkpoint that was written in the background the latest, if it is complete."""

    def save_hf(self, path: str) -> None:
        """Exports the model as a Hugging Face checkpoint."""
