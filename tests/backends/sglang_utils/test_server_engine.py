import argparse
import sys
import time
from argparse import Namespace
from dataclasses import replace

import httpx
import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.server_engine import EnginePlacement, EngineStartError
from slime.backends.sglang_utils.servers import EmbeddedEngine, SGLangEngine
from slime.config.run import RunConfig
from slime.utils.types import EngineEndpoint
from tests.arguments.sglang_options import as_installed
from tests.engines import fake, free_port
from tests.run_args import config_with


def make_config(**changes) -> RunConfig:
    defaults = {
        "hf_checkpoint": "/models/tiny",
        "seed": 1234,
        "num_gpus_per_node": 8,
    }
    return config_with(**{**defaults, **changes})


def place(**changes) -> EnginePlacement:
    return EnginePlacement(**{"rank": 0, "host": "127.0.0.1", "port": 15000, **changes})


class StandInSGLang(SGLangEngine):
    """SGLang's launcher with a parser of a few options, since SGLang is not installed here."""

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser("sglang.launch_server")
        for name in ("--model-path", "--dtype", "--host", "--dist-init-addr", "--api-key", "--load-format"):
            parser.add_argument(name, default="auto" if name == "--dtype" else None)
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int, default=1)
        for name in ("--port", "--nnodes", "--node-rank", "--random-seed", "--base-gpu-id", "--nccl-port"):
            parser.add_argument(name, type=int)
        for name in ("--disaggregation-bootstrap-port", "--pipeline-parallel-size"):
            parser.add_argument(name, type=int)
        for name in ("--disaggregation-mode", "--load-balance-method"):
            parser.add_argument(name, default="null" if "mode" in name else "round_robin")
        parser.add_argument("--enable-hierarchical-cache", action="store_true")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--cuda-graph-backend-prefill")
        parser.add_argument("--sampling-mask-max-tokens", type=int, default=4096)
        for name in (
            "--enable-memory-saver",
            "--enable-return-routed-experts",
            "--enable-metrics",
            "--skip-server-warmup",
            "--trust-remote-code",
        ):
            parser.add_argument(name, action="store_true")
        return parser


def sglang_options(config: RunConfig, placement: EnginePlacement) -> Namespace:
    engine = StandInSGLang(config, placement, "/tmp")
    command = engine.command()
    assert command[:3] == [sys.executable, "-m", "slime.backends.sglang_utils.launch_server"]
    return engine.parser().parse_args(command[3:])


def embedded_options(config: RunConfig, placement: EnginePlacement) -> EmbeddedServerArgs:
    command = EmbeddedEngine(config, placement, "/tmp").command()
    assert command[:3] == [sys.executable, "-m", "slime.backends.embedded_engine"]
    return EmbeddedServerArgs.from_cli(command[3:])


def test_the_run_decides_model_address_seed_and_size():
    config = make_config(sglang_pp_size=2, sglang_host="0.0.0.0", sglang_mem_fraction_static=0.7)
    placement = place(rank=3, num_gpus=8, base_gpu_id=4, nccl_port=15001, dist_init_addr="10.0.0.1:15002")
    options = sglang_options(config, placement)
    assert options.model_path == "/models/tiny"
    assert (options.host, options.port) == ("127.0.0.1", 15000)
    assert options.random_seed == 1234 + 3 * 8
    assert options.tp_size == 4
    assert options.base_gpu_id == 4
    assert (options.nccl_port, options.dist_init_addr) == (15001, "10.0.0.1:15002")
    assert options.mem_fraction_static == 0.7
    assert options.skip_server_warmup and options.enable_metrics
    assert not options.enable_memory_saver


def test_an_embedded_engine_shows_its_metrics_where_somebody_asks_for_them():
    assert not embedded_options(make_config(), place()).enable_metrics
    assert embedded_options(make_config(prometheus_port=9464), place()).enable_metrics
    assert embedded_options(make_config(sglang_enable_metrics=True), place()).enable_metrics


def test_without_a_tensor_parallel_flag_an_engine_uses_all_its_gpus():
    assert sglang_options(make_config(), place(num_gpus=2)).tp_size == 2


