"""Metrics in Weights & Biases, online or in a local directory (``--wandb-mode offline``)."""

import os
import secrets
from argparse import Namespace
from collections.abc import Mapping
from numbers import Real
from typing import Any

from slime.config.metrics import MetricsConfig
from slime.observability.metric_utils import plotted_step
from slime.utils.redaction import HIDDEN, is_secret, without_secrets

# Each family of metrics is plotted against the step of its own axis.
AXIS_OF_FAMILY = {
    "train/*": "train/step",
    "rollout/*": "rollout/step",
    "multi_turn/*": "rollout/step",
    "passrate/*": "rollout/step",
    "perf/*": "rollout/step",
    "eval/*": "eval/step",
}


class WandbSink:
    """One wandb run for the whole job.

    Attributes:
        run_id: by which a resumed job can continue it.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        # Importing wandb takes seconds and starts nothing we want in a run that does not use it.
        import wandb

        mode: Any = config.tracking.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        if config.tracking.wandb_key and mode == "online":
            wandb.login(key=config.tracking.wandb_key, host=config.tracking.wandb_host)
        group = _group_name(config)
        self._run = wandb.init(
            entity=config.tracking.wandb_team,
            project=config.tracking.wandb_project,
            group=group,
            name=config.tracking.run_name or group,
            dir=config.tracking.wandb_dir,
            id=config.tracking.wandb_run_id,
            resume="allow" if config.tracking.wandb_run_id else None,
            mode=mode,
            config=loggable_args(config.flat),
        )
        self.run_id = self._run.id
        for axis in sorted(set(AXIS_OF_FAMILY.values())):
            self._run.define_metric(axis)
        for family, axis in AXIS_OF_FAMILY.items():
            self._run.define_metric(family, step_metric=axis)

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        step = plotted_step(self._config, axis, step)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, Real)}
        self._run.log({**numbers, f"{axis}/step": step})

    def close(self) -> None:
        self._run.finish()


def _group_name(config: MetricsConfig) -> str | None:
    if not config.tracking.wandb_group or not config.tracking.wandb_random_suffix:
        return config.tracking.wandb_group
    return f"{config.tracking.wandb_group}_{secrets.token_hex(3)}"


def loggable_args(args: Namespace) -> dict[str, Any]:
    """The flags without secrets: no keys, of environments only the names, of addresses no user and query."""
    return {name: _shown(name, value) for name, value in vars(args).items() if not is_secret(name)}


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        hidden = name.endswith("env_vars")
        return {
            key: HIDDEN if hidden or is_secret(str(key)) else _shown(str(key), item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_shown(name, item) for item in value]
    if isinstance(value, str):
        return without_secrets(value)
    return value if isinstance(value, int | float | None) else without_secrets(str(value))
