"""Notes when the parts of a start were done, for ``benchmarks/startup.py``.

    SLIME_STARTUP_TIMES=times.jsonl python train.py ...

Every process of a local run appends ``{"part": ..., "time": seconds since the epoch}``.
"""

import json
import os
import time

TIMES_FILE = "SLIME_STARTUP_TIMES"


def reached(part: str) -> None:
    """Notes that this part of the start is done, if somebody wants to know."""
    if path := os.environ.get(TIMES_FILE):
        row = json.dumps({"part": part, "time": time.time()}) + "\n"
        with open(path, "a", encoding="utf-8") as file:  # one write, which other processes cannot split
            file.write(row)
