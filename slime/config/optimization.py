"""The slice of the optimizer's schedule."""

from dataclasses import dataclass

from slime.config.batches import BatchConfig
from slime.config.critic import CriticConfig
from slime.config.data import DataConfig
from slime.config.optimizer import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """What says how learning rate and weight decay go over a run."""

    batches: BatchConfig
    data: DataConfig
    critic: CriticConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
