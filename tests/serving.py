"""An ASGI application that uvicorn serves in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def served(app: Any, **options: Any) -> Iterator[int]:
    """The port of ``app`` with these options of uvicorn's."""
    server = uvicorn.Server(uvicorn.Config(app, **{"log_level": "error", **options, "port": 0}))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
