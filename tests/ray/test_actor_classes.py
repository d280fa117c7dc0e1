"""The classes that the driver hands to Ray are those of the processes, method by method."""

import inspect

import pytest

from slime.ray import actor_classes, rollout_manager, train_worker


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("light", "real", "inside"),
    [
        (actor_classes.RolloutManager, rollout_manager.RolloutManager, set()),
        (actor_classes.TrainRayActor, train_worker.TrainRayActor, {"start", "train_shard"}),
    ],
)
def test_every_method_is_there_under_its_name(light, real, inside):
    assert methods(light) == methods(real) - inside
    assert light.__name__ == real.__name__ and light.__module__ == actor_classes.__name__


def test_calls_and_failures_pass_through():
    late = actor_classes._late("collections.Counter", ["most_common", "elements"])
    assert late("aab").most_common(1) == [("a", 2)]
    assert late("aab").most_common(n=1) == [("a", 2)]
    with pytest.raises(TypeError):
        late("aab").elements(1)
