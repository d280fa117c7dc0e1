"""Where plug-ins import the rollout manager from."""

from slime.ray.rollout_manager import RolloutManager

__all__ = ["RolloutManager"]
