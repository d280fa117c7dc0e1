"""A trainer that is lost within an update of engines that outlive it: its successor gives them all weights.

The processes are real ones, and the engine is somebody else's: nobody starts it anew in between. Whatever its
owner says it computes with no mixture, and a trainer that comes back is kept out of it.
"""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from slime.backends.sglang_utils.external import ExternalEngines
from slime.config.lora import SERVED_ADAPTER
from slime.utils.types import EngineEndpoint
from tests.engines.embedded import Server
from tests.megatron_harness import run_ranks
from tests.weight_sync.lost_trainers import RANK, REPLACED, TAKES_BACK, Loss, flags_of, send
from tests.weight_sync.test_messages import Probes, checkpoints, gap, probe, said
from tests.weight_sync.test_nixl import needs_nixl

__all__ = ["checkpoints", "said"]  # fixtures

pytestmark = pytest.mark.slow

WHEN = ("before", "under way", "answered")
"""Whether a message has not been sent, is worked on, or was answered when the trainer is lost."""
ENDS_WITHIN_S = 240
"""How long trainers have that have lost another rank, or come back: minutes, as the machine may be busy."""
NIXL = pytest.param("nixl", marks=needs_nixl)
TRANSPORTS = ["handle", "broadcast", "disk", "delta", "group delta", "shard group", "adapters", NIXL]


def every(short):
    """All steps in the long form, and every so manieth in the short one."""
    return pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), short])


def longer(*values):
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@pytest.fixture(scope="module")
def server(checkpoints):
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--enable-lora", "--max-lora-rank", str(RANK))
    server = Server(checkpoints[0], *flags).wait_ready()
    yield server
    server.stop()


class Trial:
    """An engine, what a transport has it say of a prompt by version, and trainers of it."""

    def __init__(self, transport, server, checkpoints, said, directory):
        self.url, self.server = server.url, server
        self.flags = flags_of(transport, directory, checkpoints[0])
        self.paths = dict(zip((3, 1, 2), map(str, checkpoints), strict=True))
        self.adapter = SERVED_ADAPTER if transport == "adapters" else None
        if self.adapter is not None:  # on one base
            self.paths = dict.fromkeys(self.paths, self.paths[1])
        self.said = {"default": said["default"], "1": said["1"], "2": said["2"], "3": said["default"]}
        self.probes = self.new_probes()

    def new_probes(self):
        return Probes(self.said, self.adapter)

    def learn(self):
        """What undisturbed updates lead to, where that is not known."""
        if self.adapter is not None:
            self.said = {}
            for version in self.paths:
                self.give(version)
                self.said[str(version)] = probe(self.url, str(version), self.adapter)[1]
            pairs = itertools.combinations(self.said.values(), 2)
            assert all(gap(left, right) > 0.1 for left, right in pairs)
            self.probes = self.new_probes()

    def give(self, *versions, ranks=1, **options):
        """Returns how many steps it took the first rank."""
        return self.steps(*versions, ranks=ranks, **options)[0]

    def steps(self, *versions, loss=None, of_files=False, tells=False, ranks=1):
        """Returns how many steps it took each rank."""
        sent = [(version, self.paths[version]) for version in versions]
        more = loss, of_files, tells
        return run_ranks(send, ranks, self.url, sent, self.flags, *more, timeout=ENDS_WITHIN_S)

    def lose(self, *versions, loss, ranks=1, **options):
        """A trainer is lost, and the owner of the engine sees that it does not answer."""
        ranks = 2 if loss.how == "other rank" else ranks
        with pytest.raises(RuntimeError, match=r"rank 0 died|rank 1 died|waited for the other trainer ranks"):
            self.give(*versions, loss=loss, ranks=ranks, **options)
        self.ask()

    def ask(self):
        """Sends probes before and after somebody says that the engine may go on."""
        self.probes.send(self.url)
        self.server.post("/continue_generation")
        self.probes.send(self.url)

    def require(self, version, where):
        """Every answer so far was of whole weights, and this version serves."""
        now, found = probe(self.url, str(where), self.adapter)
        assert now == version and gap(found, self.said[version]) < 1e-4, where
        assert self.server.client.get("/health_generate").status_code == 200, where
        self.probes.require_whole()
        self.probes = self.new_probes()


@pytest.fixture
def trial(server, checkpoints, said, tmp_path):
    return partial(Trial, server=server, checkpoints=checkpoints, said=said, directory=tmp_path)


def await_takeover(server):
    """A run finds the engine there, although it does not generate."""
    engines = ExternalEngines([EngineEndpoint(server.url, None, 1, None)])
    engines.wait_ready([engines.launch(0, 0)], 60)


