"""Calls that may never return, as those of a disk that hangs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, what: str, function: Callable[[], T]) -> T:
    """Returns what ``function`` returns, or raises what it raises.

    It runs in a thread, which is left behind, and keeps no process alive, if it takes longer.

    Raises:
        TimeoutError: it has not returned after ``limit_s`` seconds; says ``what`` has not ended.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise
        raise TimeoutError(f"{what} has not ended after {limit_s:g} s") from None
