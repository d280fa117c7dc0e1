"""Weights that engines read out of the trainer's memory, by a stand-in for NIXL and by NIXL itself."""

import importlib.util
import sys
from contextlib import suppress
from itertools import count

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.embedded_engine import remote_weights
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.run import run_config
from slime.utils.tensor_bucket import tensor_digest
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports.nixl import NixlTransport
from slime.weight_sync.update import WeightUpdate
from tests.engines.embedded import Server
from tests.engines.in_process import InProcessEngine
from tests.run_args import run_args
from tests.weight_sync.nixl_stand_in import stand_in
from tests.weight_sync.test_messages import Source, checkpoints, group

__all__ = ["checkpoints", "group"]  # fixtures

pytestmark = pytest.mark.slow

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
FLAGS = dict(distributed_timeout_minutes=1, update_weight_transport="nixl", update_weight_mode="full")


class Trainer:
    versions = count(1)

    def __init__(self, checkpoint, **flags):
        self.source = Source(load_file(checkpoint / "model.safetensors"))
        self.update = WeightUpdate(run_config(run_args(**FLAGS, colocate=False, **flags)), self.source)
        (self.transport,) = self.update._transports
        assert type(self.transport) is NixlTransport
        self.clients = []

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.source.weights.values())

    def connect(self, *clients):
        self.clients = clients
        self.update.connect([client.endpoint for client in clients])

    def step(self):
        for tensor in self.source.weights.values():
            tensor += torch.randn_like(tensor) / 10
        version = str(next(self.versions))
        assert self.update.run(int(version)).sent == self.nbytes
        wanted = {name: tensor_digest(tensor) for name, tensor in self.source.weights.items()}
        for client in self.clients:
            held = client.weights_checker("checksum")["ranks"][0]["checksums"]
            assert held == {name: wanted[name] for name in held} and len(held) > 5
            assert client.weight_version() == version


@pytest.fixture(scope="module")
def served(checkpoints):
    """Clients of two engines in this process, the second of which has two tensor-parallel ranks."""
    made = [InProcessEngine(checkpoints[0], dtype="float32", tp_size=ranks) for ranks in (1, 2)]
    yield [EngineClient(EngineEndpoint(one.endpoint.url, None, 1, None), timeout=120) for one in made]
    for one in made:
        one.stop()


@pytest.fixture
def here(served):
    """Ends what a failed test has left open in the engines; returns their clients."""
    for client in served:
        with suppress(EngineError):
            client.end_weight_update()
        client.continue_generation()
    return served


@pytest.fixture
def agents(monkeypatch):
    return stand_in(monkeypatch)


@pytest.fixture
def trainer(checkpoints):
    """A function that makes one, whose engines are left at the end."""
    made = []

    def make(**flags):
        made.append(Trainer(checkpoints[1], **flags))
        return made[-1]

    yield make
    for one in made:
        one.update.disconnect()


def session_ends(one, agents):
    one.update.disconnect()
    assert agents.living == {} and one.transport._buffer.numel() == 0


def test_engines_hold_what_they_have_read_and_nothing_is_left_open(trainer, here, agents):
    one = trainer(check_weight_checksums=True)
    one.connect(*here)
    one.step()
    first = sorted(agents.living)
    assert len(first) == 3
    one.step()
    assert sorted(agents.living) == first
    session_ends(one, agents)
    one.connect(here[0])
    one.step()
    assert len(agents.living) == 2
    session_ends(one, agents)


def test_the_first_bucket_is_laid_out_before_engines_stand_still(trainer, here, agents, monkeypatch):
    one, order = trainer(), []

    def noted(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *words: order.append(name) or work(*words))

    noted(NixlTransport, "_laid_out")
    noted(NixlTransport, "_begin_session")
    noted(EngineClient, "pause_generation")
    one.connect(here[0])
    one.step()
    assert order == ["_laid_out", "_begin_session", "pause_generation", *["_laid_out"] * 2]
    order.clear()
    one.step()
    assert order == ["_laid_out", "pause_generation", *["_laid_out"] * 2]


