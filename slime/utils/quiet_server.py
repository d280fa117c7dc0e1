"""The standard library's HTTP server for a process whose console is somebody else's."""

import sys
from http.server import HTTPServer
from typing import Any


class QuietServer(HTTPServer):
    """Says nothing of a client that has gone, which else is a traceback between the lines of a run."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
