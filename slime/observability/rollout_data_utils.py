"""Recorded rollouts: written by ``--save-debug-rollout-data``, replayed by ``--load-debug-rollout-data``.

A recording is a torch file ``{"rollout_id": int, "samples": [Sample.to_dict()]}`` and loads with
``weights_only=True``, so that a file from elsewhere cannot run code.
"""

from collections.abc import Sequence
from pathlib import Path

from slime.arguments.views import TrackingView
from slime.utils.numpy_data import load_plain
from slime.utils.plain_file import NotPlainError, place, reason, write_plain
from slime.utils.types import Sample, name_samples


def save_debug_rollout_data(
    args: TrackingView, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool
) -> None:
    """Writes one rollout to the ``{rollout_id}`` template; evaluations go to ``eval_<id>``.

    Raises:
        ValueError: user code has put something into a sample that the recording would not give back.
    """
    if not args.save_debug_rollout_data:
        return
    path = recording_path(args.save_debug_rollout_data, rollout_id, evaluation=evaluation)
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
            f"{flag} {path}: is no recording that can be read: {type(error).__name__}: {reason(error)} "
            "(wanted: one that --save-debug-rollout-data of this version wrote)"
        ) from error


def load_debug_rollout_data(args: TrackingView, rollout_id: int) -> list[Sample]:
    """The samples of one recorded rollout; with a subsample ratio, half from each end.

    Raises:
        FileNotFoundError: there is no recording of this rollout.
        ValueError: see `read_recording`.
    """
    assert args.load_debug_rollout_data is not None
    path = recording_path(args.load_debug_rollout_data, rollout_id, evaluation=False)
    if not path.is_file():
        raise FileNotFoundError(f"--load-debug-rollout-data: no recording of rollout {rollout_id} at {path}")
    samples = read_recording(path, "--load-debug-rollout-data")
    ratio = args.load_debug_rollout_data_subsample
    if ratio is None:
        return samples
    kept = max(1, round(len(samples) * ratio))
    head = (kept + 1) // 2
    return samples[:head] + samples[len(samples) - (kept - head) :]
