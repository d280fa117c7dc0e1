"""An HTTP server that is router and engine at once and answers by a Python function, token by token.

It speaks what the rollout uses: /generate, /workers, /abort_request, /v1/loads.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

HEADER = "<|im_start|>assistant\n"
EOS = "<|im_end|>"
NEVER = 1e9


class FakeEngine:
    """``answer(conversation)`` gives the assistant's next turn; ``delay(conversation)`` seconds per token.

    An abort ends the delay too, so NEVER is the delay of a token that only an abort ends.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.answer: Callable[[str], str] = lambda conversation: "ok"
        self.delay: Callable[[str], float] = lambda conversation: 0.0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts = self.running = self.most_running = 0
        self.weight_version = "1"
        self.fail_with: int | None = None
        self._server = uvicorn.Server(uvicorn.Config(self._app(), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/workers")
        async def workers() -> dict[str, Any]:
            return {"workers": [{"url": f"http://127.0.0.1:{self.port}"}]}

        @app.post("/abort_request")
        async def abort(request: Request) -> Response:
            assert (await request.json())["abort_all"] is True
            self.aborts += 1
            return Response()

        @app.get("/v1/loads")
        async def loads() -> dict[str, Any]:
            return {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]}

        @app.post("/generate")
        async def generate(request: Request) -> JSONResponse:
            body = await request.json()
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            if self.fail_with:
                return JSONResponse({"error": "no such thing"}, status_code=self.fail_with)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                return JSONResponse(await self._generate(body))
            finally:
                self.running -= 1

        return app

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        conversation = self.tokenizer.decode(body["input_ids"]).rpartition(HEADER)[0]
        begun = len(body["input_ids"]) - len(self._encode(conversation + HEADER))
        whole = self._encode(self.answer(conversation) + EOS)[begun:]
        limit = body["sampling_params"]["max_new_tokens"]
        reason: dict[str, Any] = {"type": "stop"} if len(whole) <= limit else {"type": "length"}
        aborts = self.aborts
        ids: list[int] = []
        for token in whole[:limit]:
            await self._pause(self.delay(conversation), aborts)
            if self.aborts > aborts:
                reason = {"type": "abort"}
                break
            ids.append(token)
        return {
            "text": self.tokenizer.decode(ids),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": reason,
                "output_token_logprobs": [[-0.25, token, None] for token in ids],
                "weight_version": self.weight_version,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 1,
            },
        }

    async def _pause(self, seconds: float, aborts: int) -> None:
        end = time.monotonic() + seconds
        while self.aborts == aborts and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.01))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
