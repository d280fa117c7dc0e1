"""The whole tree, and how it is filled."""

from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from slime.config.backend import BackendConfig
from slime.config.fleet import FleetConfig
from slime.config.generation import GenerationConfig
from slime.config.memory import MemoryConfig
from slime.config.metrics import MetricsConfig
from slime.config.training import TrainingConfig
from slime.config.weight_update import WeightUpdateConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    TrainingConfig,
    MetricsConfig,
    GenerationConfig,
    WeightUpdateConfig,
    FleetConfig,
    MemoryConfig,
    BackendConfig,
):
    """Everything that is known of a run when it starts."""


def run_config(args: Any) -> RunConfig:
    """The tree of a parsed command line.

    Args:
        args: has every value under its flat name, as `slime.arguments.parse_args` returns it.

    Raises:
        AttributeError: a value is not there.
    """
    return filled(RunConfig, args)


def filled(kind: type[T], args: Any, thin: bool = False) -> T:
    """A group or a slice, with the values that ``args`` has under the names of its fields.

    Args:
        thin: a plug-in's own ``args`` may lack flags, which then have their defaults. Reading what follows
            from flags fails where it is not there.
    """
    groups, values = _fields_of(cast(Hashable, kind))
    parts: dict[str, Any] = {name: filled(group, args, thin) for name, group in groups.items()}
    known = [name for name in values if hasattr(args, name) or name == "flat" or not thin]
    own = {name: args if name == "flat" else getattr(args, name) for name in known}
    made = object.__new__(kind)
    vars(made).update(parts, **own)  # __init__ of a frozen class takes five times as long, for each sample
    return made


@cache
def _fields_of(kind: Any) -> tuple[dict[str, type], list[str]]:
    """The fields that are groups, with their classes, and the names of the others."""
    hints = get_type_hints(kind)
    groups = {field.name: hints[field.name] for field in fields(kind) if is_dataclass(hints[field.name])}
    return groups, [field.name for field in fields(kind) if field.name not in groups]
