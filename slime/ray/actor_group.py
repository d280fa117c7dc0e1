"""Plug-ins import the trainer's group from here."""

from slime.ray.train_group import RayTrainGroup

__all__ = ["RayTrainGroup"]
