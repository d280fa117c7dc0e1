"""Plug-ins import the trainer's Ray actor from here."""

from slime.ray.train_worker import TrainRayActor

__all__ = ["TrainRayActor"]
