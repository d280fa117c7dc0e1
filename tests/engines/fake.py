"""A scriptable engine without a model: an HTTP server that is engine and router at once.

engine = FakeEngine()
engine.start()                                       # in a thread of this process
engine.answers["pause_generation"] = {"success": True}
...
engine.seen("pause_generation")                      # the bodies it got

python tests/engines/fake.py PORT                    # the same in a process of its own
"""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

HEADER = "<|im_start|>assistant\n"
EOS = "<|im_end|>"
NEVER = 1e9
Delay = float | Callable[[], bool]


@dataclass
class Call:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class FakeEngine:
    """Answers what ``answers`` holds for a path: JSON, a Response, or what a function makes of the body.

    Any other path is 404, as on an engine too old to know it. ``/generate`` reverses ``input_ids``.

    Attributes:
        calls: all requests but those for its health, in their order.
        aborts: how often everything was aborted.
        running: requests that it works on, and the most there were at a time.
        pretended: further requests that it says it has; an abort ends one of them.
        weight_version: the last one that an update brought.
        flush_refusals: how often it says yet that it is too busy to empty its cache.
    """

    def __init__(self, api_key: str | None = None, port: int = 0) -> None:
        self.api_key, self.port = api_key, port
        self.calls: list[Call] = []
        self.aborts = self.running = self.most_running = self.pretended = self.flush_refusals = 0
        self.weight_version = "default"
        self.answers: dict[str, Any] = {
            "health": {},
            "health_generate": {},
            "model_info": self._info,
            "server_info": self._info,
            "workers": lambda body: {"workers": [{"url": self.url}]},
            "v1/loads": self._loads,
            "abort_request": self._abort,
            "flush_cache": self._flush,
            "generate": self._count,
            "update_weights_from_disk": self._update,
            "update_weights_from_tensor": self._update,
            "update_weights_from_distributed": self._update,
            "weights_checker": {"success": False, "message": "weights differ"},
        }
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), host="127.0.0.1", port=port, lifespan="off", log_level="error")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def serve(self) -> None:
        """Serves until the process ends."""
        self._server.run()

    def start(self) -> "FakeEngine":
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), f"the fake engine has ended; port {self.port} may be taken"
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """From here on nobody answers."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def seen(self, path: str) -> list[dict[str, Any]]:
        return [call.body for call in self.calls if call.path == path]

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "output_ids": body["input_ids"][::-1],
            "meta_info": {"weight_version": self.weight_version, "extra": 1},
        }

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def answer(path: str, request: Request) -> Response:
            body = json.loads(await request.body() or "{}")
            if not path.startswith("health"):
                if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
                    return JSONResponse({"error": "Unauthorized"}, status_code=401)
                self.calls.append(Call(path, body, dict(request.headers)))
            if path not in self.answers:
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            found = self.answers[path]
            if callable(found) and not isinstance(found, Response):
                found = found(body)
            if inspect.isawaitable(found):
                found = await found
            response = found if isinstance(found, Response) else JSONResponse(found)
            if path.startswith("update_weight") and response.status_code < 400:
                told = body.get("weight_version"), body.get("new_version"), self.weight_version
                self.weight_version = next(version for version in told if version is not None)
            return response

        return app

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model_path": "/nowhere", "weight_version": self.weight_version, "is_generation": True}

    def _loads(self, body: dict[str, Any]) -> dict[str, Any]:
        running = self.running + self.pretended
        return {"loads": [{"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0}]}

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        self.aborts += body["abort_all"]
        self.pretended = max(0, self.pretended - 1)
        return {}

    def _flush(self, body: dict[str, Any]) -> Response:
        if self.flush_refusals > 0:
            self.flush_refusals -= 1
            return Response("Flush cache failed.", status_code=400)
        return Response("Cache flushed.")

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True, "message": "ok"}

    async def _count(self, body: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.generate(body)
        finally:
            self.running -= 1


class TalkingEngine(FakeEngine):
    """Answers a conversation by a Python function, token by token.

    ``answer(conversation)`` gives the assistant's next turn; ``delay(conversation)`` seconds per token, or
    a function that is true once the token may come. An abort ends the delay too, so NEVER is the delay of
    a token that only an abort ends. With ``breaks_after`` the connection of the next stream breaks after so
    many chunks, or with ``says_why`` the stream ends with that as its error.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.answer: Callable[[str], str] = lambda conversation: "ok"
        self.delay: Callable[[str], Delay] = lambda conversation: 0.0
        self.weight_version = "1"
        self.breaks_after: int | None = None
        self.says_why: dict[str, Any] | None = None

    async def generate(self, body: dict[str, Any]) -> Any:
        body["weight_version"] = self.weight_version  # that the tokens are made with
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        *_, (ids, reason) = [progress async for progress in self._progress(body)]
        return self._answer_with(ids, reason, body)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        sent = 0
        async for ids, reason in self._progress(body):
            if self.breaks_after is not None and sent >= self.breaks_after:
                self.breaks_after = None
                if self.says_why is None:
                    raise ConnectionError("the engine is gone")
                yield b"data: " + json.dumps({"error": self.says_why}).encode() + b"\n\n"
                return
            yield b"data: " + json.dumps(self._answer_with(ids, reason, body)).encode() + b"\n\n"
            sent += 1
        yield b"data: [DONE]\n\n"

    async def _progress(self, body: dict[str, Any]) -> AsyncIterator[tuple[list[int], Any]]:
        """The ids after each token, the last ones with a finish reason."""
        conversation = self.tokenizer.decode(body["input_ids"]).rpartition(HEADER)[0]
        begun = len(body["input_ids"]) - len(self._encode(conversation + HEADER))
        whole = self._encode(self.answer(conversation) + EOS)[begun:]
        whole, matched = self._stopped(whole, body["sampling_params"].get("stop") or [])
        limit = body["sampling_params"]["max_new_tokens"]
        reason: dict[str, Any] = {"type": "length"}
        if len(whole) <= limit:
            reason = {"type": "stop", "matched": matched or self.tokenizer.eos_token_id}
        aborts = self.aborts
        ids: list[int] = []
        for token in whole[:limit]:
            await self._pause(self.delay(conversation), aborts)
            if self.aborts > aborts:
                reason = {"type": "abort"}
                break
            ids.append(token)
            if len(ids) < len(whole[:limit]):
                yield ids, None
        yield ids, reason

    def _stopped(self, ids: list[int], stop: str | list[str]) -> tuple[list[int], str | None]:
        """What there is of an answer with the first token that completes a stop string, and that string."""
        stops = [stop] if isinstance(stop, str) else stop
        ends = range(1, len(ids) if stops else 0)
        texts = ((end, self.tokenizer.decode(ids[:end])) for end in ends)
        found = ((ids[:end], s) for end, text in texts for s in stops if s in text)
        return next(found, (ids, None))

    def _answer_with(self, ids: list[int], reason: Any, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "text": self.tokenizer.decode(ids),
            "output_ids": list(ids),
            "meta_info": {
                "finish_reason": reason,
                "output_token_logprobs": [[-0.25, token, None] for token in ids],
                "weight_version": body["weight_version"],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 1,
                "e2e_latency": 0.5,
            },
        }

    async def _pause(self, delay: Delay, aborts: int) -> None:
        if callable(delay):
            while self.aborts == aborts and not delay():
                await asyncio.sleep(0.005)
            return
        end = time.monotonic() + delay
        while self.aborts == aborts and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.01))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    FakeEngine(port=int(sys.argv[1])).serve()
