"""Where plug-ins import the schedule of a rollout from."""

from slime.training.schedule import DpSchedule, build_dp_schedule

__all__ = ["DpSchedule", "build_dp_schedule"]
