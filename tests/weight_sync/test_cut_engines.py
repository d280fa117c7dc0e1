"""An engine whose connections are cut within an update: no engine computes with a mixture, and all get all.

The engines are processes of their own, which live on: what they still hold of the update is overwritten.
"""

import copy
import itertools
import threading
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from slime.chaos import connections
from slime.utils.types import EngineEndpoint
from slime.weight_sync.broken import GroupBroken
from tests.engines.embedded import Server
from tests.weight_sync.test_messages import Probes, checkpoints, each_message, gap, group, made, probe, said

__all__ = ["checkpoints", "group", "made", "said"]  # fixtures

pytestmark = pytest.mark.slow

WHEN = ("before", "under way")
"""Whether a message has not been sent, or is worked on, when the connections are cut."""
GROUPS = ("broadcast", "shard group", pytest.param("group delta", marks=pytest.mark.nightly))


@pytest.fixture(scope="module")
def servers(checkpoints):
    if why := connections.refusal():
        pytest.skip(f"nothing can be cut here: {why}")
    flags = ("--skip-tokenizer-init", "--dtype", "float32")
    started = [Server(checkpoints[0], *flags) for _ in range(2)]
    yield [server.wait_ready() for server in started]
    for server in started:
        server.stop()


class Trial:
    """Updates of engines, of which each second one brings other weights than the one before."""

    def __init__(self, update, source, servers, checkpoints, said):
        self.update, self.source, self.servers = update, source, servers
        self.endpoints = [EngineEndpoint(server.url, None, 1, None) for server in servers]
        self.weights = [load_file(path / "model.safetensors") for path in checkpoints[1:]]
        self.version, self.said = 0, dict(default=said["default"])
        self.by_turn = said["1"], said["2"]

    def begin(self):
        self.update.take_over()  # the module's engines are those of the test before, too
        self.update.connect(self.endpoints)
        self.give()

    def give(self):
        self.version += 1
        turn = self.version % 2
        self.source.weights = self.weights[turn]
        self.said[str(self.version)] = self.by_turn[turn]
        self.update.run(self.version)

    def repeat(self):
        """Connects and begins again, as a run does after a failure."""
        self.update.connect(self.endpoints)
        self.update.run(self.version)

    def messages(self):
        with each_message(lambda *_: None) as count:
            self.give()
        return count[0]

    def cut_at(self, step, when):
        """What the update said of it; None if it went on."""
        pid, struck = self.servers[1].process.pid, SimpleNamespace(by=None)

        def strike(number, path, sent):
            if number != step or sent:
                return
            if when == "before":
                connections.cut(pid)
            else:
                struck.by = threading.Timer(0.002, connections.cut, [pid])
                struck.by.start()

        try:
            with each_message(strike):
                self.give()
        except Exception as error:
            return error
        finally:
            if struck.by is not None:
                struck.by.join()
        return None

    def ask(self, probes):
        """Sends both a probe before and after somebody says that the engine may go on."""
        for server in self.servers:
            probes.send(server.url)
            server.post("/continue_generation")
            probes.send(server.url)

    def require_whole(self, probes, where):
        """They have computed with nothing but whole weights, and serve the latest."""
        for number, server in enumerate(self.servers):
            version, found = probe(server.url, f"{where} {number}")
            assert version == str(self.version) and gap(found, self.said[version]) < 1e-4, where
        probes.require_whole()


@pytest.fixture
def trial(servers, checkpoints, said, made):
    return lambda transport: Trial(*made(transport), servers, checkpoints, said)


@pytest.mark.parametrize("transport", GROUPS)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_at_each_message_it_is_told_so_that_the_update_can_be_repeated_for_all(transport, every, trial):
    at = trial(transport)
    at.begin()
    for step, when in [*itertools.product(range(at.messages()), WHEN)][every - 1 :: every]:
        failure, probes = at.cut_at(step, when), Probes(at.said)
        at.ask(probes)
        if failure is not None:
            assert isinstance(failure, GroupBroken) or "no answer" in str(failure), (step, when, failure)
        at.repeat()
        at.require_whole(probes, (step, when))
    at.update.disconnect()


def test_one_that_was_cut_off_between_updates_is_found_in_the_next_one(trial, servers):
    at = trial("broadcast")
    at.begin()
    connections.cut(servers[0].process.pid)
    with pytest.raises(GroupBroken, match="connections of its group have ended") as caught:
        at.give()
    # It goes from one process to another.
    assert str(copy.copy(caught.value)) == str(caught.value)
    at.repeat()
    at.require_whole(Probes(at.said), "between")
    at.update.disconnect()
