"""Small helpers without a better home."""

import gc
import importlib
import math
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # the loops import this file before they answer signals
    import numpy as np


class Box:
    """Keeps an object reference from being replaced by its object where Ray sees it among arguments."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the name of a file into errors of writing to it: those of a descriptor have none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class SingletonMeta(type):
    """Metaclass of classes that have one instance per process: every call after the first returns it.

    The arguments of later calls are not looked at.
    """

    _instances: ClassVar[dict[type, Any]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear(cls) -> None:
        """Forget the instance, so that the next call makes one from its own arguments."""
        SingletonMeta._instances.pop(cls, None)

    @staticmethod
    def clear_all_instances() -> None:
        SingletonMeta._instances.clear()


@cache
def load_function(path: str) -> Callable[..., Any]:
    """The attribute that a dotted path ``package.module.name`` points to.

    Raises:
        ValueError: the path has no dot, its module cannot be found, or the module lacks the name.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"dotted path {path!r}: expected package.module.name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"dotted path {path!r}: cannot import {module_name!r} ({error})") from error
    if not hasattr(module, name):
        raise ValueError(f"dotted path {path!r}: module {module_name!r} has no attribute {name!r}")
    return getattr(module, name)


def decode_int32_meta_array(meta_info: Mapping[str, Any], keys: str | Iterable[str]) -> "np.ndarray | None":
    """The flat int32 array under the first of ``keys`` that an engine's ``meta_info`` has; None without."""
    for key in (keys,) if isinstance(keys, str) else keys:
        if meta_info.get(key) is not None:
            from slime.utils.engine_meta import decode_int32_array

            return decode_int32_array(meta_info[key])
    return None


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Runs a command line with bash, and returns what it printed if told to capture it.

    Raises:
        subprocess.CalledProcessError: it ended with another status than 0.
    """
    print(f"$ {cmd}", flush=True)
    done = subprocess.run(["bash", "-c", cmd], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


def spare_collector() -> None:
    """Lets the garbage collector look less often, and never again at what there is now: modules mostly.

    For a process that makes samples by the thousand: they are many small objects that live long, and Python
    would look through all of them and all modules again and again, for a third of the CPU time of a rollout.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number, be it one of numpy's or torch's, that is neither NaN nor infinite."""
    if isinstance(value, str | bytes):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def plain_number(value: Any) -> Any:
    """A scalar of numpy or torch as a number of Python; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action with this interval is due after ``rollout_id``.

    It is due every ``interval`` rollouts, at the end of an epoch and after the last rollout.
    """
    if interval is None:
        return False
    step = rollout_id + 1
    if num_rollout is not None and step == num_rollout:
        return True
    return step % interval == 0 or (num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0)
