"""After a sync the engines serve the trainer's weights: real embedded engines, both transports."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports.session import WriterClient
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.writer import new_writer
from tests.engines import free_port
from tests.engines.embedded import Server
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf, tiny_hf_model
from tests.weight_sync.test_messages import Source

pytestmark = pytest.mark.slow

TRAINER, ENGINE = 1, 0
"""Seeds: engines start with other weights than the trainer holds."""

NO_LIMIT = {"distributed_timeout_minutes": 60}
"""The limit of collectives: whoever waits for it is given up before, by ``run_ranks``."""

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2, virtual stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return [save_tiny_hf(root / str(seed), "qwen3", seed=seed) for seed in (ENGINE, TRAINER)]


@pytest.fixture(scope="module")
def engine_urls(checkpoints):
    servers = [Server(checkpoints[ENGINE], "--skip-tokenizer-init", "--dtype", "float32") for _ in range(2)]
    try:
        yield [server.wait_ready().url for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def engines(engine_urls, checkpoints):
    """Clients of the engines, each serving the ENGINE weights as version "old", whatever failed before."""
    clients = [EngineClient(EngineEndpoint(url, None, 1, None)) for url in engine_urls]
    for client in clients:
        _begin_anew(client.endpoint, checkpoints[ENGINE])
    return clients


def _begin_anew(endpoint, checkpoint):
    """Gives an engine the old weights, as a trainer in the place of one that has left its update open."""
    trainer = WriterClient(endpoint, 60.0, new_writer())
    trainer.take_weights()
    trainer.update_weights_from_disk(checkpoint, weight_version="old", flush_cache=True)
    trainer.continue_generation()


def _checksum(client):
    return client.weights_checker("checksum")["per_engine_checksum"]


def _endpoints(engines, transport):
    """Tensor: engine i shares the slot of trainer rank i."""
    return [
        EngineEndpoint(engine.endpoint.url, None, 1, i if transport == "handle" else None)
        for i, engine in enumerate(engines)
    ]


def _sync(rank, args, checkpoint, transport, endpoints, versions):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, checkpoint)
    args.colocate = transport == "handle"
    args.update_weight_transport = "disk" if transport == "disk" else "nccl"
    update = WeightUpdate(run_config(args), HfWeights(args, model))
    update.connect(endpoints)
    sent = [update.run(version).sent for version in versions]
    update.disconnect()
    return sent


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", ["handle", "broadcast"])
def test_engines_hold_the_trainers_weights_after_a_sync(engines, checkpoints, transport, layout):
    engines[0].update_weights_from_disk(checkpoints[TRAINER], flush_cache=True)
    wanted = _checksum(engines[0])
    engines[0].update_weights_from_disk(checkpoints[ENGINE], weight_version="old", flush_cache=True)
    world_size = 1 if layout == "tp1" else 2
    used = engines[: 1 if layout == "tp1" and transport == "handle" else 2]
    assert all(_checksum(engine) != wanted for engine in used)
    args = make_args(checkpoints[TRAINER], update_weight_buffer_size=60_000, **LAYOUTS[layout])
    sent = run_ranks(
        _sync, world_size, args, checkpoints[TRAINER], transport, _endpoints(used, transport), [1, 2]
    )
    for engine in used:
        assert _checksum(engine) == wanted
        assert engine.weight_version() == "2"
    model_bytes = sum(p.numel() * 4 for p in tiny_hf_model("qwen3").parameters())
    sources = world_size if transport == "handle" else 1
    assert [by_rank[-1] for by_rank in sent[:sources]] == [model_bytes] * sources


def _sync_one_by_one(rank, args, checkpoint, endpoints):
    """Tensors are broadcast as large ones are; returns in which forms buckets went."""
    from slime.weight_sync.transports import broadcast

    broadcast._LEAST_MEAN, forms = 0, set()
    announced = EngineClient.update_weights_from_distributed

    def note(client, *args, load_format, **options):
        forms.add(str(load_format))
        announced(client, *args, load_format=load_format, **options)

    EngineClient.update_weights_from_distributed = note
    _sync(rank, args, checkpoint, "broadcast", endpoints, [1, 2])
    return sorted(forms)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_engines_hold_large_tensors_that_came_one_by_one(engines, checkpoints, layout):
    """They are received into the weights themselves."""
    engines[0].update_weights_from_disk(checkpoints[TRAINER], flush_cache=True)
    wanted = _checksum(engines[0])
    engines[0].update_weights_from_disk(checkpoints[ENGINE], weight_version="old", flush_cache=True)
    args = make_args(checkpoints[TRAINER], update_weight_buffer_size=60_000, **LAYOUTS[layout])
    endpoints = _endpoints(engines, "broadcast")
    forms, _ = run_ranks(_sync_one_by_one, 2, args, checkpoints[TRAINER], endpoints)
    assert forms == ["None"]
    assert [_checksum(engine) for engine in engines] == [wanted, wanted]
    assert [engine.weight_version() for engine in engines] == ["2", "2"]


def test_engines_load_what_a_trainer_has_written(engines, checkpoints, tmp_path):
    engines[0].update_weights_from_disk(checkpoints[TRAINER], flush_cache=True)
    wanted = _checksum(engines[0])
    engines[0].update_weights_from_disk(checkpoints[ENGINE], weight_version="old", flush_cache=True)
    overrides = {"update_weight_disk_dir": str(tmp_path), "update_weight_disk_keep_files": False}
    overrides |= {"synced_checkpoint": str(checkpoints[ENGINE]), "update_weight_buffer_size": 60_000}
    args = make_args(checkpoints[TRAINER], check_weight_checksums=True, **overrides, **LAYOUTS["pp2"])
    run_ranks(_sync, 2, args, checkpoints[TRAINER], "disk", _endpoints(engines, "disk"), [1, 2])
    assert [_checksum(engine) for engine in engines] == [wanted, wanted]
    assert [engine.weight_version() for engine in engines] == ["2", "2"]
    assert sorted(path.name for path in tmp_path.glob("weight_*")) == ["weight_v000001", "weight_v000002"]


LAYOUTS_OF_EXPERTS = {
    "ep2": (2, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "ep2 x pp2, virtual stages": (
        4,
        {
            **{"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            **{"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        },
    ),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Checkpoints of mixtures of experts, and an engine that serves the first."""
    root = tmp_path_factory.mktemp("experts")
    paths = [save_tiny_hf(root / str(seed), "qwen3_moe", seed=seed) for seed in (ENGINE, TRAINER)]
    server = Server(paths[ENGINE], "--skip-tokenizer-init", "--dtype", "float32")
    try:
        yield paths, EngineClient(EngineEndpoint(server.wait_ready().url, None, 1, None))
    finally:
        server.stop()


