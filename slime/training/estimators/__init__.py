"""From rewards to returns: one module per family of estimators, named by ``--advantage-estimator``."""

from slime.training.estimators.base import Estimator
from slime.training.estimators.grpo import group_relative_returns
from slime.training.estimators.reinforce_plus_plus import baseline_returns, token_returns

__all__ = ["ESTIMATORS", "Estimator"]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": group_relative_returns,
    "gspo": group_relative_returns,
    "cispo": group_relative_returns,
    "reinforce_plus_plus": token_returns,
    "reinforce_plus_plus_baseline": baseline_returns,
}
