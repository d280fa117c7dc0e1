"""The views of ``args``, made of the dataclasses of the config groups that a room reads of."""

from slime.arguments.core.runtime_context import RuntimeContext
from slime.arguments.groups.engines import DerivedEngines, EngineArgs
from slime.arguments.groups.megatron import MegatronNames
from slime.arguments.groups.model_shape import DerivedModelShape
from slime.arguments.groups.precision import DerivedPrecision, PrecisionArgs
from slime.arguments.groups.router import RouterOptions
from slime.arguments.groups.trainer import TrainerArgs
from slime.config.advantages import AdvantageConfig
from slime.config.batches import BatchConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.cluster import ClusterConfig, FaultToleranceConfig
from slime.config.critic import CriticConfig
from slime.config.data import DataConfig
from slime.config.debug import CiConfig, DebugConfig
from slime.config.distillation import DistillationConfig
from slime.config.evaluation import EvalConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.hooks import HookConfig
from slime.config.kl import KlConfig
from slime.config.loss import LogitsConfig, LossConfig
from slime.config.nucleus import NucleusConfig
from slime.config.off_policy import OffPolicyConfig
from slime.config.rejection import RejectionConfig
from slime.config.rewards import RewardConfig
from slime.config.rollout import RolloutConfig
from slime.config.router import RouterConfig
from slime.config.slime_router import SlimeRouterConfig
from slime.config.tracking import TrackingConfig
from slime.config.weight_sync import WeightSyncConfig


class ModelView(DerivedModelShape):
    """The shape of the model: names and sizes of its weights, and its FLOPs."""


class WeightSyncView(ModelView, WeightSyncConfig, ClusterConfig, DerivedEngines):
    """How weights leave the trainer."""


class TrainingView(
    ModelView,
    RolloutConfig,
    NucleusConfig,
    RewardConfig,
    BatchConfig,
    LogitsConfig,
    LossConfig,
    KlConfig,
    AdvantageConfig,
    OffPolicyConfig,
    DistillationConfig,
    HookConfig,
    DebugConfig,
    CiConfig,
    MegatronNames,
):
    """What happens to a batch."""


class TrainWorkerView(
    TrainingView,
    WeightSyncView,
    TrainerArgs,
    HfCheckpointConfig,
    CheckpointConfig,
    DerivedPrecision,
    PrecisionArgs,
    DerivedEngines,
    RuntimeContext,
):
    """A trainer process."""


class TrackingView(
    TrackingConfig,
    RolloutConfig,
    RewardConfig,
    EvalConfig,
    DataConfig,
    BatchConfig,
    LossConfig,
    AdvantageConfig,
    CheckpointConfig,
    DebugConfig,
    ClusterConfig,
):
    """Metrics, recordings and where they go."""


class RolloutView(
    ModelView,
    RolloutConfig,
    NucleusConfig,
    RewardConfig,
    EvalConfig,
    DataConfig,
    BatchConfig,
    HfCheckpointConfig,
    CheckpointConfig,
    OffPolicyConfig,
    DebugConfig,
    ClusterConfig,
    RouterConfig,
    RouterOptions,
    SlimeRouterConfig,
    MegatronNames,
    RejectionConfig,
    RuntimeContext,
):
    """How samples are made."""


class FleetView(
    RolloutView,
    TrainingView,
    TrackingView,
    FaultToleranceConfig,
    CriticConfig,
    DerivedEngines,
    EngineArgs,
    DerivedPrecision,
    PrecisionArgs,
    KlConfig,
    TrainerArgs,
    WeightSyncConfig,
):
    """Placement of processes, and the engines among them."""
