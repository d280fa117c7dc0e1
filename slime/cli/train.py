"""``slime train``: what ``train.py`` does or, with ``--async``, ``train_async.py``."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module


def run(words: Sequence[str]) -> int:
    """Starts the run; the process ends with it."""
    from slime.arguments.core.config_files import expand
    from slime.cli.supervision import supervise, wants_supervisor
    from slime.ray.session import main

    find_code_here()
    if wants_supervisor(words) and (status := supervise(words)) is not None:
        return status
    kind = "asynchronous" if "--async" in expand(words).words else "synchronous"
    loop = import_module(f"slime.ray.{kind}")
    main(loop.train, loop.refusal, loop.notes, list(words))
    return 0


def find_code_here() -> None:
    """Lets this process and its children find modules in the working directory, after all others."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, here])
