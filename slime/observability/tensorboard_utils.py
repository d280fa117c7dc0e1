"""Metrics as a tensorboard event file."""

import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from slime.arguments.views import TrackingView
from slime.observability.metric_utils import plotted_step


class TensorboardSink:
    """Writes scalars to ``<--tb-project-name>/<--tb-experiment-name>``; ``$TENSORBOARD_DIR`` is the default
    of the former."""

    def __init__(self, args: TrackingView) -> None:
        self._args = args
        # Importing tensorboard takes seconds, so only runs that use it pay.
        from torch.utils.tensorboard import SummaryWriter

        root = args.tb_project_name or os.environ.get("TENSORBOARD_DIR", "tensorboard_log")
        experiment = args.tb_experiment_name or args.run_name or "run"
        self._writer = SummaryWriter(str(Path(root) / experiment))

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        step = plotted_step(self._args, axis, step)
        for name, value in metrics.items():
            if isinstance(value, Real):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
