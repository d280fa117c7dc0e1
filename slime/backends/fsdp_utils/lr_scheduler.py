"""Learning rate and weight decay over a run, as Megatron-LM anneals them, without megatron-core."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from slime.training.optimizer_schedule import ScheduleSettings

# What a checkpoint and the flags have to agree on.
_COMPARED = (
    *("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
    *("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
)


class FSDPLRScheduler:
    """Sets ``lr`` and ``weight_decay`` of an optimizer's groups, after each step for the next one.

    Args:
        optimizer: a group's ``weight_decay`` is the schedule's times the group's ``wd_mult``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: ScheduleSettings) -> None:
        self._optimizer, self.settings, self.num_steps = optimizer, settings, 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Goes on by so many samples."""
        self.num_steps += increment
        rate, decay = (
            learning_rate(self.settings, self.num_steps),
            weight_decay(self.settings, self.num_steps),
        )
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, decay * group["wd_mult"]

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self.settings), "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken.

        Raises:
            ValueError: its schedule is another one than that of the flags, which do not say which to use.
        """
        own = vars(self.settings)
        other = {name: state[name] for name in _COMPARED if state[name] != own[name]}
        if self.settings.use_checkpoint_opt_param_scheduler:
            self.settings = ScheduleSettings(**{**own, **other})
        elif other and not self.settings.override_opt_param_scheduler:
            name, found = next(iter(other.items()))
            raise ValueError(
                f"its learning-rate schedule is not that of the flags ({name} {found}, flags {own[name]}); "
                "wanted: the same flags and --num-rollout, --override-opt-param-scheduler for the flags' "
                "schedule or --use-checkpoint-opt-param-scheduler for the checkpoint's"
            )
        self.num_steps = int(state["num_steps"])
        self.step(0)


def learning_rate(settings: ScheduleSettings, samples: int) -> float:
    """Linear warm-up to ``max_lr``, then the decay to ``min_lr``, after ``samples`` samples."""
    s = settings
    if s.lr_warmup_steps > 0 and samples <= s.lr_warmup_steps:
        return s.init_lr + (s.max_lr - s.init_lr) * samples / s.lr_warmup_steps
    if s.lr_decay_style == "constant":
        return s.max_lr
    if samples > s.lr_decay_steps:
        return s.min_lr
    if s.lr_decay_style == "inverse-square-root":
        return max(s.min_lr, s.max_lr * math.sqrt(max(s.lr_warmup_steps, 1) / max(samples, 1)))
    return s.min_lr + _height(s, samples) * (s.max_lr - s.min_lr)


def _height(s: ScheduleSettings, samples: int) -> float:
    """Returns where a decay is between ``min_lr`` (0) and ``max_lr`` (1)."""
    if s.lr_decay_style == "WSD":
        assert s.wsd_decay_steps is not None
        done = max(0.0, 1 - (s.lr_decay_steps - samples) / s.wsd_decay_steps)
        return _WSD[s.lr_wsd_decay_style or "exponential"](done)
    done = (samples - s.lr_warmup_steps) / (s.lr_decay_steps - s.lr_warmup_steps)
    return {"linear": lambda x: 1 - x, "cosine": _cosine}[s.lr_decay_style](done)


def _cosine(done: float) -> float:
    return 0.5 * (math.cos(math.pi * done) + 1)


_WSD = {
    "linear": lambda done: 1 - done,
    "cosine": _cosine,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}
"""The final decay of warm-up, stable, decay (arXiv 2404.06395), by the part of it that is done."""


def weight_decay(settings: ScheduleSettings, samples: int) -> float:
    """Returns the weight decay, from ``start_wd`` to ``end_wd`` over ``wd_incr_steps`` samples."""
    s = settings
    if s.wd_incr_style == "constant" or samples > s.wd_incr_steps:
        return s.end_wd
    done = samples / s.wd_incr_steps
    part = done if s.wd_incr_style == "linear" else 1 - _cosine(done)
    return s.start_wd + part * (s.end_wd - s.start_wd)
