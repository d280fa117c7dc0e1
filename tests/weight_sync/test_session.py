"""What engines are asked before the first bucket of an update and after the last."""

import asyncio
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from fastapi.responses import JSONResponse

from slime.backends.sglang_utils.client import EngineError
from slime.config.run import run_config
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import session as sessions
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.delta import DeltaTransport
from slime.weight_sync.transports.disk import DiskTransport
from slime.weight_sync.transports.handle import HandleTransport
from slime.weight_sync.transports.session import SessionTransport
from tests.engines import free_port
from tests.run_args import run_args
from tests.weight_sync.test_handle import Recorder

PLAN = SimpleNamespace(needs_session=False, sent=None)
WHOLE = ["pause_generation", "begin_weight_update", "end_weight_update", "continue_generation"]
INTERRUPTED = ["pause_generation", "end_weight_update"]


class Session(SessionTransport):
    """Carries nothing."""

    def __init__(self, **flags):
        super().__init__(run_config(run_args(distributed_timeout_minutes=1, **flags)))
        self.steps = []

    def _join(self):
        self.steps.append("join")

    def _leave(self):
        self.steps.append("leave")

    def send(self, bucket, is_last):
        return 0


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    engine = Recorder().start()
    engine.answers["weights_checker"] = {"success": True}
    yield engine
    engine.stop()


def endpoint(url):
    return EngineEndpoint(url, None, 1, None)


def update(session, plan=PLAN):
    session.open("1", plan)
    session.commit()
    session.resume()


def checks(engine):
    return [body["action"] for body in engine.seen("weights_checker")]


def test_engines_stand_still_around_the_buckets_for_as_long_as_is_told(engine, monkeypatch):
    times = iter([100.0, 103.5])
    monkeypatch.setattr(sessions, "monotonic", lambda: next(times))
    session = Session()
    session.connect([endpoint(engine.url)])
    update(session)
    assert engine.paths == WHOLE and session.pause == 3.5 and session.steps == ["leave", "join"]


def test_an_update_takes_as_long_within_engines_as_the_slowest_says(engine):
    """What the update before took is not told again, and one that says nothing took none."""
    engine.answers["update_weights_from_disk"] = {"success": True, "commit_time": 0.25}
    other = Recorder().start()
    other.answers["update_weights_from_disk"] = {"success": True}
    session, found = Session(), []
    session.connect([endpoint(engine.url), endpoint(other.url)])
    for loads in (2, 1, 0):
        session.open("1", PLAN)
        for _ in range(loads):
            session._engines.each(lambda client: client.update_weights_from_disk("/m"))
        session.commit()
        session.resume()
        found.append(session.commit_time)
    other.stop()
    assert found == [0.5, 0.25, 0.0]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_engines_are_told_what_becomes_of_answers_under_way(engine, mode):
    """What they have computed of answers that go on with it cannot be flushed, and need not be."""
    engine.flush_refusals = 1
    session = Session(pause_generation_mode=mode)
    session.connect([endpoint(engine.url)])
    update(session)
    assert engine.seen("pause_generation") == [{"mode": mode}]
    assert len(engine.seen("flush_cache")) == (1 if mode == "in_place" else 2)


def test_engines_flush_beside_what_else_they_are_asked_and_before_they_end_the_update(engine):
    async def flush(body):
        deadline = time.monotonic() + 120
        while "begin_weight_update" not in engine.paths and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        asked_before.extend(engine.paths)
        return {}

    asked_before, session = [], Session()
    engine.answers["flush_cache"] = flush
    session.connect([endpoint(engine.url)])
    update(session)
    assert asked_before == WHOLE[:2] and engine.paths == WHOLE


def test_an_engine_that_cannot_flush_does_not_go_on(engine):
    session = Session()
    engine.answers["flush_cache"] = JSONResponse({}, status_code=500)
    session.connect([endpoint(engine.url)])
    with pytest.raises(EngineError, match="/flush_cache: HTTP 500"):
        update(session)
    assert engine.paths == WHOLE[:2]


def test_no_engine_stops_where_one_is_not_there(engine):
    session = Session()
    session.connect([endpoint(engine.url), endpoint(f"http://127.0.0.1:{free_port()}")])
    with pytest.raises(EngineError, match="/model_info: no answer: ConnectError"):
        update(session)
    assert engine.paths == [] and not session._is_open


