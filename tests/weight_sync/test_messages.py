"""Between any two messages of an update no engine computes with a mixture, and who dies there is replaced."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import httpx
import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.run import run_config
from slime.models.blocks import Block, whole
from slime.models.served_layout import served_layout
from slime.training.weights import HeldTensor, TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server
from tests.engines.in_process import InProcessEngine
from tests.megatron_harness import save_tiny_hf
from tests.run_args import run_args

pytestmark = pytest.mark.slow

HERE = ("handle", "disk", "delta")
"""Transports over which an engine of the same process is reached."""
ELSEWHERE = ("broadcast", "group delta", "shard group")
TRANSPORTS = (*HERE, *[pytest.param(one, marks=pytest.mark.nightly) for one in ELSEWHERE])
CHOICES = {"disk": "disk", "delta": "disk", "shard group": "shards"}
"""The ``--update-weight-transport`` of those that are not for nccl."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
UPDATE = ("pause", "flush", "begin_weight", "update_weights", "end_weight", "continue", "pull")


class Source:
    """A model's weights as a trainer has them, in three buckets."""

    ranks, rounding, stage = frozenset({0}), 0.0, 0

    def __init__(self, weights, served=None):
        self.weights, self._served = weights, served

    def manifest(self):
        return [TensorInfo(name, tuple(t.shape), t.dtype) for name, t in self.weights.items()]

    def buckets(self, max_bytes):
        pairs = [*self.weights.items()]
        third = -(-len(pairs) // 3)
        for start in range(0, len(pairs), third):
            yield pairs[start : start + third]

    def own_buckets(self, max_bytes):
        return self.buckets(max_bytes)

    def held(self):
        return [
            HeldTensor(name, tuple(t.shape), t.dtype, (Block(name, whole(tuple(t.shape)), 0),))
            for name, t in self.weights.items()
        ]

    def parts(self):
        return self.weights.__getitem__

    def served(self, rank, size):
        return served_layout(ModelConfig.from_directory(self._served).shape, None, rank, size)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MASTER_ADDR", "127.0.0.1")
        yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """What engines start with, and what a trainer has after two steps that change every number."""
    root = tmp_path_factory.mktemp("hf")
    paths = [root / name for name in ("served", "first", "second")]
    for seed, path in enumerate(paths):
        save_tiny_hf(path, "qwen3", seed, num_hidden_layers=2)
    return paths


@pytest.fixture(scope="module")
def said(checkpoints):
    """Log-probs of the prompt, by version."""
    found = {}
    for version, path in zip(("default", "1", "2"), checkpoints, strict=True):
        engine = InProcessEngine(path, dtype="float32")
        found[version] = probe(engine.endpoint.url)[1]
        engine.stop()
    assert all(gap(found[a], found[b]) > 0.1 for a, b in (("default", "1"), ("1", "2")))
    return found


def gap(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def probe(url, key="", adapter=None):
    """The version that an engine says it has, and its log-probs.

    None where it was aborted, or there is no such adapter.
    """
    sampling = {"max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    body |= {"extra_key": key} | ({"lora_path": adapter} if adapter else {})
    answer = httpx.post(f"{url}/generate", json=body, timeout=120)
    if adapter and answer.status_code == 400:
        return None
    told = answer.json()["meta_info"]
    if told["finish_reason"]["type"] == "abort":
        return None
    return told["weight_version"], [entry[0] for entry in told["input_token_logprobs"][1:]]


class Probes:
    """Probes that are sent at some messages, each from no prefix of another."""

    def __init__(self, said, adapter=None):
        self._said, self._adapter, self._pool, self._sent = said, adapter, ThreadPoolExecutor(40), []

    def send(self, url):
        sent = self._pool.submit(probe, url, str(len(self._sent)), self._adapter)
        self._sent.append(sent)
        wait([sent], 0.02)
        return sent

    def require_whole(self):
        """How many were answered by which version."""
        answers = [answer for sent in self._sent if (answer := sent.result(120))]
        self._pool.shutdown()
        for version, found in answers:
            gaps = {name: round(gap(found, known), 4) for name, known in self._said.items()}
            assert gaps[version] < 1e-4, f"a mixture was computed with under {version}: {gaps}"
        return Counter(version for version, _ in answers)


@pytest.fixture
def made(checkpoints, tmp_path):
    """A function that makes an update over a transport, and its source."""

    def make(transport, **options):
        args = run_args(
            distributed_timeout_minutes=1,
            colocate=transport == "handle",
            update_weight_buffer_size=1,
            update_weight_transport=CHOICES.get(transport, "nccl"),
            update_weight_mode="delta" if "delta" in transport else "full",
            update_weight_disk_dir=str(tmp_path / "versions"),
            update_weight_local_checkpoint_dir=str(tmp_path / "local") if transport == "delta" else None,
            synced_checkpoint=str(checkpoints[0]),
            **options,
        )
        source = Source(load_file(checkpoints[1] / "model.safetensors"), checkpoints[0])
        return WeightUpdate(run_config(args), source), source

    return make


@pytest.fixture
def engines(checkpoints):
    """A function that starts an engine which a transport reaches: (its endpoint, what ends it)."""
    ends = []

    def start(transport):
        if transport in ELSEWHERE:
            server = Server(checkpoints[0], "--skip-tokenizer-init", "--dtype", "float32").wait_ready()
            ends.append(server.stop)
            return EngineEndpoint(server.url, None, 1, None), server.process.kill
        engine = InProcessEngine(checkpoints[0], dtype="float32")
        ends.append(engine.stop)
        place = 0 if transport == "handle" else None
        return EngineEndpoint(engine.endpoint.url, None, 1, place), engine.stop

    yield start
    for end in ends:
        end()


@contextmanager
def each_message(act):
    """Calls ``act(number, path, sent)`` before each message of an update and, with ``sent``, behind it."""
    request, count = EngineClient.request, [0]

    def observed(self, method, path, *args, **options):
        if not path.rpartition("/")[2].startswith(UPDATE):
            return request(self, method, path, *args, **options)
        number, count[0] = count[0], count[0] + 1
        act(number, path, False)
        answer = request(self, method, path, *args, **options)
        act(number, path, True)
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineClient, "request", observed)
        yield count


def train(source, checkpoints):
    source.weights = load_file(checkpoints[2] / "model.safetensors")


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        *[("handle", "abort"), ("handle", "in_place"), ("disk", "abort"), ("delta", "in_place")],
        *[pytest.param("broadcast", mode, marks=pytest.mark.nightly) for mode in ("abort", "in_place")],
        *[pytest.param(one, "abort", marks=pytest.mark.nightly) for one in ("group delta", "shard group")],
    ],
)
def test_no_engine_computes_with_a_mixture(transport, mode, made, engines, said, checkpoints):
    update, source = made(transport)
    endpoint, _ = engines(transport)
    for each in update._transports:
        each._pause_mode = mode
    update.connect([endpoint])
    update.run(1)
    train(source, checkpoints)
    probes = Probes(said)
    probes.send(endpoint.url).result(120)
    with each_message(lambda number, path, sent: probes.send(endpoint.url)) as count:
        update.run(2)
    probes.send(endpoint.url)
    answered = probes.require_whole()
    assert count[0] >= 4 and answered["1"] >= 1 and answered["2"] >= count[0]
    update.disconnect()


