"""What a grader could do, if an answer made it do something."""

import logging

import pytest

from slime.agent.jail import setup
from slime.rollout.rm_hub import grading_pool
from slime.rollout.rm_hub.grading_pool import GradingProcess
from tests.rollout import confined

READ_ONLY_CAPABILITIES = 1 << setup.kernel.CAP_DAC_READ_SEARCH


@pytest.fixture(scope="module")
def process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "a secret of the run")
        process = GradingProcess(limit_s=60)
        process.call(confined.HERE, "socket")
    yield process
    process.stop()


def test_keys_of_the_run_are_not_in_its_environment(process):
    environment = process.call(confined.HERE, "environment")
    assert "WANDB_API_KEY" not in environment
    allowed = {
        *grading_pool._PYTHONS_OWN,
        "PYTHONPATH",
        grading_pool._MARK,
        "LC_CTYPE",
        *grading_pool._ONE_THREAD,
    }
    assert set(environment) <= allowed


def test_it_does_not_read_the_environment_of_its_parent(process):
    assert process.call(confined.HERE, "parent") == "PermissionError"


def test_it_makes_no_sockets(process):
    assert process.call(confined.HERE, "socket") in ("PermissionError", "OSError")


def test_it_has_no_rights_and_few_system_calls(process):
    status = process.call(confined.HERE, "status")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["CapEff"], 16) & ~READ_ONLY_CAPABILITIES == 0


def test_its_files_are_few_and_short(process):
    assert process.call(confined.HERE, "limits") == [64 << 20, 256]


def unable(*args, **kwargs):
    raise OSError("not here")


@pytest.mark.parametrize("user", [0, 1000])
def test_what_a_machine_cannot_hold_is_known_by_name(monkeypatch, user):
    monkeypatch.setattr(setup.os, "geteuid", lambda: user)
    for name in ("unshare", "drop_capabilities"):
        monkeypatch.setattr(setup.kernel, name, unable)
    monkeypatch.setattr(setup, "refuse_dangerous_calls", unable)
    monkeypatch.setattr(setup, "set_limits", lambda limits: None)
    lacking = {"network", "privileges", "syscalls"} | ({"processes"} if user else set())
    assert setup.confine({}) == dict.fromkeys(lacking, "not here")


def test_a_filter_of_calls_alone_holds_the_network(monkeypatch):
    monkeypatch.setattr(setup.kernel, "unshare", unable)
    monkeypatch.setattr(setup.kernel, "drop_capabilities", lambda kept: None)
    monkeypatch.setattr(setup.kernel, "set_no_new_privileges", lambda: None)
    monkeypatch.setattr(setup, "set_limits", lambda limits: None)
    left = []
    monkeypatch.setattr(setup, "refuse_dangerous_calls", lambda sockets, lasting: left.append(sockets))
    assert "network" not in setup.confine({})
    assert left == [setup.NO_SOCKETS]


def test_what_is_not_held_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(
        GradingProcess, "_ask", lambda self, asked: {"value": None, "missing": {"network": "why"}}
    )
    grading_pool._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            GradingProcess(1)._load("a.grader")
    assert [record.getMessage() for record in caplog.records] == [
        "graders run on this machine without being shut off from: network (why)"
    ]
