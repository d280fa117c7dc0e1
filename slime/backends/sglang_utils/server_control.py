"""Bringing engines to rest: abort what runs, again and again, until nothing does."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from slime.utils.http_utils import HttpStatusError, get, post, share_key_with

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
IDLE_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 60.0
"""How many seconds an abort may take, and the load after it; a busy engine answers between two steps."""


def num_requests_from_load(load: Mapping[str, Any]) -> int:
    """Requests running and waiting on all DP ranks, from an answer of ``/v1/loads``."""
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in load["loads"])


async def abort_server_until_idle(
    url: str, retry_interval: float = 3.0, timeout: float = IDLE_TIMEOUT_S
) -> None:
    """Aborts everything on one engine and returns when it has no requests.

    One abort is not enough: a request may be on its way to the engine. Pauses between tries grow up to
    ``retry_interval`` seconds. Gives up, with a warning, if the engine does not tell its load, since a
    dead engine has nothing to abort.

    Raises:
        TimeoutError: it still has requests after ``timeout`` seconds, or never answered.
    """
    deadline = time.monotonic() + timeout
    pause = FIRST_PAUSE_S
    share_key_with(url)
    while remaining := await _abort_once(url):
        if time.monotonic() > deadline:
            raise TimeoutError(f"abort: {url} still has {remaining} requests after {timeout:g} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, retry_interval)


async def _abort_once(url: str) -> int:
    """Sends one abort; returns the number of requests left, 0 if the engine does not say.

    One that hangs counts as busy: a health check may find it, or the deadline of the whole.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await post(f"{url}/abort_request", {"abort_all": True}, max_retries=0)
            load = await get(f"{url}/v1/loads?include=core", max_retries=0)
    except TimeoutError:
        logger.warning("abort: %s gave no answer within %g s", url, ANSWER_TIMEOUT_S)
        return 1
    except (HttpStatusError, httpx.TransportError) as error:
        logger.warning("abort: cannot tell whether %s is idle: %s", url, error)
        return 0
    return num_requests_from_load(load)


async def abort_servers_until_idle(
    urls: Iterable[str], retry_interval: float = 3.0, timeout: float = IDLE_TIMEOUT_S
) -> None:
    """Aborts the requests of several engines at once, until they are idle."""
    await asyncio.gather(*(abort_server_until_idle(url, retry_interval, timeout) for url in urls))
