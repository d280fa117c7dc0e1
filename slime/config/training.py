"""The slice of what happens to a batch."""

from dataclasses import dataclass

from slime.config.advantages import AdvantageConfig
from slime.config.distillation import DistillationConfig
from slime.config.policy import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(PolicyConfig):
    """What advantages and losses read."""

    advantages: AdvantageConfig
    distillation: DistillationConfig
