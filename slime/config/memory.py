"""The slice of a run on paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.check import CheckConfig
from slime.config.debug import DebugConfig
from slime.config.engines import EngineConfig
from slime.config.experts import ExpertConfig
from slime.config.fsdp import FsdpConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.host import HostConfig
from slime.config.lora import LoraConfig
from slime.config.loss import LossConfig
from slime.config.megatron import MegatronConfig
from slime.config.model import LayerVariantConfig, ModelConfig
from slime.config.mtp import MtpConfig
from slime.config.optimizer import OptimizerConfig
from slime.config.optimizer_state import OptimizerStateConfig
from slime.config.parallelism import ParallelConfig
from slime.config.policies import PoliciesConfig
from slime.config.precision import PrecisionConfig
from slime.config.rollout import RolloutConfig
from slime.config.rope import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(HostConfig):
    """What says what GPUs and hosts of a run hold.

    Attributes:
        others: what no group of this slice states, options of SGLang's own parser among it.
        flat: ``args``, which the critic's configuration and the trainer's are filled from.
    """

    model: ModelConfig
    rotary: RotaryConfig
    layer_variants: LayerVariantConfig
    mtp: MtpConfig
    parallelism: ParallelConfig
    experts: ExpertConfig
    lora: LoraConfig
    megatron: MegatronConfig
    fsdp: FsdpConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    optimizer_state: OptimizerStateConfig
    loss: LossConfig
    rollout: RolloutConfig
    engines: EngineConfig
    hf_checkpoint: HfCheckpointConfig
    debug: DebugConfig
    check: CheckConfig
    policies: PoliciesConfig
    others: Mapping[str, Any]
    flat: Any