def test_only_the_first_rank_speaks_to_them(engine, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    session = Session()
    session.connect([endpoint(engine.url)])
    update(session)
    assert engine.paths == [] and session.pause == 0


def test_the_first_update_is_compared_and_no_other(engine):
    session = Session(check_weight_update_equal=True)
    for _ in range(2):
        session.connect([endpoint(engine.url)])
    for _ in range(2):
        update(session)
    assert checks(engine) == ["reset_tensors", "compare"]


def test_an_update_that_was_left_open_is_ended_and_has_nothing_to_be_compared_with(engine):
    session = Session(check_weight_update_equal=True)
    session.connect([endpoint(engine.url)])
    session.open("1", PLAN)
    before = len(engine.paths)
    session.connect([endpoint(engine.url)])
    assert engine.paths[before:] == INTERRUPTED
    session.connect([endpoint(engine.url)])
    assert len(engine.paths) == before + len(INTERRUPTED)
    update(session)
    assert checks(engine) == ["reset_tensors"]


def test_who_takes_over_ends_what_may_be_open(engine):
    """An engine that was started since then has nothing to end; one that is gone cannot be taken over."""
    engine.answers["end_weight_update"] = JSONResponse({"success": False}, status_code=400)
    session = Session(check_weight_update_equal=True)
    session.take_over()
    session.connect([endpoint(engine.url)])
    assert engine.paths == INTERRUPTED
    engine.answers["end_weight_update"] = {"success": True}
    update(session)
    assert checks(engine) == []
    lost = Session()
    lost.take_over()
    with pytest.raises(EngineError, match="no answer"):
        lost.connect([endpoint(f"http://127.0.0.1:{free_port()}")])


def test_an_engine_of_another_trainer_is_not_taken_for_one_without_an_update(engine):
    engine.answers["end_weight_update"] = JSONResponse({"message": "another one has come"}, status_code=409)
    session = Session()
    session.take_over()
    with pytest.raises(EngineError, match=r"HTTP 409: .*another one has come"):
        session.connect([endpoint(engine.url)])
    assert session._is_open


def test_an_update_that_has_ended_is_not_ended_again(engine):
    session = Session()
    session.connect([endpoint(engine.url)])
    update(session)
    session.connect([endpoint(engine.url)])
    assert engine.paths == WHOLE


@pytest.mark.parametrize("is_open", [True, False])
def test_an_update_in_an_engine_of_somebody_elses_is_ended_whenever_it_joins(is_open, engine):
    """It may have got it from a run before this one, or have missed the end of one of this run."""
    if not is_open:
        engine.answers["end_weight_update"] = JSONResponse({"success": False}, status_code=400)
    flags = dict(rollout_external=True, rollout_external_engine_addrs=["127.0.0.1:1"])
    session = Session(check_weight_update_equal=True, **flags)
    for _ in range(2):
        session.connect([endpoint(engine.url)])
    assert engine.paths == 2 * INTERRUPTED
    engine.answers["end_weight_update"] = {"success": True}
    update(session)
    assert checks(engine) == ([] if is_open else ["reset_tensors", "compare"])


def test_checksums_are_asked_for_where_some_were_taken(engine):
    sent = MagicMock()
    session = Session()
    session.connect([endpoint(engine.url)])
    update(session, SimpleNamespace(needs_session=False, sent=sent, weights=lambda: ["a"]))
    sent.require_held.assert_called_once_with(session._engines.clients, ["a"])


def test_an_engine_without_sessions_is_refused_where_one_is_needed(engine):
    del engine.answers["begin_weight_update"]
    session = Session()
    session.connect([endpoint(engine.url)])
    session.open("1", PLAN)
    with pytest.raises(RuntimeError, match="has no /begin_weight_update"):
        session.open("1", SimpleNamespace(needs_session=True, sent=None))


def test_connections_are_given_up_with_the_engines(engine):
    session = Session()
    session.connect([endpoint(engine.url)])
    (client,) = session._engines.clients
    update(session)
    assert client._http.connections
    session.disconnect()
    assert client._http.connections == [] and not session._engines.clients


@pytest.mark.parametrize(
    ("kind", "tolerant", "seconds"),
    [
        (BroadcastTransport, False, 60),
        (DiskTransport, False, 60),
        (BroadcastTransport, True, 20),
        (HandleTransport, True, 20),
        (DeltaTransport, True, 45),  # a whole checkpoint within a request; before other ranks give up, too
    ],
)
def test_an_engine_has_less_time_to_answer_where_another_can_take_its_place(kind, tolerant, seconds):
    flags = dict(distributed_timeout_minutes=1, rollout_engine_hang_timeout=20.0)
    flags |= dict(update_weight_disk_dir="/nowhere", synced_checkpoint="/nowhere")
    assert kind(run_config(run_args(use_fault_tolerance=tolerant, **flags)))._answer_limit == seconds


def test_an_engine_that_hangs_in_an_update_is_given_up_by_name(engine):
    hang = threading.Event()

    async def never(body):
        while not hang.is_set():
            await asyncio.sleep(0.01)

    engine.answers["begin_weight_update"] = never
    session = Session(use_fault_tolerance=True, rollout_engine_hang_timeout=0.5)
    session.connect([endpoint(engine.url)])
    with pytest.raises(EngineError, match=f"{engine.url}: /begin_weight_update: no answer: ReadTimeout"):
        session.open("1", PLAN)
    hang.set()
