"""What engines of somebody else's are asked before a run has to do with them."""

import logging
from typing import Any

import pytest
from fastapi.responses import Response

from slime.backends.sglang_utils.external import (
    ExternalEngine,
    ExternalEngineError,
    ExternalEngineInfo,
    ExternalEngines,
    apply_external_engine_info_to_args,
    differences,
    discover_external_engines,
    external_engines,
)
from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.utils.types import EngineEndpoint
from tests.backends.sglang_utils.test_server_engine import make_config
from tests.engines import free_port
from tests.engines.fake import FakeEngine
from tests.run_args import plugin_args


@pytest.fixture
def engine():
    engine = FakeEngine().start()
    yield engine
    engine.stop()


def tells(engine: FakeEngine, **info: Any) -> None:
    engine.answers["server_info"] = {"tp_size": 1, "pp_size": 1, **info}


def config_of(*engines: FakeEngine, **changes: Any) -> Any:
    addresses = [f"127.0.0.1:{engine.port}" for engine in engines]
    return make_config(**{"rollout_external_engine_addrs": addresses, "sglang_api_key": None} | changes)


@pytest.mark.parametrize(
    ("info", "kind", "gpus", "port"),
    [
        ({}, "regular", 1, None),
        ({"disaggregation_mode": "null", "tp_size": 4, "pp_size": 2}, "regular", 8, None),
        ({"num_gpus": 6, "tp_size": 2}, "regular", 6, None),
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}, "prefill", 1, 8998),
        ({"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 8998}, "decode", 1, None),
        ({"encoder_only": True}, "encoder", 1, None),
    ],
)
def test_kind_and_size_are_what_the_engine_says(engine, info, kind, gpus, port) -> None:
    tells(engine, **info)
    (found,) = discover_external_engines([engine.url])
    assert (found.worker_type, found.num_gpus, found.bootstrap_port) == (kind, gpus, port)
    assert found.endpoint == EngineEndpoint(engine.url, None, gpus, None, bootstrap_port=port)


def test_an_older_engine_is_asked_by_its_older_name(engine) -> None:
    engine.answers["get_server_info"] = {"tp_size": 2}
    del engine.answers["server_info"]
    assert discover_external_engines([engine.url])[0].num_gpus == 2


def test_one_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ExternalEngineError, match=rf"^--rollout-external-engine-addrs {url}: .*no answer"):
        discover_external_engines([url], timeout=0.2)


def test_one_that_refuses_the_key_is_named_at_once(engine) -> None:
    engine.api_key = "secret"
    with pytest.raises(ExternalEngineError, match="HTTP 401"):
        discover_external_engines([engine.url], timeout=30, api_key="another")
    assert discover_external_engines([engine.url], api_key="secret")[0].endpoint.api_key == "secret"


ADAPTERS = {"lora_rank": 8, "lora_merge": False, "lora_adapters": ["a", "b"]}


def info_of(**server_info: Any) -> ExternalEngineInfo:
    return ExternalEngineInfo("http://e:1", server_info=server_info)


