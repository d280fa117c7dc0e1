"""How each hook is called, by position and by keyword, and functions that comply."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Contract:
    option: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    # Given to those functions only that have a parameter for them.
    optional: tuple[str, ...] = ()
    is_async: bool | None = None
    functions: tuple[str, ...] = field(default=())
    # Of a module's functions, those that are for this hook, by the names that such functions usually have.
    named: str = ""

    @property
    def variable(self) -> str:
        """Environment variable with a dotted path of one's own to check."""
        return "SLIME_CONTRACT_" + self.option.upper().replace("-", "_")


RECORDERS = "tests.plugin_contracts.recorders."

CONTRACTS = (
    Contract(
        "rollout-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        is_async=False,
        functions=(
            "slime.rollout.sglang_rollout.generate_rollout",
            "slime.rollout.sft_rollout.generate_rollout",
        ),
        named=r"generate_rollout(_\w+)?",
    ),
    Contract(
        "eval-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        is_async=False,
        functions=("slime.rollout.sglang_rollout.generate_rollout",),
        named=r"eval_rollout(_\w+)?",
    ),
    Contract(
        "custom-generate-function-path",
        ("args", "sample", "sampling_params"),
        optional=("evaluation",),
        is_async=True,
        functions=(
            "slime.rollout.sglang_rollout.generate",
            "examples.calculator_tool.generate.generate",
            "examples.search_r1.generate_with_search.generate",
            "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
            RECORDERS + "generate",
        ),
        named=r"(custom_)?generate(_with_\w+)?",
    ),
    Contract(
        "custom-rm-path",
        ("args", "sample"),
        functions=(
            "examples.calculator_tool.reward.reward",
            "examples.search_r1.generate_with_search.reward_func",
            "slime.rollout.on_policy_distillation.reward_func",
            RECORDERS + "rm",
        ),
        named=r"(custom_)?rm|reward(_func)?|compute_reward",
    ),
    Contract(
        "dynamic-sampling-filter-path",
        ("args", "group"),
        is_async=False,
        functions=(
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
            RECORDERS + "dynamic_filter",
        ),
        named=r"(\w+_)?dynamic_(sampling_)?filter|check_reward_\w+",
    ),
    Contract(
        "buffer-filter-path",
        ("args", "rollout_id", "buffer", "num_samples"),
        is_async=False,
        functions=("slime.rollout.data_source.pop_first", RECORDERS + "buffer_filter"),
        named=r"(\w+_)?buffer_filter|pop_first",
    ),
    Contract(
        "data-source-path",
        ("args",),
        is_async=False,
        functions=(
            "slime.rollout.data_source.RolloutDataSource",
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        ),
        named=r"\w*DataSource\w*",
    ),
    Contract(
        "rollout-sample-filter-path",
        ("args", "groups"),
        is_async=False,
        functions=(RECORDERS + "sample_filter",),
        named=r"(rollout_)?sample_filter",
    ),
    Contract(
        "rollout-all-samples-process-path",
        ("args", "all_groups", "get_samples"),
        is_async=False,
        functions=(RECORDERS + "all_samples",),
        named=r"(process_)?all_samples(_process)?",
    ),
    Contract(
        "rollout-sample-hook-path",
        ("args", "sample"),
        optional=("rollout_id", "evaluation"),
        functions=(RECORDERS + "sample_hook",),
        named=r"(rollout_)?sample_hook",
    ),
    Contract(
        "custom-reward-post-process-path",
        ("args", "samples"),
        is_async=False,
        functions=(
            "slime.rollout.on_policy_distillation.post_process_rewards",
            RECORDERS + "post_process",
        ),
        named=r"post_process(_rewards)?",
    ),
    Contract(
        "custom-convert-samples-to-train-data-path",
        ("args", "samples"),
        is_async=False,
        functions=(RECORDERS + "convert",),
        named=r"convert(_samples_to_train_data)?",
    ),
    Contract(
        "custom-rollout-log-function-path",
        ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
        is_async=False,
        functions=(RECORDERS + "rollout_log",),
        named=r"rollout_log|log_rollout_data",
    ),
    Contract(
        "custom-eval-rollout-log-function-path",
        ("rollout_id", "args", "data", "extra_metrics"),
        is_async=False,
        functions=(RECORDERS + "eval_log",),
        named=r"eval_log|log_eval_rollout_data",
    ),
    Contract(
        "custom-update-weight-post-write-path",
        ("args", "version_dir", "rollout_engines"),
        is_async=False,
        functions=(RECORDERS + "post_write",),
        named=r"post_write",
    ),
)


def only(option: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A test of the functions for one hook."""

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        vars(test)["only"] = option
        return test

    return mark


def cases(modules: Sequence[str] = ()) -> Iterator[Any]:
    """A contract and a dotted path, for each function: the user's own where given, else the built-ins."""
    own = {contract.option: os.environ.get(contract.variable) for contract in CONTRACTS}
    found = [pair for module in modules for pair in functions_of(module)]
    for contract in CONTRACTS:
        paths = [path for option, path in found if option == contract.option]
        if variable := own[contract.option]:
            paths.append(variable)
        for path in paths or (() if modules else contract.functions):
            yield pytest.param(contract, path, id=f"{contract.option}={path}")


def functions_of(module_name: str) -> list[tuple[str, str]]:
    """The hooks that a module defines: option and dotted path of each.

    Raises:
        pytest.UsageError: it cannot be imported, or none of its functions has the name of a hook.
    """
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise pytest.UsageError(f"--plugin-module {module_name}: {error}") from error
    names = [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module_name
    ]
    found = [
        (contract.option, f"{module_name}.{name}")
        for contract in CONTRACTS
        for name in names
        if contract.named and re.fullmatch(contract.named, name)
    ]
    if not found:
        known = "; ".join(f"{contract.option}: {contract.named}" for contract in CONTRACTS)
        raise pytest.UsageError(
            f"--plugin-module {module_name}: none of {', '.join(names) or 'its functions'} has the name of a "
            f"hook ({known}); SLIME_CONTRACT_<OPTION>=dotted.path checks one of any name"
        )
    return found
