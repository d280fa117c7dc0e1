"""The page and what it asks for, over HTTP.

    app = dashboard([Run("a", Path("a/metrics.jsonl"))], key, host="127.0.0.1")

Everything lies below ``/KEY/``: who has not been told the key gets 404.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from slime.dashboard.metrics import READING_SECONDS
from slime.dashboard.recordings import RecordingError
from slime.dashboard.run import Run
from slime.utils.same_site import FOREIGN, is_foreign

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = (
    "page.js",
    "alerts.js",
    "samples.js",
    "engines.js",
    "books.js",
    "tables.js",
    "lanes.js",
    "views.js",
)
_FILES = {
    "": "index.html",
    **{name: name for name in (*_SCRIPTS, "page.css", "uPlot.iife.min.js", "uPlot.min.css")},
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_MOST = 10**9
_AT_ONCE = 32  # runs


class AskError(Exception):
    """A question that the page does not ask: 400, with what is wrong."""


class _Answer(JSONResponse):
    """JSON of what files hold: half a character, as a model's text may end with, must not hide all else."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


class _Shown:
    """What the page asks for."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {run.name: run for run in runs}

    def runs(self, request: Request) -> Any:
        return [run.summary(READING_SECONDS / len(self._runs)) for run in self._runs.values()]

    def curves(self, request: Request) -> Any:
        name = request.query_params.get("metric", "")
        return {run.name: run.metrics.curve(name) for run in self._runs.values()}

    def seconds(self, request: Request) -> Any:
        return {run.name: run.metrics.seconds() for run in self._runs.values()}

    def tables(self, request: Request) -> Any:
        return {run.name: run.tables() for run in self._runs.values()}

    def ledger(self, request: Request) -> Any:
        return {run.name: run.ledger() for run in self._runs.values()}

    def engines(self, request: Request) -> Any:
        # Side by side: one that hangs does not answer for seconds.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda run: run.engines.now(), self._runs.values())
            return dict(zip(self._runs, found, strict=True))

    def recordings(self, request: Request) -> Any:
        return {run.name: run.recordings.steps() for run in self._runs.values()}

    def samples(self, request: Request) -> Any:
        step, start = _number(request, "step"), _number(request, "start", 0)
        return self._run(request).recordings.samples(step, start)

    def sample(self, request: Request) -> Any:
        step, number = _number(request, "step"), _number(request, "number")
        return self._run(request).recordings.sample(step, number, _number(request, "start", 0))

    def traces(self, request: Request) -> Any:
        return {run.name: run.trace.steps() for run in self._runs.values()}

    def trace(self, request: Request) -> Any:
        number = _number(request, "step")
        found = self._run(request).trace.step(number)
        if found is None:
            raise AskError(f"step {number}: not in the trace (wanted: one of /api/traces)")
        return found

    def _run(self, request: Request) -> Run:
        name = request.query_params.get("run", "")
        if name not in self._runs:
            raise AskError(f"run {name!r:.100}: not shown (wanted: one of {', '.join(self._runs)})")
        return self._runs[name]


def _number(request: Request, name: str, default: int | None = None) -> int:
    given = request.query_params.get(name)
    if given is None and default is not None:
        return default
    if given is None or not (given.isascii() and given.isdecimal()) or len(given) > 10 or int(given) > _MOST:
        raise AskError(f"{name}: {given!r:.100} (wanted: a number from 0 to {_MOST})")
    return int(given)


def dashboard(runs: Sequence[Run], key: str, host: str) -> Starlette:
    """Returns the application.

    Args:
        host: the address that it listens on; on loopback it is asked under loopback's names only.
    """
    shown = _Shown(runs)
    answers = (
        *(shown.runs, shown.curves, shown.seconds, shown.tables, shown.ledger, shown.engines),
        *(shown.recordings, shown.samples, shown.sample, shown.traces, shown.trace),
    )
    routes = [Route(f"/{{key}}/{path}", _file(name)) for path, name in _FILES.items()]
    routes += [Route(f"/{{key}}/api/{answer.__name__}", _json(answer)) for answer in answers]

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if is_foreign(request.headers.get("Host", ""), request.headers.get("Origin", ""), host):
            response: Response = JSONResponse(FOREIGN, status_code=403)
        elif not _has_key(request, key):
            response = Response("not found", status_code=404)
        else:
            response = await answer(request)
        response.headers.update(_HEADERS)
        return response

    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


def _has_key(request: Request, key: str) -> bool:
    given = request.url.path.removeprefix("/").partition("/")[0]
    return hmac.compare_digest(given.encode(), key.encode())


def _file(name: str) -> Callable[[Request], Response]:
    def send(request: Request) -> Response:
        return FileResponse(_PAGE / name)

    return send


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def send(request: Request) -> Response:
        try:
            return _Answer(answer(request))
        except AskError as error:
            return JSONResponse({"error": f"{error}"}, status_code=400)
        except RecordingError as error:
            return JSONResponse({"error": f"{error}"}, status_code=422)

    return send
