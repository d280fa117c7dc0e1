import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slime.processes import stopped
from slime.processes.child import ManagedProcess
from slime.processes.forked import VARIABLE, ForkServer
from slime.processes.stopped import is_stopped, with_descendants

SLEEPER = "import time; time.sleep(600)"
# A command that detaches a daemon into a session of its own and writes both process ids to a file.
WITH_DAEMON = """
import os, subprocess, sys, time
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {daemon.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("armed", flush=True)
while True:
    time.sleep(1)
"""
ENDS_ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("goodbye", flush=True), sys.exit(3)))
print("armed", flush=True)
while True:  # in short calls: none is interrupted by a signal that comes just before it
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def fork_server():
    with closing(ForkServer()) as server:
        yield server


@pytest.fixture(params=["started", "forked"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether commands are interpreters of their own or come from a fork server."""
    if request.param == "forked":
        monkeypatch.setenv(VARIABLE, request.getfixturevalue("fork_server").address)
    return request.param


def start(code: str, tmp_path: Path, *arguments: str, **options) -> ManagedProcess:
    script = tmp_path / "thing.py"
    script.write_text(code)
    argv, log = [sys.executable, str(script), *arguments], tmp_path / "logs" / "thing.log"
    return ManagedProcess(argv, name="thing", log_path=log, imports_much=True, **options)


def wait_for(condition, timeout: float = 90.0):
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.02)
    return result


def pids_in(path: Path) -> list[int]:
    wait_for(path.exists)
    return [int(word) for word in path.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_output_goes_to_the_log_and_the_exit_status_is_reported(tmp_path):
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(7)"
    process = start(code, tmp_path)
    assert process.wait(90) == 7
    assert not process.is_alive()
    assert process.log_tail() == "out\nerr"
    assert process.log_tail(lines=1) == "err"
    reason = process.exit_reason()
    assert reason.startswith("thing: exit status 7") and reason.endswith("out\nerr")


def test_a_running_process_has_no_exit_reason(tmp_path):
    with start(SLEEPER, tmp_path) as process:
        assert process.is_alive()
        assert process.exit_reason() is None
        with pytest.raises(TimeoutError, match=r"thing: still running after 0\.1 s"):
            process.wait(0.1)


def test_a_command_killed_by_a_signal_is_reported_with_its_name(tmp_path):
    process = start("import os; os.kill(os.getpid(), 11)", tmp_path)
    assert process.wait(90) == -signal.SIGSEGV
    assert "killed by SIGSEGV" in process.exit_reason()


def test_a_missing_command_is_named_in_the_log(tmp_path):
    process = ManagedProcess(["/no/such/command"], name="thing", log_path=tmp_path / "log")
    assert process.wait(90) == 127
    assert "cannot start '/no/such/command'" in process.exit_reason()


def test_environment_changes_add_replace_and_remove(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_TEST_REMOVED", "1")
    monkeypatch.setenv("SLIME_TEST_KEPT", "2")
    code = "import os; print(sorted((k, v) for k, v in os.environ.items() if k.startswith('SLIME_TEST_')))"
    process = start(code, tmp_path, env={"SLIME_TEST_REMOVED": None, "SLIME_TEST_NEW": "3"})
    process.wait(90)
    assert process.log_tail() == "[('SLIME_TEST_KEPT', '2'), ('SLIME_TEST_NEW', '3')]"


def test_terminate_lets_the_command_end_by_itself(tmp_path):
    process = start(ENDS_ON_SIGTERM, tmp_path)
    wait_for(lambda: "armed" in process.log_tail())
    process.terminate(grace_s=90)
    assert process.poll() == 3
    assert "goodbye" in process.log_tail()


def test_terminate_kills_what_ignores_sigterm_after_the_grace_period(tmp_path):
    process = start(IGNORES_SIGTERM, tmp_path)
    wait_for(lambda: "armed" in process.log_tail())
    started = time.monotonic()
    process.terminate(grace_s=1.0)
    assert time.monotonic() - started > 0.9
    assert process.poll() == -signal.SIGKILL
    process.terminate()


def test_descendants_that_left_the_process_group_die_with_the_command(tmp_path):
    process = start(WITH_DAEMON, tmp_path, str(tmp_path / "pids"))
    command, daemon = pids_in(tmp_path / "pids")
    os.kill(command, signal.SIGKILL)
    wait_until_gone([daemon])
    assert process.wait(90) == -signal.SIGKILL


def children_but_supervisors(pid: int) -> list[int]:
    children = psutil.Process(pid).children()
    return [child.pid for child in children if "processes/supervisor" not in " ".join(child.cmdline())]


def parent_script(tmp_path: Path, after: str) -> subprocess.Popen:
    """A Python process that owns a ManagedProcess and then does ``after``."""
    code = f"""
    import os, sys, time, threading
    from slime.processes.child import ManagedProcess
    process = ManagedProcess(
        [sys.executable, {str(tmp_path / "thing.py")!r}, {str(tmp_path / "pids")!r}],
        name="thing", log_path={str(tmp_path / "log")!r}, imports_much=True,
    )
    while not os.path.exists({str(tmp_path / "pids")!r}):
        time.sleep(0.02)
    """
    (tmp_path / "thing.py").write_text(WITH_DAEMON)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code) + after])


def test_the_tree_dies_when_the_parent_is_killed(tmp_path):
    parent = parent_script(tmp_path, "time.sleep(600)")
    pids = pids_in(tmp_path / "pids")
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_until_gone(pids)


def test_the_tree_dies_when_the_parent_ends_normally(tmp_path):
    parent = parent_script(tmp_path, "")
    assert parent.wait(90) == 0
    wait_until_gone(pids_in(tmp_path / "pids"))


def test_the_tree_dies_although_a_forked_sibling_keeps_the_pipe_open(tmp_path):
    sibling = "if os.fork() == 0:\n    time.sleep(600)\nprint(1)\ntime.sleep(600)"
    parent = parent_script(tmp_path, sibling)
    pids = pids_in(tmp_path / "pids")
    siblings = wait_for(lambda: children_but_supervisors(parent.pid))
    parent.kill()
    parent.wait()
    try:
        wait_until_gone(pids)
        assert is_running(siblings[0])
    finally:
        os.kill(siblings[0], signal.SIGKILL)


def test_the_command_survives_the_thread_that_started_it(tmp_path):
    started = []
    thread = threading.Thread(target=lambda: started.append(start(SLEEPER, tmp_path)))
    thread.start()
    thread.join()
    time.sleep(1.0)
    assert started[0].is_alive()
    started[0].terminate(grace_s=0)


def test_the_command_dies_when_the_supervisor_is_killed(tmp_path):
    process = start(WITH_DAEMON, tmp_path, str(tmp_path / "pids"))
    command, daemon = pids_in(tmp_path / "pids")
    os.kill(process.pid, signal.SIGKILL)
    try:
        wait_until_gone([command])
        assert process.wait(90) == -signal.SIGKILL
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_the_group_of_a_killed_process_is_killed_once(tmp_path, monkeypatch):
    """Its number may be another group's a while later."""
    killed = []
    monkeypatch.setattr(os, "killpg", lambda group, signum: killed.append((group, signum)))
    process = start("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert process.wait(90) == -signal.SIGKILL
    assert [process.poll() for _ in range(3)] == [-signal.SIGKILL] * 3
    assert "killed by SIGKILL" in process.failure_reason()
    assert killed == [(process.pid, signal.SIGKILL)]


def test_starting_costs_little(tmp_path):
    """In processor seconds, which do not pass while others have the processor."""
    code = """
    import resource, sys
    from slime.processes.child import ManagedProcess
    assert ManagedProcess([sys.executable, "-c", "pass"], name="thing", log_path=sys.argv[1]).wait(90) == 0
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(spent.ru_utime + spent.ru_stime)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "log")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    assert 0 < float(done.stdout) < 5


def test_a_process_that_was_stopped_is_told_after_a_while(tmp_path, monkeypatch):
    code = "import subprocess, sys; subprocess.run(['sleep', '100'])"
    with ManagedProcess([sys.executable, "-c", code], name="server", log_path=tmp_path / "log") as process:
        while len(tree := with_descendants(process.pid)) < 3:
            time.sleep(0.02)
        os.kill(tree[-1], signal.SIGSTOP)
        while not is_stopped(tree[-1]):
            time.sleep(0.02)
        now = time.monotonic()
        at = lambda moment: monkeypatch.setattr(stopped, "time", SimpleNamespace(monotonic=lambda: moment))
        at(now)
        assert process.failure_reason() is None
        at(now + 5)
        assert process.failure_reason() is None
        at(now + 10)
        assert f"server: process {tree[-1]} is stopped (SIGSTOP), for 10 s" in process.failure_reason()
        monkeypatch.undo()
        os.kill(tree[-1], signal.SIGCONT)
        while is_stopped(tree[-1]):
            time.sleep(0.02)
        assert process.failure_reason() is None


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("Traceback:\n  File x\nOSError: [Errno 98] Address already in use\n", "Address already in use"),
        ("\x1b[31mthread 'main' panicked: port\x1b[0m\nnote: RUST_BACKTRACE=1\n", "panicked: port;"),
        ("all is well\nbye\n", "bye"),
    ],
)
def test_the_first_line_says_why_a_server_ended(tmp_path, log, words):
    command = [sys.executable, "-c", f"print({log!r}); raise SystemExit(1)"]
    process = ManagedProcess(command, name="router", log_path=tmp_path / "log")
    process.wait(90)
    first = process.exit_reason().splitlines()[0]
    assert first.startswith("router: exit status 1: ") and words in first and str(tmp_path / "log") in first


def test_the_cause_is_told_though_the_folder_of_the_log_was_removed(tmp_path):
    go, folder = tmp_path / "go", tmp_path / "logs"
    code = f"while [ ! -e {go} ]; do sleep 0.01; done; echo 'error: no such model' >&2; exit 3"
    with ManagedProcess(["sh", "-c", code], name="engine 0", log_path=folder / "engine.log") as process:
        shutil.rmtree(folder)
        go.touch()
        assert process.wait(60) == 3
        reason = process.exit_reason()
        assert reason is not None and reason.startswith("engine 0: exit status 3: error: no such model; log ")
