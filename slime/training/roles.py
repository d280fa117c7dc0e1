"""The trained models of a run."""

from dataclasses import dataclass

from slime.training.passes import ACTOR_PASSES, Pass


@dataclass(frozen=True)
class Role:
    """What one trained model does with a rollout.

    Attributes:
        passes: before its optimizer steps.
        loss_type: a name in ``LOSSES``; None for that of ``--loss-type``.
        gives: batch fields from its passes that other roles are to have.
    """

    name: str
    passes: tuple[Pass, ...]
    loss_type: str | None = None
    gives: tuple[str, ...] = ()


ACTOR = Role("actor", ACTOR_PASSES)
ROLES = {role.name: role for role in (ACTOR,)}
