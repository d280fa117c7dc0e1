"""A process that calls graders, one JSON line in and one out.

Run by path, not as a module of the package: it must start without torch, ray or the HTTP stack.
Request {"function": dotted path, "args": list or null to import it only, "limit_s", "ending_s": what the
processes of the grader may take to end}; reply {"value"}, {"label_error"} if the label is at fault,
or {"failed"} if the grader is. The reply to an import says under "missing" what this process is not shut off
from.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from slime.agent.jail.setup import confine

MEMORY_LIMIT_BYTES = 4 << 30
# No limit of processes: the kernel counts all of the user's, threads of the run included.
_LIMITS = {"memory_bytes": MEMORY_LIMIT_BYTES, "file_bytes": 64 << 20, "open_files": 256}
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


@cache
def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    own_process = os.getpid()
    try:
        function = _load(request["function"])
        value = None if request["args"] is None else function(*request["args"])
    except (Exception, SystemExit) as error:  # whatever an answer does to a grader must not end the run
        kind = "label_error" if type(error).__name__ == "LabelError" else "failed"
        return {kind: f"{type(error).__name__}: {error}"[:500]}
    finally:
        if os.getpid() != own_process:
            os._exit(0)  # a fork that came back from the grader
    stay = _has_children(request["ending_s"])
    return {"failed": "it left processes behind"} if stay else {"value": value}


def _has_children(ending_s: float) -> bool:
    """Whether a process that the grader started stays; daemons too, since they become ours."""
    deadline = time.monotonic() + ending_s
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if ended == 0 and time.monotonic() > deadline:
            return True
        if ended == 0:
            time.sleep(_POLL_S)


def _keep_the_reply_pipe() -> int:
    """Standard output becomes standard error: what a grader prints must not be taken for a reply."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def main() -> None:
    replies = _keep_the_reply_pipe()
    # The default action of the alarm is done by the kernel: it ends this process even inside C code,
    # and even after the parent is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # math-verify warns at every call that its own limits are off, which is on purpose.
    logging.disable(logging.WARNING)
    missing = _shut()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        answer = _answer(request)
        if request["args"] is None:
            answer["missing"] = missing
        reply = json.dumps(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, reply.encode() + b"\n")


def _shut() -> dict[str, str]:
    """Off from network, other processes and rare system calls; what is not held here, and why."""
    if sys.platform != "linux":
        return {"network, processes, system calls": f"held on Linux only, not on {sys.platform}"}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return confine(_LIMITS)


if __name__ == "__main__":
    main()