def test_a_larger_bucket_gets_a_session_of_its_own(trainer, here, agents):
    one = trainer(update_weight_buffer_size=1)
    buckets = one.source.buckets
    one.source.buckets = lambda most: reversed([*buckets(most)])  # the largest one last
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in one.source.buckets(1)]
    assert sizes[-1] == max(sizes)
    one.connect(*here)
    one.step()
    one.step()
    assert one.transport._place.size == max(sizes) and len(agents.living) == 3
    session_ends(one, agents)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("ERR", r"/update_weights_from_session: HTTP 400: .*read by NIXL of \d+ bytes: state ERR"),
        (
            "PROC",
            r"/update_weights_from_session: HTTP 400: .*read by NIXL of \d+ bytes: has not ended after 0.01",
        ),
    ],
)
def test_a_read_that_fails_or_does_not_end_is_named_and_the_next_update_is_whole(
    trainer, here, agents, monkeypatch, state, said
):
    one = trainer()
    one.connect(*here)
    one.step()
    monkeypatch.setattr(remote_weights, "_TIMEOUT_S", 0.01)
    with monkeypatch.context() as failing:
        failing.setattr(agents, "state", state)
        with pytest.raises(EngineError, match=said):
            one.step()
    one.connect(*here)
    one.step()
    session_ends(one, agents)


def test_a_session_takes_the_place_of_one_that_nobody_has_closed(trainer, here, agents):
    lost = trainer()
    lost.connect(here[0])
    lost.step()
    successor = trainer()
    successor.connect(here[0])
    successor.step()
    assert len(agents.living) == 3  # the lost trainer's, and two of the new session
    with pytest.raises(EngineError, match="has taken its place"):
        lost.step()


def test_requests_that_cannot_be_are_refused(here, agents):
    (client, _), told = here, {"session": "s", "metadata": "", "size": 8, "within_host": True}
    agents("trainer").register_memory(memory := torch.arange(64.0))
    for wrong, said in (
        ({"metadata": "%"}, "metadata: "),
        ({"metadata": "\u00e9"}, "metadata: "),
        ({"size": 0}, "size 0: wanted 1"),
        ({"metadata": "bm9ib2R5"}, "session 's': metadata of NIXL: KeyError"),
    ):
        with pytest.raises(EngineError, match=f"/open_weights_session: HTTP 400: .*{said}"):
            client.request("POST", "/open_weights_session", told | wrong)
    client.request("POST", "/open_weights_session", told | {"metadata": "dHJhaW5lcg==", "size": 256})
    place = {"session": "s", "address": memory.data_ptr(), "size": 256, "device": 0, "kind": "DRAM"}
    norm = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    with client.weight_update():
        client.update("/update_weights_from_session", place | norm, None)
        for wrong, said in (
            ({"size": 255}, r"a bucket of 255 bytes \(wanted: 256"),
            ({"shapes": [[65]]}, "shape"),
            ({"session": "t"}, "session 't' does not exist"),
            ({"address": 8}, "read by NIXL of 256 bytes: AssertionError"),
        ):
            with pytest.raises(EngineError, match=f"HTTP 400: .*{said}"):
                client.update("/update_weights_from_session", place | norm | wrong, None)
    assert [*agents.living] == ["trainer"]
    with pytest.raises(EngineError, match="session 's' does not exist"):
        client.request("POST", "/close_weights_session", {"session": "s"})


def test_without_nixl_an_engine_says_so(trainer, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    told = {"session": "s", "metadata": "", "size": 8, "within_host": True}
    with pytest.raises(EngineError, match="NIXL cannot be used: ModuleNotFoundError"):
        here[0].request("POST", "/open_weights_session", told)
    one = trainer()
    one.connect(here[0])
    with pytest.raises(RuntimeError, match="NIXL cannot be used: ModuleNotFoundError"):
        one.step()


@needs_nixl
def test_engines_read_over_nixl_itself_and_the_death_of_one_is_named(trainer, checkpoints):
    servers = []
    for ranks in (1, 2):
        words = ["--skip-tokenizer-init", "--dtype", "float32", "--tp-size", str(ranks)]
        servers.append(Server(checkpoints[0], *words))
    try:
        clients = [
            EngineClient(EngineEndpoint(server.wait_ready().url, None, 1, None), timeout=120)
            for server in servers
        ]
        one = trainer(update_weight_buffer_size=1)
        one.connect(*clients)
        one.step()
        one.step()
        buckets = one.source.buckets

        def deadly(most):
            for number, bucket in enumerate(buckets(most)):
                if number == 1:
                    servers[0].process.kill()
                yield bucket

        one.source.buckets = deadly
        with pytest.raises(EngineError, match=rf"{servers[0].url}: /\w+_session: no answer"):
            one.step()
        one.source.buckets = buckets
        one.connect(clients[1])
        one.step()
        one.update.disconnect()
    finally:
        for server in servers:
            server.stop()