@pytest.mark.parametrize(("gpu_offset", "saves"), [(0, True), (None, False)])
def test_only_engines_that_share_gpus_free_their_memory(gpu_offset, saves):
    options = sglang_options(make_config(offload_rollout=True), place(gpu_offset=gpu_offset))
    assert options.enable_memory_saver is saves
    assert options.cuda_graph_backend_prefill == ("disabled" if saves else None)


def test_only_engines_of_the_trained_model_tell_routes_and_only_for_replay():
    assert not sglang_options(make_config(), place()).enable_return_routed_experts
    config = make_config(use_rollout_routing_replay=True)
    assert sglang_options(config, place()).enable_return_routed_experts
    judge = SGLangEngine(config, place(), "", {"model_path": "/models/judge"})
    assert "enable_return_routed_experts" not in judge.settings()


@pytest.mark.parametrize("gpu_offset", [None, 0])
def test_engines_of_the_trained_model_take_adapters_and_keep_the_base_over_a_release(gpu_offset):
    assert not embedded_options(make_config(lora_rank=8), place()).enable_lora
    config = make_config(lora_rank=8, lora_merge=False, offload_rollout=True)
    options = embedded_options(config, place(gpu_offset=gpu_offset))
    assert options.enable_lora and options.max_lora_rank == 8
    assert options.enable_weights_cpu_backup is (gpu_offset is not None)
    assert SGLangEngine(config, place(), "").settings()["lora_target_modules"] == ["all"]
    judge = SGLangEngine(config, place(), "", {"model_path": "/models/judge"})
    assert "enable_lora" not in judge.settings()


@pytest.mark.parametrize(
    ("count", "flags", "at_once"),
    [
        (7, {}, 8),  # the base is one, and there are 8 by default
        (8, {}, 9),
        (20, {"sglang_max_loras_per_batch": 8}, 21),  # the default, where SGLang is installed
        (20, {"sglang_max_loras_per_batch": 4}, 4),
        (2, {"sglang_max_loras_per_batch": 16, "sglang_max_loaded_loras": 32}, 16),
    ],
)
def test_sglang_computes_all_of_several_adapters_at_once_unless_told(monkeypatch, count, flags, at_once):
    """By the options that SGLang itself has."""
    as_installed(monkeypatch)
    names = [f"a{number}" for number in range(count)]
    config = make_config(lora_rank=16, lora_merge=False, lora_adapters=names, **flags)
    engine = SGLangEngine(config, place(), "")
    options = engine.parser().parse_args(engine.command()[3:])
    assert options.enable_lora and options.lora_target_modules == ["all"]
    assert (options.max_lora_rank, options.max_loras_per_batch) == (16, at_once)
    assert options.max_loaded_loras == flags.get("sglang_max_loaded_loras") and options.lora_paths is None
    judge = SGLangEngine(config, place(), "", {"model_path": "/models/judge"})
    options = judge.parser().parse_args(judge.command()[3:])
    assert not options.enable_lora and options.max_lora_rank is None


def test_engines_of_the_trained_model_tell_as_many_ids_as_nuclei_need():
    config = make_config(replays_nucleus=True, nucleus_size=151936)
    assert sglang_options(config, place()).sampling_mask_max_tokens == 151936
    assert embedded_options(config, place()).sampling_mask_max_tokens == 151936
    assert sglang_options(make_config(), place()).sampling_mask_max_tokens == 4096
    judge = SGLangEngine(config, place(), "", {"model_path": "/models/judge"})
    assert "sampling_mask_max_tokens" not in judge.preferences()


