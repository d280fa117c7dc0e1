"""A process that compares mathematical answers, one JSON line in and one out.

Run by path, not as a module of the package: it must start without torch, ray or the HTTP stack.
Request {"gold", "answer", "limit_s"}, reply {"equal": bool} or, if the label is at fault, {"error": str}.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30


def _judge(gold: str, answer: str) -> dict[str, Any]:
    # math-verify's own limits use a Python signal handler, which cannot interrupt big-integer C code.
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_gold = parse(gold, extraction_config=config, parsing_timeout=None)
    if not parsed_gold:
        return {"error": f"the label {gold!r} is no mathematical expression"}
    try:
        parsed_answer = parse(answer, extraction_config=config, parsing_timeout=None)
        return {"equal": verify(parsed_gold, parsed_answer, timeout_seconds=None)}
    except Exception as error:  # the model wrote it: whatever breaks on it makes it wrong, not the run
        return {"equal": False, "trouble": f"{type(error).__name__}: {error}"}


def main() -> None:
    # The default action of the alarm is done by the kernel: it ends this process even inside C code,
    # and even after the parent is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It warns at every call that its own limits are off, which is on purpose.
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        try:
            reply = _judge(request["gold"], request["answer"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
