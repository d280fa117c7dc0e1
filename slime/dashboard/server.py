"""The page and what it asks for, over HTTP.

    app = dashboard([Run("a", Path("a/metrics.jsonl"))], key, host="127.0.0.1")

Everything lies below ``/KEY/``: who has not been told the key gets 404.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from slime.dashboard.metrics import READING_SECONDS, MetricsFile
from slime.utils.same_site import FOREIGN, is_foreign

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "": "index.html",
    **{name: name for name in ("page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")},
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@dataclass
class Run:
    """A run that is shown.

    Attributes:
        name: unlike those of the others.
        path: its file of metrics, which need not be there yet.
    """

    name: str
    path: Path
    metrics: MetricsFile = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.path)

    def summary(self, seconds: float) -> dict[str, Any]:
        """Returns what is known after these seconds; ``problem`` is why there is nothing, or nothing new."""
        problem = None
        try:
            self.metrics.refresh(seconds)
        except FileNotFoundError:
            problem = f"{self.path}: not there yet"
        except (OSError, ValueError) as error:
            problem = f"{error}"
        return {"name": self.name, "problem": problem, **self.metrics.summary()}


class _Shown:
    """What the page asks for."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def runs(self, request: Request) -> Response:
        return JSONResponse([run.summary(READING_SECONDS / len(self._runs)) for run in self._runs])

    def curves(self, request: Request) -> Response:
        name = request.query_params.get("metric", "")
        return JSONResponse({run.name: run.metrics.curve(name) for run in self._runs})

    def seconds(self, request: Request) -> Response:
        return JSONResponse({run.name: run.metrics.seconds() for run in self._runs})


def dashboard(runs: Sequence[Run], key: str, host: str) -> Starlette:
    """Returns the application.

    Args:
        host: the address that it listens on; on loopback it is asked under loopback's names only.
    """
    shown = _Shown(runs)
    routes = [Route(f"/{{key}}/{path}", _file(name)) for path, name in _FILES.items()]
    routes += [
        Route(f"/{{key}}/api/{name}", answer)
        for name, answer in (("runs", shown.runs), ("curves", shown.curves), ("seconds", shown.seconds))
    ]

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
