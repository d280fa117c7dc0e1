"""Random delays where threads, tasks, queues, events, locks, child processes and lines of tests meet.

Each thread draws its delays from the seed, the test, its own name and the place. Python processes that a
delayed one starts take part, by ``SLIME_RANDOM_DELAYS`` and ``startup/sitecustomize.py``, so imports are few.
"""

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

SEED = "SLIME_RANDOM_DELAYS"
STARTUP = Path(__file__).parent / "startup"
_SHARE, _HEAD_START = 0.5, 1.0
"""What delays may take of the time of a test, and seconds that they may take anyway: busy loops must end."""
_sleep, _clock = time.sleep, time.monotonic  # tests replace those of the module


class Delays:
    """How long whom to delay.

    Attributes:
        seed: what they are drawn from.
        seen: how often each kind of place was passed.
    """

    def __init__(self, seed: str) -> None:
        self.seen: Counter[str] = Counter()
        self.seed, self._forks = seed, 0
        self.start("")
        os.register_at_fork(before=self.child, after_in_child=self._after_fork)

    def start(self, name: str) -> None:
        """A test begins: its delays depend on nothing that was before it."""
        self._name, self._began, self._spent, self._children = name, _clock(), 0.0, 0
        self._local = threading.local()

    def child(self) -> str:
        """The seed of the next child process."""
        self._children += 1
        return f"{self.seed}/{self._name}/{self._children}"

    def draw(self, place: str) -> float:
        """Seconds to wait at this place: mostly none, often a few milliseconds, now and then a long time."""
        self.seen[place] += 1
        if self._spent > _HEAD_START + _SHARE * (_clock() - self._began):
            return 0.0
        dice = self._dice(place)
        chance, length = dice.random(), dice.random()
        seconds = 0.25 * length if chance < 0.02 else 0.01 * length if chance < 0.25 else 0.0
        self._spent += seconds
        return seconds

    def wait(self, place: str) -> None:
        """Waits, unless this is a place within a wait."""
        local = self._local
        if getattr(local, "waits", False):
            return
        local.waits = True
        try:
            if seconds := self.draw(place):
                _sleep(seconds)
        finally:
            local.waits = False

    def _dice(self, place: str) -> random.Random:
        """This thread's own for the place: how often others are passed depends on how fast the machine is."""
        dice = self._local.__dict__.setdefault("dice", {})
        if place not in dice:
            thread = threading.current_thread().name
            dice[place] = random.Random(f"{self.seed}/{self._name}/{thread}/{place}")
        return dice[place]

    def _after_fork(self) -> None:
        self.seed = f"{self.seed}/{self._name}/{self._children}"
        self.start("")


def install(seed: str) -> Delays:
    """Delays this process from now on, and the Python processes that it starts."""
    if (installed := getattr(threading, "random_delays", None)) is not None:
        installed.seed = seed  # a process of xdist is delayed from its start, with the seed of a child
        return installed
    from tests.plugins import delayed_places

    delays = threading.random_delays = Delays(seed)  # type: ignore[attr-defined]
    os.environ[SEED] = seed
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(STARTUP), *filter(None, paths)]))
    delayed_places.patch(delays)
    return delays
