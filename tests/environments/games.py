"""Environments that tests play, in threads and in processes: so this file imports nothing heavy."""

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import time

from slime.environments import Step
from slime.environments.protocol import LARGEST

HERE = __name__
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Tells what lies on a shelf.",
        "parameters": {"type": "object", "properties": {"shelf": {"type": "string"}}},
    },
}


class Guess:
    """A number is to be guessed; each wrong guess costs something."""

    def __init__(self, highest: int = 9) -> None:
        self.highest = highest

    def reset(self, task, seed):
        self.number = random.Random(seed).randint(0, self.highest)
        return f"{task['prompt']}: 0 to {self.highest}?"

    def step(self, answer):
        if answer.text == str(self.number):
            return Step(reward=1.0, done=True)
        return Step("higher" if answer.text < str(self.number) else "lower", reward=-0.125)


class SlowGuess(Guess):
    """The same, by asynchronous methods."""

    async def reset(self, task, seed):
        await asyncio.sleep(0)
        return super().reset(task, seed)

    async def step(self, answer):
        await asyncio.sleep(0)
        return super().step(answer)


class Shelves:
    """A tool tells what is on a shelf."""

    tools = (LOOK,)

    def reset(self, task, seed):
        self.heard = []
        return [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is on a?"}]

    def step(self, answer):
        self.heard.append(answer)
        if answer.calls:
            return Step({"a": "37"}.get(answer.calls[0].arguments["shelf"], "nothing"))
        return Step(reward=float(answer.text == "37"), done=True)


class Wayward:
    """Does what it is told, good or bad; ``closed`` counts episodes that were ended."""

    closed = 0

    def __init__(self, told: str = "") -> None:
        if told == "unmade":
            raise ValueError("no such board")
        self.told = told

    def reset(self, task, seed):
        if self.told:
            _MISDEEDS[self.told]()
        return "say something"

    def step(self, answer):
        wrong = _MISDEEDS.get(answer.text)
        return wrong() if wrong else Step("go on", reward=0.25)

    def close(self) -> None:
        type(self).closed += 1


def _loop() -> None:
    while True:
        time.sleep(0.01)


class LabelError(ValueError):
    """What graders raise who cannot read their label."""


def _blame_the_label() -> None:
    raise LabelError("no mathematics")


def _flood() -> None:
    """Says without an end what is no reply, where replies are said."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe = next(n for n in range(3, 64) if _is_pipe(n))
    while True:
        os.write(pipe, b" " * 4096)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _raise() -> None:
    raise ZeroDivisionError("by zero")


_MISDEEDS = {
    "loop": _loop,
    "allocate": lambda: bytearray(10 << 30),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave a child": lambda: subprocess.Popen(["sleep", "600"]) and Step("go on"),
    "raise": _raise,
    "blame the label": _blame_the_label,
    "flood": _flood,
    "exhaust": lambda: next(iter(())),
    "say nothing": lambda: None,
    "nan": lambda: Step("go on", reward=float("nan")),
    "numbers": lambda: Step(7),
    "say too much": lambda: Step("x" * (LARGEST + 1)),
    "say half a character": lambda: Step("\ud800"),
    "show": lambda: Step([{"role": "user", "content": [{"type": "image"}]}]),
    "secret": lambda: Step(str(os.environ.get("WANDB_API_KEY")), done=False),
    "print": lambda: print('{"value": {"observation": "", "reward": 99.0, "done": true}}') or Step("go on"),
}
