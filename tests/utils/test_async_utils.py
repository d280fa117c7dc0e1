import asyncio
import sys

import pytest

from slime.utils.async_utils import gather_or_cancel, run


def test_run_returns_results_and_raises_errors_from_the_background_loop():
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x

    async def fail():
        raise KeyError("x")

    assert run(double(4)) == 8
    with pytest.raises(KeyError):
        run(fail())


def test_a_task_that_exits_is_an_error_and_leaves_the_loop_running():
    async def exits():
        await asyncio.sleep(0)
        sys.exit(3)

    async def waits_for_it():
        await asyncio.create_task(exits())

    async def works():
        return 7

    for coro in (exits, waits_for_it):
        with pytest.raises(RuntimeError, match=r"sys\.exit\(3\)"):
            run(coro())
        assert run(works()) == 7


async def test_the_first_failure_cancels_the_others():
    cancelled = []

    async def wait():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fail():
        await asyncio.sleep(0.01)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await gather_or_cancel([wait(), fail(), wait()])
    assert cancelled == [True, True]
