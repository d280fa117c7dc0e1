"""What optimizer and schedule take from a checkpoint, and what from flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.optimizer import update_rule
from slime.backends.megatron_utils.step import TrainState
from slime.config.backend import BackendConfig
from slime.config.optimizer import ScheduleConfig
from slime.training.checkpoint_errors import other_optimizer

# What a parameter group of the optimizer has from flags, beside the rate and the decay of the schedule.
_OF_FLAGS = ("max_lr", "min_lr", "betas", "eps")


_FLAGS_OF_RULE = {
    "Adam": "--optimizer adam without --use-stateless-adam",
    "StatelessAdam": "--optimizer adam --use-stateless-adam",
    "Sgd": "--optimizer sgd",
}


def require_same_rule(config: BackendConfig, common: Mapping[str, Any], path: str | Path) -> None:
    """Moments mean something to the rule alone that made them: Adam would take SGD's for means.

    Args:
        common: of the checkpoint; one that does not say it is taken as it is.

    Raises:
        ValueError: another rule made them.
    """
    own = type(update_rule(config)).__name__
    saved = common.get("update_rule", own)
    if saved != own:
        raise other_optimizer(path, _FLAGS_OF_RULE[saved], _FLAGS_OF_RULE[own])


def load_optimizer(config: ScheduleConfig, state: TrainState, saved: dict[str, Any]) -> None:
    """Moments and step count are the checkpoint's, hyperparameters the flags' unless told otherwise.

    megatron-core's schedule prefers the learning rates of a parameter group to its own.
    """
    of_flags = [
        {key: group[key] for key in _OF_FLAGS if key in group} for group in state.optimizer.param_groups
    ]
    _share_smallest_scale(saved)
    state.optimizer.load_state_dict(saved)
    if not config.use_checkpoint_opt_param_scheduler:
        for group, values in zip(state.optimizer.param_groups, of_flags, strict=True):
            group.update(values)


def _share_smallest_scale(saved: dict[str, Any]) -> None:
    """Gives all parts of the optimizer, as those of experts, the loss scale of float16 that overflows least.

    They share one. Parts of a checkpoint may differ: each had its own before, and the last would count.
    """
    parts = [part for part in saved.values() if isinstance(part, dict) and "grad_scaler" in part]
    scalers = [part["grad_scaler"] for part in parts if "scale" in part["grad_scaler"]]
    if scalers:
        smallest = min(scalers, key=lambda scaler: float(scaler["scale"]))
        for part in parts:
            part["grad_scaler"] = smallest


def load_schedule(state: TrainState, saved: dict[str, Any], root: str | Path) -> None:
    """megatron-core asserts that flags and checkpoint agree; the user should hear which flags decide."""
    try:
        state.scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise ValueError(
            f"--load {root}: its learning-rate schedule is not that of the flags ({error}); wanted: the same "
            "flags and --num-rollout, --override-opt-param-scheduler for the flags' schedule or "
            "--use-checkpoint-opt-param-scheduler for the checkpoint's"
        ) from error
    # It takes the decay of weights from the checkpoint only after it has set that of the groups.
    state.scheduler.step(increment=0)
