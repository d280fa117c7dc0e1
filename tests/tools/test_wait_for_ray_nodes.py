"""The tool returns when a cluster is complete, and says how many nodes are there when it never is."""

import sys

import pytest

from tools import wait_for_ray_nodes


@pytest.fixture
def wait(monkeypatch):
    """``wait(counts, nodes, timeout)`` with what the cluster says at each look."""

    def run(counts, nodes, timeout):
        looks = iter(counts)
        monkeypatch.setattr(wait_for_ray_nodes, "alive_nodes", lambda address: next(looks))
        monkeypatch.setattr(wait_for_ray_nodes.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        monkeypatch.setattr(sys, "argv", ["tool", "--nodes", str(nodes), "--timeout", str(timeout)])
        wait_for_ray_nodes.main()
        return list(looks)

    return run


def test_it_looks_until_all_nodes_are_there(wait):
    assert wait([0, 1, 3, 7], nodes=3, timeout=100) == [7]


def test_it_says_what_is_missing(wait):
    with pytest.raises(SystemExit) as stop:
        wait([1, 1], nodes=3, timeout=-1)
    assert str(stop.value) == "error: RAY_ADDRESS 10.0.0.1:6379: 1 nodes after -1 seconds (wanted: 3)"
