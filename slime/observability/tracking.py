"""The destinations of metrics. The driver logs; everything else returns its numbers to the driver.

The JSONL file and the console line are always on; wandb, tensorboard and Prometheus stand beside them::

    tracker = init_tracking(config)
    tracker.add(ConsoleSink(config))  # when the number of rollouts is known
    tracker.log(step_metrics, axis="train", step=7)
    tracker.log(rollout_metrics, axis="rollout", step=3)
    tracker.finish()
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from slime.config.metrics import MetricsConfig
from slime.observability.jsonl import JsonlWriter
from slime.observability.tensorboard_utils import TensorboardSink
from slime.observability.wandb_utils import WandbSink
from slime.utils.misc import plain_number

if TYPE_CHECKING:
    from slime.observability.prometheus import PrometheusSink

Axis = Literal["train", "rollout", "eval"]

KEPT_RUN = "wandb_run.json"
"""The file beside that of the metrics by which a job that goes on continues its wandb run."""


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Sends every row to every sink.

    Attributes:
        context: what became known when the sinks were opened, for ``with_context``.
        prometheus: the sink of ``--prometheus-port``; None without.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        context: Mapping[str, Any] | None = None,
        prometheus: "PrometheusSink | None" = None,
    ) -> None:
        self._sinks = [*sinks, prometheus] if prometheus else list(sinks)
        self.context, self.prometheus = dict(context or {}), prometheus

    def add(self, sink: Sink) -> None:
        """Adds a destination of rows."""
        self._sinks.append(sink)

    def log(self, metrics: Mapping[str, Any], *, axis: Axis, step: int) -> None:
        """Log one row; nothing happens for an empty one.

        Args:
            metrics: full metric names (``train/loss``) to values.
            axis: "train" counts optimizer steps, "rollout" and "eval" count rollouts.
            step: position on that axis; rows of one step add up.
        """
        if axis not in get_args(Axis):
            raise ValueError(f"axis {axis!r}: wanted one of {get_args(Axis)}")
        if not metrics:
            return
        metrics = {name: plain_number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(axis, step, metrics)

    def finish(self) -> None:
        """Close all sinks; calling it again does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


def init_tracking(config: MetricsConfig) -> Tracker:
    """The tracker that the flags ask for, without the console.

    Call it in the driver only: two writers would mix their rows.

    Raises:
        OSError: ``--prometheus-port`` cannot be had.
    """
    path = metrics_path(config)
    sinks: list[Sink] = [JsonlWriter(path)]
    context: dict[str, str | None] = {}
    if config.tracking.use_wandb:
        wandb = WandbSink(config, path.with_name(KEPT_RUN))
        sinks.append(wandb)
        context["wandb_run_id"] = wandb.run_id
    if config.tracking.use_tensorboard:
        sinks.append(TensorboardSink(config))
    prometheus = None
    if config.tracking.prometheus_port is not None:
        # Late, as its package is; runs without it do not pay.
        from slime.observability.prometheus import PrometheusSink

        prometheus = PrometheusSink(config.tracking.prometheus_port)
    return Tracker(sinks, context, prometheus)


def metrics_path(config: MetricsConfig) -> Path:
    """``--metrics-file``, else ``metrics.jsonl`` in the ``--save`` directory, else in ``outputs/``."""
    if config.tracking.metrics_file:
        return Path(config.tracking.metrics_file)
    return Path(config.checkpoints.save or "outputs") / "metrics.jsonl"
