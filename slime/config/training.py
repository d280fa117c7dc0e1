"""The slice of what happens to a batch."""

from dataclasses import dataclass

from slime.config.advantages import AdvantageConfig
from slime.config.batches import BatchConfig
from slime.config.debug import CiConfig, DebugConfig
from slime.config.distillation import DistillationConfig
from slime.config.hooks import HookConfig
from slime.config.lora import LoraConfig
from slime.config.model import ModelConfig
from slime.config.policy import PolicyConfig
from slime.config.profiling import ProfilingConfig
from slime.config.rewards import RewardConfig
from slime.config.rollout import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(PolicyConfig):
    """What rewards, passes, advantages, losses and optimizer steps read."""

    advantages: AdvantageConfig
    distillation: DistillationConfig
    model: ModelConfig
    batches: BatchConfig
    rollout: RolloutConfig
    rewards: RewardConfig
    hooks: HookConfig
    lora: LoraConfig
    debug: DebugConfig
    profiling: ProfilingConfig
    ci: CiConfig
