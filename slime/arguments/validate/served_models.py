"""The models of a run and their engines: from the YAML file of ``--sglang-config``, or from flags.

    sglang:
      - name: policy
        server_groups:
          - {worker_type: regular, num_gpus: 6, num_gpus_per_engine: 2}
          - {worker_type: placeholder, num_gpus: 1}
      - name: judge
        model_path: /models/judge
        update_weights: false
        server_groups:
          - {worker_type: regular, num_gpus: 1, overrides: {mem_fraction_static: 0.5}}

Each model has a router of its own. The first one answers the prompts.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, flags_of
from slime.arguments.core.values import describe, typed
from slime.arguments.core.working_directory import absolute_if_there
from slime.arguments.core.yaml_file import read_yaml
from slime.config.served_models import (
    DEFAULT,
    PLACEHOLDER,
    ServedModelConfig,
    ServerGroupConfig,
    WorkerType,
)


class ModelConfig(ServedModelConfig):
    """A model as a file or flags say it; `resolve` closes what they left open."""

    def resolve(self, args: Namespace) -> "ModelConfig":
        """A copy in which nothing is left open.

        Raises:
            UsageError: its groups have different paths.
        """
        size = self.num_gpus_per_engine or args.rollout_num_gpus_per_engine
        default = absolute_if_there(
            self.model_path or args.hf_checkpoint, f"--sglang-config: model {self.name}"
        )
        groups = [
            replace(
                group,
                num_gpus_per_engine=group.num_gpus_per_engine or size,
                overrides={"model_path": default, **self._own_overrides(group)},
            )
            for group in self.server_groups
        ]
        paths = {group.overrides["model_path"]: None for group in groups if group.worker_type != PLACEHOLDER}
        if len(paths) > 1:
            raise UsageError(
                f"--sglang-config: model {self.name}: its groups have different paths, "
                f"{' and '.join(map(str, paths))} (wanted: a model for each)"
            )
        path = next(iter(paths), default)
        updates = path == args.hf_checkpoint if self.update_weights is None else self.update_weights
        return replace(
            self,
            model_path=path,
            update_weights=updates,
            num_gpus_per_engine=size,
            server_groups=groups,
            policy=args.policy_name,
            evaluates=self.name == args.eval_model,
        )

    def _own_overrides(self, group: ServerGroupConfig) -> dict[str, Any]:
        path = group.overrides.get("model_path")
        return group.overrides | ({"model_path": self._there(path)} if isinstance(path, str) else {})

    def _there(self, path: str) -> str:
        return absolute_if_there(path, f"--sglang-config: model {self.name}")


@dataclass(frozen=True)
class SglangConfig:
    """All models of a run."""

    models: list[ModelConfig]

    @classmethod
    def from_yaml(cls, path: str) -> "SglangConfig":
        """Reads the file of ``--sglang-config``; nothing is resolved yet.

        Raises:
            UsageError: it cannot be read, or something in it is missing, unknown or of another type.
        """
        where = f"--sglang-config {path}"
        root = read_yaml(where, Path(path))
        entries = root.get("sglang") if isinstance(root, dict) else None
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{where}: wanted a mapping with the key sglang and a list of models")
        if unknown := sorted(map(str, root.keys() - {"sglang"})):
            raise UsageError(f"{where}: unknown key {unknown[0]!r} (wanted: sglang alone)")
        models = [_model(where, number, entry) for number, entry in enumerate(entries, 1)]
        names = [model.name for model in models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{where}: two models are named {twice[0]} (wanted: a name for each)")
        return cls(models)

    @classmethod
    def from_prefill_num_servers(cls, args: Namespace) -> "SglangConfig":
        """One model of ``--prefill-num-servers`` engines that prefill, and the rest, which decode."""
        count, size = args.prefill_num_servers, args.rollout_num_gpus_per_engine
        prefill = count * size
        if prefill >= args.rollout_num_gpus:
            raise UsageError(
                f"--prefill-num-servers {count}: takes {prefill} of {args.rollout_num_gpus} GPUs "
                "(wanted: fewer, some have to decode)"
            )
        sizes: dict[WorkerType, int] = {"prefill": prefill, "decode": args.rollout_num_gpus - prefill}
        return cls([ModelConfig(DEFAULT, server_groups=[_group(*item) for item in sizes.items()])])

    @classmethod
    def of_flags(cls, args: Namespace) -> "SglangConfig":
        """One model, whose engines are alike; that of a policy has its name."""
        return cls(
            [
                ModelConfig(
                    args.policy_name or DEFAULT, server_groups=[_group("regular", args.rollout_num_gpus)]
                )
            ]
        )


def _group(kind: WorkerType, num_gpus: int) -> ServerGroupConfig:
    return ServerGroupConfig(worker_type=kind, num_gpus=num_gpus)


_ALIASES = {"engine_groups": "server_groups"}
_GROUP = {spec.dest: spec for spec in flags_of(ServerGroupConfig)}
_MODEL = {spec.dest: spec for spec in flags_of(ModelConfig)}


def _model(where: str, number: int, entry: Any) -> ModelConfig:
    where = f"{where}: model {number}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r:.80} (wanted: a mapping with name and server_groups)")
    if entry.get("name"):
        where = f"{where} ({entry['name']})"
    entry = {_ALIASES.get(key, key): value for key, value in entry.items()}
    groups = entry.get("server_groups")
    if not isinstance(groups, list):
        raise UsageError(f"{where}: server_groups is {groups!r:.80} (wanted: a list of groups)")
    parsed = [_server_group(f"{where}: group {n}", group) for n, group in enumerate(groups, 1)]
    return ModelConfig(**_values(where, entry | {"server_groups": []}, _MODEL) | {"server_groups": parsed})


def _server_group(where: str, entry: Any) -> ServerGroupConfig:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r:.80} (wanted: a mapping with worker_type and num_gpus)")
    return ServerGroupConfig(**_values(where, entry, _GROUP))


def _values(where: str, entry: Mapping[Any, Any], specs: Mapping[str, Flag]) -> dict[str, Any]:
    """The values of a mapping, each of its field's type and in its range."""
    values = {}
    for key, value in entry.items():
        if key not in specs:
            raise UsageError(f"{where}: unknown key {key!r} (wanted: {', '.join(specs)})")
        try:
            values[key] = typed(specs[key], value)
        except ValueError as error:
            raise UsageError(f"{where}: {describe(key, value, str(error))}") from error
    for key, spec in specs.items():
        if spec.required and values.get(key) in (None, ""):
            raise UsageError(f"{where}: {key} is missing (wanted: {spec.help})")
    return {key: value for key, value in values.items() if value is not None}
