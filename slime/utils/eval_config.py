"""Plug-ins import evaluation datasets from here."""

from slime.arguments.groups.eval_datasets import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    ensure_dataset_list,
    pick_from_args,
    read_eval_config,
    resolve_eval_datasets,
)

__all__ = [
    "EvalDatasetConfig",
    "build_eval_dataset_configs",
    "ensure_dataset_list",
    "pick_from_args",
    "read_eval_config",
    "resolve_eval_datasets",
]
