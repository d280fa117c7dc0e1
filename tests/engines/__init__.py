"""Engines for tests: a scriptable one without a model, and real embedded ones over tiny checkpoints."""

import random

from slime.utils.http_utils import find_available_port


def free_port() -> int:
    """A free port that another test session on this machine is unlikely to choose too."""
    return find_available_port(random.randrange(20000, 30000))
