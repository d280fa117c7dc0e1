"""The processes of a run on this machine, and the role that each plays."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from slime.processes.reaper import Known, living, read_processes

MARK = "SLIME_CHAOS"
"""The environment of what a disturbed run starts has this variable."""

ROLES: Mapping[str, Callable[[str], bool]] = {
    "engine": lambda command: (
        "slime.backends.embedded_engine" in command or command.startswith("sglang::scheduler")
    ),
    "router": lambda command: command.startswith("sglang::router") or " -m slime.router " in command,
    "trainer rank": lambda command: command.startswith("ray::TrainRayActor"),
    "standby": lambda command: command.startswith("ray::StandbyRank"),
    "rollout manager": lambda command: command.startswith("ray::RolloutManager"),
    "engine actor": lambda command: command.startswith("ray::EngineActor"),
    "raylet": lambda command: "raylet/raylet" in command.partition(" ")[0],
    "gcs": lambda command: "gcs/gcs_server" in command.partition(" ")[0],
}
"""Who may be struck, beside the driver: by the command line. A standby may have become a rank by now."""
DRIVER = "driver"
# What takes others down with the run: without it nothing that is left could be blamed on the run.
_GUARDS = ("slime/processes/supervisor.py", "slime/processes/reaper.py")


class RunProcesses:
    """The living processes of one run: what descends from its supervisor, or carries its mark.

    Neither alone finds all: daemons leave their parent, and some programs write their title over their
    environment.
    """

    def __init__(self, supervisor: int, mark: str) -> None:
        """
        Args:
            supervisor: process id of ``slime train --supervise``.
            mark: value of `MARK` in its environment.
        """
        self._supervisor, self._mark = supervisor, mark
        self._known: Known = {}
        self.seen: set[int] = set()

    def look(self) -> set[int]:
        """Process ids of all that live now, without the supervisor; to be called often, as daemons leave."""
        self._known = living(self._known, self._supervisor)
        self._known.pop(self._supervisor, None)
        self.seen |= self._known.keys()
        return set(self._known)

    def look_everywhere(self) -> set[int]:
        """Looks at the environment of all other processes too."""
        own = {os.getpid(), self._supervisor}
        marked = {pid for pid in read_processes() if pid not in own and self._is_marked(pid)}
        self.seen |= marked
        return self.look() | marked

    def roles(self) -> dict[str, list[int]]:
        """Process ids by role; a role that nobody plays at the moment is left out."""
        found: dict[str, list[int]] = {}
        for pid in sorted(self.look_everywhere()):
            if (role := self._role(pid)) is not None:
                found.setdefault(role, []).append(pid)
        return found

    def _role(self, pid: int) -> str | None:
        try:
            if psutil.Process(pid).ppid() == self._supervisor:
                # Between fork and exec it is no driver yet, and its supervisor waits for it without a look.
                return DRIVER if command_line(pid) != command_line(self._supervisor) else None
        except psutil.Error:
            return None
        command = command_line(pid)
        if any(guard in command for guard in _GUARDS):
            return None
        return next((role for role, plays in ROLES.items() if plays(command)), None)

    def _is_marked(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def command_line(pid: int) -> str:
    """Its words with blanks between them; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
