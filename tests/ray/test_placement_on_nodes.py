"""Placement on a simulated cluster of several nodes."""

from typing import Any

import pytest
import ray

from slime.config.run import RunConfig
from slime.ray import spawned_engines
from slime.ray.cluster import ClusterTooSmall
from slime.ray.placement_group import create_placement_groups
from tests.ray.nodes import joined_nodes
from tests.run_args import config_with

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def three_nodes():
    node = {"num_cpus": 4, "num_gpus": 2}
    with joined_nodes({"num_cpus": 4, "num_gpus": 0}, node, node) as cluster:
        yield cluster


def flags(**overrides: object) -> RunConfig:
    defaults = dict(
        actor_num_nodes=1,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        cluster_timeout=150,
    )
    return config_with(**(defaults | overrides))


def test_trainer_and_engines_get_disjoint_gpus_across_nodes() -> None:
    placement = create_placement_groups(flags())
    try:
        assert len(placement.actor) == 2 and len(placement.rollout) == 2
        assert not set(placement.actor.bundles) & set(placement.rollout.bundles)
        assert sorted(placement.actor.gpu_ids + placement.rollout.gpu_ids) == [0, 0, 1, 1]
    finally:
        placement.release()


def test_colocated_roles_share_the_slots() -> None:
    placement = create_placement_groups(flags(colocate=True, actor_num_nodes=2, rollout_num_gpus=4))
    try:
        assert placement.actor == placement.rollout
    finally:
        placement.release()


def test_too_small_a_cluster_is_refused_at_once_with_both_numbers() -> None:
    with pytest.raises(ClusterTooSmall, match=r"needs 10 GPUs, found 4 on 3 node"):
        create_placement_groups(flags(actor_num_nodes=4, actor_num_gpus_per_node=2))


def test_an_engine_over_two_nodes_has_a_part_on_each_which_meet_where_the_first_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Part:
        """By value, since Ray's processes do not find this module."""

        def __init__(self, *_: Any, part: int, base_gpu_id: int, meeting_point: str = "", **__: Any) -> None:
            self.found = part, base_gpu_id, meeting_point

        def meeting_point(self) -> str:
            return "10.0.0.1:15020"

        def wait_ready(self, timeout: float) -> tuple[Any, ...]:
            return *self.found, ray.get_runtime_context().get_node_id()

    monkeypatch.setattr(spawned_engines, "EngineActor", Part)
    args: Any = flags(debug_rollout_only=True, rollout_num_gpus=4, num_gpus_per_node=2)
    placement = create_placement_groups(args)
    try:
        slots = placement.rollout
        assert len(set(slots.nodes[:2])) == len(set(slots.nodes[2:])) == 1 and len(set(slots.nodes)) == 2
        shape = spawned_engines.EngineShape(4)
        engine = spawned_engines.SpawnedEngines(args, slots, shape).launch(0, 0)
        first, second = ray.get([actor.wait_ready.remote(5) for actor in engine.actors])
        assert first == (0, 0, "", slots.nodes[0])
        assert second == (1, 0, "10.0.0.1:15020", slots.nodes[2])
        for actor in engine.actors:
            ray.kill(actor)
    finally:
        placement.release()
