"""Files that are no files, at the hands of whoever reads a sandbox's results."""

import tracemalloc

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
async def sandbox(request):
    async with LocalSandbox(namespaces=request.param, allow_weaker=True) as sandbox:
        yield sandbox


async def test_what_has_no_end_is_not_read_and_costs_nothing(sandbox):
    await sandbox.exec("mkfifo pipe; mkdir folder; ln -s pipe link")
    for name in ("pipe", "link", "folder"):
        with pytest.raises(SandboxError, match="not a regular file"):
            await sandbox.read_file(name)
    with pytest.raises(SandboxError, match=r"not a regular file|outside of the sandbox"):
        await sandbox.read_file("/dev/zero")
    assert (await sandbox.exec("echo still here")).output == "still here\n"


async def test_a_pipe_is_not_written_to(sandbox):
    await sandbox.exec("mkfifo pipe; sleep 60 < pipe > /dev/null 2>&1 &")
    with pytest.raises(SandboxError, match=r"not a regular file|No such device"):
        await sandbox.write_file("pipe", "text")
    await sandbox.write_file("file", "text")
    await sandbox.write_file("file", "t")
    assert await sandbox.read_file("file") == "t"


async def test_a_long_file_is_read_at_little_cost(sandbox):
    """Of bytes that JSON would spell out with six letters each."""
    size = 2**24
    await sandbox.exec(f"head -c {size} /dev/zero > long")
    tracemalloc.start()
    try:
        text = await sandbox.read_file("long")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "\0" * size and peak < 7 * size


DEEP = "a/" * 1500 + "b"
IMPOSSIBLE = {
    "deep": lambda sandbox: sandbox.write_file(DEEP, ""),
    "deep to read": lambda sandbox: sandbox.read_file(DEEP),
    "long": lambda sandbox: sandbox.write_file("a" * 5000, ""),
    "ends early": lambda sandbox: sandbox.write_file("a\0b", ""),
    "half a character": lambda sandbox: sandbox.read_file("\ud800"),
    "no folder": lambda sandbox: sandbox.write_file("/dev/null/a", ""),
    "command ends early": lambda sandbox: sandbox.exec("a\0b"),
    "half a command": lambda sandbox: sandbox.exec("echo \ud800"),
    "long command": lambda sandbox: sandbox.exec("echo " + "a" * 200_000),
    "variable": lambda sandbox: sandbox.exec("env", env={"A=B": "c"}),
    "folder of a command": lambda sandbox: sandbox.exec("pwd", workdir="/dev/null"),
    "deep folder of a command": lambda sandbox: sandbox.exec("pwd", workdir=DEEP),
}


async def test_a_request_that_cannot_be_done_does_not_cost_the_sandbox(sandbox):
    for name, ask in IMPOSSIBLE.items():
        with pytest.raises(SandboxError) as refused:
            await ask(sandbox)
        assert "has died" not in str(refused.value) and len(str(refused.value)) < 600, name
    assert (await sandbox.exec("echo still here")).output == "still here\n"
