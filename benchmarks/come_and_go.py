"""Has engines of a run join and leave at random moments, as somebody with ``slime engines`` would."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.cli.engines import run as ask
from slime.config.engines import CONTROL_FILE

_PAUSE_S = 2.0, 8.0
"""The least and the most seconds between two requests."""
_RANKS = 4


@contextmanager
def coming_and_going(directory: Path, seed: int) -> Iterator[Counter[str]]:
    """Asks during the block, and yields how often each was done: add, drain, notice; and what was refused.

    Args:
        directory: of a run with up to four places for engines; it may start later, and again and again.
    """
    done, over = Counter[str](), threading.Event()
    arguments = directory, random.Random(seed), done, over
    thread = threading.Thread(target=_come_and_go, args=arguments, name="come-and-go", daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def _come_and_go(directory: Path, rng: random.Random, done: Counter[str], over: threading.Event) -> None:
    while not over.wait(rng.uniform(*_PAUSE_S)):
        what = rng.choice(("add", "add", "drain", "notice"))
        words = [str(directory)]
        if what != "add":
            words += [str(rng.randrange(_RANKS)), "--seconds", "5"]
        if what == "notice":
            words += ["--notice", "20"]
        if (directory / CONTROL_FILE).exists():
            refused = ask(["add" if what == "add" else "drain", *words])
            done["refused" if refused else what] += 1
