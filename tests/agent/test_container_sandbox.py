"""Sandboxes in containers: those of a stand-in for docker, and of an engine where one is to be used."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import pairwise

import psutil
import pytest

from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ContainerLimits,
    ContainerSandbox,
    SandboxError,
    container,
    exec_and_wait,
    owners,
)
from slime.agent.sandbox.engine import ENGINE, Client
from tests.agent.containers import IMAGE, REAL_IMAGE, StandIn, has_namespaces, real_engine

pytestmark = pytest.mark.slow
ELSEWHERE = "another-kernel/pid:[1] 1 1"
SECRET = "a value\nthat no command line has"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    if not has_namespaces():
        pytest.skip("the stand-in for docker needs namespaces")
    made = StandIn(tmp_path, monkeypatch)
    yield made
    made.remove_all()


@pytest.fixture(params=["stand-in", "real"])
def make(request, monkeypatch):
    """``make(...)``: a sandbox with these options, in either engine."""
    if request.param == "real":
        if not real_engine():
            pytest.skip("SLIME_TEST_CONTAINER_IMAGE names no image, or there is no engine")
        return lambda **options: ContainerSandbox(REAL_IMAGE, **options)
    request.getfixturevalue("engine")
    return lambda **options: ContainerSandbox(IMAGE, **options)


async def test_commands_run_with_their_environment_and_folder(make):
    async with make(workdir="/tmp") as sandbox:
        line = 'echo "$VALUE"; pwd; echo wrong >&2; exit 3'
        code, said = await sandbox.exec(line, env={"VALUE": SECRET}, workdir="/")
        assert code == 3 and sorted(said.splitlines()) == sorted([*SECRET.splitlines(), "/", "wrong"])
        assert (await sandbox.exec("pwd; env | grep -c VALUE; true")).output == "/tmp\n0\n"
        assert (await sandbox.exec("echo $STAND_IN_ENGINE_FOLDER$HOSTNAMEX")).output == "\n"


async def test_what_a_command_left_goes_on_and_files_stay(make):
    async with make() as sandbox:
        started = time.monotonic()
        await sandbox.exec("(sleep 600; echo) > /dev/null 2>&1 & echo kept > /tmp/there")
        assert "sleep 600" in await command_lines(sandbox) and time.monotonic() - started < 300
        assert await sandbox.read_file("/tmp/there") == "kept\n"


async def command_lines(sandbox):
    return (await sandbox.exec("cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\000' ' '")).output


async def test_a_command_over_its_time_ends_with_all_that_it_started(make):
    async with make() as sandbox:
        line = "setsid sleep 6000 & (sleep 6001 & setsid sleep 6002) & echo begun; wait"
        for seconds in (1, 5, 25, 125):  # it may get no turn in a short time
            code, output = await sandbox.exec(line, timeout=seconds)
            assert code == EXIT_TIME_BUDGET_EXCEEDED and output in ("", "begun\n")
            if output:
                break
        assert output
        assert "sleep 600" not in await command_lines(sandbox)
        await sandbox.exec("sleep 7000 > /dev/null 2>&1 &")
        assert (await sandbox.exec("sleep 6003", timeout=0.5)).exit_code == EXIT_TIME_BUDGET_EXCEEDED
        assert "sleep 7000" in await command_lines(sandbox)  # of another command


async def test_what_writes_without_end_is_killed_and_cut_off(make):
    async with make(limits=ContainerLimits(output_bytes=100)) as sandbox:
        code, output = await sandbox.exec("yes", timeout=600)
        assert code == 137 and output.endswith("\n[output cut off after 100 bytes]")
        assert "yes" not in (await command_lines(sandbox)).split()
        code, output = await sandbox.exec("head -c 500 /dev/zero | tr '\\000' x")
        assert code == 0 and output.count("x") == 100


async def test_a_long_command_is_waited_for_or_killed(make):
    async with make(workdir="/tmp") as sandbox:
        options = {"tag": "job", "want_output": True}
        line = "echo $WHO; sleep 0.2; exit 4"
        found = await exec_and_wait(sandbox, cmd=line, time_budget_sec=600, env={"WHO": "me"}, **options)
        assert found == (4, "me\n")
        for seconds in (1, 5, 25, 125):  # it may get no turn in a short time
            found = await exec_and_wait(
                sandbox, cmd="echo on; sleep 6000", time_budget_sec=seconds, out_file="/tmp/said", **options
            )
            assert found.exit_code == EXIT_TIME_BUDGET_EXCEEDED
            if found.output == "on\n":
                break
        assert found.output == "on\n"
        async with asyncio.timeout(300):
            while "sleep 6000" in await command_lines(sandbox):
                await asyncio.sleep(0.05)


async def test_files_go_in_and_out_whatever_is_in_them(make):
    data = bytes(range(256)) * 5000
    async with make(workdir="/tmp") as sandbox:
        await sandbox.write_file("/new/folder/a file", data)
        said = (await sandbox.exec("wc -c < '/new/folder/a file'")).output
        assert said == f"{len(data)}\n"
        await sandbox.write_file("own", "näher")
        await sandbox.write_file("own", "nah")
        assert await sandbox.read_file("/tmp/own") == await sandbox.read_file("own") == "nah"


async def test_what_is_no_file_is_neither_read_nor_written(make):
    async with make(workdir="/tmp") as sandbox:
        await sandbox.exec("mkfifo pipe; mkdir folder; ln -s /etc/passwd link")
        for name in ("pipe", "link", "folder"):
            with pytest.raises(SandboxError, match="not a regular file"):
                await sandbox.read_file(name)
            with pytest.raises(SandboxError, match="not a regular file"):
                await sandbox.write_file(name, "text")
        with pytest.raises(SandboxError, match="not a regular file"):
            await sandbox.read_file("absent")


async def test_a_file_beyond_the_limit_is_refused(make):
    async with make(limits=ContainerLimits(file_bytes=1000)) as sandbox:
        await sandbox.exec("head -c 1001 /dev/zero > /tmp/long; head -c 1000 /dev/zero > /tmp/short")
        assert len(await sandbox.read_file("/tmp/short")) == 1000
        with pytest.raises(SandboxError, match=r"'/tmp/long': more than 1000 bytes \(limits.file_bytes\)"):
            await sandbox.read_file("/tmp/long")


async def test_a_tree_is_carried_to_another_sandbox(make):
    line = "mkdir -p /tree/a/b; echo deep > /tree/a/b/c; ln -s a/b/c /tree/link; chmod +x /tree/a/b/c"
    async with make() as one, make() as other:
        await one.exec(line)
        await other.write_tree("/copy", await one.read_tree("/tree"))
        assert (await other.exec("cat /copy/link; test -x /copy/a/b/c; echo $?")).output == "deep\n0\n"
        with pytest.raises(SandboxError, match="/absent"):
            await one.read_tree("/absent")


async def test_what_cannot_be_run_says_so_and_costs_nothing(make):
    async with make() as sandbox:
        for options in ({"user": "nobody-here"}, {"workdir": "/absent"}, {"env": {"A=B": "c"}}):
            with pytest.raises(SandboxError):
                await sandbox.exec("true", **options)
        for line in ("echo a\0b", "echo \ud800", "echo " + "a" * 200_000):
            with pytest.raises(SandboxError) as refused:
                await sandbox.exec(line)
            assert len(str(refused.value)) < 600
        assert (await sandbox.exec("echo still here")).output == "still here\n"
    with pytest.raises(SandboxError, match="is not open"):
        await sandbox.exec("true")


async def test_no_network_is_there_unless_asked_for(make):
    async with make() as sandbox:
        if sandbox.image == REAL_IMAGE:
            assert (await sandbox.exec("ls /sys/class/net")).output.split() == ["lo"]


async def test_the_end_of_a_sandbox_is_that_of_its_container(engine):
    async with ContainerSandbox(IMAGE) as sandbox:
        await sandbox.exec("setsid sleep 6000 > /dev/null 2>&1 &")
        assert engine.running == [sandbox.name]
        pid = int((engine.folder / "containers" / sandbox.name / "pid").read_text())
        inside = psutil.Process(pid).children(recursive=True)
        assert inside
    assert not engine.running
    _, alive = psutil.wait_procs(inside, timeout=300)
    assert not alive


async def test_a_sandbox_whose_container_has_ended_says_so(engine):
    async with ContainerSandbox(IMAGE) as sandbox:
        pid = int((engine.folder / "containers" / sandbox.name / "pid").read_text())
        psutil.Process(pid).kill()
        psutil.Process(pid).wait(300)
        with pytest.raises(SandboxError, match=r"a command was not started: .*is not running"):
            await sandbox.exec("true")


async def test_limits_and_options_are_given_to_the_engine_and_values_of_the_environment_are_not(engine):
    limits = ContainerLimits(memory_bytes=1 << 28, cpus=1.5, processes=9)
    options = {"limits": limits, "lifetime_s": 77, "run_options": ("--network", "of-mine")}
    async with ContainerSandbox(IMAGE, **options) as sandbox:
        await sandbox.exec("echo", env={"KEY": SECRET})
    (run,) = [words for words in engine.calls if words[0] == "run"]
    pairs = dict(pairwise(run))
    wanted = {"--memory": "268435456b", "--memory-swap": "268435456b", "--cpus": "1.5", "--pids-limit": "9"}
    assert wanted.items() <= pairs.items() and pairs["--security-opt"] == "no-new-privileges"
    assert run.index("none") < run.index("of-mine") and run[-2:] == [IMAGE, "77"]
    assert not [word for words in engine.calls for word in words if SECRET in word]


async def test_containers_of_a_dead_owner_and_those_whose_time_is_up_are_removed(engine):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = owners._owner(ended.pid)
    async with AsyncExitStack() as stack:
        names = ("mine", "dead", "late", "elsewhere")
        made = {name: await stack.enter_async_context(ContainerSandbox(IMAGE)) for name in names}
        relabel(engine, made["dead"], {owners.OWNER: theirs})
        relabel(engine, made["late"], {owners.OWNER: ELSEWHERE, owners.LIFETIME: "0"})
        relabel(engine, made["elsewhere"], {owners.OWNER: ELSEWHERE})
        assert await owners.remove_orphans(str(engine.program)) == [made["late"].name]
        ended.communicate(b"\n", timeout=300)
        assert await owners.remove_orphans(str(engine.program)) == [made["dead"].name]
        assert sorted(engine.running) == sorted([made["mine"].name, made["elsewhere"].name])


@pytest.mark.parametrize("days", [-400, 400])
async def test_whoever_has_another_clock_than_the_engine_removes_nobody_s_containers(engine, days):
    (engine.folder / "clock").write_text(str(86_400 * days))
    async with ContainerSandbox(IMAGE) as mine, ContainerSandbox(IMAGE) as theirs:
        relabel(engine, theirs, {owners.OWNER: ELSEWHERE})
        assert await owners.remove_orphans(str(engine.program)) == []
        assert sorted(engine.running) == sorted([mine.name, theirs.name])
        (engine.folder / "clock").write_text(str(86_400 * days + 4000))
        assert len(await owners.remove_orphans(str(engine.program))) == 2


def test_where_no_engine_tells_the_time_nothing_is_too_old():
    other = {owners.OWNER: ELSEWHERE, owners.LIFETIME: "1"}
    assert owners.is_orphan(other, 1.5) and not owners.is_orphan(other, 0.5) and not owners.is_orphan(other)
    assert owners._seconds(None, datetime.now(UTC)) is owners._seconds(datetime.now(UTC), None) is None


async def test_a_call_that_is_stopped_ends_with_what_its_program_has_started(tmp_path):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nsleep 6000 & echo $!\nwait\n")
    program.chmod(0o755)
    client = await Client.start([str(program)], keep=1000)
    await client.until_said(b"\n", 300)
    child = psutil.Process(int(client.output))
    await client.stop()
    _, alive = psutil.wait_procs([child], timeout=300)
    for one in alive:
        one.kill()
    assert not alive


def relabel(engine, sandbox, labels):
    facts = engine.folder / "containers" / sandbox.name / "facts.json"
    found = json.loads(facts.read_text())
    facts.write_text(json.dumps({**found, "labels": {**found["labels"], **labels}}))


async def test_the_first_sandbox_of_a_process_looks_for_orphans(engine):
    left = await ContainerSandbox(IMAGE).__aenter__()
    relabel(engine, left, {owners.LIFETIME: "0"})
    async with ContainerSandbox(IMAGE):
        assert left.name in engine.running
    container._SWEPT.clear()
    async with ContainerSandbox(IMAGE):
        assert left.name not in engine.running


def test_labels_that_were_cut_off_are_those_of_no_orphan():
    begun = datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)
    line = 'abc "2026-01-02T03:04:05.123456789Z" '
    assert owners._read(line + '{"a": "b"}') == ("abc", begun, {"a": "b"})
    assert owners._read(line + "null") == ("abc", begun, {})
    for cut in (line + '{"slime.sandbox.life', line, 'abc "2026-01-', "abc", ""):
        assert owners._read(cut)[1:] == (None, {})


async def test_a_removal_that_the_engine_does_not_answer_is_tried_again(engine, monkeypatch):
    async def silent(words, **options):
        raise SandboxError("no answer")

    sandbox = await ContainerSandbox(IMAGE).__aenter__()
    with monkeypatch.context() as patch, pytest.raises(SandboxError, match="no answer"):
        patch.setattr(container, "call", silent)
        await sandbox.close()
    assert sandbox.name in engine.running
    await sandbox.close()
    assert sandbox.name not in engine.running


def test_a_process_that_got_the_number_of_another_is_not_that_one():
    mine = owners.labels(60)
    assert not owners.is_orphan(mine)
    place, pid, started = mine[owners.OWNER].rsplit(" ", 2)
    assert owners.is_orphan({**mine, owners.OWNER: f"{place} {pid} {float(started) - 100}"})
    assert not owners.is_orphan({**mine, owners.OWNER: f"elsewhere {pid} 1"})


async def test_what_is_not_there_is_named(engine, monkeypatch):
    with pytest.raises(SandboxError, match=r"other/image: .*no such image at any registry"):
        async with ContainerSandbox("other/image"):
            pass
    assert not engine.running
    monkeypatch.setenv(ENGINE, "no-such-engine")
    with pytest.raises(SandboxError, match=f"{ENGINE}=no-such-engine is no program"):
        async with ContainerSandbox(IMAGE):
            pass
    monkeypatch.delenv(ENGINE)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(SandboxError, match="neither docker nor podman is on PATH"):
        async with ContainerSandbox(IMAGE):
            pass
    with pytest.raises(ValueError, match=r"limits \{'cpus': 0\}: wanted more than 0"):
        ContainerLimits(cpus=0)
