"""The configuration of each model that a run trains."""

from typing import TypeVar

from slime.arguments.core.run_args import copied
from slime.arguments.core.runtime_context import known_to_all
from slime.config.fleet import FleetConfig
from slime.config.run import filled
from slime.config.served_models import DEFAULT

C = TypeVar("C", bound=FleetConfig)


def policy_configs(config: C) -> dict[str, C]:
    """The configuration of each trained model, by name; where there is one it is the run's."""
    if not config.policies.trained_policies:
        return {DEFAULT: config}
    known = known_to_all(config.flat)
    own = config.policies.trained_policies.items()
    return {name: filled(type(config), copied(args, **known)) for name, args in own}
