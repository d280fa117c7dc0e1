"""Weights from rank to rank: real trainer ranks, embedded engines of one and two ranks."""

import base64
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.sglang_utils.client import EngineClient
from slime.utils.tensor_bucket import deserialize_tensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.shards.source import EngineShards
from slime.weight_sync.transports.shards import ShardTransport
from tests.engines.fake import FakeEngine
from tests.engines.in_process import InProcessEngine
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.real_trainer import update_engines
from tests.weight_sync.sglang_ranks import rank_of_sglang

pytestmark = pytest.mark.slow

EXPERTS = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **EXPERTS}
SLICES = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2, **EXPERTS}
LAYOUTS = {
    "TP 2, an engine of two ranks": ("llama", 2, TP2, [2]),
    "TP 2, two engines": ("qwen3", 2, TP2, [1, 1]),
    "PP 2, an engine of two ranks": ("qwen2", 2, PP2, [2]),
    "DP 2, an engine of two ranks": ("llama", 2, {}, [2]),
    "TP 2, PP 2, engines of one rank and of two": ("qwen3", 4, {**TP2, **PP2}, [1, 2]),
    "TP 2, experts over both, an engine of two ranks": ("qwen3_moe", 2, {**TP2, **EP2}, [2]),
    "TP 2, slices of experts, an engine of two ranks": ("qwen3_moe", 2, {**TP2, **SLICES}, [2]),
}
LONG = {
    "TP 2, two engines",
    "PP 2, an engine of two ranks",
    "TP 2, slices of experts, an engine of two ranks",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By model: the weights that engines start with, and the trainer's."""
    made = {}

    def get(model):
        if model not in made:
            paths = [tmp_path_factory.mktemp("hf") for _ in range(2)]
            made[model] = [save_tiny_hf(path, model, seed, vocab_size=190) for seed, path in enumerate(paths)]
        return made[model]

    return get


@pytest.fixture(scope="module")
def engines(checkpoints):
    """By model and sizes: engines in this process, again with what they started with."""
    made: dict[tuple[str, int, int], InProcessEngine] = {}

    def get(model, sizes):
        found, first = [], 0
        for number, size in enumerate(sizes):
            key = (model, size, number)
            if key not in made:
                made[key] = InProcessEngine(checkpoints(model)[0], tp_size=size, dtype="float32")
            made[key].client.update_weights_from_disk(checkpoints(model)[0], weight_version="old")
            found.append(EngineEndpoint(made[key].endpoint.url, None, size, first))
            first += size
        return found

    yield get
    for engine in made.values():
        engine.stop()


def _args(checkpoint, layout, **flags):
    own = dict(colocate=True, update_weight_transport="shards", update_weight_buffer_size=60_000)
    return make_args(checkpoint, **own, **layout, **flags)


def _digests(client):
    (held,) = client.weights_checker("checksum")["ranks"]
    return held["checksums"]


def _ranks_of_sglang(path, size):
    state, config = load_file(f"{path}/model.safetensors"), json.loads(Path(path, "config.json").read_text())
    return [rank_of_sglang(state, config, rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.nightly if one in LONG else ()) for one in LAYOUTS]
)
def test_engines_hold_the_trainers_weights(engines, checkpoints, layout):
    """Each rank has handed over what the engine's rank before it keeps, and no byte more."""
    model, ranks, flags, sizes = LAYOUTS[layout]
    start, trained = checkpoints(model)
    endpoints = engines(model, sizes)
    clients = [EngineClient(endpoint) for endpoint in endpoints]
    clients[0].update_weights_from_disk(trained)
    wanted = _digests(clients[0])
    clients[0].update_weights_from_disk(start, weight_version="old")
    assert all(_digests(client) != wanted for client in clients)
    sent = run_ranks(update_engines, ranks, _args(trained, flags, check_weight_checksums=True), endpoints)
    for client in clients:
        found = _digests(client)
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert client.weight_version() == "2"
    keep = [
        sum(t.nbytes for t in rank.values()) for size in sizes for rank in _ranks_of_sglang(trained, size)
    ]
    assert sent == keep + [0] * (ranks - len(keep))


def _with_others(endpoints, update):
    update.connect(endpoints)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineShards, "_plan", None)  # what was decided is replayed
        update.connect(endpoints)
        return update.run(2).sent


def test_other_engines_get_other_tensors(engines, checkpoints):
    trained, (one, *two) = checkpoints("llama")[1], [*engines("llama", [2]), *engines("llama", [1, 1])]
    then = partial(_with_others, two)
    first, second = run_ranks(
        update_engines, 2, _args(trained, TP2, check_weight_checksums=True), [one], then
    )
    assert first == second == sum(t.nbytes for t in _ranks_of_sglang(trained, 1)[0].values())
    held = [_digests(EngineClient(endpoint)) for endpoint in (one, *two)]
    assert held[0] == held[1] == held[2]


def _with_a_wrong_number(update):
    """What rank 1 hands over is another number than it says."""
    serialize = ShardTransport._serialize

    def change(transport, flat):
        if torch.distributed.get_rank() == 1:
            tensors = dict(flat.reconstruct_tensors())
            if (norm := tensors.get("model.norm.weight")) is not None:
                norm[-1] += 1
        return serialize(transport, flat)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError) as said:
        patched.setattr(ShardTransport, "_serialize", change)
        update.run(2)
    return str(said.value)


def test_a_wrong_number_at_one_rank_is_found_and_named(engines, checkpoints):
    args = _args(checkpoints("llama")[1], TP2, check_weight_checksums=True)
    said = run_ranks(update_engines, 2, args, engines("llama", [2]), _with_a_wrong_number)
    assert all("tensor 'model.norm.weight': checksum " in one and "as sent" in one for one in said), said


class Recorder(FakeEngine):
    """Grants every control request of an update and keeps what each rank gets."""

    def __init__(self):
        super().__init__()
        self.ranks, self.payloads = [{}, {}], []
        granted = ("pause_generation", "begin_weight_update", "end_weight_update", "continue_generation")
        self.answers |= {path: {"success": True} for path in granted}
        self.answers["update_weights_from_tensor"] = self.keep

    def keep(self, body):
        assert body["load_format"] == "direct"
        for held, payload in zip(self.ranks, body["serialized_named_tensors"], strict=True):
            held.update({name: tensor.clone() for name, tensor in deserialize_tensors(payload)})
            self.payloads.append(base64.b64decode(payload))
        return {"success": True}


def test_a_server_is_asked_as_sglang_is_and_its_ranks_get_what_theirs_have(checkpoints):
    engine, trained = Recorder(), checkpoints("qwen2")[1]
    engine.start()
    try:
        endpoint = EngineEndpoint(engine.url, None, 2, 0)
        run_ranks(update_engines, 2, _args(trained, TP2), [endpoint])
    finally:
        engine.stop()
    for found, wanted in zip(engine.ranks, _ranks_of_sglang(trained, 2), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    versions = [body["weight_version"] for body in engine.seen("update_weights_from_tensor")]
    assert len(versions) > 4 and {*versions} == {None, "1", "2"} and versions[-1] == "2"
    assert {payload.count(b"rebuild_storage_filename") for payload in engine.payloads} == {1}
