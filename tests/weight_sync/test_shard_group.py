"""Weights from the trainer ranks that hold them straight to the engine ranks that keep them, over a group."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from slime.backends.sglang_utils.client import EngineClient
from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.shards.outgoing import OutgoingPieces
from slime.weight_sync.transports.shard_group import ShardGroupTransport
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server
from tests.engines.fake import FakeEngine
from tests.engines.in_process import InProcessEngine
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.sglang_ranks import rank_of_sglang

pytestmark = pytest.mark.slow

EXPERTS = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **EXPERTS}
SLICES = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2, **EXPERTS}
LAYOUTS = {
    "TP 2, an engine of two ranks": ("llama", 2, TP2, [2]),
    "TP 2, engines of one rank": ("qwen3", 2, TP2, [1, 1]),
    "TP 1, an engine of four ranks": ("llama", 1, {}, [4]),
    "PP 2, an engine of two ranks": ("qwen2", 2, PP2, [2]),
    "DP 2, an engine of two ranks": ("llama", 2, {}, [2]),
    "TP 2, PP 2, engines of one rank and of four": ("qwen3", 4, {**TP2, **PP2}, [1, 4]),
    "TP 2, experts over both, an engine of two ranks": ("qwen3_moe", 2, {**TP2, **EP2}, [2]),
    "TP 2, slices of experts, engines of one rank": ("qwen3_moe", 2, {**TP2, **SLICES}, [1, 1]),
}
SHORT = {
    "TP 2, an engine of two ranks",
    "TP 2, PP 2, engines of one rank and of four",
    "TP 2, experts over both, an engine of two ranks",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By model: the weights that engines start with, and the trainer's."""
    made = {}

    def get(model):
        if model not in made:
            paths = [tmp_path_factory.mktemp("hf") for _ in range(2)]
            shape = {"num_key_value_heads": 4} if model == "qwen3" else {}
            made[model] = [
                save_tiny_hf(path, model, seed, vocab_size=190, **shape) for seed, path in enumerate(paths)
            ]
        return made[model]

    return get


@pytest.fixture(scope="module")
def engines(checkpoints):
    """By model and sizes: engines again with what they started with. A process can be in a group once."""
    made: dict[tuple[str, int, int], InProcessEngine | Server] = {}

    def start(model, size, number):
        path = checkpoints(model)[0]
        if number == 0:
            return InProcessEngine(path, tp_size=size, dtype="float32")
        flags = ("--skip-tokenizer-init", "--dtype", "float32", "--tp-size", str(size))
        return Server(path, *flags).wait_ready()

    def get(model, sizes):
        found = []
        for number, size in enumerate(sizes):
            key = (model, size, number)
            made[key] = engine = made.get(key) or start(*key)
            url = engine.url if isinstance(engine, Server) else engine.endpoint.url
            found.append(EngineEndpoint(url, None, size, None))
            EngineClient(found[-1]).update_weights_from_disk(checkpoints(model)[0], weight_version="old")
        return found

    yield get
    for engine in made.values():
        engine.stop()


def _update(rank, args, endpoints, then=lambda update: update.run(2).sent):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    config = run_config(args)
    init(config)
    model = get_model(config)
    load_hf_weights(args, model, args.hf_checkpoint)
    update = WeightUpdate(config, HfWeights(args, model))
    groups = len(distributed_c10d._world.pg_map)
    try:
        update.connect(endpoints)
        update.run(1)
        return then(update)
    finally:
        update.disconnect()
        if len(distributed_c10d._world.pg_map) != groups:
            raise RuntimeError("left behind: a process group")


def _args(checkpoint, layout, **flags):
    own = dict(colocate=False, update_weight_transport="shards", update_weight_buffer_size=60_000)
    own |= {"check_weight_checksums": True}
    return make_args(checkpoint, **{**own, **layout, **flags})


def _digests(client):
    (held,) = client.weights_checker("checksum")["ranks"]
    return held["checksums"]


