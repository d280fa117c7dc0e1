"""Starts the server: HTTP in a thread of the first rank, the model's work in the order of requests on all."""

import asyncio
import logging
import os
import queue
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from aiohttp import web

from slime.backends.megatron_utils.server.app import LogProbApp, Work
from slime.backends.megatron_utils.server.arguments import MegatronServerConfig, key_of_server
from slime.backends.megatron_utils.server.model import LogProbModel, Question
from slime.config.run import filled

logger = logging.getLogger(__name__)

_IDLE_S = 30.0
"""The pause between two messages to ranks that wait, which would take a long one for the end of the first."""


def launch(args: Namespace) -> None:
    """Collective. Serves until the process is ended; what a rank cannot do ends it.

    Args:
        args: after `validate_megatron_server_args`.

    Raises:
        ValueError: weights that do not fit.
        TimeoutError: the model was not warm in time.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        model = LogProbModel(args)
        while True:
            message: list[Any] = [None, None]
            dist.broadcast_object_list(message, src=0)
            _do(model, *message)
    config, key = filled(MegatronServerConfig, args), key_of_server()
    served = LogProbApp(config, key)
    end = _serve(served.app, config.teacher_host, config.teacher_warmup_port)
    model = LogProbModel(args)
    if config.megatron_server_warmup:
        _warm_up(model, config.teacher_warmup_timeout_s)
    if config.teacher_port != config.teacher_warmup_port:
        end()
        served = LogProbApp(config, key)
        _serve(served.app, config.teacher_host, config.teacher_port)
    served.state = ""
    logger.info("log-probs at http://%s:%d", config.teacher_host, config.teacher_port)
    while True:
        _lead(model, served.work)


def _warm_up(model: LogProbModel, limit_s: float) -> None:
    begun = time.monotonic()
    _tell_and_do(model, "answer", {"ids": [0, 0]})
    if (took := time.monotonic() - begun) > limit_s:
        raise TimeoutError(f"--teacher-warmup-timeout-s {limit_s:g}: the warm-up took {took:.0f} s")


def _lead(model: LogProbModel, waiting: "queue.Queue[Work]") -> None:
    try:
        work = waiting.get(timeout=_IDLE_S)
    except queue.Empty:
        work = Work("idle", None)
    result = _tell_and_do(model, work.what, work.about)
    with suppress(InvalidStateError):  # whoever asked has gone
        work.outcome.set_result(result)


def _tell_and_do(model: LogProbModel, what: str, about: Any) -> Any:
    dist.broadcast_object_list([what, about], src=0)
    return _do(model, what, about)


def _do(model: LogProbModel, what: str, about: Any) -> Any:
    if what == "answer":
        return model.answer(Question(**about))
    return _load(model, about) if what == "load" else None


def _load(model: LogProbModel, path: str) -> str | None:
    """Returns why a rank could not load the weights; None if all have."""
    reason = None
    try:
        model.load(path)
    except (ValueError, OSError) as error:
        reason = str(error)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), None)


def _serve(app: web.Application, host: str, port: int) -> Callable[[], None]:
    """Serves in a thread of its own; returns, once it listens, what ends it.

    Raises:
        OSError: the port is taken.
    """
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app, access_log=None)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, host, port).start())

    def run() -> None:
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, name=f"log-probs at {port}", daemon=True)
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    return end
