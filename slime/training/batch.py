"""The fields of a train batch: one row each, from the sample to the loss and the metrics.

A batch is a mapping from field names to lists with one entry per sample. `FIELDS` says for each field how it
is read off a `Sample`, what tensors are made of it, whether losses see it and how metrics average it. A key
that is in no row, from a user's conversion for instance, travels all the same: see `is_per_sample`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from slime.training import nuclei
from slime.training.routes import compact
from slime.utils.types import RolloutBatch, Sample

ADAPTER, ADAPTER_STEPS = "adapter", "adapter_steps"


class BatchError(RuntimeError):
    """Samples that make no train batch; the message names the samples and the field."""


class Axis(Enum):
    """What the entry of one sample runs over."""

    SAMPLE = "one value per sample"
    TOKENS = "prompt and response, L entries"
    RESPONSE = "response, R entries"
    RAGGED = "as many entries of one form as the sample has, patches of its images for instance"


class Average(Enum):
    """How ``rollout/<field>`` is made of the entries."""

    BY_ROLLOUT = "per token by the loss mask within each rollout, then over rollouts"
    BY_SAMPLE = "over samples; of a ragged field its number of entries"


@dataclass(frozen=True)
class Field:
    """A field of the batch.

    Attributes:
        axis: what the entry of one sample runs over.
        read: takes it off a sample; the batch has it if any sample gives something, and then all must.
        unknown: what stands for it on a sample that gives nothing where others do; None refuses such a batch.
        required: a batch without it cannot be trained on, whoever made it.
        dtype: of the tensor that the trainer makes of each entry; None leaves entries as they are.
        stacked: one tensor for the whole shard instead of one per sample.
        in_loss: losses find it in their micro-batch.
        media: of a ragged field, models find it among their inputs.
        average: of the metric; None for no metric.
    """

    axis: Axis
    read: Callable[[Sample], Any] | None = None
    unknown: Callable[[Sample], Any] | None = None
    required: bool = False
    dtype: torch.dtype | None = None
    stacked: bool = False
    in_loss: bool = False
    media: bool = False
    average: Average | None = None


def _token_versions(sample: Sample) -> list[int] | None:
    """-1 where it is not known; None where none is: no entry per token for nothing."""
    versions = [int(v) if v is not None and v.isdecimal() else -1 for v in sample.token_versions]
    return versions if any(version >= 0 for version in versions) else None


def _no_versions(sample: Sample) -> list[int]:
    return [-1] * sample.response_length


def _routes(sample: Sample) -> np.ndarray | None:
    return compact(sample.rollout_routed_experts)


def _routes_of_nothing(sample: Sample) -> np.ndarray | None:
    """Makes the routes of an answer of which no token is trained on."""
    trained = sample.effective_response_length and not sample.remove_sample
    return None if trained else np.zeros((0, 0, 0), dtype=np.int16)


def _log_probs_of_nothing(sample: Sample) -> list[float] | None:
    """Makes the log-probs of an answer without tokens, which records none."""
    return None if sample.response_length else []


def _response(in_loss: bool = True, **options: Any) -> Field:
    """What the trainer itself computes per response token."""
    return Field(Axis.RESPONSE, in_loss=in_loss, average=Average.BY_ROLLOUT, **options)


FIELDS: dict[str, Field] = {
    "tokens": Field(Axis.TOKENS, lambda sample: sample.tokens, required=True, dtype=torch.long, in_loss=True),
    # [k, L], of a conversion of the user's: places that are not the tokens' indices.
    "positions": Field(Axis.TOKENS, dtype=torch.long),
    "response_lengths": Field(
        Axis.SAMPLE,
        lambda sample: sample.response_length,
        required=True,
        in_loss=True,
        average=Average.BY_SAMPLE,
    ),
    "total_lengths": Field(Axis.SAMPLE, in_loss=True, average=Average.BY_SAMPLE),
    "loss_masks": Field(Axis.RESPONSE, required=True, dtype=torch.int, in_loss=True),
    "rewards": Field(Axis.SAMPLE, required=True, in_loss=True, average=Average.BY_SAMPLE),
    "raw_reward": Field(Axis.SAMPLE, required=True),
    "local_raw_reward": Field(Axis.SAMPLE),
    "truncated": Field(
        Axis.SAMPLE,
        lambda sample: int(sample.status == Sample.Status.TRUNCATED),
        in_loss=True,
        average=Average.BY_SAMPLE,
    ),
    "sample_indices": Field(Axis.SAMPLE, in_loss=True),
    "rollout_ids": Field(Axis.SAMPLE, required=True, in_loss=True),
    "rollout_mask_sums": Field(Axis.SAMPLE, required=True, dtype=torch.float32, stacked=True, in_loss=True),
    "rollout_log_probs": _response(
        read=lambda sample: sample.rollout_log_probs, unknown=_log_probs_of_nothing, dtype=torch.float32
    ),
    nuclei.IDS: Field(
        Axis.SAMPLE, lambda sample: nuclei.compact(sample.rollout_top_p_token_ids), nuclei.ids_of_nothing
    ),
    nuclei.OFFSETS: Field(
        Axis.SAMPLE,
        lambda sample: nuclei.compact(sample.rollout_top_p_token_offsets),
        nuclei.offsets_of_nothing,
    ),
    "rollout_routed_experts": Field(Axis.SAMPLE, _routes, _routes_of_nothing),
    "teacher_log_probs": _response(read=lambda sample: sample.teacher_log_probs, dtype=torch.float32),
    "token_versions": Field(Axis.RESPONSE, _token_versions, _no_versions, dtype=torch.long),
    "round_number": Field(Axis.SAMPLE, lambda sample: sample.metadata.get("round_number")),
    "metadata": Field(Axis.SAMPLE, lambda sample: sample.train_metadata, in_loss=True),
    # Its name, in a run with several: see `slime.training.adapter_steps`.
    ADAPTER: Field(Axis.SAMPLE),
    "log_probs": _response(),
    "ref_log_probs": _response(),
    "before_log_probs": Field(Axis.RESPONSE),
    "after_log_probs": Field(Axis.RESPONSE),
    "entropy": _response(in_loss=False),
    "values": _response(),
    "kl": _response(in_loss=False),
    "opd_reverse_kl": _response(in_loss=False),
    "mean_weight": Field(Axis.SAMPLE, in_loss=True),
    "returns": _response(),
    "advantages": _response(),
}
_OF_UNKNOWN = Field(Axis.SAMPLE, in_loss=True)

REQUIRED = frozenset(name for name, field in FIELDS.items() if field.required)
"""What a trainer needs of a batch, whoever made it."""

SCHEDULE = frozenset(
    {"partition", "global_batch_sizes", "num_microbatches", "micro_batch_indices", ADAPTER_STEPS}
)
"""What a shard holds beside fields: which samples it has, and when each is trained."""


def field_of(name: str) -> Field:
    """The row of a field; of a name that has none, one that losses see and no metric shows."""
    return FIELDS.get(name, _OF_UNKNOWN)


def media_fields() -> list[str]:
    """The fields that are inputs of models beside tokens."""
    return [name for name, field in FIELDS.items() if field.media]


def is_per_sample(value: Any) -> bool:
    """Whether a value has an entry for each sample: sequences do, anything else is the whole batch's."""
    return isinstance(value, Sequence | np.ndarray | torch.Tensor) and not isinstance(value, str | bytes)


