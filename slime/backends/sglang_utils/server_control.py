"""Bringing engines to rest: abort what runs, again and again, until nothing does."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from slime.utils.http_utils import HttpStatusError, get, post

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05


def num_requests_from_load(load: Mapping[str, Any]) -> int:
    """Requests running and waiting on all DP ranks, from an answer of ``/v1/loads``."""
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in load["loads"])


async def abort_server_until_idle(url: str, retry_interval: float = 3.0) -> None:
    """Aborts everything on one engine and returns when it has no requests.

    One abort is not enough: a request may be on its way to the engine. Pauses between tries grow up to
    ``retry_interval`` seconds. Gives up, with a warning, if the engine does not tell its load, since a
    dead engine has nothing to abort.
    """
    pause = FIRST_PAUSE_S
    while True:
        try:
            await post(f"{url}/abort_request", {"abort_all": True}, max_retries=0)
            load = await get(f"{url}/v1/loads?include=core", max_retries=0)
        except (HttpStatusError, httpx.TransportError) as error:
            logger.warning("abort: cannot tell whether %s is idle: %s", url, error)
            return
        remaining = num_requests_from_load(load)
        if remaining == 0:
            return
        logger.info("abort: %s still has %d requests", url, remaining)
        await asyncio.sleep(pause)
        pause = min(2 * pause, retry_interval)


async def abort_servers_until_idle(urls: Iterable[str], retry_interval: float = 3.0) -> None:
    """The same for several engines at once."""
    await asyncio.gather(*(abort_server_until_idle(url, retry_interval) for url in urls))
