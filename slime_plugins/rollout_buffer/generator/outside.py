"""Makes nothing: programs elsewhere write the trajectories.

They learn from ``GET /buffer/status`` what the run wants, its engines' address among it (``asked``).
"""

from typing import Any

TASK_TYPE = "outside"


def run_rollout(data: dict[str, Any]) -> None:
    """Leaves the queue to others."""
