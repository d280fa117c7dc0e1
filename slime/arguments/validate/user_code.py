"""Dotted paths of the user's code: whether what they name can be called, and takes the call of its flag."""

import inspect
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.arguments.core.flag import Flag
from slime.arguments.validate.user_imports import missing_imports
from slime.utils.misc import load_function

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
    "custom_update_weight_post_write_path": HookCall(("args", "version_dir", "rollout_engines")),
}
"""Calls by the flag that names the hook; those for models and batches are not among them."""


def unusable_code(args: Namespace, specs: Iterable[Flag], shipped: Collection[str] = ()) -> Iterator[str]:
    """The dotted paths among these flags that name nothing to call.

    Args:
        shipped: paths of our own that need no look: the defaults, which take seconds to import.
    """
    for spec in specs:
        if not spec.dotted_path:
            continue
        value = getattr(args, spec.dest)
        if spec.dest == "eval_function_path" and value == getattr(args, "rollout_function_path", None):
            continue  # of which the same would be said
        for path in value if isinstance(value, list) else [value]:
            if path is None or path in shipped:
                continue
            if reason := why_unusable(path, spec.dest, spec.awaited):
                yield f"{spec.names[0]} {path}: {reason}"


def why_unusable(path: str, hook: str = "", awaited: bool = True) -> str | None:
    """Why the object at a dotted path cannot be called, or would fail when it is; None if it can.

    Args:
        hook: the flag or the field that names it.
        awaited: whether the caller awaits what it returns. Where nobody does, the body of an asynchronous
            function would never run, and what it returns be taken for a true value.
    """
    if path.endswith(".py") or "/" in path or ":" in path:
        return "is not a dotted path (wanted: package.module.name, and the package's folder on PYTHONPATH)"
    try:
        found = load_function(path)
    except Exception as error:  # importing a user's module runs the user's code, which may raise anything
        text = str(error).removeprefix(f"dotted path {path!r}: ")
        return text if isinstance(error, ValueError) else f"its import fails: {type(error).__name__}: {text}"
    if not callable(found):
        return f"is {type(found).__name__} (wanted: something to call)"
    if hook in HOOK_CALLS and (reason := HOOK_CALLS[hook].why_refused(found)):
        return reason
    if not awaited and _is_deferred(found):
        return "runs only when it is awaited or iterated, and nobody does (wanted: a plain function)"
    return "; ".join(missing_imports(path.rpartition(".")[0])) or None


def _is_deferred(found: Any) -> bool:
    """Whether a call of it makes a coroutine or a generator, and runs nothing."""
    functions = (found, vars(type(found)).get("__call__"))
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds for function in functions)
