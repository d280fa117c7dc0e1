"""What commands in a sandbox leave behind: no process, no processor time, no file, no System V object."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.agent.jail import landlock
from slime.agent.sandbox import Limits, LocalSandbox, SandboxError
from slime.agent.sandbox.local import remove_tree

pytestmark = pytest.mark.slow

DAEMON = """
LOOP = "open('begun', 'w').close()\\nwhile True: pass"
import os, signal, sys, time
if os.fork():
    while not os.path.exists("begun"):
        time.sleep(0.01)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
os.execve(sys.executable, ["left-running", "-c", LOOP], {"PYTHONHOME": sys.base_prefix})
"""
BOMB = (
    "import os\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True:\n  try: os.fork()\n  except OSError: pass"
)
LASTING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(7001, 4096, 0o1666), libc.semget(7001, 1, 0o1666), libc.msgget(7001, 0o1666))
"""


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
async def sandbox(request):
    options = (
        {} if request.param else {"namespaces": False, "allow_weaker": True, "python": "/usr/bin/python3"}
    )
    try:
        async with LocalSandbox(limits=Limits(total_cpu_s=20, processes=24), **options) as sandbox:
            yield sandbox
    except SandboxError as error:
        pytest.skip(str(error))


async def run(sandbox, code):
    await sandbox.write_file("code.py", code)
    return await sandbox.exec(f"{sandbox.python} code.py")


def processes_of(sandbox):
    """All below its first process, by their parents, whatever is in their environment."""
    first = psutil.Process(sandbox._process.pid)
    inside = {process.pid for process in sandbox._inside}
    return [p for p in first.children(recursive=True) if p.pid not in inside and runs(p)]


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


@pytest.mark.parametrize("code", [DAEMON, BOMB], ids=["daemon", "bomb"])
async def test_whatever_left_the_session_ends_with_its_command(sandbox, code):
    before = set(psutil.pids())
    assert (await run(sandbox, code)).exit_code == 0
    left = {*processes_of(sandbox), *map(psutil.Process, started_since(before))}
    for process in left:
        process.kill()
    assert not left
    assert (await sandbox.exec("echo next")).output == "next\n"


def started_since(before):
    return [pid for pid in set(psutil.pids()) - before if name_of(pid) == "left-running"]


def name_of(pid):
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


async def test_what_is_to_go_on_goes_on_until_the_end_and_no_longer():
    async with LocalSandbox(keep_background=True) as sandbox:
        await sandbox.exec("(sleep 600; echo) > /dev/null 2>&1 &")
        inside = processes_of(sandbox)
        assert inside
    assert not any(process.is_running() for process in inside)


@pytest.mark.parametrize("background", [False, True])
async def test_processor_time_is_bounded_over_all_processes_and_commands(background):
    limits = Limits(total_cpu_s=1, cpu_s=60)
    async with LocalSandbox(limits=limits, keep_background=background) as sandbox:
        spin = "setsid sh -c 'while :; do :; done' > /dev/null 2>&1 &"
        if background:
            await sandbox.exec(spin * 4)
            async with asyncio.timeout(120):
                while processes_of(sandbox):
                    await asyncio.sleep(0.1)
        else:
            started = time.monotonic()
            code, _ = await sandbox.exec(spin * 4 + " wait; sleep 600", timeout=600)
            assert code == -signal.SIGXCPU and time.monotonic() - started < 300
        with pytest.raises(SandboxError, match=r"limits.total_cpu_s: .* used \d+\.\d+ .*less than 1"):
            await sandbox.exec("echo more")


async def test_children_that_their_parent_forgets_are_counted():
    """The kernel drops the times of those whose parent ignores their end."""
    code = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += "while True:\n  if not os.fork():\n    while time.process_time() < 0.5: pass\n    os._exit(0)\n"
    # One at a time: on a busy machine more would come to the limit of processes.
    code += "  try: os.wait()\n  except ChildProcessError: pass\n"
    async with LocalSandbox(limits=Limits(total_cpu_s=2, processes=24)) as sandbox:
        await sandbox.write_file("code.py", code)
        assert (await sandbox.exec("exec python code.py", timeout=300)).exit_code == -signal.SIGXCPU


async def test_no_object_of_system_v_stays(sandbox):
    if "leftovers" not in sandbox.held:
        pytest.skip(sandbox.missing["leftovers"])
    before = objects()
    said = (await run(sandbox, LASTING)).output.split()
    assert said == ["-1"] * 3 or sandbox.workspace == "/workspace"
    assert objects() == before


def objects():
    return {kind: Path(f"/proc/sysvipc/{kind}").read_text().count("\n") for kind in ("shm", "sem", "msg")}


async def test_no_file_stays_outside_of_the_folder_that_is_removed(sandbox, tmp_path):
    if "leftovers" not in sandbox.held:
        pytest.skip(sandbox.missing["leftovers"])
    name, places = f"left-{os.getpid()}", ["/tmp", "/var/tmp", "/dev/shm", str(tmp_path)]
    tmp_path.chmod(0o777)
    (tmp_path / "there").write_text("whole")
    (tmp_path / "there").chmod(0o666)
    for place in places:
        await sandbox.exec(f"echo x > {place}/{name}; mkdir {place}/{name}-d; ln -s x {place}/{name}-l")
    await sandbox.exec(f"true > {tmp_path}/there; rm -f {tmp_path}/there; echo x > own; echo x > /dev/null")
    assert (await sandbox.exec("cat own")).output == "x\n"
    folder = sandbox._folder
    await sandbox.close()
    assert not [place for place in places if any(Path(place).glob(f"{name}*"))]
    assert (tmp_path / "there").read_text() == "whole" and not Path(folder).exists()


async def test_a_command_cannot_end_what_would_end_it():
    async with LocalSandbox(namespaces=False, allow_weaker=True, python="/usr/bin/python3") as sandbox:
        if landlock.version() < 6 or "leftovers" not in sandbox.held:
            pytest.skip("needs Landlock's scopes of signals")
        first = sandbox._process.pid
        kill = f"kill -9 {first}; kill -9 -{first}; prlimit --pid {first} --cpu=1:1; echo alive"
        code, output = await sandbox.exec(f"setsid sh -c '{kill}'")
        assert (await sandbox.exec("echo next")).output == "next\n"
        assert sandbox._process.pid == first and sandbox._process.returncode is None, (code, output)


def test_a_folder_is_removed_however_deep_and_shut_it_is(tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    os.chdir(folder)
    try:
        for _ in range(700):
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
    finally:
        os.chdir("/")
    (folder / "shut").mkdir(mode=0)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(500)
    try:
        remove_tree(str(folder))
    finally:
        sys.setrecursionlimit(usual)
        left = folder.exists()
        subprocess.run(["rm", "-rf", folder], check=True)  # pytest cannot
    assert not left
    remove_tree(str(folder))
