"""Engines of a model and their router."""

import pytest

from slime.backends.sglang_utils.router import RouterError
from slime.ray.engine import EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.served_model import ServedModel
from tests.ray.stand_ins import Cluster, Router, Source


def launched(cluster: Cluster, *sources: Source) -> ServedModel:
    groups, first = [], 0
    for source in sources:
        groups.append(EngineGroup(source, first_rank=first))
        first += len(source)
    model = ServedModel("default", groups, lambda: Router(cluster))
    model.launch()
    model.wait_ready(5)
    return model


def die(model: ServedModel, rank: int) -> None:
    engine = model.engines[rank]
    engine.become(EngineState.DEAD)
    engine.end()


def test_groups_come_up_together_and_number_their_engines_on() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2), Source(cluster, 1))
    assert [engine.rank for engine in model.engines] == [0, 1, 2]
    assert [engine.url for engine in model.living] == ["http://engine0", "http://engine1", "http://engine2"]
    assert model.launches == 3
    assert cluster.routed == []


def test_a_replacement_is_a_new_engine_in_the_same_place() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2), Source(cluster, 2))
    old = model.engines
    die(model, 2)
    assert model.dead == [old[2]]
    (new,) = model.replace_gone()
    assert new is not old[2] and new.rank == 2
    assert model.engines == [old[0], old[1], new, old[3]]
    assert (new.state, old[2].state) == (EngineState.STARTING, EngineState.DEAD)
    assert model.launches == 5


def test_a_dead_engine_keeps_its_place_until_it_is_gone() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))
    lost = model.engines[0]
    lost.become(EngineState.DEAD)
    assert model.replace_gone() == []
    lost.end()
    assert [engine.rank for engine in model.replace_gone()] == [0]


def test_an_engine_that_dies_while_it_is_admitted_does_not_stay_in_the_router() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))

    def die_meanwhile(url: str) -> None:
        model.engines[0].become(EngineState.DEAD)
        model.dismiss(model.engines[0])  # too early: it is not listed yet

    cluster.on_register = die_meanwhile
    model.admit(model.engines[0])
    assert cluster.routed == [] and model.engines[0].state is EngineState.DEAD


def test_a_router_that_refuses_an_engine_is_an_error_unless_the_engine_has_died() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))

    def refuse(url: str) -> None:
        if url == "http://engine1":
            model.engines[1].become(EngineState.DEAD)
        raise RouterError(f"waited 60 s for it to list {url}")

    cluster.on_register = refuse
    with pytest.raises(RouterError, match="engine0"):
        model.admit(model.engines[0])
    model.admit(model.engines[1])
    assert [engine.state for engine in model.engines] == [EngineState.READY, EngineState.DEAD]
