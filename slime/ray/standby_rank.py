"""A trainer process that waits for a rank to be lost, with all that it will need imported."""

from argparse import Namespace
from importlib import import_module

from slime.config.run import run_config
from slime.models import family_of
from slime.ray.local_gpu import number_of
from slime.ray.preload import trainer_modules
from slime.ray.process_watch import ProcessLocation
from slime.ray.train_worker import TrainRayActor


class StandbyRank(TrainRayActor):
    """Is no rank until it takes a place: it has no CUDA context and is in no process group."""

    def __init__(self, args: Namespace) -> None:
        config = run_config(args)
        for module in trainer_modules(config):
            import_module(module)
        if config.model.model_type:
            family_of(config.model.model_type)

    def take_place(self, args: Namespace, role: str, rank: int, world_size: int, gpu: str) -> ProcessLocation:
        """Becomes a rank that can be told to `init`.

        Args:
            gpu: of its slot, as Ray calls it.
        """
        self._become(args, role, rank, world_size, number_of(gpu))
        return self.process_location()
