"""The states of one engine."""

import threading

import pytest

from slime.ray.engine import Engine, EngineState, IllegalStateChange
from tests.ray.stand_ins import Cluster, Handle, ready_engine

STARTING, READY, SERVING, DRAINING, DEAD = EngineState


def test_an_engine_starts_is_ready_and_serves() -> None:
    cluster = Cluster()
    engine = Engine(0, Handle(cluster, 0))
    assert engine.state is STARTING and not engine.lives
    engine.started(cluster.endpoint(0))
    assert engine.state is READY and engine.lives
    assert engine.become(SERVING)
    assert engine.state is SERVING and engine.lives


@pytest.mark.parametrize("path", [[], [READY], [READY, SERVING]], ids=["starting", "ready", "serving"])
def test_it_may_die_in_every_state_and_stays_dead(path: list[EngineState]) -> None:
    engine = Engine(0, Handle(Cluster(), 0))
    for state in path:
        engine.become(state)
    assert engine.become(DEAD)
    for state in EngineState:
        assert not engine.become(state)
    assert engine.state is DEAD and not engine.lives


def test_one_that_leaves_is_not_alive_and_no_longer_dies() -> None:
    engine = ready_engine(Cluster())
    engine.become(SERVING)
    assert engine.become(DRAINING) and not engine.lives
    for state in EngineState:
        assert not engine.become(state)
    assert engine.state is DRAINING


def test_an_illegal_change_is_refused_by_name() -> None:
    cluster = Cluster()
    engine = Engine(3, Handle(cluster, 3))
    with pytest.raises(IllegalStateChange, match="engine 3 is starting: it cannot become serving"):
        engine.become(SERVING)
    engine.started(cluster.endpoint(3))
    for state in (STARTING, READY):
        with pytest.raises(
            IllegalStateChange, match=rf"engine 3 \(http://engine3\) is ready: .* {state.value}"
        ):
            engine.become(state)
    engine.become(SERVING)
    with pytest.raises(IllegalStateChange):
        engine.become(READY)
    assert engine.state is SERVING


def test_of_many_that_find_it_dead_one_is_told_so() -> None:
    engine = ready_engine(Cluster())
    start, told = threading.Barrier(8), []

    def find() -> None:
        start.wait(60)
        told.append(engine.become(DEAD))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(told) == [False] * 7 + [True]


def test_it_is_ended_once_and_gone_afterwards() -> None:
    cluster = Cluster()
    engine = ready_engine(cluster, 2)
    assert not engine.gone.is_set()
    engine.end()
    engine.end()
    assert engine.gone.is_set() and cluster.stopped == [2]
