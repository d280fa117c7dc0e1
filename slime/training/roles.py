"""The trained models of a run."""

from dataclasses import dataclass

from slime.training.passes import ACTOR_PASSES, CRITIC_PASSES, Pass


@dataclass(frozen=True)
class Role:
    """What one trained model does with a rollout.

    Attributes:
        passes: before its optimizer steps.
        loss_type: a name in ``LOSSES``; None for that of ``--loss-type``.
        outputs: batch fields from its passes that other roles are to have.
        prefix: goes before the names of its metrics.
        steps: name of the time of its optimizer steps among the metrics.
    """

    name: str
    passes: tuple[Pass, ...]
    loss_type: str | None = None
    outputs: tuple[str, ...] = ()
    prefix: str = ""
    steps: str = "actor_train"


ACTOR = Role("actor", ACTOR_PASSES)
CRITIC = Role(
    "critic",
    CRITIC_PASSES,
    loss_type="value_loss",
    outputs=("values",),
    prefix="critic-",
    steps="steps",
)
ROLES = {role.name: role for role in (ACTOR, CRITIC)}
