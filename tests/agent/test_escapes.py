"""What code in a local sandbox tries, and how far it gets: nowhere."""

import http.server
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Limits, LocalSandbox, SandboxError
from slime.agent.sandbox.limits import MIB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]
SMALL = Limits(
    memory_bytes=256 * MIB, cpu_s=5, file_bytes=4 * MIB, disk_bytes=8 * MIB, processes=24, output_bytes=4096
)


@pytest.fixture
async def sandbox():
    try:
        async with LocalSandbox(limits=SMALL) as sandbox:
            yield sandbox
    except SandboxError as error:
        pytest.skip(str(error))


async def run(sandbox, code, timeout=60):
    await sandbox.write_file("code.py", code)
    return await sandbox.exec("python code.py", timeout=timeout)


async def test_a_program_runs_and_says_how_it_ended(sandbox):
    assert await run(sandbox, "print(6 * 7); raise SystemExit(3)") == (3, "42\n")
    assert {"files", "processes", "network", "privileges"} <= set(sandbox.held)


async def test_files_of_the_machine_are_not_there(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("K")
    names = [
        "/etc/shadow",
        "/etc/passwd-",
        str(secret),
        str(Path(__file__)),
        str(Path.home() / ".ssh"),
        "/sys",
    ]
    code = f"import os; print([name for name in {names!r} if os.path.exists(name)])"
    assert await run(sandbox, code) == (0, "[]\n")
    assert "root" not in (await sandbox.exec("cat /etc/passwd")).output


@pytest.mark.parametrize(
    "name", ["/usr/planted", "/planted", "/etc/planted", "/dev/planted", f"{sys.prefix}/planted"]
)
async def test_nothing_but_the_workspace_can_be_written(sandbox, name):
    code, output = await sandbox.exec(f"echo x > {name}")
    assert code != 0 and ("Read-only" in output or "Permission" in output)
    assert not Path(name).exists()


async def test_a_folder_that_is_shown_is_shown_read_only(sandbox, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows").write_text("1")
    folder.chmod(0o777)
    (folder / "rows").chmod(0o666)
    async with LocalSandbox(readable=[folder]) as shown:
        assert (await shown.exec(f"cat {folder}/rows")).output == "1"
        for name in ("rows", "planted"):
            code, output = await shown.exec(f"echo 2 > {folder}/{name}")
            assert code != 0 and "Read-only" in output
    assert [path.name for path in folder.iterdir()] == ["rows"] and (folder / "rows").read_text() == "1"


@pytest.mark.parametrize(
    "target", ["/etc/shadow", "/proc/1/root/etc/shadow", "/proc/1/environ", "../../etc/shadow"]
)
async def test_links_lead_to_nothing_of_the_machine(sandbox, target):
    await sandbox.exec(f"ln -s {target} link")
    assert (await sandbox.exec("cat link")).exit_code != 0
    if "environ" not in target:
        with pytest.raises(SandboxError):
            await sandbox.read_file("link")
    await sandbox.exec("ln -s /usr folder")
    with pytest.raises(SandboxError, match=r"Read-only|Permission"):
        await sandbox.write_file("folder/planted", "x")


async def test_the_parents_environment_is_not_there(sandbox, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "K")
    async with LocalSandbox() as fresh:
        output = (await fresh.exec("env; cat /proc/*/environ")).output
    assert "WANDB" not in output and "PYTHONPATH" not in output


@pytest.fixture
def server():
    server = http.server.HTTPServer(("0.0.0.0", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def test_no_network_leads_out_nor_to_this_machine(sandbox, server):
    code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server})), (socket.AF_INET, ("8.8.8.8", 53)),
                        (socket.AF_INET6, ("::1", {server}))):
    try:
        with socket.socket(family) as client:
            client.settimeout(2)
            client.connect(address)
            print("out")
    except OSError as error:
        print(type(error).__name__)
try:
    print(socket.getaddrinfo("pypi.org", 443))
except OSError as error:
    print(type(error).__name__)
