"""Where plug-ins import the trainer's Ray actor from."""

from slime.ray.train_worker import TrainRayActor

__all__ = ["TrainRayActor"]
