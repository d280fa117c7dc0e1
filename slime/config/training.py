"""The slice of what happens to a batch."""

from dataclasses import dataclass

from slime.config.batches import BatchConfig
from slime.config.debug import CiConfig, DebugConfig
from slime.config.estimation import EstimationConfig
from slime.config.hooks import HookConfig
from slime.config.lora import LoraConfig
from slime.config.model import ModelConfig
from slime.config.policy import PolicyConfig
from slime.config.profiling import ProfilingConfig
from slime.config.rewards import RewardConfig
from slime.config.rollout import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(PolicyConfig, EstimationConfig):
    """What rewards, passes, advantages, losses and optimizer steps read."""

    model: ModelConfig
    batches: BatchConfig
    rollout: RolloutConfig
    rewards: RewardConfig
    hooks: HookConfig
    lora: LoraConfig
    debug: DebugConfig
    profiling: ProfilingConfig
    ci: CiConfig
