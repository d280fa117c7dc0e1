"""Sandboxes that are started in advance: what is given out, how often, and what becomes of it."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError, SandboxPool


class Counted:
    """A sandbox that does nothing but count; ``gate`` holds its start back."""

    made: list["Counted"]

    def __init__(self):
        self.entered = self.left = 0
        type(self).made.append(self)

    async def __aenter__(self):
        async with asyncio.timeout(300):
            await type(self).gate.wait()
        if type(self).error:
            raise type(self).error
        self.entered += 1
        return self

    async def __aexit__(self, *error):
        self.left += 1


@pytest.fixture
def kind():
    class Kind(Counted):
        made, gate, error = [], asyncio.Event(), None

    Kind.gate.set()
    return Kind


async def until(holds):
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0)


async def test_each_sandbox_is_given_out_once_and_another_one_takes_its_place(kind):
    used = []
    async with SandboxPool(kind, size=2) as pool:
        for _ in range(5):
            await until(lambda: pool.ready == 2)
            async with pool.sandbox() as sandbox:
                assert (sandbox.entered, sandbox.left) == (1, 0)
                used.append(sandbox)
        assert len({id(one) for one in used}) == 5
        await until(lambda: all(one.left == 1 for one in used))
        await until(lambda: pool.ready == 2)
        assert len(kind.made) == 7
    assert all(one.left == 1 for one in kind.made)


async def test_a_sandbox_that_fails_its_user_is_not_given_out_again(kind):
    async with SandboxPool(kind, size=1) as pool:
        await until(lambda: pool.ready == 1)
        with pytest.raises(RuntimeError, match="of the user"):
            async with pool.sandbox() as sandbox:
                raise RuntimeError("of the user")
        async with pool.sandbox() as other:
            assert other is not sandbox
        await until(lambda: sandbox.left == 1)


async def test_more_users_than_are_ready_have_one_each(kind):
    async with SandboxPool(kind, size=1) as pool, AsyncExitStack() as users:
        used = [await users.enter_async_context(pool.sandbox()) for _ in range(3)]
        assert len({id(one) for one in used}) == 3 and [one.left for one in used] == [0, 0, 0]


async def test_one_that_has_been_ready_for_too_long_is_replaced(kind):
    async with SandboxPool(kind, size=1, oldest_s=1e-9) as pool:
        await until(lambda: pool.ready == 1)
        old = kind.made[0]
        async with pool.sandbox() as sandbox:
            assert sandbox is not old
        await until(lambda: old.left == 1)


async def test_a_start_that_fails_is_told_to_whoever_needs_it_and_ends_nothing(kind, caplog):
    kind.error = SandboxError("no engine")
    async with SandboxPool(kind, size=1) as pool:
        await until(lambda: "could not be started in advance: no engine" in caplog.text)
        with pytest.raises(SandboxError, match="no engine"):
            async with pool.sandbox():
                pass
        kind.error = None
        async with pool.sandbox() as sandbox:
            assert sandbox.entered == 1
        await until(lambda: pool.ready == 1)


async def test_the_end_of_a_pool_waits_for_no_start_and_leaves_no_sandbox(kind):
    async with SandboxPool(kind, size=1) as pool:
        await until(lambda: pool.ready == 1)
        kind.gate.clear()
        async with pool.sandbox() as sandbox:
            await until(lambda: len(kind.made) == 2)
    assert sandbox.left == 1 and [one.left - one.entered for one in kind.made] == [0, 0]
    with pytest.raises(SandboxError, match="SandboxPool: is not open"):
        async with pool.sandbox():
            pass
    with pytest.raises(ValueError, match="size=0, at_once=2, oldest_s=600"):
        SandboxPool(kind, size=0)


async def test_one_that_cannot_be_ended_keeps_no_other_from_its_end(kind, caplog):
    async def fail(self, *error):
        self.left += 1
        raise RuntimeError("of a class of a user's")

    kind.__aexit__ = fail
    async with SandboxPool(kind, size=2) as pool:
        await until(lambda: pool.ready == 2)
    assert [one.left for one in kind.made] == [1, 1]
    assert "could not be ended: of a class of a user's" in caplog.text


async def test_nothing_of_a_use_is_there_in_the_next_one():
    try:
        async with LocalSandbox():
            pass
    except SandboxError as error:
        pytest.skip(str(error))
    async with SandboxPool(LocalSandbox, size=1) as pool:
        for _ in range(3):
            async with pool.sandbox() as sandbox:
                assert (await sandbox.exec("ls; cat mine; echo secret > mine")).output.count("secret") == 0
