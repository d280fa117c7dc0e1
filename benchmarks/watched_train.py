"""``train.py``, with seconds and memory of every call that its loop makes.

    python benchmarks/watched_train.py CALLS.jsonl --hf-checkpoint ...        (then the flags of train.py)

One line for each call of the actor and of the rollout: its name, its seconds, and the bytes in use before
and after. On a GPU these are all that is taken of the first GPU, by whatever process; elsewhere the
resident memory of the run's processes, in which pages that several of them share count several times.
"""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from slime.ray.session import main

WATCHED = {
    "actor": ("onload", "train", "offload_training_state", "update_weights", "offload"),
    "rollout": ("generate", "offload", "onload_weights", "onload_kv"),
}


def used_bytes() -> int:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)
    used = 0
    for process in psutil.Process().children(recursive=True):
        try:
            used += process.memory_info().rss
        except psutil.Error:  # it has ended since it was listed
            continue
    return used


class Watched:
    """A side of the loop whose calls are written down."""

    def __init__(self, side: Any, name: str, out: TextIO) -> None:
        self._side, self._name, self._out = side, name, out

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._side, method)
        return self._watch(method, found) if method in WATCHED[self._name] else found

    def _watch(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before, started = used_bytes(), time.monotonic()
            result = call(*args, **kwargs)
            seconds = time.monotonic() - started
            row = {
                "call": f"{self._name}.{method}",
                "seconds": seconds,
                "before": before,
                "after": used_bytes(),
            }
            self._out.write(json.dumps(row) + "\n")
            self._out.flush()
            return result

        return watched


def watched_loop(out: TextIO) -> Callable[..., None]:
    def loop(args: Namespace, actor: Any, critic: Any, rollout: Any, log: Any) -> None:
        train.train(args, Watched(actor, "actor", out), critic, Watched(rollout, "rollout", out), log)  # type: ignore[arg-type]

    return loop


if __name__ == "__main__":
    with open(sys.argv.pop(1), "w") as calls:
        main(watched_loop(calls), train.refusal, train.notes)