def sample_fields(batch: Mapping[str, Any]) -> list[str]:
    """The names under which a batch has an entry for each of its samples.

    Raises:
        BatchError: a value has another number of entries.
    """
    names = [key for key, value in batch.items() if key not in SCHEDULE and is_per_sample(value)]
    count = len(batch["tokens"])
    for name in names:
        if len(batch[name]) != count:
            raise BatchError(f"{name}: {len(batch[name])} entries for a batch of {count} samples")
    return names


def loss_fields(shard: RolloutBatch) -> list[str]:
    """The names under which losses find something in a micro-batch of a rank's shard."""
    return [
        key
        for key, value in shard.items()
        if key not in SCHEDULE and field_of(key).in_loss and is_per_sample(value)
    ]


def take(values: Any, indices: Sequence[int]) -> Any:
    """The entries of some samples: of a tensor or an array a tensor or an array, else a list."""
    if isinstance(values, np.ndarray | torch.Tensor):
        return values[list(indices)]
    return [values[i] for i in indices]


def select(batch: RolloutBatch, indices: Sequence[int]) -> RolloutBatch:
    """The batch of some of its samples, with what belongs to the whole."""
    per_sample = set(sample_fields(batch))
    return {key: take(value, indices) if key in per_sample else value for key, value in batch.items()}
