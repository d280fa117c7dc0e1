"""What a colocated engine with several tensor-parallel ranks receives."""

import contextlib
import gc
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fastapi.responses import JSONResponse
from torch.distributed import distributed_c10d

from slime.config.run import run_config
from slime.utils.tensor_bucket import FlattenedTensorBucket, deserialize_tensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import handle
from slime.weight_sync.transports.handle import HandleTransport
from slime.weight_sync.update import WeightUpdate
from tests.engines.fake import FakeEngine
from tests.families import tiny_family
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf, tiny_hf_model
from tests.run_args import run_args


class Recorder(FakeEngine):
    """Grants every control request of an update and keeps the weights that it brings, by TP rank."""

    def __init__(self):
        super().__init__()
        self.weights: dict = {}
        self.requests: list[set[str]] = []
        granted = ("pause_generation", "begin_weight_update", "end_weight_update", "continue_generation")
        self.answers |= {path: {"success": True} for path in granted}
        self.answers["update_weights_from_tensor"] = self.keep

    def keep(self, body):
        for rank, payload in enumerate(body["serialized_named_tensors"]):
            bucket = FlattenedTensorBucket(**deserialize_tensors(payload))
            tensors = {name: tensor.clone() for name, tensor in bucket.reconstruct_tensors()}
            self.weights.setdefault(rank, {}).update(tensors)
            self.requests.append({*tensors})
        return {"success": True, "commit_time": 0.5}

    @property
    def paths(self):
        """What it is asked one after the other: beside them it flushes, and first says that it is there."""
        beside = ("flush_cache", "model_info", "take_weights")
        return [call.path for call in self.calls if call.path not in beside]


@pytest.fixture
def engine():
    engine = Recorder()
    engine.start()
    yield engine
    engine.stop()


def _entered(update):
    """The files of ours that an update enters which is not the first one.

    Without what stands in for CUDA and what notes times for a trace: no weight goes through these.
    """
    files = set()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if "/slime/" in name:
            files.add(name.rpartition("/slime/")[2])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        update.run(5)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files - {"backends/megatron_utils/cpu_support.py", "observability/spans.py"})


def _fails_on_one_rank(endpoint, update):
    """One rank cannot hand over its second bucket; returns what each says. Then it goes on."""
    work, calls = handle.serialize_bucket, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the manager of shared memory is late")
        return work(*args)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError) as said:
        if torch.distributed.get_rank() == 1:
            patched.setattr(handle, "serialize_bucket", fail_once)
        update.run(5)
    update.connect([endpoint])
    update.run(6)
    return str(said.value)


def _sync(rank, args, endpoint, then=lambda update: None):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    shared = Path("/dev/shm")
    mine = f"torch_{os.getpid()}_*"
    others = set(shared.glob(mine))  # of an earlier process with this id
    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    config = run_config(args)
    update = WeightUpdate(config, HfWeights(args, model), [HandleTransport(config)])
    groups = len(distributed_c10d._world.pg_map)
    update.connect([endpoint])
    try:
        update.run(4)
        return then(update)
    finally:
        update.disconnect()
        gc.collect()  # a failure's traceback holds the bucket
        left = set(shared.glob(mine)) - others
        if left or len(distributed_c10d._world.pg_map) != groups:
            raise RuntimeError(f"left behind: {left or 'a process group'}")


def _pause_and_commit(update):
    report = update.run(5)
    return report.pause, report.commit


def _endpoint(engine):
    return EngineEndpoint(engine.url, None, 2, 0)


