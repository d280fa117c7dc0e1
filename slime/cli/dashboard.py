"""``slime dashboard``: curves of runs in a browser."""

import argparse
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from slime.arguments.core.errors import UsageError
from slime.cli.run_dir import metrics_file, read_record
from slime.dashboard.server import Run, dashboard
from slime.utils.addresses import http_url

_PORT = 8899


def run(words: Sequence[str]) -> int:
    """Serves the page until it is interrupted."""
    parser = argparse.ArgumentParser("slime dashboard", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="directories of runs, or files of metrics")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=_PORT, help="0 takes a free one (default: %(default)s)")
    asked = parser.parse_args(words)
    try:
        runs = runs_of(asked.runs)
        listener = _listener(asked.host, asked.port)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    key = secrets.token_urlsafe(16)
    print(f"{http_url(asked.host, listener.getsockname()[1])}/{key}/", flush=True)
    print("whoever has this address sees the runs; end with Ctrl-C", flush=True)
    config = uvicorn.Config(dashboard(runs, key, asked.host), log_level="warning", access_log=False)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def runs_of(places: Sequence[str]) -> list[Run]:
    """Returns a run for each directory or file, named by its last part where that tells them apart.

    Raises:
        FileNotFoundError: one is not there.
    """
    if missing := [place for place in places if not Path(place).exists()]:
        raise FileNotFoundError(f"{missing[0]}: not there (wanted: the directory of a run)")
    found = {Path(place).resolve(): place for place in reversed(places)}  # one that is given twice is one
    counts = Counter(path.name for path in found)
    return [
        Run(path.name if counts[path.name] == 1 else _with_its_parent(place, path), _metrics_of(place))
        for path, place in reversed(found.items())
    ]


def _with_its_parent(place: str, path: Path) -> str:
    """A name that is no last part of another: a link may have any."""
    return place if "/" in place else str(path)


def _metrics_of(place: str) -> Path:
    """The file of metrics, which a run that has just begun has not written yet."""
    with suppress(UsageError):  # no record in it: of another version, or of somebody else
        if Path(place).is_dir():
            return metrics_file(place, read_record(place))
    return Path(place) / "metrics.jsonl" if Path(place).is_dir() else Path(place)


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        OSError: with the address, as where the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"--host {host} --port {port}: {why} (wanted: a free one, as --port 0)") from error
