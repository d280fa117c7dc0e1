"""Which GPUs each engine of several models takes."""

import pytest

from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig
from slime.ray.engine_slots import EngineSplit, group_places, require_neighbours
from slime.ray.placement_group import Slots


def group(num_gpus: int, size: int = 1, kind: str = "regular") -> ServerGroupConfig:
    return ServerGroupConfig(kind, num_gpus, size)  # type: ignore[arg-type]


def slots(*nodes: list[int]) -> Slots:
    """Slots on nodes a, b, ... with these GPUs."""
    names = [name for name, ids in zip("abc", nodes, strict=False) for _ in ids]
    ids = [gpu for node in nodes for gpu in node]
    return Slots(None, tuple(range(len(ids))), tuple(ids), tuple(names))


def test_groups_follow_one_another_and_placeholders_take_slots_but_no_rank() -> None:
    models = [
        ModelConfig("policy", server_groups=[group(4, 2), group(2, kind="placeholder"), group(1)]),
        ModelConfig("judge", server_groups=[group(1)]),
    ]
    places = [(p.model.name, p.first_slot, p.first_rank) for p in group_places(models)]
    assert places == [("policy", 0, 0), ("policy", 6, 2), ("judge", 7, 3)]


def test_spare_gpus_come_last_and_are_for_engines_of_the_first_model() -> None:
    models = [
        ModelConfig("policy", server_groups=[group(1, kind="placeholder"), group(4, 2)]),
        ModelConfig("judge", server_groups=[group(1)]),
    ]
    *others, place = group_places(models, 4)
    assert others == list(group_places(models)) and not any(other.spare for other in others)
    assert (place.model.name, place.first_slot, place.first_rank, place.spare) == ("policy", 6, 3, True)
    assert (place.group.size, place.group.num_engines) == (2, 2)
    with pytest.raises(
        EngineSplit, match="engine 4 of model policy would get the GPUs 8 of node 0, 10 of node"
    ):
        require_neighbours(models, slots([0, 1, 2, 3, 4, 5, 6, 7, 8, 10]), 16, 4)


@pytest.mark.parametrize(
    ("size", "there"),
    [
        (1, slots([3], [0])),
        (2, slots([0, 1], [4, 5])),
        (4, slots([0, 1], [4, 5])),  # over two nodes of two GPUs
        (6, slots([0, 1], [0, 1], [0, 1])),
    ],
)
def test_engines_on_neighbouring_gpus_can_start(size: int, there: Slots) -> None:
    models = [ModelConfig("m", server_groups=[group(len(there), size)])]
    require_neighbours(models, there, 2)


@pytest.mark.parametrize(
    ("size", "there", "said"),
    [
        (2, slots([0, 2]), "engine 0 of model m would get the GPUs 0 of node 0, 2 of node 0"),
        (2, slots([0, 1, 2], [0]), "engine 1 of model m would get the GPUs 2 of node 0, 0 of node 1"),
        (4, slots([0, 1, 2], [0]), "engine 0 of model m"),
    ],
    ids=["a gap", "two nodes", "a part over two nodes"],
)
def test_an_engine_whose_gpus_lie_apart_is_refused(size: int, there: Slots, said: str) -> None:
    models = [ModelConfig("m", server_groups=[group(len(there), size)])]
    with pytest.raises(EngineSplit, match=said):
        require_neighbours(models, there, 2)
