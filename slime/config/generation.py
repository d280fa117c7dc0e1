"""The slice of rollouts: prompts, the requests that answer them, and rewards."""

from dataclasses import dataclass
from typing import Any

from slime.config.batches import BatchConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.cluster import ClusterConfig
from slime.config.data import DataConfig
from slime.config.debug import DebugConfig
from slime.config.engines import EngineConfig
from slime.config.evaluation import EvalConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.lora import LoraConfig
from slime.config.nucleus import NucleusConfig
from slime.config.off_policy import OffPolicyConfig
from slime.config.policies import PoliciesConfig
from slime.config.rejection import RejectionConfig
from slime.config.rewards import RewardConfig
from slime.config.rollout import RolloutConfig
from slime.config.router import RouterConfig
from slime.config.token_log import TokenLogConfig


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What rollout functions and data sources read.

    Attributes:
        flat: the run's ``args``, for hooks of users and functions that they call.
    """

    data: DataConfig
    batches: BatchConfig
    rollout: RolloutConfig
    nucleus: NucleusConfig
    token_log: TokenLogConfig
    off_policy: OffPolicyConfig
    rewards: RewardConfig
    rejection: RejectionConfig
    evaluation: EvalConfig
    hf_checkpoint: HfCheckpointConfig
    checkpoints: CheckpointConfig
    lora: LoraConfig
    engines: EngineConfig
    router: RouterConfig
    cluster: ClusterConfig
    debug: DebugConfig
    policies: PoliciesConfig
    flat: Any
