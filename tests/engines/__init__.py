"""Engines for tests: a scriptable one without a model, and real embedded ones over tiny checkpoints."""

import os
import random
from functools import cache

from slime.utils.http_utils import is_port_available

_FIRST, _COUNT = 30_100, 2_600
"""Above what runs choose for their engines and routers, which listen long after they have looked whether a
port is free, and below the kernel's range for outgoing connections."""


@cache
def _of_this_process() -> list[int]:
    """Ports that no other test process of this session chooses from, the next one last.

    Where they begin is left to the system's chance: a seed would be that of another session too.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(_FIRST + worker, _FIRST + _COUNT, workers))
    start = random.SystemRandom().randrange(len(ports))
    return ports[start:] + ports[:start]


def free_port() -> int:
    """A free port, which is given out again only after all the others.

    Whoever is to listen there may take a while, and another test process must not choose it meanwhile.
    """
    ports = _of_this_process()
    while True:
        port = ports.pop()
        ports.insert(0, port)
        if is_port_available(port):
            return port