def test_a_mixture_would_be_found(made, engines, said, checkpoints, monkeypatch):
    update, source = made("handle")
    endpoint, _ = engines("handle")
    update.connect([endpoint])
    update.run(1)
    train(source, checkpoints)
    probes = Probes(said)
    monkeypatch.setattr(Engine, "_resting", False)
    monkeypatch.setattr(Engine, "pause", lambda engine, mode: None)
    with each_message(lambda number, path, sent: probes.send(endpoint.url).result(120)):
        update.run(2)
    with pytest.raises(AssertionError, match="a mixture was computed with"):
        probes.require_whole()
    update.disconnect()


@pytest.mark.parametrize("transport", ["handle", pytest.param("broadcast", marks=pytest.mark.nightly)])
def test_each_message_by_which_a_model_changes_says_which_models_do(transport, made, engines, monkeypatch):
    update, _ = made(transport, update_weight_selector="target")
    request, told = EngineClient.request, []

    def noted(self, method, path, body=None, **options):
        if path.startswith(("/begin_weight_update", "/update_weights_from")):
            told.append(body.get("selector"))
        return request(self, method, path, body, **options)

    monkeypatch.setattr(EngineClient, "request", noted)
    update.connect([engines(transport)[0]])
    update.run(1)
    update.disconnect()
    assert told == ["target"] * 4


def messages_of(transport, made, engines):
    update, _ = made(transport)
    update.connect([engines(transport)[0]])
    update.run(1)
    with each_message(lambda *_: None) as count:
        update.run(2)
    update.disconnect()
    return count[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_dies_at_any_message_is_named_and_its_successor_gets_all(
    transport, made, engines, said, checkpoints
):
    for dies_at in range(messages_of(transport, made, engines)):
        update, source = made(transport)
        victim, kill = engines(transport)
        update.connect([victim])
        update.run(1)
        train(source, checkpoints)

        def strike(number, path, sent, dies_at=dies_at, kill=kill):
            if number == dies_at and not sent:
                kill()

        with each_message(strike), pytest.raises(EngineError, match=victim.url):
            update.run(2)
        successor, _ = engines(transport)
        update.connect([successor])
        update.run(2)
        version, found = probe(successor.url)
        assert version == "2" and gap(found, said["2"]) < 1e-4, dies_at
        update.disconnect()


class Gone(BaseException):
    """The trainer's process ends here."""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("arrived", [False, True])
def test_a_trainer_that_dies_at_any_message_leaves_no_mixture_to_whom_takes_over(
    transport, arrived, made, engines, said, checkpoints
):
    """Before the message was sent, and when it has arrived."""
    endpoint, _ = engines(transport)
    for dies_at in range(messages_of(transport, made, engines)):
        first, before = made(transport)
        first.take_over()
        first.connect([endpoint])
        first.run(1)

        def strike(number, path, sent, dies_at=dies_at):
            if number == dies_at and sent == arrived:
                raise Gone

        train(before, checkpoints)
        with each_message(strike), pytest.raises(Gone):
            first.run(2)
        probes = Probes(said)
        probes.send(endpoint.url)
        second, source = made(transport)
        train(source, checkpoints)
        second.take_over()
        second.connect([endpoint])
        second.run(2)
        probes.send(endpoint.url)
        assert probes.require_whole()["2"] >= 1, dies_at
        second.disconnect()