"""
    code, output = await run(sandbox, code)
    assert code == 0 and "out" not in output and output.splitlines()[-1] == "gaierror"


@pytest.mark.parametrize("family", [16, 17, 38, 40])  # netlink, packet, alg, vsock
async def test_sockets_of_rare_families_are_refused(sandbox, family):
    if "syscalls" not in sandbox.held:
        pytest.skip(sandbox.missing["syscalls"])
    assert "PermissionError" in (await run(sandbox, f"import socket; socket.socket({family}, 3)")).output


async def test_a_fork_bomb_stays_small_and_ends_with_its_time(sandbox):
    code, _ = await run(
        sandbox, "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout=2
    )
    assert code == EXIT_TIME_BUDGET_EXCEEDED
    mark = sandbox._mark
    await sandbox.close()
    assert not marked(mark)


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.environ().values()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


async def test_a_daemon_that_is_wanted_ends_with_the_sandbox():
    code = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(600)
    os._exit(0)
os.wait()
"""
    async with LocalSandbox(limits=SMALL, keep_background=True) as sandbox:
        assert (await run(sandbox, code)).exit_code == 0
        assert "code.py" in (await sandbox.exec("cat /proc/[0-9]*/cmdline")).output
        mark = sandbox._mark
        assert marked(mark)
    assert not marked(mark)


async def test_other_processes_are_neither_seen_nor_signalled_nor_traced(sandbox):
    # Not this process's parent: where that is process 1, so is one of the sandbox's own.
    neighbour = subprocess.Popen(["sleep", "6000"])
    code = f"""
import ctypes, os, signal
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[0])
for number in ({os.getpid()}, {neighbour.pid}):
    try:
        os.kill(number, signal.SIGKILL)
        print("killed")
    except OSError as error:
        print(type(error).__name__)
os.kill(1, signal.SIGKILL)
libc = ctypes.CDLL(None, use_errno=True)
for number in (1, {os.getpid()}):
    print(libc.ptrace(16, number, 0, 0))
try:
    open("/proc/1/mem", "rb")
except OSError as error:
    print(type(error).__name__)
"""
    try:
        _, output = await run(sandbox, code)
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()
    assert output.splitlines() == ["1", *["ProcessLookupError"] * 2, "-1", "-1", "PermissionError"]
    assert (await sandbox.exec("echo alive")).output == "alive\n"


async def test_ten_gigabytes_are_refused(sandbox):
    code, output = await run(sandbox, "x = bytearray(10 << 30)")
    assert code == 1 and output.endswith("MemoryError\n")


async def test_all_processes_together_get_no_more_memory_than_one(sandbox):
    if "memory" not in sandbox.held:
        pytest.skip(sandbox.missing["memory"])
    code = """
import os, time
for _ in range(5):
    if not os.fork():
        memory = bytearray(100 << 20)
        for place in range(0, len(memory), 4096):
            memory[place] = 1
        print("got it", flush=True)
        time.sleep(600)
        os._exit(0)
os.wait()
"""
    try:
        _, output = await run(sandbox, code)
    except SandboxError:  # the kernel may have chosen the sandbox's first process
        return
    assert output.count("got it") < 5


async def test_files_are_bounded_one_by_one_and_together(sandbox):
    code, output = await run(sandbox, "open('big', 'wb').write(bytes(6 << 20))")
    assert code != 0 and (await sandbox.exec("stat -c %s big")).output.strip() in ("", str(4 << 20))
    code, output = await sandbox.exec(
        "for i in 1 2 3 4 5 6; do head -c 3000000 /dev/zero > part$i || exit 7; done"
    )
    assert code == 7 and "No space" in output


@pytest.mark.parametrize("cmd", ["while :; do :; done", "sleep 1000", "trap '' TERM INT; sleep 1000 & wait"])
async def test_what_goes_on_for_ever_ends_with_its_time(sandbox, cmd):
    assert (await sandbox.exec(cmd, timeout=0.5)).exit_code == EXIT_TIME_BUDGET_EXCEEDED
    assert await sandbox.exec("echo next") == (0, "next\n")


async def test_open_files_are_bounded(sandbox):
    code = """
import os
count = 0
try:
    while count < 1000:
        count += bool(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(count < 256, error.errno)
"""
    assert (await run(sandbox, code)).output == "True 24\n"


async def test_processor_time_is_bounded():
    async with LocalSandbox(limits=Limits(cpu_s=1)) as sandbox:
        code, _ = await sandbox.exec("exec python -c 'while True: pass'", timeout=600)
    assert code in (-signal.SIGXCPU, -signal.SIGKILL)