@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS)
def test_experts_of_all_ranks_reach_engines_on_gpus_of_their_own(experts, layout):
    paths, engine = experts
    _begin_anew(engine.endpoint, paths[ENGINE])
    engine.update_weights_from_disk(paths[TRAINER], flush_cache=True)
    wanted = _checksum(engine)
    engine.update_weights_from_disk(paths[ENGINE], weight_version="old", flush_cache=True)
    assert _checksum(engine) != wanted
    world_size, overrides = LAYOUTS_OF_EXPERTS[layout]
    # Buckets that end between the experts of a layer.
    balance = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    args = make_args(paths[TRAINER], update_weight_buffer_size=50_000, **balance, **overrides)
    run_ranks(_sync, world_size, args, paths[TRAINER], "broadcast", _endpoints([engine], "broadcast"), [1, 2])
    assert _checksum(engine) == wanted and engine.weight_version() == "2"


def test_generation_goes_on_after_a_sync_with_the_new_weights(engines, checkpoints):
    args = make_args(checkpoints[TRAINER], check_weight_checksums=True)
    endpoints = _endpoints(engines, "broadcast")
    run_ranks(_sync, 1, args, checkpoints[TRAINER], "broadcast", endpoints, [7])
    prompt = list(range(3, 23))
    answer = engines[1].request(
        "POST",
        "/generate",
        {
            **{"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0},
            "sampling_params": {"max_new_tokens": 0},
        },
    )
    assert answer["meta_info"]["weight_version"] == "7"
    with torch.no_grad():
        logits = tiny_hf_model("qwen3", seed=TRAINER)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]]
    found = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
    assert (found - expected).abs().max() < 1e-4


def test_engines_beyond_the_trainers_slots_get_their_weights_by_broadcast(engines, checkpoints):
    args = make_args(checkpoints[TRAINER])
    endpoints = _endpoints(engines, "handle")  # the second one has slot 1, a single rank trains
    run_ranks(_sync, 1, args, checkpoints[TRAINER], "handle", endpoints, [3])
    assert _checksum(engines[0]) == _checksum(engines[1])
    assert [engine.weight_version() for engine in engines] == ["3", "3"]


def test_an_equal_update_passes_its_check_and_an_unequal_one_fails(engines, checkpoints):
    endpoints = _endpoints(engines[:1], "handle")
    args = make_args(checkpoints[ENGINE], check_weight_update_equal=True)
    engines[0].weights_checker("snapshot")
    run_ranks(_sync, 1, args, checkpoints[ENGINE], "handle", endpoints, [1, 2])
    with pytest.raises(RuntimeError, match="weights differ from the snapshot"):
        run_ranks(_sync, 1, args, checkpoints[TRAINER], "handle", endpoints, [1])


