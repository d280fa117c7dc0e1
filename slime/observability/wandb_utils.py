"""Metrics in Weights & Biases, online or in a local directory (``--wandb-mode offline``)."""

import json
import os
import secrets
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from slime.config.metrics import MetricsConfig
from slime.config.run import values_of
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
    """One wandb run for the whole job, which a job continues that goes on from a checkpoint.

    Args:
        kept: file in which the job leaves the names of its run for the next one.

    Attributes:
        run_id: of the wandb run.

    Raises:
        RuntimeError: what is kept there are no names of a run.
    """

    def __init__(self, config: MetricsConfig, kept: Path) -> None:
        self._config = config
        # Importing wandb takes seconds and starts nothing we want in a run that does not use it.
        import wandb

        mode: Any = config.tracking.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        if config.tracking.wandb_key and mode == "online":
            wandb.login(key=config.tracking.wandb_key, host=config.tracking.wandb_host)
        earlier = {} if config.checkpoints.finetune else _read(kept)
        run_id = config.tracking.wandb_run_id or os.environ.get("WANDB_RUN_ID") or earlier.get("id")
        group = _group_name(config, earlier.get("group"))
        self._run = wandb.init(
            entity=config.tracking.wandb_team,
            project=config.tracking.wandb_project,
            group=group,
            name=config.tracking.run_name or group,
            dir=config.tracking.wandb_dir,
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            config=loggable_values(values_of(config)),
        )
        self.run_id = self._run.id
        if mode != "disabled":
            _write(kept, {"id": self.run_id, "group": group})
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


def _read(kept: Path) -> dict[str, str | None]:
    if not kept.is_file():
        return {}
    try:
        names = json.loads(kept.read_text(encoding="utf-8"))
        return {"id": names["id"], "group": names["group"]}
    except (ValueError, TypeError, KeyError) as error:
        wanted = "wanted: --wandb-run-id, or the file removed, for a run of its own"
        raise RuntimeError(f"{kept}: does not hold the names of a wandb run ({wanted})") from error


def _write(kept: Path, names: Mapping[str, str | None]) -> None:
    new = kept.with_suffix(".new")
    new.write_text(json.dumps(names), encoding="utf-8")
    new.replace(kept)


def _group_name(config: MetricsConfig, earlier: str | None) -> str | None:
    """The group with a suffix of its own, that of the run before if it is the same group."""
    group = config.tracking.wandb_group
    if not group or not config.tracking.wandb_random_suffix:
        return group
    if earlier is not None and earlier.rpartition("_")[0] == group:
        return earlier
    return f"{group}_{secrets.token_hex(3)}"


def loggable_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags without secrets: no keys, of environments only the names, of addresses no user and query."""
    return {name: _shown(name, value) for name, value in values.items() if not is_secret(name)}


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
