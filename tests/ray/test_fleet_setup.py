"""From the flags of a run to its models, engines and routers; nothing is started."""

from typing import Any

import pytest

from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig
from slime.config.run import RunConfig
from slime.ray import fleet_setup
from slime.ray.fleet_setup import fleet_of
from slime.ray.placement_group import Slots
from tests.engines.fake import FakeEngine
from tests.run_args import config_with

SLOTS = Slots(None, tuple(range(6)), tuple(range(6)), ("n",) * 6)


def group(num_gpus: int, size: int = 1, kind: str = "regular", **overrides: Any) -> ServerGroupConfig:
    return ServerGroupConfig(kind, num_gpus, size, {"model_path": "m", **overrides})  # type: ignore[arg-type]


def flags(*models: ModelConfig, **changes: Any) -> RunConfig:
    routers = {model.name: ("127.0.0.1", 3000 + i) for i, model in enumerate(models)}
    defaults = dict(
        served_models=list(models),
        sglang_model_routers=routers,
        router_prometheus_port=29000,
        use_fault_tolerance=True,
        rollout_health_check_interval=60.0,
        rollout_health_check_timeout=1.0,
    )
    return config_with(**{**defaults, **changes})


POLICY = ModelConfig(
    "policy", update_weights=True, server_groups=[group(2, 2), group(1, kind="placeholder"), group(1)]
)
JUDGE = ModelConfig(
    "judge", model_path="judge", update_weights=False, server_groups=[group(2, context_length=64)]
)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each source of engines was made of."""
    made: list[dict[str, Any]] = []

    class Source:
        def __init__(self, args: Any, slots: Slots, shape: Any, first_slot: int, trainer_gpus: int) -> None:
            made.append({"gpus": slots.gpu_ids, "shape": shape, "first": first_slot, "trainer": trainer_gpus})

        def __len__(self) -> int:
            return 0

    monkeypatch.setattr(fleet_setup, "SpawnedEngines", Source)
    return made


def test_an_engine_may_take_its_hang_timeout_over_a_request(sources: list[dict[str, Any]]) -> None:
    fleet = fleet_of(flags(POLICY, JUDGE, rollout_engine_hang_timeout=7.0), SLOTS, trainer_gpus=4)
    groups = [group for model in fleet.models.values() for group in model._groups]
    assert [group._answer_timeout for group in groups] == [7.0] * 3


def test_a_model_that_keeps_earlier_versions_waits_for_the_first(sources: list[dict[str, Any]]) -> None:
    past = ModelConfig("past", update_weights=True, update_interval=3, server_groups=[group(1)], policy="b")
    model = fleet_of(flags(POLICY, past), SLOTS, trainer_gpus=4).models["past"]
    assert (model.update_interval, model.policy) == (3, "b")
    assert model.takes_updates and model.waits_for_weights
    alone = fleet_of(flags(POLICY, past, debug_rollout_only=True), SLOTS, trainer_gpus=0).models["past"]
    assert not alone.takes_updates and not alone.waits_for_weights


def test_each_group_gets_its_own_slots_and_options(sources: list[dict[str, Any]]) -> None:
    fleet = fleet_of(flags(POLICY, JUDGE), SLOTS, trainer_gpus=4)
    assert {name: model.takes_updates for name, model in fleet.models.items()} == {
        "policy": True,
        "judge": False,
    }
    alone = fleet_of(flags(POLICY, debug_rollout_only=True), SLOTS, trainer_gpus=0)
    assert not alone.models["policy"].takes_updates
    assert [(one["gpus"], one["first"], one["trainer"]) for one in sources[:3]] == [
        ((0, 1), 0, 4),
        ((3,), 3, 4),
        ((4, 5), 4, 4),
    ]
    assert [one["shape"].num_gpus for one in sources[:3]] == [2, 1, 1]
    assert sources[2]["shape"].overrides == {"model_path": "m", "context_length": 64}


def test_a_model_that_not_every_update_reaches_keeps_its_weights_over_a_release_of_their_memory(
    sources: list[dict[str, Any]],
) -> None:
    past = ModelConfig("past", update_weights=True, update_interval=3, server_groups=[group(1)])
    fleet_of(flags(POLICY, JUDGE, past, offload_rollout=True, colocate=True), SLOTS, trainer_gpus=6)
    kept = [one["shape"].overrides.get("enable_weights_cpu_backup") for one in sources]
    assert kept == [None, None, True, True]


def routers_of(monkeypatch: pytest.MonkeyPatch, args: Any) -> list[dict[str, Any]]:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(fleet_setup, "log_dir", lambda: __import__("pathlib").Path("/logs"))
    monkeypatch.setattr(
        fleet_setup,
        "start_router",
        lambda config, **options: started.append({"args": config.flat, **options}),
    )
    for model in fleet_of(args, SLOTS, 0).models.values():
        model._start_router()
    return started


def test_each_model_has_a_router_of_its_own(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = routers_of(monkeypatch, flags(POLICY, JUDGE))
    assert (first["port"], second["port"]) == (3000, 3001)
    assert [str(one["log_path"]) for one in (first, second)] == ["/logs/router.log", "/logs/router_judge.log"]
    assert first["args"].router_prometheus_port == 29000
    assert second["args"].router_prometheus_port is None  # two cannot share one
    assert second["args"].hf_checkpoint == JUDGE.model_path  # middleware has the tokenizer of its model
    assert not hasattr(first["args"], "router_pd_disaggregation")


def test_a_router_in_front_of_two_halves_is_told_so(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = ModelConfig(
        "policy", update_weights=True, server_groups=[group(1, kind="prefill"), group(1, kind="decode")]
    )
    fleet = fleet_of(flags(halves), SLOTS, 0)
    assert [one["shape"].kind for one in sources] == ["prefill", "decode"]
    assert [group._kind for group in fleet.models["policy"]._groups] == ["prefill", "decode"]
    (router,) = routers_of(monkeypatch, flags(halves))
    assert router["args"].router_pd_disaggregation is True


def test_external_engines_make_one_model_that_is_updated_and_never_started() -> None:
    engines = [FakeEngine().start() for _ in range(2)]
    try:
        for engine in engines:
            engine.answers["server_info"] = {"tp_size": 2}
        addresses = [engine.url for engine in engines]
        told = dict(
            rollout_external=True,
            rollout_external_engine_addrs=addresses,
            rollout_engine="embedded",
            sglang_model_routers={"default": ("127.0.0.1", 3000)},
            hf_checkpoint="m",
            seed=1,
        )
        (alone,) = fleet_of(flags(**told, debug_rollout_only=True), SLOTS, 0).models.values()
        assert not alone.waits_for_weights and not alone._groups[0]._source._gets_weights
        (model,) = fleet_of(flags(**told), SLOTS, 0).models.values()
        for one in model._groups:
            one.launch()
        model.wait_ready(120)
        assert model.takes_updates and model.waits_for_weights
        found = [(one.url, one.endpoint.num_gpus, one.is_colocated) for one in model.living]
        assert found == [(url, 2, False) for url in addresses]
        engines[1].stop()
        assert [model._groups[0]._source.can_fill(place) for place in range(2)] == [True, False]
    finally:
        for engine in engines:
            engine.stop()
