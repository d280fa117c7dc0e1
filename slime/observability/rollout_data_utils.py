"""Recorded rollouts: written by ``--save-debug-rollout-data``, replayed by ``--load-debug-rollout-data``.

A recording is a torch file ``{"rollout_id": int, "samples": [Sample.to_dict()]}`` and loads with
``weights_only=True``, so that a file from elsewhere cannot run code.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from slime.arguments.views import TrackingView
from slime.utils.types import Sample


def save_debug_rollout_data(
    args: TrackingView, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool
) -> None:
    """Writes one rollout to the ``{rollout_id}`` template; evaluations go to ``eval_<id>``."""
    if not args.save_debug_rollout_data:
        return
    template = args.save_debug_rollout_data
    if evaluation:
        template = template.replace("{rollout_id", "eval_{rollout_id")
    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, path)


def load_debug_rollout_data(args: TrackingView, rollout_id: int) -> list[Sample]:
    """The samples of one recorded rollout; with a subsample ratio, half from each end.

    Raises:
        FileNotFoundError: there is no recording of this rollout.
    """
    assert args.load_debug_rollout_data is not None
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    if not path.is_file():
        raise FileNotFoundError(f"--load-debug-rollout-data: no recording of rollout {rollout_id} at {path}")
    samples = [Sample.from_dict(s) for s in torch.load(path, weights_only=True)["samples"]]
    ratio = args.load_debug_rollout_data_subsample
    if ratio is None:
        return samples
    kept = max(1, round(len(samples) * ratio))
    head = (kept + 1) // 2
    return samples[:head] + samples[len(samples) - (kept - head) :]
