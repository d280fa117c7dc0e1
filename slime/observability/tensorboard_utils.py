"""Metrics as a tensorboard event file."""

import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from slime.config.metrics import MetricsConfig
from slime.observability.metric_utils import plotted_step


class TensorboardSink:
    """Writes scalars to ``<--tb-project-name>/<--tb-experiment-name>``; ``$TENSORBOARD_DIR`` is the default
    of the former."""

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        # Importing tensorboard takes seconds, so only runs that use it pay.
        from torch.utils.tensorboard import SummaryWriter

        root = config.tracking.tb_project_name or os.environ.get("TENSORBOARD_DIR", "tensorboard_log")
        experiment = config.tracking.tb_experiment_name or config.tracking.run_name or "run"
        self._writer = SummaryWriter(str(Path(root) / experiment))

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        step = plotted_step(self._config, axis, step)
        for name, value in metrics.items():
            if isinstance(value, Real):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
