"""``--rollout-sample-hook-path``: user functions that see each sample once it is generated."""

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from slime.config.rollout import RolloutConfig
from slime.rollout.base_types import RolloutError, accepted, blame, describe
from slime.utils.misc import load_function
from slime.utils.types import Sample

_current_rollout_id: ContextVar[int | None] = ContextVar("current_rollout_id", default=None)


def set_current_rollout_id(rollout_id: int) -> None:
    """Name the rollout that tasks started from here belong to."""
    _current_rollout_id.set(rollout_id)


class NoSampleError(RolloutError, TypeError):
    """A hook has returned something else than a sample."""


async def apply_rollout_sample_hooks(args: RolloutConfig, value: Any, **offered: Any) -> Any:
    """Run all hooks in order on a sample, or on each in a (nested) list of samples, keeping the nesting.

    A hook is ``f(args, sample, *, rollout_id, evaluation)``, plain or async, of which it may leave out
    either keyword; it returns the sample to go on with, or None if it changed the one it got.

    Args:
        offered: keywords for hooks that take them, beside the two.
    """
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **offered) for item in value]
    for path in args.rollout_sample_hook_path or ():
        value = await _apply(path, args, value, offered)
    return value


async def _apply(path: str, args: RolloutConfig, sample: Sample, more: Mapping[str, Any]) -> Sample:
    hook = load_function(path)
    with blame(hook, sample):
        offered = {"rollout_id": _current_rollout_id.get(), "evaluation": False, **more}
        result = hook(args, sample, **accepted(hook, offered))
        if inspect.isawaitable(result):
            result = await result
    if result is None:
        return sample
    if not isinstance(result, Sample):
        raise NoSampleError(f"{describe(hook)} returned {type(result).__name__}, expected a Sample or None")
    return result
