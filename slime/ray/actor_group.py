"""Where plug-ins import the trainer's group from."""

from slime.ray.train_group import RayTrainGroup

__all__ = ["RayTrainGroup"]
