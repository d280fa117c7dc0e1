"""``slime dashboard``: what runs do and did, in a browser."""

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
from slime.cli.run_dir import Record, control_places, max_staleness, metrics_file, read_record
from slime.dashboard.engines import Engines
from slime.dashboard.recordings import Recordings
from slime.dashboard.run import Run
from slime.dashboard.server import dashboard
from slime.dashboard.token_texts import TokenTexts
from slime.dashboard.trace import TraceFile
from slime.processes.private import write_private
from slime.utils.addresses import http_url

_PORT = 8899


def run(words: Sequence[str]) -> int:
    """Serves the page until it is interrupted."""
    parser = argparse.ArgumentParser("slime dashboard", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="directories of runs, or files of metrics")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--address-file", help="write the address there, for its owner alone, instead")
    asked = parser.parse_args(words)
    try:
        runs = runs_of(asked.runs)
        listener = _listener(asked.host, asked.port)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    key = secrets.token_urlsafe(16)
    address = f"{http_url(asked.host, listener.getsockname()[1])}/{key}/"
    if asked.address_file:
        write_private(Path(asked.address_file), f"{address}\n")
    else:
        print(f"{address}\nwhoever has this address sees the runs; end with Ctrl-C", flush=True)
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
        _run(path.name if counts[path.name] == 1 else _with_its_parent(place, path), place)
        for path, place in reversed(found.items())
    ]


def _run(name: str, place: str) -> Run:
    """A run by its record, if it has one; else by where files are as a rule."""
    record = _record_of(place)
    trained = _templates(place, record, "save_debug_train_data", "train_data")
    rollouts = _templates(place, record, "save_debug_rollout_data", "rollout_data")
    tokenizer = _named(record, "hf_checkpoint")
    texts = TokenTexts(Path(tokenizer) / "tokenizer.json" if tokenizer else None)
    return Run(
        name,
        _metrics_of(place, record),
        max_staleness(record),
        Recordings(rollouts, trained, texts),
        TraceFile(Path(_named(record, "trace") or Path(place) / "trace.json")),
        Engines(control_places(place, record)),
    )


def _record_of(place: str) -> Record | None:
    """The record in a run's directory; None of a run of another version, of somebody else, or of a file."""
    with suppress(UsageError):
        return read_record(place) if Path(place).is_dir() else None
    return None


def _named(record: Record | None, flag: str) -> str | None:
    """The place that a flag of the run names, against the directory in which it was started."""
    named = record.flags.get(flag) if record else None
    return None if not named else str(((record and record.started_in) or Path()) / str(named))


def _templates(place: str, record: Record | None, flag: str, folder: str) -> tuple[str, ...]:
    """Where recordings may be: as the run was told, or in its directory, where they may have been put."""
    name = f"{folder}/{{rollout_id}}.pt"
    dumped = _named(record, "dump_details")
    found = (_named(record, flag), dumped and f"{dumped}/{name}", f"{place}/{name}")
    return tuple(template for template in found if template)


def _with_its_parent(place: str, path: Path) -> str:
    """A name that is no last part of another: a link may have any."""
    return place if "/" in place else str(path)


def _metrics_of(place: str, record: Record | None) -> Path:
    """The file of metrics, which a run that has just begun has not written yet."""
    with suppress(UsageError):
        if record:
            return metrics_file(place, record)
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
