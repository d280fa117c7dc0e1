"""By what ``slime engines`` reaches a run: a server of the driver on loopback, whose key its file has.

GET /engines                                        the engines, what they hold, and places that are free
POST /engines/drain {"engines": [1], "seconds": 60} has them leave; "notice": seconds left
POST /engines/add   {"count": 1, "model": ""}       has others join, and tells their numbers
"""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from slime.config.engines import CONTROL_FILE, LAST_ENGINES
from slime.config.limits import MAX_SECONDS
from slime.config.run import RunConfig
from slime.processes.private import write_private
from slime.ray.ending import cause
from slime.ray.engine import MembershipError
from slime.ray.engine_loads import with_loads
from slime.ray.engine_record import recording
from slime.ray.engine_rows import EngineRow
from slime.ray.rollout_group import RolloutGroup
from slime.utils.addresses import http_url
from slime.utils.quiet_server import QuietServer
from slime.utils.same_site import is_foreign

_HOST = "127.0.0.1"
_READ_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 2.0  # for an engine to say what it holds
_FLEET_TIMEOUT_S = 60.0  # for the rollout side, which may be at work
_LONGEST_BODY = 65536  # bytes
_MAX_ADDED = 100_000

Answer = tuple[int, dict[str, Any]]


class Malformed(ValueError):
    """A request that is none of those above."""


@contextmanager
def engine_control(config: RunConfig, rollout: RolloutGroup) -> Iterator[None]:
    """Serves during the block, if the run has a directory, and engines.

    Those of somebody else are listed; they do not come or go by request.
    """
    directory = config.checkpoints.save
    if directory is None or config.debug.debug_train_only:
        yield
        return
    key, address = secrets.token_urlsafe(32), Path(directory) / CONTROL_FILE
    look = partial(_rows, rollout, config.router.sglang_api_key)
    server = QuietServer((_HOST, 0), _handler(rollout, key, look))
    threading.Thread(target=server.serve_forever, name="engine-control", daemon=True).start()
    try:
        url = http_url(_HOST, server.server_address[1])
        write_private(address, json.dumps({"url": url, "key": key}) + "\n")
        with recording(Path(directory) / LAST_ENGINES, look):
            yield
    finally:
        address.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


def _rows(rollout: RolloutGroup, api_key: str | None, timeout: float = _FLEET_TIMEOUT_S) -> list[EngineRow]:
    """What the rollout side knows of its engines, and what they say themselves."""
    rows = rollout.ask_fleet("rows", timeout=timeout)
    return with_loads(rows, api_key, min(timeout, _LOAD_TIMEOUT_S))


def answer(
    rollout: RolloutGroup, look: Callable[[], Sequence[EngineRow]], method: str, path: str, body: bytes
) -> Answer:
    """What a request that has the key gets."""
    try:
        match method, path:
            case "GET", "/engines":
                return 200, {"engines": [asdict(row) for row in look()]}
            case "POST", "/engines/drain":
                rollout.ask_fleet("drain", *_drain_of(_object(body)))
                return 200, {}
            case "POST", "/engines/add":
                return 200, {"engines": rollout.ask_fleet("add", *_add_of(_object(body)))}
            case _:
                return 404, {"error": f"{method} {path}: wanted GET /engines, POST /engines/drain or .../add"}
    except Malformed as error:
        return 400, {"error": str(error)}
    except MembershipError as error:
        return 409, {"error": cause(error)}
    except Exception as error:  # the rollout side is lost, or started again just now: the run's own affair
        return 503, {"error": f"the rollout side does not answer: {cause(error)}"}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Malformed("the body is no object")
    return found


def _drain_of(asked: dict[str, Any]) -> tuple[list[int], float, float]:
    ranks = asked.get("engines")
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise Malformed(f"engines: {ranks!r} (wanted: numbers of engines)")
    return ranks, _seconds("seconds", asked.get("seconds")), _seconds("notice", asked.get("notice", 0))


def _seconds(name: str, found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= MAX_SECONDS:
        raise Malformed(f"{name}: {found!r} (wanted: 0 to {MAX_SECONDS:g})")
    return float(found)


def _add_of(asked: dict[str, Any]) -> tuple[int, str]:
    count, model = asked.get("count"), asked.get("model", "")
    if type(count) is not int or not 0 < count <= _MAX_ADDED:
        raise Malformed(f"count: {count!r} (wanted: a number of engines, 1 to {_MAX_ADDED})")
    if not isinstance(model, str):
        raise Malformed(f"model: {model!r} (wanted: the name of one)")
    return count, model


def _handler(
    rollout: RolloutGroup, key: str, look: Callable[[], Sequence[EngineRow]]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _READ_TIMEOUT_S  # others wait meanwhile

        def do_GET(self) -> None:
            self._serve(b"")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > _LONGEST_BODY:
                self._send(413, {"error": f"Content-Length {length!r} (wanted: up to {_LONGEST_BODY})"})
            elif self._may_ask():
                self._send(*answer(rollout, look, "POST", self.path, self.rfile.read(int(length))))

        def _serve(self, body: bytes) -> None:
            if self._may_ask():
                self._send(*answer(rollout, look, self.command, self.path, body))

        def _may_ask(self) -> bool:
            given, wanted = self.headers.get("Authorization", ""), f"Bearer {key}"
            if is_foreign(self.headers.get("Host", ""), self.headers.get("Origin", ""), _HOST):
                self._send(403, {"error": "asked by a page of another site"})
            elif not hmac.compare_digest(given.encode(), wanted.encode()):
                self._send(401, {"error": f"wanted: the key in {CONTROL_FILE} of the run's directory"})
            else:
                return True
            return False

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: it would stand between the lines of the run."""

    return Handler
