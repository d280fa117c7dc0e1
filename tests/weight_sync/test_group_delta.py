"""Changes over the process group, to real engines: they hold what a full update would bring, or stop."""

from contextlib import contextmanager
from itertools import count

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.run import run_config
from slime.utils.tensor_bucket import tensor_digest
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import transports_of
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.group_delta import GroupDeltaTransport
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.live import SentState
from tests.engines.embedded import Server
from tests.run_args import run_args
from tests.weight_sync.test_messages import Source, checkpoints, group

__all__ = ["checkpoints", "group"]  # fixtures

pytestmark = pytest.mark.slow


def config_of(**flags):
    own = dict(update_weight_mode="delta", update_weight_transport="nccl", colocate=False)
    return run_config(run_args(distributed_timeout_minutes=1, **own | flags))


@pytest.fixture(scope="module")
def clients(checkpoints):
    """Clients of two engines, the second of which has two tensor-parallel ranks."""
    servers = []
    for ranks in (1, 2):
        words = ["--skip-tokenizer-init", "--dtype", "float32", "--tp-size", str(ranks)]
        servers.append(Server(checkpoints[0], *words))
    try:
        endpoints = [
            EngineEndpoint(server.wait_ready().url, None, ranks, None)
            for ranks, server in enumerate(servers, 1)
        ]
        yield [EngineClient(endpoint, timeout=120) for endpoint in endpoints]
    finally:
        for server in servers:
            server.stop()


class Trainer:
    """Notes what goes over the process group."""

    versions = count(1)

    def __init__(self, checkpoint, monkeypatch, **flags):
        self.source = Source(load_file(checkpoint / "model.safetensors"))
        self.update = WeightUpdate(config_of(**flags), self.source)
        assert [type(one) for one in self.update._transports] == [GroupDeltaTransport]
        self.rng, self.clients, self.carried = torch.Generator().manual_seed(1), [], 0
        self.damage = lambda flat: None
        broadcast = dist.broadcast

        def note(flat, *args, **options):
            self.carried += flat.nbytes
            self.damage(flat)
            return broadcast(flat, *args, **options)

        monkeypatch.setattr(dist, "broadcast", note)

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.source.weights.values())

    def connect(self, *clients):
        self.clients = clients
        self.update.connect([client.endpoint for client in clients])

    def train(self):
        """Changes one number in a hundred, and one tensor not at all."""
        for tensor in [*self.source.weights.values()][1:]:
            chosen = torch.rand(tensor.shape, generator=self.rng) < 0.01
            tensor[chosen] += 0.25

    def step(self):
        self.train()
        self.carried, version = 0, str(next(self.versions))
        report = self.update.run(int(version))
        assert report.sent == self.carried
        wanted = {name: tensor_digest(tensor) for name, tensor in self.source.weights.items()}
        for client in self.clients:
            (rank, *_) = client.weights_checker("checksum")["ranks"]
            for name, digest in rank["checksums"].items():
                assert digest == wanted[name], name
            assert client.weight_version() == version
        return report


@pytest.fixture
def trainer(checkpoints, monkeypatch):
    """A function that makes one, whose engines are left at the end."""
    made = []

    def make(**flags):
        made.append(Trainer(checkpoints[1], monkeypatch, **flags))
        return made[-1]

    yield make
    for one in made:
        one.damage = lambda flat: None
        one.update.disconnect()


def state(client):
    return client.request("GET", "/weights_base")["state"]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_after_a_whole_update_come_changes(trainer, clients, encoding):
    one = trainer(update_weight_delta_encoding=encoding, check_weight_checksums=True)
    one.connect(*clients)
    first = one.step()
    assert (first.sent, first.density) == (one.nbytes, 0.0)
    for _ in range(2):
        report = one.step()
        assert 0 < report.sent < one.nbytes / 5 and 0 < report.density < 0.05
    assert len({state(client) for client in clients}) == 1


@pytest.mark.parametrize("most", [None, 1])
def test_changes_are_found_before_engines_stand_still_up_to_the_bytes_of_a_bucket(
    trainer, clients, monkeypatch, most
):
    order = []

    def noted(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *words: order.append(name) or work(*words))

    noted(SentState, "bucket")
    noted(EngineClient, "pause_generation")
    one = trainer(**({} if most is None else {"update_weight_buffer_size": most}))
    one.connect(clients[0])
    for _ in range(2):
        order.clear()
        one.step()
        before, after = (3, 0) if most is None else (1, 2)
        assert order == [*["bucket"] * before, "pause_generation", *["bucket"] * after]


def test_weights_come_whole_after_changes_that_were_found_and_not_sent(trainer, clients):
    one = trainer()
    one.connect(clients[0])
    one.step()
    with unanswered("pause_generation"), pytest.raises(OSError, match="no answer came"):
        one.step()
    one.connect(clients[0])
    assert one.step().sent == one.nbytes
    assert one.step().sent < one.nbytes


def test_an_update_without_a_change_carries_nothing(trainer, clients):
    one = trainer()
    one.connect(*clients)
    one.step()
    one.train = lambda: None
    assert (one.step().sent, one.carried) == (0, 0)


def test_weights_come_whole_where_an_engine_does_not_hold_what_was_sent_last(trainer, clients):
    """A joiner; an engine that was started anew or has forgotten; all of them after a failure."""
    first, second = clients
    one = trainer()
    one.connect(first)
    one.step()
    assert one.step().sent < one.nbytes
    one.connect(first, second)
    assert one.step().sent == one.nbytes
    assert one.step().sent < one.nbytes
    forget(one, second)
    assert one.step().sent == one.nbytes
    assert one.step().sent < one.nbytes

    with unanswered("end_weight_update"), pytest.raises(OSError, match="no answer came"):
        one.step()
    one.connect(first, second)
    assert one.step().sent == one.nbytes


@contextmanager
def unanswered(name):
    """Has answers to a request be lost, which engines have done."""
    request = getattr(EngineClient, name)

    def lost(client, *words):
        request(client, *words)
        raise OSError("no answer came")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineClient, name, lost)
        yield


def forget(one, client):
    """Has an engine no longer hold a whole state, as one that was started anew does not."""
    (transport,) = one.update._transports
    with client.weight_update():
        told = {"tensors": [], "checksum": "xxh3-128", "number": 0, "group_name": transport._group_name}
        client.request("POST", "/update_weights_from_changes", told)
    assert state(client) is None


def test_a_change_that_arrives_damaged_is_refused_by_the_name_of_its_tensor(trainer, clients):
    one = trainer()
    one.connect(*clients)
    one.step()
    one.damage = lambda flat: flat[-1:].bitwise_xor_(1)
    with pytest.raises(EngineError, match=r"/update_weights_from_changes: HTTP 400: .*weight 'model\.\S+': "):
        one.step()
    one.damage = lambda flat: None
    one.connect(*clients)
    assert one.step().sent == one.nbytes
    assert one.step().sent < one.nbytes


def test_other_runs_take_the_way_that_they_ask_for():
    assert [type(one) for one in transports_of(config_of(update_weight_mode="full"))] == [BroadcastTransport]
