"""What a colocated engine with several tensor-parallel ranks receives."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from slime.utils.tensor_bucket import FlattenedTensorBucket, deserialize_tensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.handle import HandleTransport
from slime.weight_sync.update import WeightUpdate
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf, tiny_hf_model


class _Recorder(BaseHTTPRequestHandler):
    """Answers every control request with success and keeps what was asked, weights by TP rank included."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        self.server.calls.append(self.path.split("?")[0])
        status = 200
        if self.path == "/update_weights_from_tensor":
            status = self.server.update_status
            self.server.versions.append(body["weight_version"])
            for rank, payload in enumerate(body["serialized_named_tensors"]):
                bucket = FlattenedTensorBucket(**deserialize_tensors(payload))
                tensors = {name: tensor.clone() for name, tensor in bucket.reconstruct_tensors()}
                self.server.weights.setdefault(rank, {}).update(tensors)
        answer = json.dumps({"success": status == 200, "message": "as told"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    server.calls, server.versions, server.weights, server.update_status = [], [], {}, 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _sync(rank, args, endpoint):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(args)
    model = get_model(args)
    load_hf_weights(args, model, args.hf_checkpoint)
    update = WeightUpdate(args, HfWeights(args, model), [HandleTransport(args)])
    update.connect([endpoint])
    update.run(4)


def _endpoint(engine):
    return EngineEndpoint(f"http://127.0.0.1:{engine.server_port}", None, 2, 0)


def test_each_rank_of_an_engine_gets_all_weights_from_its_trainer_rank(engine, tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    run_ranks(_sync, 2, args, _endpoint(engine))
    expected = tiny_hf_model("llama").state_dict()
    assert sorted(engine.weights) == [0, 1]
    for tensors in engine.weights.values():
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_session_surrounds_the_buckets_and_the_last_one_carries_the_version(engine, tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    run_ranks(_sync, 2, args, _endpoint(engine))
    assert engine.calls[:3] == ["/pause_generation", "/flush_cache", "/begin_weight_update"]
    assert engine.calls[-2:] == ["/end_weight_update", "/continue_generation"]
    assert set(engine.calls[3:-2]) == {"/update_weights_from_tensor"}
    assert engine.versions[-1] == "4"
    assert set(engine.versions[:-1]) == {None}


def test_a_refusal_reaches_all_ranks_and_generation_does_not_go_on(engine, tmp_path):
    engine.update_status = 400
    args = make_args(save_tiny_hf(tmp_path, "llama"), update_weight_buffer_size=50_000)
    with pytest.raises(RuntimeError, match="/update_weights_from_tensor: HTTP 400"):
        run_ranks(_sync, 2, args, _endpoint(engine), timeout=40)
    assert engine.calls.count("/update_weights_from_tensor") == 1
    assert "/continue_generation" not in engine.calls
