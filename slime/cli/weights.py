"""``slime weights follow``: brings the versions that a trainer publishes to an engine of somebody else's."""

import argparse
import logging
import math
import os
import platform
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from slime.processes.exclusive import DirectoryUnusable
from slime.processes.signal_flag import SignalFlag
from slime.utils.stores import bad_url, is_url, shown
from slime.utils.types import EngineEndpoint
from slime.utils.worker_url import WANTED, worker_url
from slime.weight_sync.follower import EngineFollower, Replaced
from slime.weight_sync.presence import Taken
from slime.weight_sync.versions.board import bad_name
from slime.weight_sync.versions.home import home_of

_LONGEST, _MARK = 100, 8
"""Characters of a name, and of what tells it from others."""


class Refused(ValueError):
    """Something that was given cannot be used."""


def run(words: Sequence[str]) -> int:
    """Follows until it is told to end (SIGTERM, Ctrl-C), or another one takes its place."""
    asked = _parser().parse_args(words)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    try:
        endpoint, local = _required(asked), Path(asked.local_checkpoint_dir).absolute()
        with home_of(local) as home:
            name = asked.name or _name(asked.engine, home)
            follower = EngineFollower(asked.place, endpoint, local, name, asked.known_as, home=home)
            return _follow(asked, follower)
    except (Refused, Replaced, Taken, DirectoryUnusable, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime weights", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="follow")
    follow = commands.add_parser("follow", help="beside an engine, until it is told to end")
    follow.add_argument("place", metavar="DIR | URL", help="the trainer's --update-weight-disk-dir")
    follow.add_argument("--engine", required=True, metavar="URL", help=f"{WANTED} of the engine")
    follow.add_argument(
        "--local-checkpoint-dir",
        required=True,
        metavar="DIR",
        help="where checkpoints are made that the engine loads, by the same path; room for two",
    )
    follow.add_argument(
        "--known-as",
        metavar="URL",
        help="its URL in --rollout-external-engine-addrs, if it is another",
    )
    follow.add_argument(
        "--name", help="of this follower (default: its host, the engine's URL, and a mark of DIR)"
    )
    follow.add_argument(
        "--key-variable", metavar="NAME", help="variable of the environment with the engine's key"
    )
    follow.add_argument(
        "--poll-seconds", type=float, default=1.0, help="between two looks (default: %(default)g)"
    )
    return parser


def _required(asked: argparse.Namespace) -> EngineEndpoint:
    """The engine.

    Raises:
        Refused: a value cannot be used; names it.
    """
    if is_url(asked.place) and (reason := bad_url(asked.place)):
        raise Refused(f"{shown(asked.place)}: {reason}")
    for flag, url in (("--engine", asked.engine), ("--known-as", asked.known_as)):
        if url is not None and worker_url(url) is None:
            raise Refused(f"{flag}: is no address of an engine (wanted: {WANTED})")
    if not 0 < asked.poll_seconds < math.inf:
        raise Refused(f"--poll-seconds {asked.poll_seconds:g} (wanted: above 0)")
    if asked.name is not None and (reason := bad_name(asked.name)):
        raise Refused(f"--name {reason}")
    local = Path(asked.local_checkpoint_dir).absolute()
    if not is_url(asked.place) and Path(asked.place).resolve() == local.resolve():
        raise Refused(f"--local-checkpoint-dir {local}: is the trainer's, whose versions it would remove")
    return EngineEndpoint(asked.engine.rstrip("/"), _key(asked.key_variable), 1, None)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise Refused(f"--key-variable {variable}: not set (wanted: export {variable}=KEY)")
    return key


def _name(engine: str, home: str) -> str:
    """Gives it the same name when it is started anew, and another one than those of hosts called the same."""
    name = re.sub(r"[^A-Za-z0-9.-]", "-", f"{platform.node() or 'host'}-{urlsplit(engine).netloc}")
    return f"{name.lstrip('.-')[-_LONGEST:]}-{home[:_MARK]}".lstrip(".-")


def _follow(asked: argparse.Namespace, follower: EngineFollower) -> int:
    ended = SignalFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())  # a step that has begun goes on to its end
    with follower:
        print(f"following {asked.place} for {asked.engine}", flush=True)
        while not ended.is_set():
            brought = follower.step()
            if brought is not None:
                print(f"version {brought.version} is served", flush=True)
            ended.wait(asked.poll_seconds)
    return 0