@pytest.mark.parametrize("transport", TRANSPORTS)
@every(13)
def test_its_successor_gives_them_whole_weights(transport, every, trial, server):
    """At each message of two updates."""
    at = trial(transport)
    at.learn()
    whole = at.give(1, 2)
    assert whole >= 2 * 5
    for step, when in [*itertools.product(range(whole), WHEN)][every - 1 :: every]:
        at.lose(1, 2, loss=Loss(step, when))
        await_takeover(server)
        at.give(2)
        at.require("2", (step, when))


@pytest.mark.parametrize("transport", ["disk", *longer("delta")])
@every(29)
def test_so_it_does_when_it_was_killed_while_it_wrote(transport, every, trial):
    """At each thing that two updates do in the directory of versions."""
    at = trial(transport)
    whole = at.give(1, 2, of_files=True)
    assert whole > 29
    for step in range(whole)[every - 1 :: every]:
        at.lose(1, 2, loss=Loss(step, "before"), of_files=True)
        at.give(2)
        at.require("2", step)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step_of", ["tells", *longer("of_files")])
@every(23)
def test_so_it_does_when_one_of_two_ranks_that_write_changes_was_killed(step_of, rank, every, trial):
    """At each thing that they tell each other, and that this one does in the directory of versions."""
    at = trial("delta")
    options = {"ranks": 2, step_of: True}
    whole = at.steps(1, 2, **options)[rank]
    when = ("before", "answered") if step_of == "tells" else ("before",)
    assert whole > 20
    for step, moment in [*itertools.product(range(whole), when)][every - 1 :: every]:
        at.lose(1, 2, loss=Loss(step, moment, rank=rank), **options)
        at.give(2, ranks=2)
        at.require("2", (rank, step, moment))


@pytest.mark.parametrize(
    "transport", ["handle", "shard group", *longer("broadcast", "disk", "delta", "adapters")]
)
@every(11)
def test_a_rank_that_loses_another_one_ends_by_name_and_leaves_no_mixture(transport, every, trial):
    at = trial(transport)
    at.learn()
    whole = at.give(1, 2)
    for step in range(whole)[every - 1 :: every]:
        at.lose(1, 2, loss=Loss(step, "before", "other rank"))
        at.give(2)
        at.require("2", step)


@pytest.mark.parametrize(
    "transport", ["broadcast", *longer("handle", "group delta", "shard group", "disk", "adapters")]
)
@every(9)
def test_a_successor_that_is_lost_as_well_leaves_no_mixture(transport, every, trial):
    """The first one dies with some of its second version given, the second one anywhere."""
    at = trial(transport)
    at.learn()
    half = at.give(1, 2) - 3
    whole = at.give(2)
    for step in range(whole)[every - 1 :: every]:
        at.lose(1, 2, loss=Loss(half, "before"))
        at.lose(2, loss=Loss(step, "answered"))
        at.give(2)
        at.require("2", step)


@pytest.mark.parametrize("of_files", [False, *longer(True)])
@pytest.mark.parametrize(
    "transport",
    ["handle", "broadcast", *longer("disk", "delta", "group delta", "shard group", "adapters"), NIXL],
)
@every(17)
def test_one_that_was_stopped_and_comes_back_is_kept_out_by_name(transport, of_files, every, trial, tmp_path):
    """Of the engine, and of the directory of versions; another one has given version 3 meanwhile."""
    if of_files and transport not in ("disk", "delta"):
        pytest.skip("it writes no files")
    at = trial(transport)
    at.learn()
    whole = at.give(1, 2, of_files=of_files)
    when = ("before",) if of_files else ("before", "answered")
    first = 3 if of_files else 1  # before that it had not come
    moments = [*itertools.product(range(whole), when)][first:]
    for step, when in moments[every - 1 :: every]:
        note = tmp_path / f"{step} {when}"
        loss = Loss(step, when, "stopped", note=str(note))
        with ThreadPoolExecutor(1) as beside:
            old = beside.submit(at.give, 1, 2, loss=loss, of_files=of_files)
            pid = await_stop(note, old)
            try:
                at.ask()
                at.give(3)
                at.ask()
            finally:
                os.kill(pid, signal.SIGCONT)
            error = old.exception(ENDS_WITHIN_S)
        at.ask()
        last = not of_files and (step, when) == (whole - 1, "answered")
        assert REPLACED in str(error) or (last and error is None), (step, when, error)
        assert TAKES_BACK not in str(error), (step, when)
        at.require("3", (step, when))


def await_stop(note, trainer):
    """The process id of a trainer, once it is stopped."""
    for _ in range(60_000):
        if note.exists() and psutil.Process(int(note.read_text())).status() == psutil.STATUS_STOPPED:
            return int(note.read_text())
        if trainer.done():
            raise AssertionError(f"it was not stopped: {trainer.exception()}")
        threading.Event().wait(0.002)
    raise TimeoutError(f"{note}: no trainer was stopped within 120 s")
