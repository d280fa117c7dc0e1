"""Evaluation datasets: from ``--eval-prompt-data`` or the YAML file of ``--eval-config``.

    eval:
      defaults: {temperature: 1.0, n_samples_per_eval_prompt: 4}
      datasets:
        - {name: aime, path: data/aime.jsonl, rm_type: math}
        - {name: greedy, path: data/aime.jsonl, temperature: 0, n_samples_per_eval_prompt: 1}

A dataset's own value wins over ``defaults``, which wins over the flags. An explicit null is a value.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import flags_of
from slime.arguments.core.spelling import nearest
from slime.arguments.core.values import describe, typed
from slime.arguments.core.working_directory import absolute_if_there
from slime.arguments.core.yaml_file import read_yaml
from slime.config.evaluation import EvalDatasetConfig

# For each field, the flags that give its value, first one that is set.
_FROM_ARGS: dict[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("custom_rm_path",),
}
_TYPES = get_type_hints(EvalDatasetConfig)
_SPECS = {spec.dest: replace(spec, type=_TYPES[spec.dest]) for spec in flags_of(EvalDatasetConfig)}
_SECTIONS = ("defaults", "datasets")
_LONGEST_NAME = 128  # characters


def resolve_eval_datasets(args: Namespace) -> None:
    """Sets ``args.eval_datasets``, and ``args.eval_prompt_data`` to the flat list of names and files.

    Raises:
        UsageError: the YAML file or the list of pairs cannot be used.
    """
    if args.eval_config is not None:
        raw, defaults = read_eval_config(Path(args.eval_config))
    else:
        raw, defaults = _pairs(args.eval_prompt_data or []), {}
    args.eval_datasets = build_eval_dataset_configs(args, raw, defaults)
    args.eval_prompt_data = [word for d in args.eval_datasets for word in (d.name, d.path)] or None


def read_eval_config(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Datasets and defaults of a YAML file; interpolations are resolved."""
    where = f"--eval-config {path}"
    root = read_yaml(where, path)
    config = root.get("eval", root) if isinstance(root, dict) else None
    if not isinstance(config, dict):
        raise UsageError(f"{where}: wanted a mapping with datasets")
    for key in config.keys() - set(_SECTIONS):
        if meant := nearest(str(key), _SECTIONS):
            raise UsageError(f"{where}: unknown key {key!r} (did you mean {meant}?)")
    datasets = ensure_dataset_list(config.get("datasets"))
    if not datasets:
        others = ", ".join(str(key) for key in config if key not in _SECTIONS)
        found = f"found: {others}; " if others else ""
        raise UsageError(f"{where}: has no datasets ({found}wanted: datasets, a list)")
    defaults = config.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UsageError(f"{where}: defaults is {type(defaults).__name__} (wanted: a mapping)")
    return datasets, defaults


def ensure_dataset_list(datasets: Any) -> list[dict[str, Any]]:
    """A list of mappings; a mapping from name to fields becomes one."""
    if isinstance(datasets, Mapping):
        if {"name", "path"} <= datasets.keys():
            raise UsageError(
                "--eval-config: datasets is one dataset (wanted: a list of them, each after a dash)"
            )
        for name, values in datasets.items():
            if values is not None and not isinstance(values, Mapping):
                raise UsageError(f"--eval-config: dataset {name} is {values!r:.80} (wanted: a mapping)")
        return [{"name": name, **(values or {})} for name, values in datasets.items()]
    if datasets is not None and not isinstance(datasets, list | tuple):
        raise UsageError(f"--eval-config: datasets is {datasets!r:.80} (wanted: a list of mappings)")
    return list(datasets or [])


def build_eval_dataset_configs(
    args: Namespace, raw_config: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[EvalDatasetConfig]:
    """Fills every dataset's open fields from ``defaults`` and then from ``args``."""
    defaults = _values("defaults", defaults)
    datasets = [_build(args, entry, defaults) for entry in raw_config]
    names = [dataset.name for dataset in datasets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{_given(args)}: two datasets are named {twice[0]} (wanted: a name for each)")
    return datasets


def _build(args: Namespace, entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> EvalDatasetConfig:
    if not isinstance(entry, Mapping):
        raise UsageError(f"--eval-config: a dataset is {entry!r:.80} (wanted: a mapping with name and path)")
    name = entry.get("name", "<unnamed>")
    if isinstance(name, str) and (reason := _why_no_name(name)):
        raise UsageError(f"{_given(args)}: dataset {name!r:.80}: {reason}")
    if missing := [key for key in ("name", "path") if entry.get(key) in (None, "")]:
        raise UsageError(f"--eval-config: dataset {name}: {missing[0]} is missing")
    values = {**_from_args(args), **defaults, **_values(f"dataset {name}", entry)}
    return EvalDatasetConfig(**values | {"path": absolute_if_there(values["path"], f"eval dataset {name}")})


def _given(args: Namespace) -> str:
    return "--eval-config" if getattr(args, "eval_config", None) is not None else "--eval-prompt-data"


def _why_no_name(name: str) -> str | None:
    """Why metrics cannot be called eval/NAME and eval/NAME-truncated_ratio; None if they can."""
    if len(name) > _LONGEST_NAME:
        return f"is a name of {len(name)} characters (wanted: at most {_LONGEST_NAME})"
    if bad := [letter for letter in name if letter == "/" or not letter.isprintable()]:
        return f"has {bad[0]!r} in its name (wanted: a name without slashes and line breaks)"
    return None


def _values(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one mapping of the file, each of its field's type and in its range."""
    values = {}
    for key, value in given.items():
        if key not in _SPECS:
            raise UsageError(
                f"--eval-config: {where}: unknown key {key!r} (wanted: {', '.join(sorted(_SPECS))})"
            )
        try:
            values[key] = typed(_SPECS[key], value)
        except ValueError as error:
            raise UsageError(f"--eval-config: {where}: {describe(key, value, str(error))}") from error
    return values


def _from_args(args: Namespace) -> dict[str, Any]:
    return {name: pick_from_args(args, candidates) for name, candidates in _FROM_ARGS.items()}


def pick_from_args(args: Namespace, names: Sequence[str]) -> Any:
    """The first of these flags that is not None."""
    return next((value for name in names if (value := getattr(args, name, None)) is not None), None)


def _pairs(words: Sequence[str]) -> list[dict[str, Any]]:
    if len(words) == 1:
        return [{"name": "aime", "path": words[0]}]
    if len(words) % 2:
        raise UsageError(f"--eval-prompt-data {' '.join(words)}: wanted pairs of name and file")
    for word in words:
        if not word:
            raise UsageError("--eval-prompt-data: a name or a file is empty (wanted: pairs of name and file)")
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]
