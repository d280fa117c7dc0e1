"""``slime train``: what ``train.py`` does or, with ``--async``, ``train_async.py``."""

from collections.abc import Sequence
from importlib import import_module

ASYNC = "--async"


def run(words: Sequence[str]) -> int:
    """Starts the run; the process ends with it."""
    from slime.ray.session import main

    kind = "asynchronous" if ASYNC in words else "synchronous"
    loop = import_module(f"slime.ray.{kind}")
    main(loop.train, loop.refusal, loop.notes, [word for word in words if word != ASYNC])
    return 0
