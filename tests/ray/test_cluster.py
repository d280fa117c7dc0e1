"""Joining a cluster: the recipe of the docs, and a last line for whoever finds none."""

import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.ray import cluster
from slime.ray.cluster import ClusterUnreachable, _join, ray_cluster
from tests.engines import free_port
from tests.run_args import config_with

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HANGS = 600  # seconds; on a busy machine a process takes a while to import Ray
JOIN = """
import pickle
import sys
import ray
from slime.ray import cluster
from slime.ray.cluster import ClusterUnreachable, ray_cluster
try:
    with ray_cluster(pickle.load(sys.stdin.buffer)):
        print("joined", ray.cluster_resources()["GPU"], len(ray.nodes()))
except ClusterUnreachable as error:
    print(error)
"""


LISTENING = """
import psutil
def listening():
    own = psutil.Process()
    found = [c for p in [own, *own.children(recursive=True)] for c in p.net_connections("inet")]
    return {c.laddr.ip.removeprefix("::ffff:") for c in found if c.status == "LISTEN"}
def monitors():
    return [p.pid for p in psutil.Process().children(recursive=True) if "monitor.py" in " ".join(p.cmdline())]
def task_events():
    servers = [p for p in psutil.Process().children(recursive=True) if "gcs_server" in p.cmdline()[0]]
    return [p.environ().get("RAY_task_events_report_interval_ms") for p in servers]
"""


def config(timeout: float) -> bytes:
    """What `JOIN` is given: the parser is slow to import, and no driver needs it for this."""
    flags = {"num_gpus_per_node": 2, "debug_train_only": True, "debug_rollout_only": True}
    return pickle.dumps(config_with(cluster_timeout=timeout, **flags))


def join(address: str, timeout: float, **env: str) -> str:
    """The last line of a driver that joins."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", JOIN],
        input=config(timeout),
        env={**environment, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANGS,
    )
    return run.stdout.decode().strip().splitlines()[-1]


def test_an_address_that_nobody_answers_is_named_in_time() -> None:
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(ClusterUnreachable, match=rf"RAY_ADDRESS {address}: nobody answers within 1 s"):
        _join(address, 1.0)
    assert time.monotonic() - start < HANGS


def test_a_server_that_never_says_whether_it_is_a_cluster_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = join(address, 2)
        assert line == f"error: RAY_ADDRESS {address}: connecting (--cluster-timeout): not done after 2 s"


def recipe() -> list[str]:
    """The commands of docs/usage.md, "Several nodes", for a cluster that is started by hand."""
    page = (ROOT / "docs/usage.md").read_text()
    block = re.search(r"## Several nodes.*?by hand.*?```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return block.group(1).splitlines()


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path, as Ray's sockets need one; what was started there is killed."""
    path = Path(tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp"))
    yield path
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path) in command.read_text(errors="replace"):
                os.kill(int(command.parent.name), signal.SIGKILL)
        except OSError:
            continue
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.cluster
def test_the_recipe_for_several_nodes_works_as_printed_and_admits_nobody_else(place: Path) -> None:
    mode, token, head, other, run = recipe()
    address = f"127.0.0.1:{free_port()}"

    def shell(home: str, *lines: str) -> None:
        (place / home).mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        script = "\n".join(lines).replace("FIRST_NODE:6379", address).replace("6379", address.split(":")[1])
        for start in re.findall(r"^ray start[^#\n]*", script, re.MULTILINE):
            script = script.replace(start, f"{start.strip()} --num-gpus 2 --num-cpus 4 ")
        subprocess.run(
            ["bash", "-ec", script],
            env={**environment, "HOME": str(place / home), "RAY_TMPDIR": str(place)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=HANGS,
        )

    shell("first", mode, token, head)
    key = place / "first/.ray/auth_token"
    assert key.stat().st_mode & 0o777 == 0o600
    shutil.copytree(key.parent, place / "second/.ray")
    shell("second", mode, other)
    assert run.startswith("RAY_ADDRESS=FIRST_NODE:6379 ")
    exported = dict([mode.split("#")[0].removeprefix("export ").strip().split("=")])
    assert join(address, 120, HOME=str(place / "first"), **exported) == "joined 4.0 2"
    # The driver's shell need not say the mode again.
    assert join(address, 120, HOME=str(place / "first")) == "joined 4.0 2"
    refusal = join(address, 120, HOME=str(place))
    assert refusal.startswith(f"RAY_ADDRESS {address}: somebody listens there and refuses us (wanted: ")


def test_logs_that_cannot_be_hidden_are_a_warning_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "set")
    monkeypatch.setattr(cluster, "_init", lambda **_: None)
    monkeypatch.setattr(cluster, "start_run_reaper", lambda: None)
    monkeypatch.setattr(cluster, "share_environment", lambda: None)
    monkeypatch.setattr(cluster, "_listen_on_loopback", lambda: None)
    monkeypatch.setattr(cluster, "_reapers", [])
    monkeypatch.setenv("SLIME_FORK_WORKERS", "0")
    monkeypatch.setattr(cluster, "session_directory", lambda: tmp_path / "gone")
    cluster._start_local(config_with(num_gpus_per_node=1, cluster_timeout=60.0))
    assert "Ray's logs may be readable for everybody" in caplog.text and str(tmp_path / "gone") in caplog.text


@pytest.mark.parametrize(("reapers", "terminated", "asked"), [(1, True, 0), (1, False, 1), (0, True, 1)])
def test_ray_is_not_asked_to_end_what_a_sigterm_to_all_has_ended(
    monkeypatch: pytest.MonkeyPatch, reapers: int, terminated: bool, asked: int
) -> None:
    """It would wait for answers of its own processes; the reaper of a local run ends what is left."""
    calls: list[int] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_start_local", lambda args: None)
    monkeypatch.setattr(cluster, "own_processes", dict)
    monkeypatch.setattr(cluster, "was_terminated", lambda: terminated)
    monkeypatch.setattr(cluster, "_reapers", [None] * reapers)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: calls.append(1))
    with ray_cluster(config_with()):
        pass
    assert len(calls) == asked


@pytest.mark.cluster
def test_a_local_run_leaves_no_token_behind_and_shows_others_neither_logs_nor_ports(tmp_path: Path) -> None:
    code = JOIN.replace("import ray\n", "import ray\nfrom slime.ray.cluster import session_directory\n", 1)
    code = code.replace(
        'print("joined"',
        'print("joined", oct(session_directory().stat().st_mode), listening(), monitors(), task_events()',
    )
    code = LISTENING + code
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=config(60),
        # Python's temporary directory is not Ray's.
        env={**environment, "HOME": str(tmp_path), "TMP": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=HANGS,
    )
    assert run.stdout.decode().startswith(
        "joined 0o40700 {'127.0.0.1'} [] ['0'] 2.0 1"
    )  # GPUs as the flag says
    assert not (tmp_path / ".ray").exists()
