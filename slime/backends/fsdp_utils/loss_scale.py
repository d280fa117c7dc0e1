"""The factor that keeps the gradients of float16 within its range, found as Megatron-LM finds it."""

from collections.abc import Mapping
from typing import Any

from slime.config.precision import PrecisionConfig

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScale:
    """A fixed factor (``--loss-scale``), or one that falls after steps that overflow and grows after others.

    Attributes:
        factor: losses are multiplied by it, gradients divided.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._fixed = config.loss_scale is not None
        self._config = config
        self.factor = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self._good_steps, self._tolerated = 0, config.hysteresis

    def update(self, overflow: bool) -> None:
        """Updates the scale after a step; ``overflow`` says that it was skipped."""
        if self._fixed:
            return
        if overflow:
            self._good_steps, self._tolerated = 0, self._tolerated - 1
            if self._tolerated <= 0:
                self.factor = max(self.factor * _BACKOFF, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps, self._tolerated = 0, self._config.hysteresis
            self.factor *= _GROWTH

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "good_steps": self._good_steps, "tolerated": self._tolerated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken, unless flags fix the factor."""
        if not self._fixed:
            self.factor = float(state["factor"])
            self._good_steps, self._tolerated = int(state["good_steps"]), int(state["tolerated"])


def loss_scale(config: PrecisionConfig) -> LossScale | None:
    """Makes the loss scale of a run in float16; None for any other dtype."""
    return LossScale(config) if config.fp16 else None
