"""What a process knows about its node."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.ray import node
from slime.ray.node import (
    first_port,
    forget_shared_environment,
    listening_host,
    log_dir,
    process_env,
    runtime_env,
    share_environment,
)


def test_servers_leave_loopback_only_in_a_cluster_of_several_machines() -> None:
    assert listening_host({"10.0.0.1"}, "10.0.0.1") == "127.0.0.1"
    assert listening_host({"10.0.0.1", "10.0.0.2"}, "10.0.0.2") == "10.0.0.2"


def test_the_shell_wins_over_our_defaults_and_the_flag_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    env = process_env({"OMP_WAIT_POLICY": "ACTIVE", "PORT": 1})  # type: ignore[dict-item]
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["PORT"]) == ("3", "ACTIVE", "1")
    assert env["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()
    assert "NCCL_CUMEM_ENABLE" not in env
    assert process_env(trainer=True)["NCCL_CUMEM_ENABLE"] == "0"


def test_ray_is_told_of_what_its_processes_do_not_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        mine = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        patch.setattr(os, "environ", dict(os.environ) | mine)
        forget_shared_environment()
        everything = process_env()
        assert runtime_env(everything) == {"env_vars": everything}
        share_environment()
        assert everything.items() <= os.environ.items()
        assert process_env() == everything
        assert runtime_env(process_env(trainer=True)) == {}
        assert runtime_env(process_env({"OMP_NUM_THREADS": "2"})) == {"env_vars": {"OMP_NUM_THREADS": "2"}}
        # Too late for those that run.
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
        assert runtime_env(process_env()) == {"env_vars": {"OMP_WAIT_POLICY": "ACTIVE"}}
        forget_shared_environment()
        assert runtime_env(everything) == {"env_vars": everything}


def test_runs_keep_their_ports_and_logs_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = {}
    for job in ("01", "02"):

        class Context:
            def get_session_name(self) -> str:
                return "session"

            def get_job_id(self, job: str = job) -> str:
                return job

        monkeypatch.setattr(node.ray, "get_runtime_context", Context)
        found[first_port(3000, 1000)] = log_dir()
    assert len(found) == len(set(found.values())) == 2
    (root,) = tmp_path.iterdir()
    assert root.stat().st_mode & 0o777 == 0o700 and all(root in path.parents for path in found.values())
    assert all(3000 <= port < 4000 for port in found)


@pytest.mark.parametrize(
    ("nodes", "lives"),
    [
        ([{"NodeID": "here", "Alive": True}, {"NodeID": "there", "Alive": False}], True),
        ([{"NodeID": "here", "Alive": False}, {"NodeID": "there", "Alive": True}], False),
        ([], False),
    ],
)
def test_a_node_that_ray_has_given_up_is_not_alive(nodes, lives, monkeypatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(node.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(node.ray, "nodes", lambda: nodes)
    assert node.node_is_alive() is lives
