"""Nuclei: the tokens among which the engine drew each response token, as samples and batches have them.

A sample has the token ids of all nuclei in one list, and R + 1 offsets that say where each response
token's begin. A token that no model drew, a tool's for instance, has an empty nucleus: its log-prob is over
the whole vocabulary.
"""

from typing import Any

import numpy as np

from slime.training.nucleus_rows import FLAGS, IDS, OFFSETS
from slime.utils.types import RolloutBatch, Sample


def compact(values: Any) -> np.ndarray | None:
    """int32, as nuclei may be larger than all other fields of a batch."""
    return None if values is None else np.asarray(values, dtype=np.int32).reshape(-1)


def ids_of_nothing(sample: Sample) -> np.ndarray | None:
    """No ids, for an answer of which no token is trained on; else None."""
    trained = sample.effective_response_length and not sample.remove_sample
    return None if trained else np.zeros(0, dtype=np.int32)


def offsets_of_nothing(sample: Sample) -> np.ndarray | None:
    """Offsets of empty nuclei, for an answer of which no token is trained on; else None."""
    nothing = ids_of_nothing(sample) is not None
    return np.zeros(sample.response_length + 1, dtype=np.int32) if nothing else None


def check_nuclei(batch: RolloutBatch, vocab_size: int) -> None:
    """Whether a batch that is to be trained within its nuclei has them.

    Raises:
        ValueError: there are none, or those of a sample do not fit it or the vocabulary.
    """
    if missing := [name for name in (IDS, OFFSETS) if name not in batch]:
        raise ValueError(
            f"{FLAGS}: no sample has {' and '.join(missing)} (wanted: "
            "slime.rollout.generation.wanted_of_tokens(args) in every request, sampling_params as they were "
            "given, and append_response_tokens with the answer's meta_info)"
        )
    names = batch.get("sample_indices", range(len(batch["tokens"])))
    samples = zip(names, batch[IDS], batch[OFFSETS], batch["loss_masks"], strict=True)
    for name, ids, offsets, mask in samples:
        if problem := _problem(np.asarray(ids), np.asarray(offsets), np.asarray(mask), vocab_size):
            raise ValueError(f"{FLAGS}: sample {name}: {problem}")


def _problem(ids: np.ndarray, offsets: np.ndarray, mask: np.ndarray, vocab_size: int) -> str | None:
    if len(offsets) != len(mask) + 1:
        return f"{len(offsets)} offsets of nuclei for {len(mask)} response tokens (wanted: one more)"
    if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        return (
            f"offsets of nuclei {offsets.tolist()!r:.100} do not rise from 0 to {len(ids)}, the number of ids"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        return f"ids {ids.min()} to {ids.max()} in its nuclei, wanted 0 to {vocab_size - 1}"
    if lacking := int(((np.diff(offsets) == 0) & (mask != 0)).sum()):
        return f"{lacking} tokens that are trained on have no nucleus"
    return None
