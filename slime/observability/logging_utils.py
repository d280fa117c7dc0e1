"""Metrics of user code: hooks, generate functions and rewards log them here, in whatever process they run.

    from slime.observability import logging_utils

    logging_utils.log(args, {"rollout/tool_calls": 2.5, "rollout/step": rollout_id}, step_key="rollout/step")

The driver alone writes. So what is logged waits in its process, and goes to the driver with the metrics that
this process returns next: of the rollout, the evaluation or the training step that is under way.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from threading import Lock
from typing import Any

AXES = ("train", "rollout", "eval")
_waiting: dict[str, dict[str, Any]] = defaultdict(dict)
_lock = Lock()


def configure_logger(prefix: str = "") -> None:
    """Lets the process of a script print its log on standard error, each line after ``prefix``."""
    form = f"%(asctime)s {prefix.replace('%', '%%')}%(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Log metrics under their full names; of a name that is logged again before the next row, the last value.

    Args:
        step_key: ``train/step``, ``rollout/step`` or ``eval/step``. Their steps are known and need not be
            among the metrics.

    Raises:
        ValueError: there is no such axis.
    """
    axis, _, name = step_key.partition("/")
    if axis not in AXES or name != "step":
        wanted = ", ".join(f"{axis}/step" for axis in AXES)
        raise ValueError(f"step_key {step_key!r}: no axis of metrics (wanted: {wanted})")
    with _lock:
        _waiting[axis].update({key: value for key, value in metrics.items() if key != step_key})


def take_logged(*axes: str) -> dict[str, Any]:
    """What was logged on these axes since the last call."""
    with _lock:
        return {name: value for axis in axes for name, value in _waiting.pop(axis, {}).items()}
