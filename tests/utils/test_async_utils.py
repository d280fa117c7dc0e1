import asyncio
import sys

import pytest

from slime.utils.async_utils import Slots, gather_or_cancel, run


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


async def test_slots_go_to_those_who_have_waited_longest() -> None:
    slots, order, running, most = Slots(2), [], 0, 0

    async def work(number: int) -> None:
        nonlocal running, most
        async with slots:
            order.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await gather_or_cancel(work(number) for number in range(7))
    assert order == list(range(7)) and most == 2 and not slots.locked()


async def test_a_limit_that_changes_is_that_of_now() -> None:
    limit = 1
    slots = Slots(lambda: limit)
    await slots.acquire()
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    limit = 3
    late = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0.01)
    assert [task.done() for task in (*waiting, late)] == [True, True, False, False] and slots.locked()
    limit = 1
    slots.release()
    slots.release()
    await asyncio.sleep(0.01)
    assert not waiting[2].done() and slots.locked()
    slots.release()
    async with asyncio.timeout(60):
        await waiting[2]
    late.cancel()
    slots.release()
    assert not slots.locked()


@pytest.mark.parametrize("handed", [False, True])
async def test_a_slot_is_not_lost_with_who_waited_for_it(handed: bool) -> None:
    slots = Slots(1)
    await slots.acquire()
    first, second = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    if handed:
        slots.release()
    first.cancel()
    await asyncio.sleep(0)
    if not handed:
        slots.release()
    async with asyncio.timeout(60):
        await second
    assert slots.locked() and first.cancelled()
    slots.release()
    assert not slots.locked()
