"""The processes of a run are found by descent and by mark, and only those that play a role are struck."""

import os
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from slime.chaos.victims import MARK, RunProcesses

TITLES = {
    "engine": "python -m slime.backends.embedded_engine --port=1",
    "router": "sglang::router",
    "trainer rank": "ray::TrainRayActor.train",
    "rollout manager": "ray::RolloutManager",
    "standby": "ray::StandbyRank",
    "engine actor": "ray::EngineActor",
    "raylet": "/site-packages/ray/core/src/ray/raylet/raylet",
    "gcs": "/site-packages/ray/core/src/ray/gcs/gcs_server",
}
OTHERS = [
    "ray::IDLE",
    "python -I -S /x/slime/processes/supervisor.py 7 -- python -m slime.backends.embedded_engine",
    "python -I -S /x/slime/processes/reaper.py 7",
]
# A supervisor with a driver below it, and all others below that; the first engine has left both.
_TREE = """
if [ "$0" = supervisor ]; then
  (sleep 600; true) &  # a fork of it, which is no driver
  bash -c "$TREE" driver "$@" &
  wait
fi
titles=("$@")
for title in "${titles[@]:1}"; do (exec -a "$title" sleep 600) & done
(setsid bash -c 'exec -a "$0" sleep 600' "${titles[0]}" &)
wait
"""


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except OSError:  # it has ended
        return ""


@pytest.fixture
def tree():
    mark = uuid.uuid4().hex
    titles = [*TITLES.values(), "python -m slime.router settings.json", *OTHERS]
    command = ["bash", "-c", _TREE, "supervisor", *titles]
    env = {**os.environ, MARK: mark, "TREE": _TREE}
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        processes = RunProcesses(process.pid, mark)
        deadline = time.monotonic() + 60
        while len(processes.look_everywhere()) < len(titles) + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while not set(titles) <= set(map(title, processes.look_everywhere())):  # before, they are bash's
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield processes, process.pid
        for pid in processes.look_everywhere():
            with suppress(ProcessLookupError):  # some end with what they wait for
                os.kill(pid, 9)
        process.kill()


def test_every_role_is_found_and_nobody_else(tree):
    processes, supervisor = tree
    roles = processes.roles()
    counts = {role: len(pids) for role, pids in roles.items()}
    assert counts == {**dict.fromkeys(TITLES, 1), "router": 2, "driver": 1}
    assert supervisor not in processes.look_everywhere()
    assert os.getpid() not in processes.look_everywhere()


def test_what_has_left_its_parent_is_found_by_its_mark_and_is_not_forgotten(tree):
    processes, supervisor = tree
    (engine,) = processes.roles()["engine"]
    assert engine not in RunProcesses(supervisor, "another mark").look_everywhere()
    os.kill(engine, 9)
    deadline = time.monotonic() + 60
    while engine in processes.look_everywhere():
        assert time.monotonic() < deadline
    assert "engine" not in processes.roles() and engine in processes.seen