def _kept(path, size):
    """Bytes that all ranks of an engine keep, by what is known of SGLang's; padding comes from nobody."""
    state, config = load_file(f"{path}/model.safetensors"), json.loads(Path(path, "config.json").read_text())
    ranks = [rank_of_sglang(state, config, rank, size) for rank in range(size)]
    width, padded = config["hidden_size"], -config["vocab_size"] % 64
    padded = -config["vocab_size"] % (64 * size) if (config["vocab_size"] + padded) % size else padded
    tables = 1 if config["tie_word_embeddings"] else 2
    return sum(t.nbytes for rank in ranks for t in rank.values()) - 4 * width * padded * tables


@pytest.mark.parametrize(
    "layout", [one if one in SHORT else pytest.param(one, marks=pytest.mark.nightly) for one in LAYOUTS]
)
def test_engines_hold_the_trainers_weights(engines, checkpoints, layout):
    """As after whole weights came; and no byte came twice, or to a rank that does not keep it."""
    model, ranks, flags, sizes = LAYOUTS[layout]
    start, trained = checkpoints(model)
    endpoints = engines(model, sizes)
    clients = [EngineClient(endpoint) for endpoint in endpoints]
    clients[0].update_weights_from_disk(trained)
    wanted = _digests(clients[0])
    clients[0].update_weights_from_disk(start, weight_version="old")
    assert all(_digests(client) != wanted for client in clients)
    sent = run_ranks(_update, ranks, _args(trained, flags), endpoints)
    for client in clients:
        found = _digests(client)
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert client.weight_version() == "2"
    assert sum(sent) == sum(_kept(trained, size) for size in sizes)
    assert min(sent) > 0.2 * sum(sent) / ranks


def _with_others(endpoints, update):
    update.connect(endpoints)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OutgoingPieces, "_plan", None)  # what was decided is replayed
        update.connect(endpoints)
        return update.run(2).sent


def test_other_engines_get_other_pieces(engines, checkpoints):
    trained, (one, *two) = checkpoints("llama")[1], [*engines("llama", [2]), *engines("llama", [1, 1])]
    sent = run_ranks(_update, 2, _args(trained, TP2), [one], partial(_with_others, two))
    assert sum(sent) == 2 * _kept(trained, 1)
    held = [_digests(EngineClient(endpoint)) for endpoint in (one, *two)]
    assert held[0] == held[1] == held[2]


def _with_a_wrong_number(update):
    """What rank 1 sends is another number than it says."""
    packed = ShardGroupTransport._packed

    def change(transport, bucket):
        found = packed(transport, bucket)
        if torch.distributed.get_rank() == 1 and any("layers.2.mlp.down_proj" in name for name, _ in bucket):
            for one in found:
                one.data[-1] += 1
        return found

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError) as said:
        patched.setattr(ShardGroupTransport, "_packed", change)
        update.run(2)
    return str(said.value)


def test_a_wrong_number_of_one_rank_is_found_and_named(engines, checkpoints):
    args = _args(checkpoints("llama")[1], TP2)
    said = run_ranks(_update, 2, args, engines("llama", [2]), _with_a_wrong_number)
    assert all(", rank 1: tensor 'model." in one and "as sent" in one for one in said), said


def _refused(rank, args, endpoints):
    with pytest.raises(RuntimeError) as said:
        _update(rank, args, endpoints)
    return str(said.value)


def test_a_server_without_such_messages_is_refused_by_name(checkpoints):
    engine = FakeEngine()  # knows what SGLang does
    engine.start()
    try:
        args = _args(checkpoints("llama")[1], TP2)
        said = run_ranks(_refused, 2, args, [EngineEndpoint(engine.url, None, 2, None)])
    finally:
        engine.stop()
    assert all(f"engine {engine.url}: knows only weights that one rank broadcasts" in one for one in said), (
        said
    )
