"""What engines hold and do at the moment, as they say themselves; asked by the driver."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.ray.engine import EngineState
from slime.ray.engine_rows import EngineRow
from slime.utils.types import EngineEndpoint

_AT_ONCE = 64  # engines
_NOT_THERE = 404  # of an older server, which tells no load
ANSWERS, NO_ANSWER = "answers", "no answer"


def with_loads(rows: Sequence[EngineRow], api_key: str | None, timeout: float) -> list[EngineRow]:
    """The rows with health, requests and speed of those that may answer, all asked side by side.

    Args:
        timeout: seconds for all of them together: one that sends its answer byte by byte has no more.
    """
    clients = {
        row: EngineClient(EngineEndpoint(row.url, api_key, 1, None), timeout)
        for row in rows
        if row.url and row.state != EngineState.DEAD.value
    }
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="engine-load")
    try:
        asked = {row: pool.submit(_with_load, row, client) for row, client in clients.items()}
        answered = wait(asked.values(), timeout=timeout).done
        found = {row: one.result(timeout=0) for row, one in asked.items() if one in answered}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for client in clients.values():  # so that a thread that still reads ends
            client.close()
    silent = {row: replace(row, health=row.health or NO_ANSWER) for row in clients}
    return [found.get(row) or silent.get(row, row) for row in rows]


def _with_load(row: EngineRow, client: EngineClient) -> EngineRow:
    try:
        load = client.request("GET", "/v1/loads", params={"include": "core"})
        return replace(row, health=row.health or ANSWERS, **_counts(load))
    except EngineError as error:
        found = NO_ANSWER if error.status is None else f"HTTP {error.status}"
        return replace(row, health=row.health or (ANSWERS if error.status == _NOT_THERE else found))
    except (KeyError, TypeError, ValueError, OverflowError):  # an answer of another form
        return replace(row, health=row.health or ANSWERS)


def _counts(load: Any) -> dict[str, Any]:
    """Sums over its data-parallel ranks, and the fullest cache of them.

    A rank that runs nothing may still tell how fast it last was.
    """
    ranks = load["loads"]
    running = sum(int(rank["num_running_reqs"]) for rank in ranks)
    waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
    speed = sum(float(rank.get("gen_throughput", 0.0)) for rank in ranks if rank["num_running_reqs"])
    cache = max((float(rank["token_usage"]) for rank in ranks if "token_usage" in rank), default=None)
    return {"running": running, "waiting": waiting, "tokens_per_second": round(speed, 1), "cache": cache}
