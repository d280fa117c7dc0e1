"""An environment in a process of its own: a function of JSON, which that process is asked to call.

It plays one episode at a time. See `slime.rollout.environment_hosts` for who asks.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from slime.environments.protocol import Answer, Environment, checked_step, messages_of, tools_of
from slime.utils.misc import load_function

ACT = f"{__name__}.act"
_METHODS = ("reset", "step", "close")
_playing: dict[str, Environment] = {}


def act(name: str, *args: Any) -> Any:
    """Calls one of the functions below: one path, so that all is there once an episode has begun."""
    functions: dict[str, Callable[..., Any]] = {"begin": begin, "step": step, "end": end}
    return functions[name](*args)


def begin(path: str, options: Mapping[str, Any], task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Begins an episode of the class at a dotted path.

    Returns:
        ``messages`` and ``tools``; or under ``unmade`` why there is no such environment, whatever the task.
    """
    try:
        environment = load_function(path)(**options)
    except Exception as error:  # a constructor of the user's, which may raise anything
        return {"unmade": f"{type(error).__name__}: {error}"}
    deferred = [name for name in _METHODS if inspect.iscoroutinefunction(getattr(environment, name, None))]
    if deferred:
        return {"unmade": f"{deferred[0]} is asynchronous (wanted: plain methods, or no process of its own)"}
    _playing["episode"] = environment
    observation: Any = environment.reset(task, seed)
    return {"messages": messages_of(observation), "tools": tools_of(environment)}


def step(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What comes of a turn of the model."""
    return asdict(checked_step(_playing["episode"].step(Answer.from_dict(answer))))


def end() -> None:
    """Ends the episode, if there is one."""
    close = getattr(_playing.pop("episode", None), "close", None)
    if close is not None:
        close()
