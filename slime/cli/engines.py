"""``slime engines``: looks at the engines of a run that goes on, and has some leave it, or others join."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.arguments.core.errors import UsageError
from slime.cli.run_dir import control_places
from slime.config.engines import CONTROL_FILE
from slime.utils.run_control import Refused, RunControl, control_file
from slime.utils.terminal import escaped

_ANSWER_TIMEOUT_S = 90.0
_LOOK_AGAIN_S = 0.5
_FREE, _SERVING = "free", "serving"
_COLUMNS = (
    *("engine", "model", "state", "since", "health", "weights"),
    *("running", "waiting", "tokens/s", "address"),
)


def run(words: Sequence[str]) -> int:
    """Asks the run, and tells what it says."""
    asked = _parser().parse_args(words)
    try:
        status: int = asked.do(asked)
    except (Refused, UsageError) as error:
        print(f"error: {escaped(str(error))}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime engines", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="list | drain | add")
    listing = commands.add_parser("list", help="the engines, what each does, and places that are free")
    listing.add_argument("run", metavar="RUN_DIR")
    listing.add_argument("--json", action="store_true", help="an object for each")
    listing.set_defaults(do=_list)
    drain = commands.add_parser("drain", help="has engines leave the run, and frees their GPUs")
    drain.add_argument("run", metavar="RUN_DIR")
    drain.add_argument("engines", nargs="*", type=int, metavar="ENGINE", help="numbers, as list has them")
    drain.add_argument("--host", help="in the place of numbers: all engines with this host in their address")
    drain.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="that each has for its requests, until the next weight update (default: %(default)g)",
    )
    drain.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="until their places are taken away: they have left before, and none starts there meanwhile",
    )
    drain.add_argument("--wait", type=float, metavar="SECONDS", help="wait so long for them to have left")
    drain.set_defaults(do=_drain)
    add = commands.add_parser("add", help="has more engines join the run, on places that are free")
    add.add_argument("run", metavar="RUN_DIR")
    add.add_argument("count", nargs="?", type=int, default=1, metavar="N", help="how many (default: 1)")
    add.add_argument("--model", default="", help="of which served model (default: the first)")
    add.add_argument("--wait", type=float, metavar="SECONDS", help="wait so long for them to serve")
    add.set_defaults(do=_add)
    return parser


def _list(asked: argparse.Namespace) -> int:
    rows = _Run(asked.run).engines()
    if asked.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    lines = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row["failure"]:
            print(f"engine {row['rank']} failed at {_clock(row['failed'])}: {escaped(row['failure'])}")
    return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kind = "" if row["kind"] == "regular" else row["kind"]
    state, health = row["state"] + (f" ({kind})" if kind else ""), row["health"]
    counts = (_number(row[name]) for name in ("running", "waiting", "tokens_per_second"))
    texts = (str(row["rank"]), row["model"], state, _clock(row["since"]), health, row["version"])
    return tuple(map(escaped, (*texts, *counts, row["url"])))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _clock(at: float) -> str:
    """A time of today, or with its day."""
    when, today = datetime.fromtimestamp(at), datetime.now()
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%Y-%m-%d %H:%M:%S")


def _drain(asked: argparse.Namespace) -> int:
    of_run = _Run(asked.run)
    ranks = _ranks(asked, of_run)
    names = ", ".join(map(str, ranks))
    body = {"engines": ranks, "seconds": asked.seconds, "notice": asked.notice}
    of_run.ask("POST", "/engines/drain", body)
    print(f"leaving: {names}", flush=True)
    if asked.wait is None:
        return 0
    deadline = time.monotonic() + asked.wait
    while left := [rank for rank in ranks if not of_run.states().get(rank, _FREE).startswith(_FREE)]:
        if time.monotonic() > deadline:
            raise Refused(f"not gone after {asked.wait:g} s: {', '.join(map(str, left))}")
        time.sleep(_LOOK_AGAIN_S)
    print(f"gone: {names}")
    return 0


def _ranks(asked: argparse.Namespace, of_run: "_Run") -> list[int]:
    """The numbers that were given, or those of the engines of a host."""
    if bool(asked.engines) == bool(asked.host):
        raise Refused("wanted: numbers of engines, or --host")
    if asked.engines:
        return list(asked.engines)
    hosts = {row["rank"]: urlsplit(row["url"]).hostname for row in of_run.engines() if row["url"]}
    if found := [rank for rank, host in hosts.items() if host == asked.host]:
        return found
    known = ", ".join(sorted({str(host) for host in hosts.values()}))
    raise Refused(f"--host {asked.host}: no engine is there (wanted: one of {known})")


def _add(asked: argparse.Namespace) -> int:
    of_run = _Run(asked.run)
    told = of_run.ask("POST", "/engines/add", {"count": asked.count, "model": asked.model})
    ranks, names = told["engines"], ", ".join(map(str, told["engines"]))
    print(f"starting: {names}", flush=True)
    if asked.wait is None:
        return 0
    deadline = time.monotonic() + asked.wait
    while late := [rank for rank in ranks if (states := of_run.states()).get(rank) != _SERVING]:
        if lost := [rank for rank in late if states.get(rank) == _FREE]:
            raise Refused(f"ended while they started: {', '.join(map(str, lost))}; the run's log says how")
        if time.monotonic() > deadline:
            raise Refused(f"not serving after {asked.wait:g} s: {', '.join(map(str, late))}")
        time.sleep(_LOOK_AGAIN_S)
    print(f"serving: {names}")
    return 0


class _Run:
    """A run that goes on, as its directory tells how to reach it.

    Raises:
        Refused: there is none.
    """

    def __init__(self, place: str) -> None:
        self._control = RunControl(_address_file(place), place, _ANSWER_TIMEOUT_S)

    def engines(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask("GET", "/engines")["engines"]
        return rows

    def states(self) -> dict[int, str]:
        """What each engine does, by number; places that are free too."""
        return {row["rank"]: row["state"] for row in self.engines()}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        Raises:
            Refused: with what the run says, or because it does not answer.
        """
        return self._control.ask(method, path, body)


def _address_file(place: str) -> Path:
    """The file in the directory itself, or in that of the checkpoints, where the run's record names another.

    Raises:
        Refused: it is not there.
    """
    if (file := control_file(control_places(place))) is None:
        raise Refused(f"{place}: has no {CONTROL_FILE} (wanted: the directory of a run that goes on)")
    return file
