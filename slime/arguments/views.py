"""What each room reads of ``args``, with its type.

    def eval_rollout(args: RolloutView, rollout_id: int) -> RolloutFnEvalOutput: ...

A view is a static type only, of ``view_types``: at run time it is the flat Namespace that users' hooks
get, so that whoever reads a flag need not import all config groups. Nobody makes one or writes to one. A room
that hands ``args`` on to another has a view that includes the other's. A function that is called from where
``args`` is a Namespace takes that too, and calls ``view``.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from slime.arguments.view_types import (
        FleetView,
        ModelView,
        RolloutView,
        TrackingView,
        TrainingView,
        TrainWorkerView,
        WeightSyncView,
    )
else:
    ModelView = WeightSyncView = TrainingView = TrainWorkerView = TrackingView = RolloutView = FleetView = (
        Namespace
    )

__all__ = [
    "FleetView",
    "ModelView",
    "RolloutView",
    "TrackingView",
    "TrainWorkerView",
    "TrainingView",
    "WeightSyncView",
    "view",
]

V = TypeVar("V")


def view(args: object, kind: type[V]) -> V:
    """``args`` itself, as what a room reads of it."""
    return cast(V, args)
