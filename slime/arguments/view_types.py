"""The views of ``args``, made of the dataclasses of the config groups that a room reads of."""

from slime.arguments.core.runtime_context import RuntimeContext
from slime.arguments.groups.batches import BatchArgs, DerivedBatches
from slime.arguments.groups.checkpoints import CheckpointArgs
from slime.arguments.groups.cluster import ClusterArgs, DerivedCluster, FaultToleranceArgs
from slime.arguments.groups.critic import CriticArgs, DerivedCritic
from slime.arguments.groups.data import DataArgs, DerivedData
from slime.arguments.groups.debug import CiArgs, DebugArgs
from slime.arguments.groups.engines import DerivedEngines, EngineArgs
from slime.arguments.groups.evaluation import DerivedEvaluation, EvalArgs
from slime.arguments.groups.hf_checkpoint import HfCheckpointArgs
from slime.arguments.groups.hooks import HookArgs
from slime.arguments.groups.megatron import MegatronNames
from slime.arguments.groups.model_shape import DerivedModelShape
from slime.arguments.groups.nucleus import DerivedNucleus, NucleusArgs
from slime.arguments.groups.precision import DerivedPrecision, PrecisionArgs
from slime.arguments.groups.rejection import RejectionArgs
from slime.arguments.groups.rewards import RewardArgs
from slime.arguments.groups.rollout import DerivedRollout, RolloutArgs
from slime.arguments.groups.router import RouterArgs, RouterOptions
from slime.arguments.groups.slime_router import SlimeRouterArgs
from slime.arguments.groups.tracking import DerivedTracking, TrackingArgs
from slime.arguments.groups.trainer import TrainerArgs
from slime.arguments.groups.weight_sync import WeightSyncArgs
from slime.config.advantages import AdvantageConfig
from slime.config.distillation import DistillationConfig
from slime.config.kl import KlConfig
from slime.config.loss import LogitsConfig, LossConfig
from slime.config.off_policy import OffPolicyConfig


class ModelView(DerivedModelShape):
    """The shape of the model: names and sizes of its weights, and its FLOPs."""


class WeightSyncView(ModelView, WeightSyncArgs, DerivedCluster, ClusterArgs):
    """How weights leave the trainer."""


class TrainingView(
    ModelView,
    DerivedRollout,
    RolloutArgs,
    DerivedNucleus,
    NucleusArgs,
    RewardArgs,
    DerivedBatches,
    BatchArgs,
    LogitsConfig,
    LossConfig,
    KlConfig,
    AdvantageConfig,
    OffPolicyConfig,
    DistillationConfig,
    HookArgs,
    DebugArgs,
    CiArgs,
    MegatronNames,
):
    """What happens to a batch."""


class TrainWorkerView(
    TrainingView,
    WeightSyncView,
    TrainerArgs,
    HfCheckpointArgs,
    CheckpointArgs,
    DerivedPrecision,
    PrecisionArgs,
    DerivedEngines,
    RuntimeContext,
):
    """A trainer process."""


class TrackingView(
    DerivedTracking,
    TrackingArgs,
    DerivedRollout,
    RolloutArgs,
    RewardArgs,
    DerivedEvaluation,
    EvalArgs,
    DataArgs,
    DerivedBatches,
    BatchArgs,
    LossConfig,
    AdvantageConfig,
    CheckpointArgs,
    DebugArgs,
    DerivedCluster,
    ClusterArgs,
):
    """Metrics, recordings and where they go."""


class RolloutView(
    ModelView,
    DerivedRollout,
    RolloutArgs,
    DerivedNucleus,
    NucleusArgs,
    RewardArgs,
    DerivedEvaluation,
    EvalArgs,
    DerivedData,
    DataArgs,
    DerivedBatches,
    BatchArgs,
    HfCheckpointArgs,
    CheckpointArgs,
    OffPolicyConfig,
    DebugArgs,
    DerivedCluster,
    ClusterArgs,
    RouterArgs,
    RouterOptions,
    SlimeRouterArgs,
    MegatronNames,
    RejectionArgs,
    RuntimeContext,
):
    """How samples are made."""


class FleetView(
    RolloutView,
    TrainingView,
    TrackingView,
    FaultToleranceArgs,
    DerivedCritic,
    CriticArgs,
    DerivedEngines,
    EngineArgs,
    DerivedPrecision,
    PrecisionArgs,
    KlConfig,
    TrainerArgs,
    WeightSyncArgs,
):
    """Placement of processes, and the engines among them."""