def test_each_rank_of_an_engine_gets_all_weights_from_its_trainer_rank(engine, tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    run_ranks(_sync, 2, args, _endpoint(engine))
    expected = tiny_hf_model("llama").state_dict()
    assert sorted(engine.weights) == [0, 1]
    for tensors in engine.weights.values():
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    before = engine.paths.count("update_weights_from_tensor")
    (pause, commit), other = run_ranks(_sync, 2, args, _endpoint(engine), _pause_and_commit)
    posted = (engine.paths.count("update_weights_from_tensor") - before) / 2
    assert pause > 0 and commit == 0.5 * posted and other == (0, 0)


def test_tensors_that_an_engine_joins_come_in_one_request(engine, tmp_path):
    """Buckets hold one parameter, and between the two there are others."""
    tiny_family("deepseek_v3", tmp_path)
    experts = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    args = make_args(tmp_path, update_weight_buffer_size=1, **experts)
    run_ranks(_sync, 1, args, EngineEndpoint(engine.url, None, 1, 0))
    layers = [f"model.layers.{layer}.self_attn" for layer in range(4)]
    pairs = [{f"{layer}.q_a_proj.weight", f"{layer}.kv_a_proj_with_mqa.weight"} for layer in layers]
    assert all(any(pair <= request for request in engine.requests) for pair in pairs)
    assert len(engine.requests) > len(pairs)


def test_no_shared_memory_and_no_group_is_left_when_engines_are_disconnected(engine, tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    files, _ = run_ranks(_sync, 2, args, _endpoint(engine), _entered)
    assert {"weight_sync/update.py", "backends/sglang_utils/client.py"} <= {*files}
    assert len(files) <= 12, files  # who follows a weight to the wire reads these


def test_the_session_surrounds_the_buckets_and_the_last_one_carries_the_version(engine, tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    run_ranks(_sync, 2, args, _endpoint(engine))
    assert engine.paths[:2] == ["pause_generation", "begin_weight_update"]
    assert engine.paths[-2:] == ["end_weight_update", "continue_generation"]
    assert set(engine.paths[2:-2]) == {"update_weights_from_tensor"}
    versions = [body["weight_version"] for body in engine.seen("update_weights_from_tensor")]
    assert versions[-1] == "4"
    assert set(versions[:-1]) == {None}


def test_a_refusal_reaches_all_ranks_and_generation_does_not_go_on(engine, tmp_path):
    refusal = {"success": False, "message": "as told"}
    engine.answers["update_weights_from_tensor"] = JSONResponse(refusal, status_code=400)
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    with pytest.raises(RuntimeError, match="/update_weights_from_tensor: HTTP 400"):
        run_ranks(_sync, 2, args, _endpoint(engine))
    assert engine.paths.count("update_weights_from_tensor") == 1
    assert "continue_generation" not in engine.paths


def test_a_rank_that_fails_half_way_is_named_on_all_and_the_next_update_is_whole(engine, tmp_path):
    """The others wait for its part of the bucket, and the engine for the end of the update."""
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    then = partial(_fails_on_one_rank, _endpoint(engine))
    first, second = run_ranks(_sync, 2, args, _endpoint(engine), then, timeout=200)
    assert second == "the manager of shared memory is late"
    assert first == f"trainer rank 1 handed over no bucket: RuntimeError: {second}"
    session = [path for path in engine.paths if path != "update_weights_from_tensor"]
    opened = ["pause_generation", "begin_weight_update"]
    closed = ["end_weight_update", "continue_generation"]
    assert session == [*opened, *closed, *opened, "pause_generation", "end_weight_update", *opened, *closed]
    assert engine.seen("update_weights_from_tensor")[-1]["weight_version"] == "6"


@pytest.mark.parametrize(
    ("gpus", "offset", "accepted"),
    [(2, 0, True), (2, 2, True), (2, 3, False), (1, 4, False), (2, None, False)],
)
def test_only_engines_whose_ranks_all_share_a_trainers_gpu_are_accepted(monkeypatch, gpus, offset, accepted):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    transport = HandleTransport(run_config(run_args()))
    assert transport.accepts(EngineEndpoint("http://127.0.0.1:1", None, gpus, offset)) == accepted


def test_who_tells_an_engine_of_the_session_hands_it_buckets_over_the_same_connection(monkeypatch):
    rank = 0
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    transport = HandleTransport(run_config(run_args()))
    transport.agreement = SimpleNamespace(step=lambda name: contextlib.nullcontext())
    beside, own = [
        EngineEndpoint(f"http://127.0.0.1:{port}", None, 1, offset) for port, offset in ((1, 1), (2, 0))
    ]
    transport.connect([beside, own])
    assert transport._engine is transport._engines.clients[1]
    rank = 1
    transport.connect([beside, own])
    assert transport._engine.endpoint == beside and not transport._engines.clients
    transport.disconnect()


def test_no_two_engines_share_a_trainer_rank(monkeypatch):
    groups = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, **_: groups.append(ranks))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 9)
    transport = HandleTransport(run_config(run_args()))
    beside = [EngineEndpoint(f"http://127.0.0.1:{port}", None, size, port) for port, size in ((0, 2), (2, 1))]
    transport._endpoints = beside
    transport._join()
    assert transport.source_ranks() == {0, 1, 2} and groups == [[0, 1]]
    transport._endpoints = [EngineEndpoint("http://127.0.0.1:7", None, 2, 1)]
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:7: another engine has one"):
        transport._join()


def test_handles_are_collected_once_the_engine_has_answered(monkeypatch):
    done = []
    monkeypatch.setattr(handle, "serialize_bucket", lambda bucket: "payload")
    monkeypatch.setattr(handle, "collect_handles", lambda: done.append("collected"))
    transport = HandleTransport(run_config(run_args()))
    assert transport.send([("a", torch.ones(2))], is_last=True) == 0 and done == []
    transport._version, transport._engine, transport._ranks = "7", MagicMock(), [0]
    client, post = transport._engine, transport._engine.update_weights_from_tensor
    post.side_effect = lambda *_, **options: done.append(options["weight_version"])
    assert [transport.send([("a", torch.ones(2))], is_last) for is_last in (False, True)] == [8, 8]
    assert done == [None, "collected", "7", "collected"] and post.call_args.args == (["payload"],)
    transport._leave()
    client.close.assert_called_once_with()


@pytest.fixture
def flats(monkeypatch):
    """What a transport has made a handle of, and the values that were in it then."""
    flats = []

    def note(bucket):
        flats.append((bucket.flattened_tensor, bucket.flattened_tensor.view(torch.float32).tolist()))
        return "payload"

    monkeypatch.setattr(handle, "serialize_bucket", note)
    monkeypatch.setattr(handle, "withdraw_handle", lambda flat: flats.append("withdrawn"))
    return flats


def _transport(post):
    transport = HandleTransport(run_config(run_args()))
    transport._engine, transport._ranks = MagicMock(), [0]
    transport._engine.update_weights_from_tensor.side_effect = post
    return transport


def _bucket(value):
    return [("a", torch.full((3,), value))]


def test_what_was_prepared_is_not_filled_again(flats):
    transport, bucket = _transport(None), _bucket(1.0)
    transport.prepare(bucket, None)
    bucket[0][1].zero_()
    for is_last in (False, True):
        transport.send(bucket, is_last)
    assert [values for _, values in flats] == [[1.0] * 3, [0.0] * 3]


def test_a_bucket_is_filled_while_the_engine_takes_the_one_before_and_never_over_it(flats):
    answer = threading.Semaphore(0)
    transport = _transport(lambda *_, **options: answer.acquire(timeout=120))
    transport.send(_bucket(1.0), is_last=False)
    sending = threading.Thread(target=transport.send, args=(_bucket(2.0), False))
    sending.start()
    deadline = time.monotonic() + 120
    while len(flats) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sending.is_alive() and [values for _, values in flats] == [[1.0] * 3, [2.0] * 3]
    assert flats[0][0].view(torch.float32).tolist() == [1.0] * 3
    answer.release(4)
    sending.join(120)
    transport.send(_bucket(3.0), is_last=True)
    places = [flat.data_ptr() for flat, _ in flats]
    assert places[0] == places[2] != places[1]
    transport.send(_bucket(4.0), is_last=True)  # a model of one bucket needs one place
    assert flats[3][0].data_ptr() == places[0]


def test_engines_are_left_once_they_no_longer_read(flats):
    """A refusal is told with the next bucket, which nobody has got."""
    answers = []

    def refuse(*_, **options):
        time.sleep(0.05)
        answers.append("refused")
        raise RuntimeError("as told")

    transport = _transport(refuse)
    transport.send(_bucket(1.0), is_last=False)
    with pytest.raises(RuntimeError, match="as told"):
        transport.send(_bucket(2.0), is_last=False)
    assert flats[-1] == "withdrawn" and answers == ["refused"]
    transport = _transport(refuse)
    transport.send(_bucket(1.0), is_last=False)
    transport._leave()
    assert answers == ["refused"] * 2
