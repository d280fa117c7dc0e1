import asyncio
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import (
    abort_server_until_idle,
    abort_servers_until_idle,
    num_requests_from_load,
)
from slime.utils.http_utils import http_url
from tests.engines import free_port


def test_running_and_waiting_requests_of_all_ranks_count():
    loads = [
        {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 3},
        {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 0},
    ]
    assert num_requests_from_load({"loads": loads}) == 9


def test_aborts_are_repeated_until_the_engine_is_idle(fake_engine, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(server_control, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    fake_engine.pretended = 3
    asyncio.run(abort_server_until_idle(fake_engine.url, retry_interval=0.07))
    assert fake_engine.seen("abort_request") == [{"abort_all": True}] * 3
    assert pauses == [0.05, 0.07]


def test_a_dead_engine_is_given_up_and_does_not_hold_up_the_others(fake_engine, caplog):
    fake_engine.pretended = 2
    dead = http_url("127.0.0.1", free_port())
    asyncio.run(abort_servers_until_idle([dead, fake_engine.url]))
    assert f"cannot tell whether {dead} is idle" in caplog.text
    assert len(fake_engine.seen("abort_request")) == 2


def test_an_engine_that_stays_busy_is_an_error_in_the_end(fake_engine):
    fake_engine.pretended = 10_000
    with pytest.raises(TimeoutError, match=rf"abort: {fake_engine.url} still has \d+ requests after 0\.2 s"):
        asyncio.run(abort_server_until_idle(fake_engine.url, timeout=0.2))
