"""The slice of metrics and recordings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.advantages import AdvantageConfig
from slime.config.batches import BatchConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.cluster import ClusterConfig
from slime.config.data import DataConfig
from slime.config.evaluation import EvalConfig
from slime.config.lora import LoraConfig
from slime.config.loss import LossConfig
from slime.config.rewards import RewardConfig
from slime.config.rollout import RolloutConfig
from slime.config.tracking import TrackingConfig


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What says which metrics there are, and where they go.

    Attributes:
        others: what no group of this slice states, options of SGLang's own parser among it.
        flat: the run's ``args``, for hooks of users.
    """

    tracking: TrackingConfig
    rollout: RolloutConfig
    rewards: RewardConfig
    evaluation: EvalConfig
    data: DataConfig
    batches: BatchConfig
    loss: LossConfig
    lora: LoraConfig
    advantages: AdvantageConfig
    checkpoints: CheckpointConfig
    cluster: ClusterConfig
    others: Mapping[str, Any]
    flat: Any
