"""What is compared of trainer and engines before the first step, and when it ends the run."""

import json
import math
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.run import RunConfig
from slime.config.served_models import ServedModelConfig, ServerGroupConfig
from slime.ray import fleet as fleet_module
from slime.ray import rollout_group
from slime.ray.fleet import Fleet
from slime.ray.losses import RolloutSideLost
from slime.ray.rollout_group import RolloutGroup
from slime.ray.served_policy import (
    BOUNDS,
    PolicyMismatch,
    log_probs_of,
    number_format,
    probe_tokens,
    require_same_policy,
)
from slime.utils.types import EngineEndpoint
from tests.engines.fake import FakeEngine
from tests.ray.stand_ins import Cluster, client_class
from tests.run_args import config_with
from tools.make_tiny_model import main as make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny_model(["--output", str(path), "--hidden-size", "32", "--num-layers", "1"])
    return path


@pytest.fixture
def make(tiny: Path, tmp_path: Path):
    """The configuration of a run; ``config`` changes what the engines' config.json says."""

    def build(config: dict | None = None, groups: list[dict] | None = None, **changes) -> RunConfig:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "qwen3", "dtype": "float32", **(config or {})})
        )
        group = [ServerGroupConfig("regular", 1, 1, overrides) for overrides in groups or []]
        defaults = {
            **{"hf_checkpoint": str(tiny), "synced_checkpoint": str(tmp_path), "vocab_size": 270},
            **{"bf16": False, "fp32": True, "rollout_engine": "embedded"},
            "served_models": [ServedModelConfig("policy", update_weights=True, server_groups=group)],
        }
        return config_with(**{**defaults, **changes})

    return build


