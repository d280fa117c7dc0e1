"""Plug-ins import the rollout manager from here."""

from slime.ray.rollout_manager import RolloutManager

__all__ = ["RolloutManager"]
