"""``--dashboard``: the page of a run, beside it and for as long as it lasts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.config.run import RunConfig
from slime.observability.tracking import metrics_path
from slime.processes.child import ManagedProcess

ADDRESS, LOG = "dashboard.url", "dashboard.log"
"""Files beside that of the metrics; the first holds the key, and only its owner reads it."""


@contextmanager
def run_page(config: RunConfig) -> Iterator[None]:
    """Serves the page during the block, if the flag asks for it. The run does not depend on it."""
    if not config.tracking.dashboard:
        yield
        return
    metrics = metrics_path(config)
    address = metrics.with_name(ADDRESS)
    address.unlink(missing_ok=True)  # of a run that was killed
    command, log = _command(config, metrics, address), metrics.with_name(LOG)
    with ManagedProcess(command, name="dashboard", log_path=log):
        print(f"the run in a browser: its address is in {address}", flush=True)
        try:
            yield
        finally:
            address.unlink(missing_ok=True)


def _command(config: RunConfig, metrics: Path, address: Path) -> list[str]:
    """A command line without the key, which others on this machine would see."""
    place = config.checkpoints.save or str(metrics)
    command = [sys.executable, "-m", "slime.cli", "dashboard", place, "--port", "0"]
    return [*command, "--address-file", str(address)]
