"""Prompts are rendered and counted in a process of their own: the driver need not import transformers.

    with tokenizer_process():
        length = ask(function, *arguments)  # None: find out in this process

Without torch, for which transformers looks and which no tokenizer of its own needs, that process starts in
half the time. What it cannot do is done again by whoever asked, so that each error is what it would be there.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

T = TypeVar("T")

_running: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def tokenizer_process() -> Iterator[None]:
    """Starts it, and ends it on exit. Where torch is imported anyway there is none."""
    if "torch" in sys.modules:
        yield
        return
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    env = os.environ | {"PYTHONPATH": path, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    _running.append(process)
    try:
        yield
    finally:
        _running.remove(process)
        process.kill()
        process.communicate()


def ask(function: Callable[..., T], *arguments: Any) -> T | None:
    """What ``function`` returns there; None if it fails, or nobody is there to be asked."""
    if not _running:
        return None
    process = _running[-1]
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump((function, arguments), process.stdin)
        process.stdin.flush()
        answer: T | None = pickle.load(process.stdout)  # noqa: S301 - of a process of ours
    except (OSError, EOFError):  # it has ended
        return None
    return answer


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        try:
            function, arguments = pickle.load(requests)  # noqa: S301 - of the process that started this one
        except EOFError:
            return
        try:
            answer = function(*arguments)
        except Exception:  # whoever asked finds it again, and tells it
            answer = None
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # nobody waits for it any more
            return


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's affair
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints is no answer
    sys.modules["torch"] = None  # type: ignore[assignment]
    from slime.utils import processing_utils  # noqa: F401 - while the driver looks at other flags

    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
