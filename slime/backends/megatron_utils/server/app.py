"""The HTTP side of the log-prob server: requests become work for the model's ranks, in their order."""

import asyncio
import hmac
import itertools
import queue
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import BasicAuth, web
from aiohttp.typedefs import Handler

from slime.backends.megatron_utils.server.arguments import MegatronServerConfig
from slime.utils.same_site import FOREIGN, is_foreign

_BODY_LIMIT = 64 * 2**20
_MAX_SAMPLES = 1024
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What a body may raise that is no request."""


@dataclass(frozen=True)
class Work:
    """Something for the ranks to do: "answer", about a `Question`'s fields, or "load", about a path."""

    what: str
    about: Any
    outcome: "Future[Any]" = field(default_factory=Future)


class Refused(Exception):
    """A request that is not answered: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LogProbApp:
    """Serves a model.

    Args:
        api_key: that requests have to show, as a bearer token or as the password of an address.

    Attributes:
        work: what the ranks are to do. A "load" has as its outcome why it failed, None if it did not.
        state: why nothing is answered; empty while it is.
    """

    def __init__(self, config: MegatronServerConfig, api_key: str | None = None) -> None:
        self._config, self._api_key, self._path = config, api_key, config.first_weights
        self.work: queue.Queue[Work] = queue.Queue()
        self.state = "starting"
        self._loads_next = False
        self._numbers = itertools.count()
        self._waiting: dict[int, int] = {}  # requests, and how many tokens they have
        self.app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[self._guard])
        self.app.router.add_get("/detect", self._detect)
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/info", self._info)
        self.app.router.add_get("/get_loads", self._loads)
        self.app.router.add_post("/generate", self._generate)
        self.app.router.add_post("/update_weights_from_disk", self._update)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin", "")
        if is_foreign(host, origin, self._config.teacher_host):
            return web.json_response(FOREIGN, status=403)
        if request.path != "/healthz" and not self._has_key(request.headers.get("Authorization", "")):
            return web.json_response({"error": "wrong or missing key"}, status=401)
        try:
            return await handler(request)
        except Refused as error:
            return web.json_response({"error": str(error)}, status=error.status)
        except _UNREADABLE as error:
            return web.json_response({"error": f"not a request: {error!r}"}, status=400)

    def _has_key(self, shown: str) -> bool:
        if self._api_key is None:
            return True
        key = shown.removeprefix("Bearer ")
        if key == shown:
            try:
                key = BasicAuth.decode(shown).password
            except ValueError:
                return False
        # aiohttp has surrogates for bytes of a header that are not UTF-8
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self._api_key.encode())

    async def _detect(self, request: web.Request) -> web.Response:
        return web.json_response({"type": "megatron"})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": self.state or "ok"}, status=503 if self.state else 200)

    async def _info(self, request: web.Request) -> web.Response:
        names = ("vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
        told = {name: getattr(self._config, name) for name in names}
        return web.json_response(
            {**told, "model_path": self._path, "max_length": self._config.megatron_server_max_length}
        )

    async def _loads(self, request: web.Request) -> web.Response:
        told = {"num_requests": len(self._waiting), "num_tokens": sum(self._waiting.values())}
        return web.json_response(told)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = self._question(body)
        if self.state:
            raise Refused(503, self.state)
        number = next(self._numbers)
        self._waiting[number] = len(asked["ids"])
        try:
            found = await asyncio.wrap_future(self._put("answer", asked))
        finally:
            del self._waiting[number]
        if body.get("return_logprob"):
            found |= {"meta_info": _as_an_engine_says_it(asked["ids"], found["log_probs"])}
        return web.json_response({"request_id": str(number), **found})

    def _question(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Reads a request.

        Raises:
            Refused: it has no tokens, other tokens than the model, too many, or asks for text.
        """
        ids, most = body["input_ids"], self._config.megatron_server_max_length
        count, labels = body.get("sample_n") or 0, body.get("label_token_ids") or []
        if most and len(ids) > most:
            raise Refused(413, f"{len(ids)} tokens (wanted: at most --megatron-server-max-length {most})")
        if (body.get("sampling_params") or {}).get("max_new_tokens", 0) != 0:
            raise Refused(400, "sampling_params.max_new_tokens: nothing is generated here (wanted: 0)")
        if type(count) is not int or not 0 <= count <= _MAX_SAMPLES:
            raise Refused(400, f"sample_n {count!r} (wanted: 0 to {_MAX_SAMPLES})")
        rows = labels if labels and isinstance(labels[0], list) else [labels] * bool(labels)
        if rows is labels and (len(rows) != len(ids) or len({len(row) for row in rows}) != 1):
            raise Refused(400, f"label_token_ids: {len(rows)} rows (wanted: {len(ids)} of one length)")
        for name, tokens in (("input_ids", ids), *(("label_token_ids", row) for row in rows)):
            vocabulary = self._config.vocab_size
            if not tokens or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
                raise Refused(400, f"{name}: wanted a list of tokens from 0 to {vocabulary - 1}")
        return {"ids": ids, "sample_n": count, "labels": labels}

    async def _update(self, request: web.Request) -> web.Response:
        """Requests before it are answered by the old weights, those that come meanwhile are refused.

        So are those after a failure, until an update succeeds.
        """
        body = await request.json()
        path = body.get("model_path") or body.get("path") or body.get("load")
        if not isinstance(path, str) or not Path(path).is_dir():
            raise Refused(400, f"model_path {path!r} (wanted: a directory of weights)")
        if self.state and not self._loads_next:
            raise Refused(409, self.state)
        limit = float(body.get("timeout_s") or self._config.megatron_server_update_timeout_s)
        if not limit > 0:
            raise Refused(400, f"timeout_s {limit:g} (wanted: more than 0 seconds)")
        self.state, self._loads_next = f"weights are being updated from {path}", False
        outcome = self._put("load", path)
        outcome.add_done_callback(lambda done: self._updated(path, done.result()))
        try:
            async with asyncio.timeout(limit):
                reason = await asyncio.shield(asyncio.wrap_future(outcome))
        except TimeoutError as error:
            raise Refused(504, f"not done within {limit:g} s: {self.state}") from error
        if reason:
            raise Refused(400, reason)
        return web.json_response({"success": True, "model_path": path})

    def _updated(self, path: str, reason: str | None) -> None:
        """After a failure some weights may be the new ones: only other weights help."""
        if reason is None:
            self.state, self._path = "", path
        else:
            self.state, self._loads_next = f"weights could not be updated: {reason}", True

    def _put(self, what: str, about: Any) -> "Future[Any]":
        work = Work(what, about)
        self.work.put(work)
        return work.outcome


def _as_an_engine_says_it(ids: list[int], log_probs: list[float]) -> dict[str, Any]:
    """Makes what SGLang answers about a prompt, which `slime.rollout.on_policy_distillation` reads."""
    pairs = zip([None, *log_probs], ids, strict=True)
    return {
        "input_token_logprobs": [[value, token, None] for value, token in pairs],
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "finish_reason": {"type": "length", "length": 0},
    }
