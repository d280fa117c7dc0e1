"""Recorded rollouts: written by ``--save-debug-rollout-data``, replayed by ``--load-debug-rollout-data``.

A recording is a torch file ``{"rollout_id": int, "samples": [Sample.to_dict()]}`` and loads with
``weights_only=True``, so that a file from elsewhere cannot run code.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.utils.engine_meta import RoutedShape
from slime.utils.numpy_data import load_plain
from slime.utils.plain_file import NotPlainError, place, reason, write_plain
from slime.utils.types import Sample, name_samples


def save_debug_rollout_data(
    path_template: str | None,
    data: Sequence[Sample] | Mapping[str, Mapping[str, Any]],
    *,
    rollout_id: int,
    evaluation: bool,
) -> None:
    """Writes one rollout to the ``{rollout_id}`` template, if there is one; evaluations go to ``eval_<id>``.

    Args:
        data: samples, or ``{name: {"samples": ...}}`` of an evaluation.

    Raises:
        ValueError: user code has put something into a sample that the recording would not give back.
    """
    if not path_template:
        return
    if isinstance(data, Mapping):
        data = [sample for dataset in data.values() for sample in dataset["samples"]]
    samples = data
    path = recording_path(path_template, rollout_id, evaluation=evaluation)
    try:
        write_plain({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, path)
    except NotPlainError as error:
        keys = error.keys
        named = f"{name_samples(samples[keys[1]])}: {place(keys[2:])}" if len(keys) > 1 else place(keys)
        raise ValueError(
            f"--save-debug-rollout-data {path}: {named} is {error.found}, which no recording gives back "
            "(wanted: plain data and tensors)"
        ) from None


def recording_path(template: str, rollout_id: int, *, evaluation: bool) -> Path:
    """Returns where a template puts the recording of a rollout, or of the evaluation after it."""
    if evaluation:
        template = template.replace("{rollout_id", "eval_{rollout_id")
    return Path(template.format(rollout_id=rollout_id))


def read_recording(path: Path, flag: str) -> list[Sample]:
    """The samples of the file that ``flag`` names.

    Raises:
        ValueError: it is none of ours, or of another version.
    """
    try:
        return [Sample.from_dict(sample) for sample in load_plain(path)["samples"]]
    except OSError:
        raise
    except Exception as error:  # files of others may hold anything
        raise ValueError(
            f"{flag} {path}: is not a readable recording: {type(error).__name__}: {reason(error)} "
            "(wanted: one that --save-debug-rollout-data of this version wrote)"
        ) from error


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """The samples of one recorded rollout; with a subsample ratio, half from each end.

    Raises:
        FileNotFoundError: there is no recording of this rollout.
        ValueError: see `read_recording`.
    """
    path = recording_path(path_template, rollout_id, evaluation=False)
    if not path.is_file():
        raise FileNotFoundError(f"--load-debug-rollout-data: no recording of rollout {rollout_id} at {path}")
    samples = read_recording(path, "--load-debug-rollout-data")
    if subsample_ratio is None:
        return samples
    kept = max(1, round(len(samples) * subsample_ratio))
    head = (kept + 1) // 2
    return samples[:head] + samples[len(samples) - (kept - head) :]


_DTYPES = {
    "tokens": torch.long,
    "loss_masks": torch.int,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
}


def tensorize_rollout_data_for_training(rollout_data: dict[str, Any]) -> None:
    """Makes tensors of the lists per sample that a trainer reads, in place; whatever is absent stays so."""
    for name, dtype in _DTYPES.items():
        if rollout_data.get(name) is not None:
            rollout_data[name] = [torch.as_tensor(values, dtype=dtype) for values in rollout_data[name]]
    if rollout_data.get("rollout_mask_sums") is not None:
        sums = rollout_data["rollout_mask_sums"]
        rollout_data["rollout_mask_sums"] = torch.as_tensor(sums, dtype=torch.float32)


def validate_rollout_routed_experts_for_replay(
    routed_experts: Sequence[torch.Tensor], args: RoutedShape
) -> None:
    """Raises ValueError unless each sample has [tokens - 1, layers, top k] integers."""
    layers, top_k = args.num_layers, args.moe_router_topk
    for number, routes in enumerate(routed_experts):
        shape = tuple(routes.shape)
        if len(shape) != 3 or shape[1:] != (layers, top_k) or routes.is_floating_point():
            raise ValueError(
                f"rollout_routed_experts of sample {number}: {routes.dtype} {list(shape)} (wanted: integers, "
                f"[tokens - 1, {layers} layers, top {top_k}])"
            )
