"""The first process of a jail: it shuts itself in, then takes requests from the parent, a JSON line each."""

import base64
import json
import os
import select
import signal
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

from slime.agent.jail import kernel
from slime.agent.jail.commands import is_out_of_time, run_command
from slime.agent.jail.descendants import Descendants
from slime.agent.jail.ports import offer_ports
from slime.agent.jail.setup import Jail, enter_namespaces, shut

_CHUNK = 1 << 20
_LONGEST_ERROR = 500
_LOOK_S = 1.0
"""The pause between two looks at what runs while there is no command."""


def main() -> None:
    """Reads the configuration, says what it holds, serves until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = json.loads(_read_line())
    jail = Jail(config)
    apart = enter_namespaces(jail)
    if apart and (child := os.fork()):
        os.close(0)
        os.close(1)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    refused = offer_ports(config["channel"], config["ports"], apart) if config["ports"] else ""
    inmates = Descendants(alone=apart)
    if not apart:
        _end_with_all(inmates)
    shut(jail, apart)
    _reply({"held": jail.held, "missing": jail.missing, "workspace": jail.workspace, "no_ports": refused})
    while line := _read_line(inmates, jail):
        _reply(_serve(json.loads(line), jail, inmates))
    _end(inmates)


def _end_with_all(inmates: Descendants) -> None:
    """Ends the inmates with this process: where there is no namespace nothing else does."""
    kernel.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: _end(inmates))


def _end(inmates: Descendants) -> None:
    inmates.kill()
    os._exit(0)


def _serve(request: dict[str, Any], jail: Jail, inmates: Descendants) -> dict[str, Any]:
    try:
        if request["do"] == "write":
            path = _path(request["path"], jail)
            path.parent.mkdir(parents=True, exist_ok=True)
            with _regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
                file.write(request["content"].encode("latin-1"))
            return {}
        if request["do"] == "read":
            with _regular(_path(request["path"], jail), os.O_RDONLY, "rb") as file:
                return {"content": base64.b64encode(_whole(file, jail)).decode()}
        limits = jail.config["limits"]
        keeps = jail.config["keep_background"]
        # In a namespace nobody reaches process 1, and what another command has left is to be reached.
        request["apart"] = not keeps and "processes" not in jail.held
        reply = run_command(request, limits, jail.workspace, inmates, lambda: _end(inmates))
        if not keeps:
            inmates.kill()
        return reply
    except Exception as error:  # a path of a thousand folders for one; the sandbox outlives its requests
        return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}


def _regular(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open a file that has an end: a pipe may have nobody at its other end, and a device goes on for ever.

    Raises:
        ValueError: it is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, mode)  # type: ignore[return-value]


def _whole(file: BinaryIO, jail: Jail) -> bytes:
    most = jail.config["limits"]["file_bytes"]
    content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{file.name} has over {most} bytes (wanted: file_bytes at most)")
    return content


def _path(name: str, jail: Jail) -> Path:
    """Resolves a path.

    Where the jail has no root of its own, only what lies in its workspace, links followed.
    """
    path = Path(jail.workspace, name)
    if "files" not in jail.held and not path.resolve().is_relative_to(Path(jail.workspace).resolve()):
        raise ValueError(f"{name} lies outside of the sandbox")
    return path


def _read_line(inmates: Descendants | None = None, jail: Jail | None = None) -> bytes:
    """Nothing follows it: the parent waits for each reply. What runs meanwhile uses no more than its time."""
    line = bytearray()
    while not select.select([0], [], [], _LOOK_S if inmates and inmates.bury() else None)[0]:
        assert inmates is not None and jail is not None
        if is_out_of_time(inmates, jail.config["limits"]):
            inmates.kill()
    while chunk := os.read(0, _CHUNK):
        line += chunk
        if chunk.endswith(b"\n"):
            return bytes(line)
    return b""


def _reply(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
