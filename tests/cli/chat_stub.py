"""A server of OpenAI's protocol whose answers tell what it was asked, for tests of a conversation."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sesame"
ENDLESS = "on and on"
FULL = "too much"
CONTEXT = 400
_STEP_S = 0.02


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._say(401, {"error": "no key"})
        else:
            self._say(200, {"data": [{"id": "stub", "max_model_len": CONTEXT}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        question = asked[-1]["content"]
        if question == FULL:
            self._say(400, {"message": "900 prompt tokens exceed the context of 8 tokens"})
            return
        self.send_response(200)
        self.end_headers()
        said = " | ".join(f"{message['role']}: {message['content']!r}" for message in asked)
        self._event("counting" if question == ENDLESS else said, None)
        try:
            while question == ENDLESS and not self.server.left.wait(_STEP_S):
                self._event(".", None)
        except ConnectionError:
            self.server.left.set()
        else:
            self._event("", "length" if question == "cut" else "stop")

    def _event(self, text: str, reason: str | None) -> None:
        choice = {"delta": {"content": text}, "finish_reason": reason}
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *words: object) -> None:
        """Says nothing."""


class ChatStub(ThreadingHTTPServer):
    """``left`` is set once a client has gone away from an endless answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def chat_stub() -> Iterator[ChatStub]:
    """Serves as long as the body runs."""
    with ChatStub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
