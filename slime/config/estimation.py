"""The slice of advantages."""

from dataclasses import dataclass
from typing import Any

from slime.config.advantages import AdvantageConfig
from slime.config.distillation import DistillationConfig
from slime.config.kl import KlConfig
from slime.config.off_policy import OffPolicyConfig


@dataclass(frozen=True, kw_only=True)
class EstimationConfig:
    """What estimators of advantages read.

    Attributes:
        flat: the run's ``args``, for functions of users alone.
    """

    advantages: AdvantageConfig
    kl: KlConfig
    off_policy: OffPolicyConfig
    distillation: DistillationConfig
    flat: Any
