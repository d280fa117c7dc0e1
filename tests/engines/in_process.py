"""An embedded engine with its server in threads of the test: it starts in milliseconds."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import uvicorn

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.app import create_app
from slime.backends.sglang_utils.client import EngineClient
from slime.utils.types import EngineEndpoint


class InProcessEngine:
    """Serves a checkpoint until `stop`.

    Two of a process cannot be in one process group: torch knows a group's name once.

    Attributes:
        state: what the routes work with.
    """

    def __init__(self, model_path: Path | str, **flags: Any) -> None:
        self.state = build_server(
            EmbeddedServerArgs(model_path=str(model_path), skip_tokenizer_init=True, **flags)
        )
        options: dict[str, Any] = {"port": 0, "log_level": "error", "lifespan": "off"}
        self._server = uvicorn.Server(uvicorn.Config(create_app(self.state), **options))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.endpoint = EngineEndpoint(f"http://127.0.0.1:{port}", None, 1, None)
        self.client = EngineClient(self.endpoint, timeout=120)

    async def _serve(self) -> None:
        self.state.engine.start(asyncio.get_running_loop())
        try:
            await self._server.serve()
        finally:
            self.state.engine.stop()

    def stop(self) -> None:
        """Whoever still waits for an answer gets none."""
        self.client.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