IN_BF16 = {"bf16": True, "fp32": False}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "float32"),
        ({"fp16": True, "fp32": False}, "float16"),
        (IN_BF16, "bfloat16"),
        ({**IN_BF16, "config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"sglang_dtype": "bfloat16"}, "bfloat16"),
        ({"sglang_dtype": "half"}, "float16"),
        ({"sglang_dtype": "float", "groups": [{"dtype": "bfloat16"}]}, "bfloat16"),
        ({"rollout_external": True, "config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "quantised"),
        ({"sglang_quantization": "fp8"}, "quantised"),
        ({"sglang_kv_cache_dtype": "fp8_e4m3"}, "quantised"),
        ({"groups": [{}, {"quantization": "fp8"}]}, "quantised"),
    ],
)
def test_the_bound_is_that_of_the_coarsest_number_format(make, changes, found):
    assert number_format(make(**changes)) == found


def test_a_gap_at_the_bound_passes_and_one_above_it_ends_the_run(make):
    expected = [-1.0, -2.0, -3.0, -4.0]
    for config, bound in [(make(), 1e-3), (make(**IN_BF16), 0.1), (make(served_policy_bound=0.25), 0.25)]:
        near = [value + sign * bound * 0.99 for value, sign in zip(expected, (1, -1, 1, -1), strict=True)]
        assert require_same_policy(config, "engine 0", near, expected) == pytest.approx(bound * 0.99)
        with pytest.raises(PolicyMismatch, match="apart on average"):
            require_same_policy(config, "engine 0", [value + bound * 1.01 for value in expected], expected)


def test_the_message_names_both_sides_both_figures_the_bound_and_its_origin(make):
    config = make(train_backend="fsdp", rollout_engine="sglang")
    with pytest.raises(PolicyMismatch) as error:
        require_same_policy(config, "engine 3 of actor (http://e)", [-1.5, -2.5], [-1.0, -2.0])
    message = str(error.value)
    for part in (
        "engine 3 of actor (http://e) (sglang) does not serve the policy of the fsdp trainer",
        "a prompt of 3 tokens their log-probs are 0.5 apart on average, wanted at most 0.001 (float32)",
        "the mean is -1.5000 in the trainer, -2.0000 in the engine",
        f"config.json of {config.engines.synced_checkpoint} (model_type qwen3:",
        "--no-check-served-policy",
    ):
        assert part in message
    assert "\n" not in message
    with pytest.raises(PolicyMismatch, match=r"at most 0\.1 \(--served-policy-bound\)"):
        require_same_policy(make(served_policy_bound=0.1), "engine 0", [-1.5], [-1.0])


@pytest.mark.parametrize("found", [[math.nan, -2.0], [-math.inf, -2.0]])
def test_log_probs_that_are_no_numbers_are_no_policy(make, found):
    with pytest.raises(PolicyMismatch):
        require_same_policy(make(), "engine 0", found, [-1.0, -2.0])


def test_an_engine_that_leaves_tokens_out_is_named(make):
    with pytest.raises(PolicyMismatch, match="engine 0: 1 log-probs of a prompt, wanted 2"):
        require_same_policy(make(), "engine 0", [-1.0], [-1.0, -2.0])


def test_the_prompt_is_text_that_fits_every_context(make):
    tokens = probe_tokens(make())
    assert len(tokens) == 128 and len(set(tokens)) > 20
    assert all(0 <= token < 270 for token in tokens)
    assert probe_tokens(make(rollout_max_context_len=100)) == tokens[:84]
    assert probe_tokens(make(sglang_context_length=50)) == tokens[:34]
    assert probe_tokens(make(groups=[{}, {"context_length": 40}])) == tokens[:24]
    assert max(probe_tokens(make(vocab_size=100))) < 100


def test_an_engine_is_asked_to_score_the_prompt_and_to_generate_nothing():
    engine = FakeEngine()
    entries = [[None, 5, None], [-1.25, 6, None], [-0.5, 7, None]]
    engine.answers["generate"] = {"meta_info": {"input_token_logprobs": entries}}
    engine.start()
    try:
        client = EngineClient(EngineEndpoint(engine.url, None, 1, None))
        assert log_probs_of(client, [5, 6, 7]) == [-1.25, -0.5]
        assert log_probs_of(client, [5, 6, 7], "mine") == [-1.25, -0.5]
        body, adapted = engine.seen("generate")
        assert "lora_path" not in body and adapted == {**body, "lora_path": "mine"}
        assert body["input_ids"] == [5, 6, 7] and body["sampling_params"]["max_new_tokens"] == 0
        assert body["return_logprob"] and body["logprob_start_len"] == 0
    finally:
        engine.stop()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, make):
    """Two models of which one takes updates; ``answers`` holds the log-probs of its engines by address."""
    cluster = Cluster()
    monkeypatch.setattr("slime.ray.engine.EngineClient", client_class(cluster))
    monkeypatch.setattr(
        fleet_module, "log_probs_of", lambda client, tokens, adapter: answer(client.url, adapter)
    )
    answers: dict[str, object] = {}

    def answer(url: str, adapter: str | None) -> object:
        if adapter is not None:
            return answers[f"{url}: {adapter}"]
        if isinstance(answers[url], Exception):
            raise answers[url]
        return answers[url]

    models = [cluster.model(2), cluster.model(1, "judge", first_rank=2, takes_updates=False)]
    times = {f"rollout_health_check_{name}": 60.0 for name in ("interval", "timeout", "first_wait")}
    fleet = Fleet(make(**times), models)
    fleet.start()
    yield fleet, answers
    fleet.stop()


def test_every_engine_with_the_trainers_weights_is_asked_and_no_other(fleet):
    fleet, answers = fleet
    answers.update({"http://engine0": [-1.0], "http://engine1": [-1.0]})
    fleet.check_policy([1, 2], [-1.0])
    answers["http://engine1"] = [-2.0]
    with pytest.raises(PolicyMismatch, match=r"^engine 1 .*, model default \(embedded\) does not serve"):
        fleet.check_policy([1, 2], [-1.0])


def test_engines_that_keep_adapters_beside_the_base_are_asked_with_theirs(fleet, make):
    fleet, answers = fleet
    fleet._config = make(lora_rank=8, lora_merge=False)
    answers.update({"http://engine0": [-1.0], "http://engine1": [-1.0]})
    answers.update({"http://engine0: slime": [-2.0], "http://engine1: slime": [-2.0]})
    fleet.check_policy([1, 2], [-2.0])
    with pytest.raises(PolicyMismatch):
        fleet.check_policy([1, 2], [-1.0])


def test_of_several_adapters_that_which_is_named_is_asked(fleet, make):
    fleet, answers = fleet
    fleet._config = make(lora_rank=8, lora_merge=False, lora_adapters=["a", "b"])
    for number, name in ((-2.0, "a"), (-3.0, "b")):
        answers.update({f"http://engine{rank}: {name}": [number] for rank in (0, 1)})
    fleet.check_policy([1, 2], [-2.0], "a")
    fleet.check_policy([1, 2], [-3.0], "b")
    with pytest.raises(PolicyMismatch):
        fleet.check_policy([1, 2], [-2.0], "b")


def test_an_engine_that_dies_of_it_is_replaced_only_under_fault_tolerance(fleet, make):
    fleet, answers = fleet
    answers["http://engine0"] = EngineError("http://engine0", "/generate", None, "gone")
    answers["http://engine1"] = [-1.0]
    with pytest.raises(EngineError):
        fleet.check_policy([1, 2], [-1.0])
    fleet._config = make(use_fault_tolerance=True)
    fleet.check_policy([1, 2], [-1.0])
    assert [engine.rank for engine in fleet.models["default"].living] == [1]


def test_halves_of_engines_are_left_out_with_a_warning(fleet, caplog):
    fleet, _ = fleet
    for engine in fleet.models["default"].engines:
        engine.kind = "decode"
    fleet.check_policy([1, 2], [-1.0])
    assert "is a decode engine: its policy is not checked" in caplog.text


@pytest.mark.parametrize("shares", [False, True])
def test_engines_that_gave_their_memory_away_are_asked_when_they_have_it_back(monkeypatch, shares):
    calls: list[str] = []
    group = RolloutGroup.__new__(RolloutGroup)
    group._needs_offload, group._to_check, group._log = shares, {}, MagicMock()
    monkeypatch.setattr(
        rollout_group.RolloutGroup, "_call", lambda self, method, *arguments: calls.append(method)
    )
    group.check_policy([1], [-1.0])
    assert calls == ([] if shares else ["check_policy"])
    group.onload_kv()
    group.onload_kv()
    assert calls == (["onload", "check_policy", "onload"] if shares else ["check_policy"])


def test_engines_lost_before_they_were_asked_are_held_against_the_newest_weights(monkeypatch):
    """The trainer may have gone back to a checkpoint by then."""
    asked: list[tuple] = []
    group = RolloutGroup.__new__(RolloutGroup)
    group._needs_offload, group._to_check, group._log = True, {}, MagicMock()

    def call(self, method, *arguments):
        if not asked:
            asked.append(())
            raise RolloutSideLost("gone while it took its memory back")
        asked.append((method, *arguments))

    monkeypatch.setattr(rollout_group.RolloutGroup, "_call", call)
    group.check_policy([1], [-1.0], "a")
    with pytest.raises(RolloutSideLost):
        group.onload_kv()
    for name, expected in (("a", -2.0), ("b", -3.0)):
        group.check_policy([1], [expected], name)
    group.onload_kv()
    checks = [arguments for method, *arguments in asked[1:] if method == "check_policy"]
    assert checks == [[[1], [-2.0], "a", "default"], [[1], [-3.0], "b", "default"]]


def test_every_format_has_a_bound():
    assert list(BOUNDS.values()) == sorted(BOUNDS.values())
