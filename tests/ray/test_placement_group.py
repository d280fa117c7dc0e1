import pytest

from slime.config.run import RunConfig
from slime.ray.placement_group import Layout, placement_layout, sort_key
from tests.run_args import config_with


def flags(**overrides: object) -> RunConfig:
    defaults = dict(
        actor_num_nodes=1,
        actor_num_gpus_per_node=4,
        rollout_num_gpus=2,
    )
    return config_with(**(defaults | overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, Layout(trainer=4, rollout=2, rollout_offset=4)),
        ({"colocate": True, "rollout_num_gpus": 4}, Layout(4, 4, 0)),
        ({"colocate": True, "rollout_num_gpus": 6}, Layout(4, 6, 0)),
        ({"colocate": True, "rollout_num_gpus": 2}, Layout(4, 2, 0)),
        ({"rollout_spare_gpus": 3}, Layout(trainer=4, rollout=5, rollout_offset=4)),
        ({"critic_num_gpus": 4}, Layout(4, 2, 8, critic=4)),
        ({"critic_num_gpus": 4, "colocate": True}, Layout(4, 2, 0, critic=4)),
        ({"critic_num_gpus": 4, "debug_train_only": True}, Layout(4, 0, 8, critic=4)),
        ({"debug_train_only": True}, Layout(4, 0, 4)),
        ({"debug_rollout_only": True}, Layout(0, 2, 0)),
        ({"rollout_external": True}, Layout(4, 0, 4)),
        ({"rollout_external": True, "debug_rollout_only": True}, Layout(0, 0, 0)),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 16}, Layout(16, 16, 16)),
    ],
)
def test_layout_gives_each_role_its_slots(overrides: dict, expected: Layout) -> None:
    assert placement_layout(flags(**overrides)) == expected


def test_bundles_sort_by_address_then_gpu_both_as_numbers() -> None:
    found = [("10.0.0.10", 0), ("10.0.0.9", 10), ("10.0.0.9", 9), ("10.0.0.10", 2)]
    assert sorted(found, key=sort_key) == [
        ("10.0.0.9", 9),
        ("10.0.0.9", 10),
        ("10.0.0.10", 0),
        ("10.0.0.10", 2),
    ]


def test_unresolvable_node_names_sort_after_addresses() -> None:
    assert sort_key(("no-such-host.invalid", 0)) > sort_key(("255.255.255.255", 7))


def test_the_group_is_as_large_as_the_larger_need() -> None:
    assert Layout(4, 6, 0).total == 6
    assert Layout(4, 2, 0).total == 4
    assert Layout(4, 2, 4).total == 6
    assert Layout(4, 2, 0, critic=4).total == 8
