"""What is done with any sandbox, here with the local one; E2B's against a stand-in of its package."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    E2BSandbox,
    LocalSandbox,
    SandboxError,
    ensure_agent_user,
    exec_and_wait,
)


@pytest.fixture
async def sandbox():
    """One where commands run detached, as at E2B."""
    try:
        async with LocalSandbox(keep_background=True) as sandbox:
            yield sandbox
    except SandboxError as error:
        pytest.skip(str(error))


async def test_a_long_command_is_waited_for(sandbox):
    result = await exec_and_wait(
        sandbox,
        cmd="echo $WHO in $(pwd); sleep 0.3; exit 4",
        time_budget_sec=600,
        tag="job",
        env={"WHO": "me"},
        workdir="/tmp",
        want_output=True,
    )
    assert result == (4, "me in /tmp\n")
    assert (await exec_and_wait(sandbox, cmd="true", time_budget_sec=600, tag="job")) == (0, "")


async def test_a_long_command_runs_also_where_nothing_stays_after_a_command():
    options = {"tag": "job", "out_file": "said", "want_output": True}
    async with LocalSandbox() as sandbox:
        slow = "echo $WHO; sleep 0.2; exit 4"
        result = await exec_and_wait(sandbox, cmd=slow, time_budget_sec=600, env={"WHO": "me"}, **options)
        assert result == (4, "me\n")
        result = await exec_and_wait(sandbox, cmd="echo begun; sleep 600", time_budget_sec=0.5, **options)
        assert result == (EXIT_TIME_BUDGET_EXCEEDED, "begun\n")


async def test_a_command_over_its_budget_is_killed(sandbox, monkeypatch):
    own = sandbox.exec

    async def once_it_has_begun(cmd, **options):
        """Looks for the command's end only then, however late its first turn comes."""
        while cmd.startswith("cat /tmp/long.done") and (await own("cat said")).output != "begun\n":
            await asyncio.sleep(0.01)
        return await own(cmd, **options)

    monkeypatch.setattr(sandbox, "exec", once_it_has_begun)
    cmd = "echo begun; sleep 6000"
    code, output = await exec_and_wait(
        sandbox, cmd=cmd, time_budget_sec=0.2, tag="long", out_file="/workspace/said", want_output=True
    )
    assert (code, output) == (EXIT_TIME_BUDGET_EXCEEDED, "begun\n")
    async with asyncio.timeout(300):  # the kill has been sent; each process dies when its turn comes
        while "sleep" in (await own("cat /proc/[0-9]*/comm")).output.split("\n"):
            await asyncio.sleep(0.01)
    assert await sandbox.read_file("said") == "begun\n"


async def test_a_command_is_killed_though_its_session_is_yet_to_come(sandbox):
    """Its first process may have had no turn at all when its time is up."""
    folder = f"{sandbox.workspace}/bin"
    await sandbox.write_file(f"{folder}/setsid", "#!/bin/sh\nwhile :; do sleep 0.01; done\n")
    await sandbox.exec(f"chmod +x {folder}/setsid")
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    code, _ = await exec_and_wait(sandbox, cmd="true", time_budget_sec=0.1, tag="job", env=path)
    assert code == EXIT_TIME_BUDGET_EXCEEDED
    async with asyncio.timeout(60):
        while "setsid" in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).output:
            await asyncio.sleep(0.01)


async def test_the_agents_user_is_there_or_cannot_be_had(sandbox):
    await ensure_agent_user(sandbox)
    with pytest.raises(SandboxError, match="user nobody-here"):
        await ensure_agent_user(sandbox, user="nobody-here")


async def test_a_sandbox_that_is_not_entered_or_was_closed_says_so():
    with pytest.raises(SandboxError, match="is not open"):
        await LocalSandbox().exec("true")
    with pytest.raises(SandboxError, match="E2BSandbox: is not open"):
        await E2BSandbox("image").read_file("x")


async def test_e2b_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxError, match="needs the package e2b"):
        async with E2BSandbox("image"):
            pass


class TimeoutException(Exception):
    pass


class CommandExitException(Exception):
    exit_code, stdout, stderr = 3, "out", "err"


class FakeE2B:
    """One object for the sandbox, its commands and its files."""

    def __init__(self):
        self.calls, self.failures, self.files = [], 1, {}
        self.commands = self

    async def create(self, **options):
        self.calls.append(options)
        if self.failures:
            self.failures -= 1
            raise TimeoutException
        box = SimpleNamespace(
            commands=self, kill=self.kill, files=SimpleNamespace(write=self.write, read=self.read)
        )
        return box

    async def run(self, cmd, **options):
        self.calls.append((cmd, options))
        if cmd == "fail":
            raise CommandExitException
        if cmd == "slow":
            raise TimeoutException
        return SimpleNamespace(exit_code=0, stdout="out", stderr="")

    async def write(self, path, content, user):
        self.files[path] = content

    async def read(self, path, user):
        return self.files[path]

    async def kill(self):
        self.calls.append("kill")


async def test_e2b_is_asked_as_its_package_wants(monkeypatch):
    monkeypatch.setattr("asyncio.sleep", lambda seconds: _nothing())
    fake = FakeE2B()
    module = SimpleNamespace(
        AsyncSandbox=fake, TimeoutException=TimeoutException, CommandExitException=CommandExitException
    )
    monkeypatch.setitem(sys.modules, "e2b", module)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "60")
    async with E2BSandbox("swe", image_metadata_key="image") as sandbox:
        assert fake.calls == [{"template": "md", "timeout": 60, "metadata": {"image": "swe"}}] * 2
        assert await sandbox.exec("ls", user="agent", env={"A": "1"}, workdir="/x", timeout=5) == (0, "out")
        assert fake.calls[-1] == ("ls", {"user": "agent", "envs": {"A": "1"}, "cwd": "/x", "timeout": 5})
        assert await sandbox.exec("fail") == (3, "outerr")
        assert await sandbox.exec("slow") == (EXIT_TIME_BUDGET_EXCEEDED, "")
        await sandbox.write_file("f", "text")
        assert await sandbox.read_file("f") == "text"
    assert fake.calls[-1] == "kill"
    async with E2BSandbox("swe"):
        assert fake.calls[-1] == {"template": "swe", "timeout": 60, "metadata": {}}


async def _nothing():
    return None
