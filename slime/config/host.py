"""The slice of a host's memory."""

from dataclasses import dataclass

from slime.config.batches import BatchConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.cluster import ClusterConfig, FaultToleranceConfig
from slime.config.critic import CriticConfig
from slime.config.distillation import DistillationConfig
from slime.config.kl import KlConfig
from slime.config.off_policy import OffPolicyConfig
from slime.config.trainer import TrainerConfig
from slime.config.weight_sync import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """What says what a node keeps beside its GPUs."""

    trainer: TrainerConfig
    cluster: ClusterConfig
    fault_tolerance: FaultToleranceConfig
    critic: CriticConfig
    kl: KlConfig
    distillation: DistillationConfig
    off_policy: OffPolicyConfig
    checkpoints: CheckpointConfig
    batches: BatchConfig
    weight_sync: WeightSyncConfig
