import asyncio

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
