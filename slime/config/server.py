"""The slice of one engine's server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.cluster import ClusterConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.lora import LoraConfig
from slime.config.nucleus import NucleusConfig
from slime.config.off_policy import OffPolicyConfig
from slime.config.precision import PrecisionConfig
from slime.config.router import RouterConfig
from slime.config.tracking import TrackingConfig
from slime.config.trainer import TrainerConfig
from slime.config.weight_sync import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What says how an engine's server is started.

    Attributes:
        others: what no group of this slice states, options of the servers' own parsers among it.
    """

    cluster: ClusterConfig
    hf_checkpoint: HfCheckpointConfig
    precision: PrecisionConfig
    nucleus: NucleusConfig
    off_policy: OffPolicyConfig
    lora: LoraConfig
    trainer: TrainerConfig
    router: RouterConfig
    weight_sync: WeightSyncConfig
    tracking: TrackingConfig
    others: Mapping[str, Any]
