"""``--policies``: a YAML file of the models that a run trains, each with flags of its own.

policies:
- name: solver                      # what it does not say, the command line does
- name: rewriter
  hf_checkpoint: /models/rewriter
  lr: 5e-6
  sglang_config: rewriter.yaml      # its engines, and models beside it: earlier versions of it, a judge

The flags of the run are those of the first one.
"""

import argparse
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.values import why_no_place
from slime.arguments.core.yaml_file import place_in, read_yaml
from slime.arguments.groups import (
    advantages,
    kl,
    loss,
    model_shape,
    off_policy,
    optimizer,
    optimizer_state,
    parallelism,
)
from slime.arguments.groups.custom_config import value_of
from slime.config.policies import PoliciesConfig
from slime.config.router import RouterConfig
from slime.config.served_models import DEFAULT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GROUPS = (optimizer, optimizer_state, loss, kl, advantages, off_policy, model_shape, parallelism)
OWN_FLAGS = frozenset(
    {
        *(spec.dest for group in _GROUPS for spec in group.CONFIG_GROUP.specs()),
        *("hf_checkpoint", "load", "save", "save_hf", "finetune", "no_load_optim", "no_load_rng", "seed"),
        *("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
        "sglang_config",
        *("global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu"),
        *("log_probs_max_tokens_per_gpu", "update_weight_disk_dir", "save_debug_train_data"),
        *("freeze_params_name_list", "only_train_params_name_list"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"),
    }
)
"""Flags that a policy may have for itself: they are about its weights, its trainer and its engines."""
_OF_THE_RUN = frozenset(field.name for field in fields(RouterConfig))
REFUSED = {
    "colocate": "trainers and engines of several policies share no GPUs",
    "asynchronous": "the asynchronous loop trains one policy",
    "partial_rollout": "a sample of several policies cannot be taken up again",
    "rollout_spare_gpus": "nothing says whose engines they would be for",
    "rollout_queue_per_engine": "nothing says whose engines would join and leave",
    "prefill_num_servers": "each policy has engines that are alike",
    "rollout_external": "each policy has engines that the run starts",
    "rollout_external_engine_addrs": "each policy has engines that the run starts",
    "sglang_router_ip": "each policy has a router that the run starts",
    "debug_train_only": "recordings are of one policy",
    "debug_rollout_only": "recordings are of one policy",
    "load_debug_rollout_data": "recordings are of one policy",
    "load_forge_rollout_data": "recordings are of one policy",
    "dump_details": "it is one place for the details of all policies",
}


def apply_policies(
    args: Namespace, specs: Mapping[str, Flag], actions: Sequence[argparse.Action]
) -> list[str]:
    """Reads the file that ``args.policies`` names: ``args.trained_policies`` has what it says of each policy.

    Returns:
        No notes.

    Raises:
        UsageError: the file cannot be read, a name is none, or a flag is none of a policy's or cannot have
            its value.
    """
    args.trained_policies, args.policy_name = {}, None
    if args.policies is None:
        return []
    where = f"--policies {args.policies}"
    options, wrong = {action.dest: action for action in actions}, list[str]()
    found: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(_entries(where, args.policies)):
        name = _name_of(where, entry, found)
        values = found[name] = {}
        for key, value in entry.items():
            there = f"--policies {place_in(args.policies, 'policies', number, str(key))}: {name}"
            try:
                if key != "name":
                    values[key] = _value(there, key, value, specs.get(key), options.get(key))
            except UsageError as error:
                wrong += error.messages
    if wrong:
        raise UsageError(*wrong, unknown=())
    if len(found) < 2:
        raise UsageError(f"{where}: one policy (wanted: two or more, or no --policies)")
    args.trained_policies, args.policy_name = found, next(iter(found))
    return []


def take_first_policy(args: Namespace) -> dict[str, Any]:
    """Sets what the file says of the first policy; returns the values of ``args`` before."""
    before = dict(vars(args))
    for key, value in args.trained_policies.get(args.policy_name, {}).items():
        setattr(args, key, value)
    return before


def _entries(where: str, path: str) -> list[dict[str, Any]]:
    if reason := why_no_place(path):
        raise UsageError(f"{where}: {reason}")
    root = read_yaml(where, Path(path))
    entries = root.get("policies") if isinstance(root, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{where}: wanted a mapping with policies, a list of mappings with a name")
    if unknown := sorted(map(str, root.keys() - {"policies"})):
        raise UsageError(f"{where}: unknown key {unknown[0]!r} (wanted: policies alone)")
    return entries


def _name_of(where: str, entry: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == DEFAULT:
        raise UsageError(
            f"{where}: name is {name!r:.80} (wanted: letters, digits, dots, dashes, not {DEFAULT})"
        )
    if name in others:
        raise UsageError(f"{where}: two policies are named {name} (wanted: a name for each)")
    return name


def _value(where: str, key: str, value: Any, spec: Flag | None, option: argparse.Action | None) -> Any:
    if option is None:
        raise UsageError(f"{where}: {key} is not a flag")
    if key not in OWN_FLAGS and not _is_of_engines(key):
        raise UsageError(f"{where}: {key} is of the run, not of a policy (wanted: on the command line)")
    return value_of(where, key, value, spec, option)


def _is_of_engines(key: str) -> bool:
    """Whether it is an option of the servers; those that only look so are about all routers of the run."""
    return key.startswith("sglang_") and key not in _OF_THE_RUN


def contradictions(args: Namespace) -> Iterator[str]:
    """What a run of several policies cannot do."""
    if args.trained_policies:
        for option, _ in given(args, *REFUSED):
            yield f"{option}: not with --policies: {REFUSED[option[2:].replace('-', '_')]}"


CONFIG_GROUP = ConfigGroup({"policies": PoliciesConfig}, contradictions=contradictions)
