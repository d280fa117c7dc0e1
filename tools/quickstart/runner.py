"""Runs one phase as a child process and shows how far it is."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from slime.processes.child import ManagedProcess
from tools.quickstart.phases import Phase

POLL_SECONDS = 0.5
# Ray, the engine and the trainer stop one after the other.
GRACE_SECONDS = 40.0


class PhaseFailed(RuntimeError):
    """A phase's process did not succeed; the message holds its cause and its log file."""


def run_phase(phase: Phase, log: Path, env: Mapping[str, str], console: Console) -> float:
    """Run ``phase`` to its end and return its wall seconds.

    Raises:
        PhaseFailed: its exit status is not 0.
    """
    start = time.monotonic()
    # It gets no Ctrl-C from the terminal, being in a session of its own; it is told to stop by us, once.
    child = ManagedProcess(phase.command, name=phase.name, log_path=log, env=env)
    try:
        _watch(phase, child, console)
    finally:
        child.terminate(GRACE_SECONDS)
    if status := child.wait():
        raise PhaseFailed(_describe_failure(phase, status, child))
    return time.monotonic() - start


def _watch(phase: Phase, child: ManagedProcess, console: Console) -> None:
    """Draw a bar and print each line once. Where no bar can be drawn, print some of the lines only."""
    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if phase.total:
        columns[2:2] = [BarColumn(bar_width=30), MofNCompleteColumn()]
    shown = 0
    if not console.is_terminal:
        console.print(phase.title)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(phase.title, total=phase.total or None)
        running = True
        while running:
            running = _still_running(child)
            progress = phase.progress()
            for number, line in enumerate(progress.lines[shown:], start=shown + 1):
                if number % phase.every == 0:
                    console.print(f"  {line}", highlight=False)
            shown = max(shown, len(progress.lines))
            bar.update(task, completed=progress.done)


def _still_running(child: ManagedProcess) -> bool:
    try:
        child.wait(POLL_SECONDS)
    except TimeoutError:
        return True
    return False


def _describe_failure(phase: Phase, status: int, child: ManagedProcess) -> str:
    cause = child.log_tail(1).strip() or "it said nothing"
    return f"{phase.name} failed with exit status {status} (log: {child.log_path}): {cause}"