@pytest.mark.parametrize(
    ("flags", "info", "said"),
    [
        (
            {"sglang_context_length": 512},
            {"context_length": 256},
            "started with context_length 256 (wanted: 512",
        ),
        ({"fp32": True}, {"dtype": "bfloat16"}, "started with dtype bfloat16 (wanted: float32"),
        ({"fp16": True, "sglang_dtype": "bfloat16"}, {"dtype": "float16"}, "dtype float16 (wanted: bfloat16"),
        (
            {"sglang_enable_deterministic_inference": True},
            {"enable_deterministic_inference": False},
            "enable_deterministic_inference False (wanted: True",
        ),
        (
            {"use_rollout_routing_replay": True},
            {"enable_return_routed_experts": False},
            "started without --enable-return-routed-experts (--use-rollout-routing-replay)",
        ),
        (
            {"replays_nucleus": True, "nucleus_top_k": 5000, "nucleus_size": 5000},
            {"sampling_mask_max_tokens": 4096},
            "started with --sampling-mask-max-tokens 4096 (wanted: 5000, or --rollout-top-k",
        ),
        (ADAPTERS, {"enable_lora": None, "max_lora_rank": None}, "started without --enable-lora (wanted: it"),
        (
            ADAPTERS,
            {"enable_lora": True, "max_lora_rank": 4},
            "max_lora_rank 4 (wanted: at least 8, for --no-lora-merge)",
        ),
        (ADAPTERS, {"enable_lora": True, "max_loaded_loras": 1}, "max_loaded_loras 1 (wanted: at least 2"),
        (ADAPTERS, {"tokenizer_worker_num": 2}, "tokenizer_worker_num 2 (wanted: 1, for --no-lora-merge)"),
        (ADAPTERS, {"dp_size": 2}, "dp_size 2 (wanted: 1, for --no-lora-merge)"),
    ],
)
def test_an_option_that_differs_is_named_with_both_values(flags, info, said) -> None:
    (line,) = differences(make_config(**flags), info_of(**info))
    assert line.startswith("--rollout-external-engine-addrs http://e:1: was ") and said in line


@pytest.mark.parametrize(
    ("flags", "info"),
    [
        ({}, {"context_length": 256, "dtype": "bfloat16"}),  # nobody has asked for anything
        ({"fp32": True}, {"dtype": "auto"}),
        ({"sglang_context_length": 512}, {"context_length": None}),
        ({"sglang_context_length": 512}, {"context_length": 512}),
        (
            {"sglang_log_level": "debug", "sglang_api_key": "k"},
            {"log_level": "info", "port": 1, "api_key": "x"},
        ),
        ({}, {"model_path": "/elsewhere", "random_seed": 5, "tp_size": 8}),
        (
            {"replays_nucleus": True, "nucleus_top_k": 5000, "nucleus_size": 5000},
            {"sampling_mask_max_tokens": 5000},
        ),
        ({"replays_nucleus": True, "nucleus_top_k": 5000, "nucleus_size": 5000}, {}),
        ({"nucleus_top_k": 5000}, {"sampling_mask_max_tokens": 1}),
        ({"use_rollout_routing_replay": True}, {"enable_return_routed_experts": True}),
        ({"use_rollout_routing_replay": True}, {}),
        (ADAPTERS, {}),
        (ADAPTERS, {"enable_lora": True, "max_lora_rank": 8, "max_loaded_loras": 2, "dp_size": 1}),
        (ADAPTERS, {"enable_lora": True, "max_lora_rank": None, "max_loaded_loras": None}),
        ({**ADAPTERS, "lora_merge": True}, {"enable_lora": False, "max_lora_rank": 4, "dp_size": 2}),
    ],
)
def test_what_an_engine_may_decide_for_itself_is_no_difference(flags, info) -> None:
    assert list(differences(make_config(**flags), info_of(**info))) == []


def test_kinds_have_to_go_together(engine) -> None:
    other = FakeEngine().start()
    try:
        tells(engine, disaggregation_mode="prefill")
        tells(other)
        with pytest.raises(ExternalEngineError, match="there are prefill and regular engines"):
            external_engines(config_of(engine, other))
        with pytest.raises(ExternalEngineError, match="all engines prefill"):
            external_engines(config_of(engine))
        tells(other, disaggregation_mode="decode")
        assert [info.worker_type for info in external_engines(config_of(engine, other))] == [
            "prefill",
            "decode",
        ]
    finally:
        other.stop()


def test_one_that_differs_ends_the_run_before_it_starts(engine) -> None:
    tells(engine, dtype="bfloat16")
    with pytest.raises(ExternalEngineError, match="dtype bfloat16"):
        external_engines(config_of(engine, fp32=True))


