"""Files that are no files, at the hands of whoever reads a sandbox's results."""

import time

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
async def sandbox(request):
    async with LocalSandbox(namespaces=request.param, allow_weaker=True) as sandbox:
        yield sandbox


async def test_what_has_no_end_is_not_read_and_costs_nothing(sandbox):
    await sandbox.exec("mkfifo pipe; mkdir folder; ln -s pipe link")
    for name in ("pipe", "link", "folder"):
        with pytest.raises(SandboxError, match="no regular file"):
            await sandbox.read_file(name)
    with pytest.raises(SandboxError, match=r"no regular file|outside of the sandbox"):
        await sandbox.read_file("/dev/zero")
    assert (await sandbox.exec("echo still here")).output == "still here\n"


async def test_a_pipe_is_not_written_to(sandbox):
    await sandbox.exec("mkfifo pipe; sleep 60 < pipe > /dev/null 2>&1 &")
    with pytest.raises(SandboxError, match=r"no regular file|No such device"):
        await sandbox.write_file("pipe", "text")
    await sandbox.write_file("file", "text")
    await sandbox.write_file("file", "t")
    assert await sandbox.read_file("file") == "t"


async def test_a_long_file_is_read_at_little_cost(sandbox):
    await sandbox.exec("head -c 33554432 /dev/urandom > long")
    start = time.process_time()
    text = await sandbox.read_file("long")
    assert len(text) > 2**24
    assert time.process_time() - start < 10
