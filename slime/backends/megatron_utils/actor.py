"""Where plug-ins import the trainer's Ray actor from."""

from slime.ray.train_worker import TrainRayActor as MegatronTrainRayActor

__all__ = ["MegatronTrainRayActor"]
