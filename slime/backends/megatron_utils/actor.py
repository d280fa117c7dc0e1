"""Plug-ins import the trainer's Ray actor from here."""

from slime.ray.train_worker import TrainRayActor as MegatronTrainRayActor

__all__ = ["MegatronTrainRayActor"]