async def test_a_flood_of_output_is_cut_off_and_its_writer_killed(sandbox):
    code, output = await sandbox.exec("yes", timeout=600)
    assert (
        code == -signal.SIGKILL
        and len(output) < 4200
        and output.endswith("[output cut off after 4096 bytes]")
    )
    code, output = await sandbox.exec("seq 1 2000")
    assert code == 0 and output.startswith("1\n2\n") and output.endswith("[output cut off after 4096 bytes]")


async def test_an_exit_without_ceremony_is_an_exit_code(sandbox):
    assert await run(sandbox, "import os; print('x', flush=True); os._exit(9)") == (9, "x\n")
    assert (await run(sandbox, "import os; os.kill(os.getpid(), 11)")).exit_code in (-11, 139)


async def test_no_rights_can_be_won(sandbox):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/tmp"))
try:
    os.setuid(0)
except OSError as error:
    print(type(error).__name__)
"""
    assert (await run(sandbox, code)).output.splitlines() == ["-1 -1 -1", "OSError"]


async def test_there_are_no_rights_to_begin_with(sandbox):
    """Neither in force nor to be had by a program that would bring some."""
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(libc.capget(header, data), sum(data))
print(sum(libc.prctl(23, number, 0, 0, 0) > 0 for number in range(64)), libc.prctl(39, 0, 0, 0, 0))
"""
    assert (await run(sandbox, code)).output.splitlines() == ["0 0", "0 1"]


async def test_calls_that_reach_other_processes_and_the_kernel_are_refused_even_for_oneself(sandbox):
    if "syscalls" not in sandbox.held or platform.machine() != "x86_64":
        pytest.skip(sandbox.missing.get("syscalls", "numbers of x86_64"))
    # ptrace (to be traced), process_vm_readv, kcmp, bpf, perf_event_open, keyctl, io_uring_setup, userfaultfd
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number in (101, 310, 312, 321, 298, 250, 425, 323):
    result = libc.syscall(number, 0, os.getpid() if number != 101 else 0, 0, 0, 0, 0)
    print(result, ctypes.get_errno())
"""
    assert (await run(sandbox, code)).output.splitlines() == ["-1 1"] * 8


async def test_bytes_that_are_no_text_do_no_harm(sandbox):
    assert (await sandbox.exec("printf '\\377a'")).output == "\ufffda"
    await sandbox.write_file("x", b'\xff\n"')
    assert await sandbox.read_file("x") == '\ufffd\n"'


async def test_what_the_machine_cannot_hold_is_refused_by_name():
    with pytest.raises(
        SandboxError, match=r"cannot hold files, processes.*\(files: switched off;.*allow_weaker=True"
    ):
        async with LocalSandbox(namespaces=False):
            pass
    with pytest.raises(ValueError, match=r"isolation \['disk'\]: unknown"):
        LocalSandbox(isolation=["disk"])
    with pytest.raises(ValueError, match="readable /"):
        LocalSandbox(readable=["/"])


async def test_without_namespaces_limits_and_the_end_of_daemons_hold_still():
    options = {"limits": SMALL, "namespaces": False, "allow_weaker": True, "keep_background": True}
    async with LocalSandbox(**options) as sandbox:
        assert {"files", "processes"} <= set(sandbox.missing) and "files" not in sandbox.held
        assert (await sandbox.exec("yes", timeout=600)).exit_code == -signal.SIGKILL
        with pytest.raises(SandboxError, match="outside of the sandbox"):
            await sandbox.read_file("/etc/hostname")
        await sandbox.exec("setsid sleep 600 > /dev/null 2>&1 &")
        mark = sandbox._mark
        assert marked(mark)
    assert not marked(mark)
    assert not Path(sandbox.workspace).exists()


@pytest.mark.parametrize("namespaces", [True, False])
async def test_the_sandbox_ends_with_the_run(namespaces):
    code = (
        "import asyncio, os, sys\nfrom slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n"
        f"  async with LocalSandbox(namespaces={namespaces}, allow_weaker=True) as sandbox:\n"
        "    print(sandbox._mark, flush=True)\n    await sandbox.exec('sleep 600', timeout=600)\n"
        "asyncio.run(main())"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    mark = run.stdout.readline().strip()
    assert mark and marked(mark)
    run.kill()
    run.wait()
    run.stdout.close()
    for _ in range(5000):
        if not marked(mark):
            return
        threading.Event().wait(0.01)
    raise AssertionError("processes of the sandbox outlive the run")