@pytest.mark.parametrize("transport", ["handle", "broadcast"])
def test_an_engine_of_another_model_fails_the_sync_on_all_ranks(engines, tmp_path, transport):
    other = save_tiny_hf(tmp_path, "qwen3", hidden_size=32)
    sizes = {"tensor_model_parallel_size": 2, "update_weight_buffer_size": 30_000}
    args = make_args(other, **sizes, **NO_LIMIT)
    with pytest.raises(RuntimeError, match=r"rank \d:(.|\n)*/update_weights_from_"):
        run_ranks(_sync, 2, args, other, transport, _endpoints(engines[:1], transport), [1])


def test_a_dead_engine_fails_the_connection_at_once(checkpoints):
    endpoint = EngineEndpoint(f"http://127.0.0.1:{free_port()}", None, 1, None)
    args = make_args(checkpoints[TRAINER], **NO_LIMIT)
    with pytest.raises(RuntimeError, match="/take_weights: no answer"):
        run_ranks(_sync, 1, args, checkpoints[TRAINER], "broadcast", [endpoint], [1])


def _failure_to_connect(rank, args, endpoints):
    dist.init_process_group("gloo")
    with pytest.raises((EngineError, RuntimeError)) as failure:
        WeightUpdate(run_config(args), Source({})).connect(endpoints)
    return str(failure.value)


def test_all_ranks_end_where_the_first_one_finds_an_engine_dead(checkpoints):
    """The others would meet behind it."""
    endpoint = EngineEndpoint(f"http://127.0.0.1:{free_port()}", None, 2, 0)
    args = make_args(checkpoints[TRAINER], colocate=True, **NO_LIMIT)
    first, second = run_ranks(_failure_to_connect, 2, args, [endpoint], timeout=120)
    assert "/take_weights: no answer" in first
    assert second.startswith("weight sync, step 'take engines': rank 0 failed: EngineError:")


def _sync_past_a_death(rank, args, checkpoint, endpoints, place, pid):
    """The engine at a place is killed between two buckets; then the others are given the weights."""
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    class Deadly(HfWeights):
        def buckets(self, max_bytes):
            for index, bucket in enumerate(super().buckets(max_bytes)):
                if index == 1 and args.victim_lives:
                    os.kill(pid, signal.SIGKILL)
                    args.victim_lives = False
                yield bucket

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, checkpoint)
    args.victim_lives = True
    update = WeightUpdate(run_config(args), Deadly(args, model))
    update.connect(endpoints)
    with pytest.raises(EngineError, match="update_weights_from_distributed: no answer"):
        update.run(1)
    update.connect([endpoint for i, endpoint in enumerate(endpoints) if i != place])
    update.run(2)
    update.disconnect()


@pytest.mark.parametrize("place", [0, 1])
def test_an_engine_that_dies_between_two_buckets_holds_up_no_other(checkpoints, place):
    servers = [Server(checkpoints[ENGINE], "--skip-tokenizer-init", "--dtype", "float32") for _ in range(2)]
    try:
        endpoints = [EngineEndpoint(server.wait_ready().url, None, 1, None) for server in servers]
        args = make_args(checkpoints[TRAINER], update_weight_buffer_size=60_000, **NO_LIMIT)
        pid = servers[place].process.pid
        run_ranks(_sync_past_a_death, 1, args, checkpoints[TRAINER], endpoints, place, pid)
        assert EngineClient(endpoints[1 - place]).weight_version() == "2"
    finally:
        for server in servers:
            server.stop()


def _sync_after(rank, args, checkpoint, transport, endpoints, dies):
    """Dies between two buckets; or takes the place of one that did."""
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    class Deadly(HfWeights):
        def buckets(self, max_bytes):
            for index, bucket in enumerate(super().buckets(max_bytes)):
                if index == 1 and dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield bucket

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, checkpoint)
    args.colocate = transport == "handle"
    update = WeightUpdate(run_config(args), Deadly(args, model))
    if not dies:
        update.take_over()
    update.connect(endpoints)
    update.run(1 if dies else 3)
    update.disconnect()


@pytest.mark.parametrize("transport", ["handle", "broadcast"])
def test_ranks_in_the_place_of_lost_ones_end_their_update_and_send_all_weights(
    engines, checkpoints, transport
):
    """What the engines had loaded is gone, so there is nothing that they are compared with."""
    endpoints = _endpoints(engines[:1], transport)
    flags = {"update_weight_buffer_size": 60_000, "check_weight_update_equal": True, **NO_LIMIT}
    args = make_args(checkpoints[TRAINER], **flags)
    engines[0].weights_checker("snapshot")
    with pytest.raises(RuntimeError, match="rank 0"):
        run_ranks(_sync_after, 1, args, checkpoints[TRAINER], transport, endpoints, True)
    run_ranks(_sync_after, 1, args, checkpoints[TRAINER], transport, endpoints, False)
    found = _checksum(engines[0])
    assert engines[0].weight_version() == "3"
    engines[0].update_weights_from_disk(checkpoints[TRAINER], flush_cache=True)
    assert _checksum(engines[0]) == found