def test_one_that_was_restarted_with_old_weights_is_found_by_their_version(engine) -> None:
    handle = ExternalEngine(EngineEndpoint(engine.url, None, 1, None))
    assert handle.failure_reason() is None  # before the first update
    handle.updated("3")
    for version in ("3", "4"):  # 4: an update is under way
        engine.weight_version = version
        assert handle.failure_reason() is None
    engine.weight_version = "default"
    reason = handle.failure_reason()
    assert reason == (
        "it serves weight version 'default', and was given '3': "
        "it was restarted, or somebody else updates it too"
    )
    engine.answers["model_info"] = Response(status_code=500)
    assert handle.failure_reason() is None


def test_versions_that_are_no_numbers_are_compared_as_they_are(engine) -> None:
    handle = ExternalEngine(EngineEndpoint(engine.url, None, 1, None))
    handle.updated("default")
    assert handle.failure_reason() is None
    engine.weight_version = "1"
    assert "given 'default'" in str(handle.failure_reason())


def test_what_an_engine_says_of_itself_is_told_without_its_key() -> None:
    info = ExternalEngineInfo(
        "http://e:1",
        "e",
        1,
        num_gpus=8,
        server_info={"tp_size": 4, "pp_size": "2", "ep_size": None},
        api_key="k",
    )
    assert info.parallel_config == {"tp_size": 4, "pp_size": 2, "ep_size": 1, "moe_dp_size": 1}
    assert info.to_dict() == {
        **{"url": "http://e:1", "host": "e", "port": 1, "worker_type": "regular", "num_gpus": 8},
        **{"server_info": {"tp_size": 4, "pp_size": "2", "ep_size": None}, "bootstrap_port": None},
    }
    assert info.endpoint == EngineEndpoint("http://e:1", "k", 8, None)


def test_an_encoder_is_no_engine_that_generates() -> None:
    (line,) = differences(make_config(), ExternalEngineInfo("http://e:1", worker_type="encoder"))
    assert line.endswith("only encodes images (wanted: an engine that generates)")


def test_engines_of_others_fill_places_once_they_serve(engine) -> None:
    there, gone = (
        EngineEndpoint(url, None, 1, None) for url in (engine.url, f"http://127.0.0.1:{free_port()}")
    )
    engines = ExternalEngines([there, gone])
    assert len(engines) == 2 and engines.can_fill(0) and not engines.can_fill(1)
    handles = [engines.launch(place, rank=7) for place in range(2)]
    assert engines.wait_ready(handles[:1], timeout=600) == [there]
    with pytest.raises(EngineStartError, match=f"engine {gone.url}: does not serve after 0.1 s"):
        engines.wait_ready(handles, timeout=0.1)
    assert str(handles[1].failure_reason()).startswith("it no longer answers: Connect")
    handles[0].end()
    assert engines.can_fill(0)


def test_an_engine_that_is_paused_can_be_given_weights_and_generates_nothing_without(engine) -> None:
    """It stands still where a run before this one was killed while it updated it."""
    engine.answers["ready"] = engine.answers["health_generate"] = Response(status_code=503)
    place = [EngineEndpoint(engine.url, None, 1, None)]
    updated, not_updated = (ExternalEngines(place, gets_weights=gets) for gets in (True, False))
    assert updated.can_fill(0) and not not_updated.can_fill(0)
    assert updated.wait_ready([updated.launch(0, 0)], timeout=600) == place
    with pytest.raises(EngineStartError, match="does not serve after 0 s"):
        not_updated.wait_ready([not_updated.launch(0, 0)], timeout=0)


def test_a_plug_in_is_told_of_engines_in_its_args(engine, caplog) -> None:
    tells(engine, tp_size=4)
    address = f"127.0.0.1:{engine.port}"
    args = plugin_args(rollout_external_engine_addrs=[address, f"http://{address}"], sglang_api_key="k")
    engine.api_key = "k"
    with caplog.at_level(logging.INFO):
        apply_external_engine_info_to_args(args, logging.getLogger("plug-in"))
    assert (args.rollout_num_engines, args.rollout_num_gpus) == (2, 8)
    assert [info["url"] for info in args.rollout_external_engine_infos] == [engine.url] * 2
    assert "2 external engines on 8 GPUs" in caplog.text
