"""``--megatron-config-path``: a YAML file with flags of the actor and of the critic.

megatron:
- name: critic           # any
  role: critic           # or actor
  overrides: {lr: 1e-5, load: /checkpoints/critic}

What it says of the actor holds for the run, except that the critic goes on with what the command line said.
"""

import argparse
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag
from slime.arguments.core.run_args import copied
from slime.arguments.core.values import why_no_place
from slime.arguments.core.yaml_file import place_in, read_yaml
from slime.arguments.groups.critic import OWN_FLAGS, SHARED
from slime.arguments.groups.custom_config import value_of
from slime.config.advantages import ESTIMATORS

_ROLES = ("actor", "critic")
_PLACES = ("num_nodes", "num_gpus_per_node")
_KEYS = {"name", "role", "overrides", "args"}


def apply_role_config(
    args: Namespace, specs: Mapping[str, Flag], actions: Sequence[argparse.Action]
) -> list[str]:
    """Sets what the file that ``args.megatron_config_path`` names says of the roles.

    Returns:
        Notes on keys that have no effect or are no flags.

    Raises:
        UsageError: the file cannot be read, a value is not one that its flag can have, or the roles would
            differ in what they have to share.
    """
    args.critic_overrides = {}
    if args.megatron_config_path is None:
        return []
    where = f"--megatron-config-path {args.megatron_config_path}"
    found = _read(where, Path(args.megatron_config_path))
    options = {action.dest: action for action in actions}
    notes, wrong = list[str](), list[str]()
    typed: dict[str, dict[str, Any]] = {}
    for role, overrides in found.items():
        values = typed[role] = {}
        for key, value in overrides.items():
            if key in _PLACES:
                notes.append(f"{where}: {role}: {key} has no effect (flags say where roles are)")
                continue
            if key not in options and key not in vars(args):
                notes.append(f"{where}: {role}: {key} is not a flag and taken for a key of your own")
            there = f"--megatron-config-path {_place(args.megatron_config_path, role, key)}: {role}"
            try:
                values[key] = _value(there, args, key, value, specs.get(key), options.get(key))
            except UsageError as error:
                wrong += error.messages
    if wrong:
        raise UsageError(*wrong, unknown=())
    if "critic" in typed and not ESTIMATORS[args.advantage_estimator].critic:
        notes.append(f"{where}: critic has no effect without --advantage-estimator ppo")
    _set_actor(args, typed.get("actor", {}))
    _set_critic(args, typed.get("critic", {}))
    return notes


def parse_megatron_role_args(base_args: Namespace, megatron_config_path: str, role: str) -> Namespace:
    """A copy of ``base_args`` as a role sees them, by such a file."""
    found = _read(f"--megatron-config-path {megatron_config_path}", Path(megatron_config_path))
    own = {key: value for key, value in found.get(role, {}).items() if key not in _PLACES}
    values = {key: _number_like(getattr(base_args, key, None), value) for key, value in own.items()}
    if role != "critic":
        return copied(base_args, **values)
    return copied(
        base_args,
        **values
        | dict(kl_coef=0, use_opd=False, custom_advantage_function_path=None)
        | dict(untie_embeddings_and_output_weights=True),
    )


def _read(where: str, path: Path) -> dict[str, dict[str, Any]]:
    if reason := why_no_place(str(path)):
        raise UsageError(f"{where}: {reason}")
    root = read_yaml(where, path)
    entries = root.get("megatron") if isinstance(root, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{where}: wanted a mapping with megatron, a list of roles")
    return dict(_entries(where, entries))


def _place(path: str, role: str, key: str) -> str:
    """The line of an override; it is only looked for where roles are entries of their own."""
    entries = read_yaml(path, Path(path))["megatron"]
    number = next(n for n, entry in enumerate(entries) if entry["role"] == role)
    return place_in(path, "megatron", number, "overrides" if "overrides" in entries[number] else "args", key)


def _entries(where: str, entries: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[str] = set()
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        if role not in _ROLES:
            raise UsageError(f"{where}: role is {role!r} (wanted: actor or critic)")
        if role in seen:
            raise UsageError(f"{where}: two entries for {role} (wanted: one)")
        if unknown := sorted(map(str, entry.keys() - _KEYS)):
            raise UsageError(f"{where}: {role}: unknown key {unknown[0]} (wanted: name, role, overrides)")
        overrides = entry.get("overrides", entry.get("args")) or {}
        if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
            raise UsageError(f"{where}: {role}: overrides are {overrides!r:.80} (wanted: a mapping of flags)")
        seen.add(role)
        yield role, overrides


def _value(
    where: str, args: Namespace, key: str, value: Any, spec: Flag | None, option: argparse.Action | None
) -> Any:
    base = getattr(args, key, None)
    found = value_of(where, key, _number_like(base, value), spec, option)
    if key in SHARED and found != base:
        raise UsageError(f"{where}: {key} is {found!r} (wanted: {base!r}, as of the run: roles share it)")
    return found


def _number_like(base: Any, value: Any) -> Any:
    """Text as a number where a number stands, as the original reads it."""
    if isinstance(value, str) and type(base) in (int, float):
        try:
            return type(base)(value)
        except ValueError:
            return value
    return value


def _set_actor(args: Namespace, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        base = getattr(args, key, None)
        if key == "lr" and args.critic_lr is None:
            args.critic_lr = base
        elif key not in OWN_FLAGS:
            args.critic_overrides[key] = base
        setattr(args, key, value)


def _set_critic(args: Namespace, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if key in OWN_FLAGS:
            setattr(args, OWN_FLAGS[key], value)
        else:
            args.critic_overrides[key] = value
