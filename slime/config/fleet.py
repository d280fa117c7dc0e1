"""The slice of the processes that generate: engines and routers, and where they run."""

from dataclasses import dataclass
from typing import Any

from slime.config.cluster import FaultToleranceConfig
from slime.config.critic import CriticConfig
from slime.config.debug import DebugConfig
from slime.config.engines import EngineConfig
from slime.config.model import ModelConfig
from slime.config.policies import PoliciesConfig
from slime.config.rollout import RolloutConfig
from slime.config.server import ServerConfig
from slime.config.slime_router import SlimeRouterConfig


@dataclass(frozen=True, kw_only=True)
class FleetConfig(ServerConfig):
    """What says which engines and routers there are, where they run, and what is asked of them.

    Attributes:
        flat: ``args``, which other processes fill their part of the configuration from.
    """

    engines: EngineConfig
    fault_tolerance: FaultToleranceConfig
    slime_router: SlimeRouterConfig
    rollout: RolloutConfig
    model: ModelConfig
    critic: CriticConfig
    debug: DebugConfig
    policies: PoliciesConfig
    flat: Any
