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
_WHOLE = frozenset({"flat", "others"})
"""Fields of a slice that are ``args``, and what no group of the slice states of them."""


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
    key = cast(Hashable, kind)
    groups, values = _fields_of(key)
    made = object.__new__(kind)
    known = [name for name in values if hasattr(args, name)] if thin else values
    own = {name: getattr(args, name) for name in known}
    parts: dict[str, Any] = {name: filled(group, args, thin) for name, group in groups.items()}
    vars(made).update(parts, **own)  # __init__ of a frozen class takes five times as long, for each sample
    if "flat" in _whole_fields(key):
        vars(made)["flat"] = args
    if "others" in _whole_fields(key):
        stated = _names_of(key)
        vars(made)["others"] = {name: value for name, value in vars(args).items() if name not in stated}
    return made


def values_of(config: Any) -> dict[str, Any]:
    """What a group or a slice was filled with, under the flat names: all of ``args`` if it has ``others``."""
    groups, values = _fields_of(cast(Hashable, type(config)))
    own = vars(config)
    found = {**own.get("others", {}), **{name: own[name] for name in values if name in own}}
    for name in groups:
        found |= values_of(own[name])
    return found


def options_of(config: Any, prefix: str) -> dict[str, Any]:
    """Values of another parser under the names that it has for them, which have a prefix in ``args``."""
    found = values_of(config).items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


@cache
def _fields_of(kind: Any) -> tuple[dict[str, type], list[str]]:
    """The fields that are groups, with their classes, and the names of those that are values of ``args``."""
    hints = get_type_hints(kind)
    groups = {field.name: hints[field.name] for field in fields(kind) if is_dataclass(hints[field.name])}
    own = [field.name for field in fields(kind) if field.name not in groups]
    return groups, [name for name in own if name not in _WHOLE]


@cache
def _whole_fields(kind: Any) -> frozenset[str]:
    """Which fields of a slice are made of ``args`` as a whole."""
    return frozenset(field.name for field in fields(kind)) & _WHOLE


@cache
def _names_of(kind: Any) -> frozenset[str]:
    """The names of the values of a slice and its groups."""
    groups, own = _fields_of(kind)
    return frozenset(own).union(*(_names_of(group) for group in groups.values()))
