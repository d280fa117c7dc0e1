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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from slime.arguments.errors import UsageError


@dataclass
class EvalDatasetConfig:
    """One dataset to evaluate on. None leaves the choice to the rollout's own default."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What decides which samples the file gives."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """A copy of a sample's metadata with this dataset's reward type and overrides."""
        own = {"rm_type": self.rm_type} if self.rm_type is not None else {}
        return {**(metadata or {}), **own, **self.metadata_overrides}


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
_FIELDS = frozenset(f.name for f in fields(EvalDatasetConfig))


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
    try:
        root = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"--eval-config {path}: {str(error).splitlines()[0]}") from error
    config = root.get("eval", root) if isinstance(root, dict) else None
    if not isinstance(config, dict):
        raise UsageError(f"--eval-config {path}: wanted a mapping with datasets")
    datasets = ensure_dataset_list(config.get("datasets"))
    if not datasets:
        raise UsageError(f"--eval-config {path}: datasets is empty")
    defaults = config.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UsageError(f"--eval-config {path}: defaults is {type(defaults).__name__} (wanted: a mapping)")
    return datasets, defaults


def ensure_dataset_list(datasets: Any) -> list[dict[str, Any]]:
    """A list of mappings; a mapping from name to fields becomes one."""
    if isinstance(datasets, Mapping):
        return [{"name": name, **(values or {})} for name, values in datasets.items()]
    return list(datasets or [])


def build_eval_dataset_configs(
    args: Namespace, raw: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[EvalDatasetConfig]:
    """Fills every dataset's open fields from ``defaults`` and then from ``args``."""
    if unknown := sorted(set(defaults) - _FIELDS):
        raise UsageError(f"--eval-config: unknown key {unknown[0]!r} in defaults (wanted: {_names()})")
    return [_build(args, entry, defaults) for entry in raw]


def _build(args: Namespace, entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> EvalDatasetConfig:
    if not isinstance(entry, Mapping):
        raise UsageError(f"--eval-config: a dataset is {entry!r} (wanted: a mapping with name and path)")
    name = entry.get("name", "<unnamed>")
    if missing := [key for key in ("name", "path") if not entry.get(key)]:
        raise UsageError(f"--eval-config: dataset {name}: {missing[0]} is missing")
    if unknown := sorted(set(entry) - _FIELDS):
        raise UsageError(f"--eval-config: dataset {name}: unknown key {unknown[0]!r} (wanted: {_names()})")
    values = {**_from_args(args), **defaults, **entry}
    return EvalDatasetConfig(**values)


def _from_args(args: Namespace) -> dict[str, Any]:
    return {name: pick_from_args(args, candidates) for name, candidates in _FROM_ARGS.items()}


def pick_from_args(args: Namespace, names: Sequence[str]) -> Any:
    """The first of these flags that is not None."""
    return next((value for name in names if (value := getattr(args, name)) is not None), None)


def _names() -> str:
    return ", ".join(sorted(_FIELDS))


def _pairs(words: Sequence[str]) -> list[dict[str, Any]]:
    if len(words) == 1:
        return [{"name": "aime", "path": words[0]}]
    if len(words) % 2:
        raise UsageError(f"--eval-prompt-data {' '.join(words)}: wanted pairs of name and file")
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]
