"""The slice of weights on their way from the trainer to the engines."""

from dataclasses import dataclass
from typing import Any

from slime.config.cluster import ClusterConfig, FaultToleranceConfig
from slime.config.engines import EngineConfig
from slime.config.weight_sync import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig:
    """What weight updates and their transports read.

    Attributes:
        flat: ``args``, for hooks of users.
    """

    weight_sync: WeightSyncConfig
    cluster: ClusterConfig
    fault_tolerance: FaultToleranceConfig
    engines: EngineConfig
    flat: Any
