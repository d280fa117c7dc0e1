"""Ray on a busy machine: one more try, nothing left of the first, and a last line that helps."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray._private import node, services
from ray._private.node import Node

from slime.processes.reaper import living
from slime.ray import local_start
from slime.ray.local_start import RayNotStarted, start_ray

ROOT = Path(__file__).parents[2]
NODE = "ab" * 28


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for Ray is no other test's."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("RAY_agent_register_timeout_ms", None)  # of a start in another test
    monkeypatch.setattr(local_start.ray, "shutdown", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def fail_after_starting(times: int, started: list["subprocess.Popen[bytes]"]) -> None:
    """Fails as Ray does: a child with a child of its own has started, and an error comes."""
    if len(started) < times:
        started.append(subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True))
        time.sleep(0.2)
        raise Exception("The current node timed out during startup.\nThis could happen")


def test_a_start_that_fails_once_is_done_again_and_leaves_nothing() -> None:
    before, started = living({}, os.getpid()), []
    start_ray(60.0, lambda: fail_after_starting(1, started))
    assert started[0].wait(10) is not None
    assert living({}, os.getpid()).keys() <= before.keys()
    assert {"RAY_agent_register_timeout_ms": "60000"}.items() <= os.environ.items()


def test_a_start_that_fails_twice_says_what_to_do() -> None:
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RayNotStarted) as error:
        start_ray(60.0, lambda: fail_after_starting(2, started))
    assert str(error.value).startswith(
        "Ray did not start on this machine in 2 tries: The current node timed out during startup. (wanted: "
    )
    assert "a longer --cluster-timeout than 60," in str(error.value)
    assert [process.wait(10) for process in started] != []


def test_a_busy_machine_has_more_tries_until_the_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (10.0 * (os.cpu_count() or 1), 0.0, 0.0))
    calls: list[int] = []

    def init() -> None:
        calls.append(1)
        if len(calls) < 4:
            raise Exception("its raylet has ended")

    start_ray(60.0, init)
    assert len(calls) == 4
    calls[:] = []
    with pytest.raises(RayNotStarted, match="in 2 tries: its raylet has ended"):
        start_ray(0.0, init)
    with pytest.raises(RayNotStarted, match="in 6 tries"):
        start_ray(60.0, lambda: (_ for _ in ()).throw(Exception("its raylet has ended")))


def test_a_raylet_that_is_slow_has_the_whole_time_and_a_dead_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([RuntimeError("no such node"), RuntimeError("no such node"), {"node": 1}])

    def get_node(*_: object) -> object:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(local_start, "_LOOK_INTERVAL", 0.01)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(local_start, "_lives", lambda name: True)
    found: list[object] = []
    start_ray(60.0, lambda: found.append(services.get_node("gcs", "node")))
    assert found == [{"node": 1}]
    assert services.get_node is get_node

    answers = iter([RuntimeError("no such node")] * 4)
    with pytest.raises(RayNotStarted, match=r"its raylet is not up after 0 s"):
        start_ray(0.0, lambda: services.get_node("gcs", "node"))
    monkeypatch.setattr(local_start, "_lives", lambda name: False)
    answers = iter([RuntimeError("no such node")] * 2)
    with pytest.raises(RayNotStarted, match="its raylet has ended"):
        start_ray(60.0, lambda: services.get_node("gcs", "node"))


def test_a_port_of_the_gcs_is_waited_for_while_others_run_and_only_as_long_as_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[object, ...]] = []

    def read_port(*words: object, timeout_ms: int) -> int:
        read.append((*words, (tmp_path / f"gcs_server_port_{NODE}").exists(), timeout_ms))
        return 4711

    def lives(name: str) -> bool:
        looks.append(name)
        if len(looks) == 3:
            (tmp_path / f"gcs_server_port_{NODE}").touch()
        return len(looks) > 1

    def start() -> None:
        found.append(node.wait_for_persisted_port(str(tmp_path), NODE, "gcs_server_port", timeout_ms=60000))

    looks: list[str] = []
    found: list[int] = []
    monkeypatch.setattr(local_start, "_PORT_INTERVAL", 0.0)
    monkeypatch.setattr(node, "wait_for_persisted_port", read_port)
    monkeypatch.setattr(local_start, "_lives", lives)
    start_ray(60.0, start)
    assert found == [4711] and looks == ["gcs_server"] * 3
    assert read == [(str(tmp_path), NODE, "gcs_server_port", True, 1000)]
    assert node.wait_for_persisted_port is read_port

    (tmp_path / f"gcs_server_port_{NODE}").unlink()
    monkeypatch.setattr(local_start, "_lives", lambda name: False)
    with pytest.raises(RayNotStarted, match="its GCS has ended"):
        start_ray(60.0, start)
    assert len(read) == 1


def test_a_ray_that_chooses_the_port_of_its_gcs_itself_is_started_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[bool] = []
    monkeypatch.delattr(node, "wait_for_persisted_port")
    start_ray(60.0, lambda: started.append(hasattr(node, "wait_for_persisted_port")))
    assert started == [False]


@pytest.mark.parametrize("logs_are_shown", [False, True])
def test_ray_starts_no_monitor_and_reads_logs_where_they_are_shown(
    logs_are_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    for name in ("start_monitor", "start_log_monitor"):
        monkeypatch.setattr(Node, name, lambda node, name=name: started.append(name))

    def init() -> None:
        node = object.__new__(Node)
        node.start_monitor()
        node.start_log_monitor()

    start_ray(60.0, init, logs_are_shown)
    assert started == ["start_log_monitor"] * logs_are_shown
    init()
    assert started[-2:] == ["start_monitor", "start_log_monitor"]


SLOW = """
import sys, ray
from slime.ray.local_start import start_ray
sys.executable = sys.argv[1]
start_ray(120.0, lambda: ray.init(address="local", num_cpus=1, include_dashboard=False))
print("up", len(ray.nodes()))
"""


@pytest.mark.cluster
@pytest.mark.nightly
def test_agents_of_ray_that_are_too_slow_once_are_waited_for_the_second_time(tmp_path: Path) -> None:
    python, once = tmp_path / "python", tmp_path / "once"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *dashboard/agent.py*) [ -e {once} ] || {{ touch {once}; sleep 60; }};; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(stat.S_IRWXU)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", SLOW, str(python)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.stdout == "up 1\n", run.stderr
    assert "Ray did not start, and is started again: its raylet has ended" in run.stderr
