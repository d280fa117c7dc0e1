"""Processes from a fork server are as an interpreter would have made them. With children: test_child.py."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from slime.processes.forked import (
    VARIABLE,
    Declined,
    ForkedProcess,
    ForkServer,
    _without_setup,
    split_address,
    status_of,
    worker_python,
)

ROOT = Path(__file__).parents[2]
REPORT = """
import gc, json, os, random, sys
json.dump({
    "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path[0],
    "name": __name__, "imported": "wave" in sys.modules, "random": random.random(),
    "collects": gc.isenabled(), "passed over": gc.get_freeze_count(),
    "session": os.getsid(0) == os.getpid(), "main": sys.modules["__main__"].__file__,
    "numpy": sys.modules["numpy"].random.random() if "numpy" in sys.modules else None,
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
}, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def server():
    with closing(ForkServer()) as server:
        server.preload(["wave", "numpy", "no_such_module"])
        yield server


def fork(server: ForkServer, *words: object, **options) -> ForkedProcess:
    with open(os.devnull, "r+b") as nothing:
        return ForkedProcess(
            server.address, [str(w) for w in words], files=(nothing.fileno(),) * 3, **options
        )


def report(server: ForkServer, directory: Path, number: int = 0, **options) -> dict:
    script, found = directory / "report.py", directory / f"{number}.json"
    script.write_text(REPORT)
    assert fork(server, script, found, **options).wait(60) == 0
    return json.loads(found.read_text())


def test_a_script_finds_what_an_interpreter_would_give_it(server, tmp_path: Path) -> None:
    env = os.environ | {"SLIME_TEST_NEW": "1"}
    found = report(server, tmp_path, env=env, cwd="/")
    assert found["argv"] == [str(tmp_path / "report.py"), str(tmp_path / "0.json")]
    assert found["env"] == env and found["cwd"] == "/" and found["path"] == str(tmp_path)
    assert found["files"] == [0, 1, 2, 3]  # the last one lists them
    assert found["name"] == "__main__" and found["main"] == str(tmp_path / "report.py")
    assert found["session"] and found["collects"] and found["passed over"] > 1000


def test_what_was_preloaded_is_there_and_chance_is_not_repeated(server, tmp_path: Path) -> None:
    found = [report(server, tmp_path, number) for number in range(2)]
    assert all(f["imported"] for f in found)
    assert found[0]["random"] != found[1]["random"]
    assert found[0]["numpy"] != found[1]["numpy"]


def test_a_module_is_run_as_by_python_m(server, tmp_path: Path) -> None:
    (tmp_path / "a_module.py").write_text(REPORT)
    assert fork(server, "-m", "a_module", tmp_path / "m.json", cwd=str(tmp_path)).wait(60) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["argv"] == [str(tmp_path / "a_module.py"), str(tmp_path / "m.json")]
    assert found["path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("1 / 0", 1),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_the_status_is_that_of_the_process(server, tmp_path: Path, code: str, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    process = fork(server, script)
    assert process.wait(60) == status == process.poll() == process.returncode


def test_standard_output_and_error_are_the_files_that_came_with_it(server, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys; print('out', flush=True); print('bad', file=sys.stderr); 1 / 0")
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        files = (nothing.fileno(), file.fileno(), file.fileno())
        ForkedProcess(server.address, [str(script)], files=files).wait(60)
    text = log.read_text()
    assert text.startswith("out\nbad\n") and text.endswith("ZeroDivisionError: division by zero\n")


def test_a_signal_reaches_it_and_a_wait_has_an_end(server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    process = fork(server, script)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    deadline = time.monotonic() + 60
    while str(script) not in " ".join(psutil.Process(process.pid).cmdline()):  # it writes its title itself
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("change", [{"OMP_NUM_THREADS": "7"}, {"LD_PRELOAD": ""}, {"PATH": None}])
def test_an_environment_that_libraries_would_have_read_otherwise_is_declined(server, change) -> None:
    env = {k: v for k, v in (os.environ | change).items() if v is not None}
    with pytest.raises(Declined, match=next(iter(change))):
        fork(server, "-m", "this", env=env)


def test_a_request_without_the_key_is_not_answered(server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    _, path = split_address(server.address)
    with open(os.devnull, "r+b") as nothing, pytest.raises(Declined, match="hung up"):
        ForkedProcess(f"{'0' * 32}@{path}", [str(script)], files=(nothing.fileno(),) * 3)
    assert not (tmp_path / "ran").exists()
    assert fork(server, script).wait(60) == 0 and (tmp_path / "ran").exists()


def test_what_was_forked_ends_with_its_server(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    with closing(ForkServer()) as server:
        server.preload(["wave"])
        process = fork(server, script)
        os.kill(server.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        while psutil.pid_exists(process.pid) and psutil.Process(process.pid).status() != "zombie":
            time.sleep(0.01)
        with pytest.raises(Declined):
            fork(server, script)


def test_a_server_ends_with_the_process_that_started_it_and_leaves_no_file() -> None:
    code = """
from slime.processes.forked import ForkServer
import os, sys
server = ForkServer()
server.preload(["wave"])
print(server.pid, server.directory, flush=True)
sys.stdin.read()
os._exit(0)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, directory = owner.stdout.readline().split()
    assert Path(directory).stat().st_mode & 0o777 == 0o700
    owner.communicate("")
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie":
        time.sleep(0.01)
    deadline = time.monotonic() + 60
    while Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker(context: dict, *more: str) -> list[str]:
    setup = f"--serialized-runtime-env-context={json.dumps(context)}"
    return ["/ray/setup_worker.py", "/ray/default_worker.py", "--port=1", "--language=PYTHON", setup, *more]


def test_a_worker_whose_setup_changes_variables_alone_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"A": "1"})
    plain = ["/ray/default_worker.py", "--port=1"]
    assert _without_setup("py", plain) == ({"A": "1"}, plain)
    env, words = _without_setup("py", worker({"env_vars": {"B": "2"}, "py_executable": "py"}, "--hash=3"))
    assert env == {"A": "1", "B": "2"} and words == [*plain, "--hash=3"]
    assert _without_setup("py", worker({"env_vars": {"B": "$A/2"}})) is None
    assert _without_setup("py", worker({"py_executable": "other"})) is None
    assert _without_setup("py", worker({"command_prefix": ["cd /tmp &&"]})) is None
    assert _without_setup("py", [word for word in worker({}) if "language" not in word]) is None


def test_the_program_for_rays_workers_is_python_for_everything_else(
    server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, server.address)
    program = worker_python(server)
    code = "import sys; print(sys.argv[1:], sys.executable)"
    done = subprocess.run([program, "-c", code, "a b"], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == f"['a b'] {sys.executable}"
    directory = tmp_path / "a 'ray'"
    directory.mkdir()
    script = directory / "default_worker.py"
    script.write_text(REPORT)
    subprocess.run([program, str(script), str(tmp_path / "w.json")], check=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "w.json").exists() or not (tmp_path / "w.json").read_text().endswith("}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert json.loads((tmp_path / "w.json").read_text())["imported"]
    # Without the server it is started.
    script.write_text("import sys; print('wave' in sys.modules)")
    os_env = os.environ | {"OMP_NUM_THREADS": "7"}
    done = subprocess.run([program, str(script)], env=os_env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_server_ends_with_who_started_it_though_an_import_takes_long(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("open('started', 'w').close()\nimport time\ntime.sleep(600)\n")
    code = """
import os, time
from slime.processes.forked import ForkServer
server = ForkServer()
server.preload(["endless"])
while not os.path.exists("started"):
    time.sleep(0.01)
print(server.pid, server.directory, flush=True)
os._exit(0)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", code]
    owner = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=300)
    pid, directory = owner.stdout.split()
    deadline = time.monotonic() + 120
    while psutil.pid_exists(int(pid)) or Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_server_says_how_what_it_has_forked_ended(server, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    process = fork(server, script)
    assert status_of(server.address, process.pid) is None
    process.kill()
    process.wait(60)
    assert status_of(server.address, process.pid) == -signal.SIGKILL
    with pytest.raises(Declined):
        status_of(f"key@{tmp_path}/none", process.pid)