def test_a_chosen_prefill_graph_backend_stays():
    config = make_config(offload_rollout=True, sglang_cuda_graph_backend_prefill="full")
    assert sglang_options(config, place(gpu_offset=0)).cuda_graph_backend_prefill == "full"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"fp16": True}, "float16"),
        ({"fp32": True}, "float32"),
        ({"fp32": True, "sglang_dtype": "auto"}, "float32"),
        ({"fp32": True, "sglang_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_engines_compute_in_the_trainers_dtype_unless_told(changes, dtype):
    assert sglang_options(make_config(**changes), place()).dtype == dtype
    assert embedded_options(make_config(**changes), place()).dtype == dtype


def test_beside_a_bfloat16_trainer_sglang_does_not_choose_float16():
    assert sglang_options(make_config(), place()).dtype == "bfloat16"
    assert sglang_options(make_config(sglang_dtype="float32"), place()).dtype == "float32"
    judge = StandInSGLang(make_config(), place(), "/tmp", {"model_path": "/models/judge"})
    assert "dtype" not in judge.preferences()
    assert embedded_options(make_config(), place()).dtype == "auto"


def test_an_embedded_engine_computes_on_the_gpu_of_its_place():
    assert embedded_options(make_config(), place(base_gpu_id=3)).base_gpu_id == 3
    options = embedded_options(make_config(sglang_device="cuda"), place())
    assert (options.device, options.base_gpu_id) == ("cuda", 0)


def test_each_part_of_an_engine_over_nodes_knows_its_number_and_where_they_meet():
    parts = [
        sglang_options(
            make_config(),
            place(rank=2, num_gpus=16, num_nodes=2, node_rank=part, dist_init_addr="10.0.0.1:15020"),
        )
        for part in range(2)
    ]
    assert [(one.nnodes, one.node_rank, one.dist_init_addr) for one in parts] == [
        (2, 0, "10.0.0.1:15020"),
        (2, 1, "10.0.0.1:15020"),
    ]
    assert [(one.tp_size, one.random_seed) for one in parts] == [(16, 1234 + 2 * 8)] * 2


def test_parts_on_one_machine_have_logs_of_their_own(tmp_path):
    placements = [place(num_nodes=2, node_rank=part) for part in range(2)]
    logs = {EmbeddedEngine(make_config(), placement, tmp_path).log_path.name for placement in placements}
    assert logs == {"engine_0_node_0.log", "engine_0_node_1.log"}


def test_halves_of_an_engine_know_what_they_do():
    config = make_config(sglang_enable_hierarchical_cache=True)
    prefill = sglang_options(config, place(worker_type="prefill", bootstrap_port=15005))
    assert (prefill.disaggregation_mode, prefill.disaggregation_bootstrap_port) == ("prefill", 15005)
    assert prefill.load_balance_method == "follow_bootstrap_room" and prefill.enable_hierarchical_cache
    decode = sglang_options(config, place(worker_type="decode"))
    assert (decode.disaggregation_mode, decode.disaggregation_bootstrap_port) == ("decode", None)
    assert not decode.enable_hierarchical_cache
    whole = sglang_options(config, place())
    assert whole.disaggregation_mode == "null"


def test_the_pipeline_of_a_group_wins_over_that_of_the_run():
    engine = StandInSGLang(make_config(sglang_pp_size=2), place(num_gpus=8), "/tmp", {"pp_size": 4})
    assert engine.parser().parse_args(engine.command()[3:]).tp_size == 2


def test_the_embedded_engine_gets_the_flags_it_has():
    config = make_config(
        sglang_context_length=512, sglang_enable_deterministic_inference=True, sglang_ep_size=2
    )
    options = embedded_options(config, place(rank=1, port=15003))
    assert options.model_path == "/models/tiny"
    assert options.port == 15003
    assert options.context_length == 512
    assert options.enable_deterministic_inference
    assert options.random_seed == 1242


def test_overrides_win_over_flags_but_not_over_the_placement():
    config = make_config(sglang_context_length=512, sglang_mem_fraction_static=0.7)
    overrides = {"model_path": "/models/judge", "dtype": "bfloat16", "port": 1, "mem_fraction_static": 0.5}
    engine = StandInSGLang(config, place(), "/tmp", overrides)
    options = engine.parser().parse_args(engine.command()[3:])
    assert (options.model_path, options.dtype) == ("/models/judge", "bfloat16")
    assert (options.port, options.mem_fraction_static) == (15000, 0.5)


def test_the_embedded_engine_keeps_to_one_passive_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = EmbeddedEngine(make_config(), place(), "/tmp").environment()
    assert environment == {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }


def test_sglang_runs_without_expandable_segments(monkeypatch):
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "false")
    environment = SGLangEngine(make_config(), place(), "/tmp").environment()
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] is None
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "false"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"


def test_beyond_loopback_a_key_is_required():
    with pytest.raises(ValueError, match=r"engine on 10\.0\.0\.1: an API key is required beyond loopback"):
        place(host="10.0.0.1")
    engine = EmbeddedEngine(make_config(), place(host="10.0.0.1", port=1, api_key="k"), "/tmp")
    assert engine.endpoint == EngineEndpoint("http://10.0.0.1:1", "k", 1, None)


