"""What rollout functions return, and the error that ends a rollout."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from slime.utils.types import Sample, name_samples

__all__ = [
    "GradingFailed",
    "RolloutError",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "accepted",
    "blame",
    "call_rollout_fn",
    "describe",
    "name_samples",
]


class RolloutError(RuntimeError):
    """A rollout cannot go on; the message says which function failed on which sample, or what is missing."""


class GradingFailed(RolloutError):
    """The grader hung, raised or died on an answer, of which nothing is known now.

    A reward function that raises it loses that sample, not the run: see ``slime.rollout.ungraded``.
    """


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on; a sample that was split is a list inside its group."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per eval set: ``rewards`` and ``truncated`` (one per sample) and ``samples``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap the bare list or dict that an older one returns."""
    output = fn(*args, evaluation=evaluation, **kwargs)
    if isinstance(output, RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput):
        return output
    if evaluation and isinstance(output, dict):
        return RolloutFnEvalOutput(data=output)
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(samples=output)
    wanted = "RolloutFnEvalOutput or a dict" if evaluation else "RolloutFnTrainOutput or a list"
    raise RolloutError(f"{describe(fn)} returned {type(output).__name__}, expected {wanted}")


def accepted(fn: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``keywords`` that a user's function has parameters for; all if it takes any."""
    parameters = _parameters(fn)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return dict(keywords)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in keywords.items() if name in names}


@cache
def _parameters(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Looked up once per function: it takes as long as sending a request."""
    return tuple(inspect.signature(fn).parameters.values())


async def awaited(fn: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a user's function that has to be async."""
    answer = fn(*arguments, **keywords)
    if not inspect.isawaitable(answer):
        raise TypeError(f"it returned {type(answer).__name__} at once, expected an async function")
    return await answer


def describe(fn: Callable[..., Any]) -> str:
    """The dotted path of a function, for messages."""
    return f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__name__)}"


@contextmanager
def blame(fn: Callable[..., Any], samples: Sample | list[Sample]) -> Iterator[None]:
    """Turn what a user's function raises into a RolloutError that names function and sample.

    So a cancellation that is nobody's wish but the function's own, such as one of a client that it uses.
    """
    try:
        yield
    except RolloutError:
        raise
    # Let through, an exit would end the event loop's thread, and everybody would wait for it.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise
        raise RolloutError(
            f"{describe(fn)} failed on {name_samples(samples)}: {type(error).__name__}: {error}"
        ) from error


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0
