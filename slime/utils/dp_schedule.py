"""Plug-ins import the schedule of a rollout from here."""

from slime.training.schedule import DpSchedule, build_dp_schedule

__all__ = ["DpSchedule", "build_dp_schedule"]
