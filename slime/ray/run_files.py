"""What the servers of a run keep apart from those of other runs on the machine: logs and ports."""

import os
import tempfile
import zlib
from pathlib import Path

import ray


def log_dir() -> Path:
    """A directory of this run on this node, named after the user and Ray's session and job."""
    return Path(tempfile.gettempdir()) / f"slime-{os.getuid()}" / _run_name()


def first_port(base: int, spread: int) -> int:
    """Where this run starts to look for free ports: ``base`` plus up to ``spread``.

    Two runs that start together would otherwise find the same port free, and the one whose server loses
    it would find the other's server healthy.
    """
    return base + zlib.crc32(_run_name().encode()) % spread


def _run_name() -> str:
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}/{context.get_job_id()}"
