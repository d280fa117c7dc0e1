"""The name by which engines and directories know the ranks that give them weights.

A trainer that was stopped or cut off may come back when another one has taken its place. What it still sends
is known by this name.
"""

import os
import platform
import uuid

HEADER = "X-Weights-Writer"
"""The header of a request in which a trainer says who it is; SGLang does not look at it."""


def new_writer() -> str:
    """A name that nobody had before: where the process is, and something random."""
    host = platform.node().encode("ascii", "replace").decode() or "localhost"
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def replaced(writer: str, by: str) -> str:
    """What is wrong with what ``writer`` sends."""
    return f"{writer} sends weights no more: {by} has taken its place (wanted: one trainer at a time)"
