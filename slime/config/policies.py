"""The models that a run trains, where they are several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class PoliciesConfig:
    """Several models that are trained in one run, each with a trainer and engines of its own.

    Attributes:
        trained_policies: the ``args`` of each, by name; empty where the run trains one model, and in these.
        policy_name: whose flags these are, of the whole run the first one's; None where there is one model.
    """

    policies: str | None = flag(
        place=True, help="YAML file of the models that the run trains, each with flags of its own"
    )
    trained_policies: Mapping[str, Any]
    policy_name: str | None
