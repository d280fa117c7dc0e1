"""SlimeRouter: a router that passes requests and answers on as they are.

run_router(args)             # serves at --sglang-router-ip and -port until it is told to end
SlimeRouter(args).app        # the same as an ASGI application, with the middleware
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware

from slime.router.admin import Admin
from slime.router.asgi import AuthMiddleware, FrontApp, run_app
from slime.router.front import Front
from slime.router.health import HealthWatch
from slime.router.metrics import Counts
from slime.router.pool import WorkerState
from slime.router.processes import run_parent
from slime.router.serving import listening, stop_signal, until_first
from slime.router.settings import RouterSettings
from slime.router.upstream import Upstream, choosing_pool
from slime.utils.misc import load_function


class SlimeRouter:
    """One process of the router. Middleware gets it as ``router``.

    Attributes:
        args: of the run; as far as they can be written as JSON, in a run's router process.
        radix_tree: the tree that answers ``/retrieve_from_text``; middleware sets it.
        app: the ASGI application. Of the middleware that was given, the last is outermost.
    """

    def __init__(self, args: Any, verbose: bool = False) -> None:
        self.args, self.verbose = args, verbose
        self.settings = RouterSettings.of(args)
        self.counts = Counts()
        self.pool = choosing_pool(self.settings, self.counts)
        self.radix_tree: Any = None
        if verbose:
            logging.getLogger("slime.router").setLevel(logging.INFO)
        self.upstream: Upstream
        self.admin: Admin
        self.front: Front
        self.app = self._app()

    @property
    def worker_request_counts(self) -> dict[str, int]:
        """Requests in flight by worker URL."""
        return {worker.url: worker.in_flight for worker in self.pool}

    @property
    def dead_workers(self) -> set[str]:
        """URLs of the workers that are quarantined."""
        return {worker.url for worker in self.pool if worker.state is WorkerState.QUARANTINED}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HealthWatch]:
        """Has connections and looks after the workers."""
        self.upstream = Upstream(self.pool, self.settings, self.counts)
        health = HealthWatch(self.pool, self.settings, _nothing)
        self.admin = Admin(self.pool, self.counts, health.check, _nothing)
        self.front = self._front()
        try:
            yield health
        finally:
            await health.close()
            await self.upstream.close()

    def _front(self) -> Front:
        settings, middleware = self.settings, None
        if settings.middleware_paths:
            self.app.middleware_stack = self.app.build_middleware_stack()  # what is wrong with it is said now
            middleware = partial(run_app, self.app)
        parts = (self.upstream, self.admin, self.counts)
        return Front(*parts, settings.api_key, settings.host, middleware, lambda: self.radix_tree)

    def _app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with self.running():
                yield

        loaded: list[Any] = [load_function(path) for path in self.settings.middleware_paths]
        middleware = [Middleware(cls, router=self) for cls in reversed(loaded)]
        auth: Any = AuthMiddleware
        app = Starlette(
            lifespan=lifespan,
            middleware=[
                Middleware(auth, api_key=self.settings.api_key, host=self.settings.host),
                *middleware,
            ],
        )
        app.router.default = FrontApp(self)
        return app


async def _nothing() -> None:
    """Tells nobody of a change: there is one process."""


def run_router(args: Any) -> None:
    """Serves until SIGTERM, in one process or several; middleware, which shares no state, in one."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    router = SlimeRouter(args)
    settings = router.settings
    if settings.processes > 1 and not settings.middleware_paths:
        asyncio.run(run_parent(settings))
    else:
        asyncio.run(_serve(router))


async def _serve(router: SlimeRouter) -> None:
    stop, settings = stop_signal(), router.settings
    async with router.running() as health, listening(router.front, settings.host, settings.port):
        await until_first(stop.wait(), health.task)