class FakeServerEngine(EmbeddedEngine):
    """Starts the fake engine, or other Python code, instead of a server with a model."""

    code: str | None = None

    def command(self) -> list[str]:
        if self.code:
            return [sys.executable, "-c", self.code]
        return [sys.executable, fake.__file__, str(self.placement.port)]


@pytest.fixture
def engine(tmp_path):
    engine = FakeServerEngine(make_config(), place(port=free_port()), tmp_path)
    yield engine
    engine.shutdown()


def test_an_engine_lives_from_launch_to_shutdown(engine):
    assert not engine.is_alive()
    engine.launch()
    engine.wait_ready(600)
    assert engine.is_alive() and engine.failure_reason() is None
    assert engine.client.weight_version() == "default"
    engine.shutdown()
    assert not engine.is_alive()
    assert not engine.client.health()
    engine.launch()
    engine.wait_ready(600)


def test_an_engine_is_launched_once_at_a_time(engine):
    with pytest.raises(RuntimeError, match="engine 0 was not launched"):
        engine.process.is_alive()
    engine.code = "import time; time.sleep(600)"
    engine.launch()
    with pytest.raises(RuntimeError, match="engine 0 already runs"):
        engine.launch()


def test_an_engine_that_ends_at_start_is_explained_by_its_log(engine):
    engine.code = "import sys; sys.exit('no such model')"
    engine.launch()
    with pytest.raises(EngineStartError, match=r"(?s)engine 0 .*exit status 1.*no such model"):
        engine.wait_ready(600)


def test_an_engine_that_never_serves_is_given_up(engine):
    engine.code = "import time; print('loading', flush=True); time.sleep(600)"
    engine.launch()
    while "loading" not in engine.log_path.read_text():
        time.sleep(0.02)
    with pytest.raises(EngineStartError, match=r"(?s)does not serve .*--engine-startup-timeout.*loading"):
        engine.wait_ready(1.0)


def test_a_part_on_another_node_serves_no_http_and_is_ready_once_it_runs(tmp_path):
    placement = place(port=free_port(), num_nodes=2, node_rank=1)
    engine = FakeServerEngine(make_config(), placement, tmp_path)
    engine.code = "import time; time.sleep(600)"
    engine.launch()
    engine.wait_ready(600)
    engine.shutdown()


def test_shutdown_before_launch_does_nothing(engine):
    engine.shutdown()
    assert not engine.is_alive()


class HelpedEngine(FakeServerEngine):
    """A server that leaves it to a helper to fetch weights."""

    pulls_weights = False


@pytest.fixture
def helped(tmp_path):
    config = make_config(update_weight_local_checkpoint_dir=str(tmp_path / "local"))
    placement = place(port=free_port(), puller_port=free_port(), api_key="k")
    engine = HelpedEngine(config, placement, tmp_path)
    yield engine
    engine.shutdown()


@pytest.mark.slow
def test_a_helper_that_fetches_weights_lives_and_ends_with_the_server(helped, tmp_path):
    assert helped.endpoint.puller == f"http://127.0.0.1:{helped.placement.puller_port}"
    helped.launch()
    helped.wait_ready(600)
    assert helped.is_alive()
    shared, local = str(tmp_path / "shared"), str(tmp_path / "local")
    stranger = EngineClient(replace(helped.endpoint, api_key="wrong"))
    for client, place, said in (
        (helped.client, local, "/pull_weights: HTTP 400: .*is no version of weights"),
        (helped.client, "/elsewhere", "HTTP 400: .*local_checkpoint_dir /elsewhere"),
        (stranger, local, "HTTP 401"),
    ):
        body = {"local_checkpoint_dir": place, "source_dir": shared, "target_version": 1}
        with pytest.raises(EngineError, match=said):
            client.request("POST", f"{helped.endpoint.puller}/pull_weights", body)
    foreign = {"Origin": "http://elsewhere.example", "Authorization": "Bearer k"}
    assert httpx.post(f"{helped.endpoint.puller}/pull_weights", headers=foreign, json={}).status_code == 403
    helped._puller.terminate(5)
    assert not helped.is_alive()
    assert "helper that fetches weights" in helped.failure_reason()
