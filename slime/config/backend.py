"""The slice of the trainers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.checkpoints import CheckpointConfig
from slime.config.cluster import ClusterConfig
from slime.config.experts import ExpertConfig
from slime.config.fsdp import FsdpConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.hooks import HookConfig
from slime.config.kl import KlConfig
from slime.config.lora import LoraConfig
from slime.config.loss import LossConfig
from slime.config.megatron import MegatronConfig
from slime.config.model import LayerVariantConfig, ModelConfig
from slime.config.mtp import MtpConfig
from slime.config.off_policy import OffPolicyConfig
from slime.config.optimization import OptimizationConfig
from slime.config.optimizer_state import OptimizerStateConfig
from slime.config.parallelism import ParallelConfig
from slime.config.precision import PrecisionConfig
from slime.config.rope import RotaryConfig
from slime.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class BackendConfig(OptimizationConfig):
    """What the trainers read to build, load, train and save a model.

    Attributes:
        others: what no group of this slice states, fields of megatron-core's own dataclasses among it.
        flat: ``args``, for hooks of users.
    """

    trainer: TrainerConfig
    cluster: ClusterConfig
    parallelism: ParallelConfig
    experts: ExpertConfig
    hf_checkpoint: HfCheckpointConfig
    model: ModelConfig
    rotary: RotaryConfig
    layer_variants: LayerVariantConfig
    mtp: MtpConfig
    lora: LoraConfig
    megatron: MegatronConfig
    fsdp: FsdpConfig
    precision: PrecisionConfig
    optimizer_state: OptimizerStateConfig
    checkpoints: CheckpointConfig
    kl: KlConfig
    loss: LossConfig
    off_policy: OffPolicyConfig
    hooks: HookConfig
    others: Mapping[str, Any]
    flat: Any
