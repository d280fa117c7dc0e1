"""Where the servers of a run keep their logs."""

import tempfile
from pathlib import Path

import ray


def log_dir() -> Path:
    """A directory of this run on this node, named after Ray's session and job."""
    context = ray.get_runtime_context()
    return Path(tempfile.gettempdir()) / "slime" / context.get_session_name() / context.get_job_id()
