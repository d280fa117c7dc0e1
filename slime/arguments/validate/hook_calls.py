"""How hooks are called, so that a function that cannot take the call is refused before a run."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class HookCall:
    """What a hook is given.

    Attributes:
        positional: by position, under the names that the documentation has for them.
        keywords: by name, always.
        optional: by name, to a function that has a parameter for it.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def why_refused(self, function: Callable[..., Any]) -> str | None:
        """Why a function cannot be called so; None if it can, or does not tell its parameters."""
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # of a builtin
            return None
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        given = [*self.keywords, *(name for name in self.optional if kinds.get(name) in _BY_NAME)]
        try:
            signature.bind(*self.positional, **dict.fromkeys(given))
        except TypeError as error:
            return f"its parameters are {signature} (wanted: {self}; {error})"
        return None

    def __str__(self) -> str:
        return f"({', '.join([*self.positional, *(f'{name}=...' for name in self.keywords)])})"


_ROLLOUT = HookCall(("args", "rollout_id", "data_source"), ("evaluation",))
HOOK_CALLS = {
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "custom_generate_function_path": HookCall(
        ("args", "sample", "sampling_params"), optional=("evaluation",)
    ),
    "custom_rm_path": HookCall(("args", "sample")),
    "dynamic_sampling_filter_path": HookCall(("args", "group")),
    "buffer_filter_path": HookCall(("args", "rollout_id", "buffer", "num_samples")),
    "data_source_path": HookCall(("args",)),
    "rollout_sample_filter_path": HookCall(("args", "groups")),
    "rollout_all_samples_process_path": HookCall(("args", "all_groups", "get_samples")),
    "rollout_sample_hook_path": HookCall(("args", "sample"), optional=("rollout_id", "evaluation")),
    "custom_reward_post_process_path": HookCall(("args", "samples")),
    "custom_convert_samples_to_train_data_path": HookCall(("args", "samples")),
    "custom_rollout_log_function_path": HookCall(
        ("rollout_id", "args", "samples", "extra_metrics", "rollout_time")
    ),
    "custom_eval_rollout_log_function_path": HookCall(("rollout_id", "args", "data", "extra_metrics")),
}
"""Calls by the flag that names the hook; those of the trainer are not among them."""
