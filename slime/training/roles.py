"""The trained models of a run."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from slime.training.losses import LossFunction, select_loss
from slime.training.passes import ACTOR_PASSES, Pass


@dataclass(frozen=True)
class Role:
    """What one trained model does with a rollout.

    Attributes:
        passes: before its optimizer steps.
        loss: chooses the loss by the flags.
        gives: batch fields from its passes that other roles are to have.
    """

    name: str
    passes: tuple[Pass, ...]
    loss: Callable[[Namespace], LossFunction]
    gives: tuple[str, ...] = ()


ACTOR = Role("actor", ACTOR_PASSES, select_loss)
ROLES = {role.name: role for role in (ACTOR,)}
