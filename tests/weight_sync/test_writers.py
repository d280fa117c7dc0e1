"""The names of trainers: told to engines and directories, and looked at where an engine cannot."""

import pytest
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineError
from slime.config.run import run_config
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import session as session_module
from slime.weight_sync.transports.handle import HandleTransport
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.owner import WRITERS, DirectoryTaken, require_directory, take_directory
from slime.weight_sync.writer import HEADER, new_writer
from tests.megatron_harness import run_ranks
from tests.run_args import run_args
from tests.weight_sync.test_session import PLAN, Session, endpoint, engine, update

__all__ = ["engine"]  # a fixture

OLD, NEW = "here:1:old", "here:2:new"


@pytest.fixture
def session(engine, monkeypatch):
    """The session of an engine that knows no names, as SGLang, whose trainer is slow."""
    monkeypatch.setattr(session_module, "_STOPPED_S", 0.0)
    session = Session()
    session.writer = OLD
    session.connect([endpoint(engine.url)])
    return session


def give(engine, session, version):
    """What another rank of the same trainer sends."""
    session._engines.clients[0].update_weights_from_tensor([], weight_version=version)
    assert engine.weight_version == version


def test_names_are_told_with_each_request_and_no_two_are_equal(engine, session):
    session.open("1", PLAN)
    assert {call.headers.get(HEADER.lower()) for call in engine.calls} == {OLD}
    assert engine.seen("take_weights") == [{"writer": OLD}]
    names = {new_writer() for _ in range(100)}
    assert len(names) == 100 and all(name.isascii() and " " not in name for name in names)


def test_an_engine_that_knows_names_is_not_asked_for_its_version(engine, monkeypatch):
    monkeypatch.setattr(session_module, "_STOPPED_S", 0.0)
    engine.answers["take_weights"] = {"success": True, "interrupted": False}
    session = Session()
    session.writer = OLD
    session.connect([endpoint(engine.url)])
    update(session)
    assert engine.seen("take_weights") and len(engine.seen("model_info")) == 1  # to be connected


@pytest.mark.parametrize("interrupted", [True, False])
def test_nothing_is_compared_with_an_update_that_was_left_open(engine, interrupted):
    """The engine says so when it is taken."""
    engine.answers["take_weights"] = {"success": True, "interrupted": interrupted}
    session = Session(check_weight_update_equal=True)
    session.writer = OLD
    session.connect([endpoint(engine.url)])
    assert session._check_pending is not interrupted


def test_an_engine_is_not_asked_again_and_again_while_nobody_can_have_come(engine):
    session = Session()
    session.writer = OLD
    session.connect([endpoint(engine.url)])
    before = len(engine.seen("model_info"))
    update(session)
    assert len(engine.seen("model_info")) - before == 1  # to be connected


def test_versions_of_its_own_pass_as_soon_as_they_are_sent(engine, session):
    (client,) = session._engines.clients
    engine.answers["update_weight_version"] = {"success": True}
    give(engine, session, "3")
    client.pause_generation()
    client.update_weight_version("4")
    engine.weight_version = "4"
    client.continue_generation()
    assert engine.paths[-2:] == ["update_weight_version", "continue_generation"]


def test_updates_of_its_own_pass(engine, session):
    for version in ("1", "2", "2"):
        session.open(version, PLAN)
        give(engine, session, version)
        session.commit()
        session.resume()
    assert engine.paths.count("continue_generation") == 3


def test_weights_that_another_rank_has_sent_are_its_own(engine, session):
    session.open("1", PLAN)
    engine.weight_version = "1"
    session.commit()
    session.resume()
    session.open("2", PLAN)


@pytest.mark.parametrize("moment", ["pause", "bucket", "version", "continue"])
def test_who_comes_back_when_an_engine_has_other_weights_is_stopped_by_name(engine, session, moment):
    steps = {
        "pause": lambda: session.open("1", PLAN),
        "bucket": lambda: session._engines.clients[0].update_weights_from_tensor([], weight_version=None),
        "version": lambda: session._engines.clients[0].update_weight_version("1"),
        "continue": session.resume,
    }
    engine.answers["update_weight_version"] = {"success": True}
    for name, step in steps.items():
        if name == moment:
            engine.weight_version = "7"
            before = engine.paths
            found = r"weight version '7' \(wanted: '.+', which here:1:old found there or gave it\)"
            with pytest.raises(EngineError, match=f"{engine.url}: .*{found}: another trainer has taken"):
                step()
            assert engine.paths == before
            return
        step()
        engine.weight_version = "1" if name == "version" else engine.weight_version


def test_a_rank_that_tells_no_session_is_stopped_too(engine, monkeypatch):
    """It hands an engine buckets over a connection of its own."""
    monkeypatch.setattr(session_module, "_STOPPED_S", 0.0)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    transport = HandleTransport(run_config(run_args(distributed_timeout_minutes=1)))
    transport.writer = OLD
    transport.connect([EngineEndpoint(engine.url, None, 1, 1)])
    assert engine.seen("take_weights") == [{"writer": OLD}]
    transport._engine.update_weights_from_tensor([], weight_version=None)
    engine.weight_version = "7"
    with pytest.raises(EngineError, match=r"weight version '7' .* another trainer has taken its place"):
        transport._engine.update_weights_from_tensor([], weight_version=None)
    transport.disconnect()


class Source:
    ranks, rounding = frozenset({0}), 0.0

    def manifest(self):
        return list[TensorInfo]()


def _names(rank):
    dist.init_process_group("gloo")
    config = run_config(run_args(distributed_timeout_minutes=10, colocate=True))
    made = [WeightUpdate(config, Source()) for _ in range(2)]
    return [each.writer for update in made for each in update._transports]


def test_all_ranks_and_transports_of_an_update_have_one_name():
    first, second = run_ranks(_names, 2)
    assert first == second
    assert first[0] == first[1] != first[2] == first[3]  # by handle and by broadcast, twice


def test_a_directory_is_that_of_who_came_last(tmp_path):
    root = tmp_path / "versions"
    for _ in range(2):
        take_directory(root, OLD)
        require_directory(root, OLD)
    take_directory(root, NEW)
    require_directory(root, NEW)
    for act in (take_directory, require_directory):
        with pytest.raises(DirectoryTaken, match=f"disk-dir {root}: {OLD} sends weights no more: {NEW} has"):
            act(root, OLD)
    assert (root / WRITERS).read_text().split() == [OLD, NEW]


def test_a_line_that_a_full_disk_has_torn_is_nobodys(tmp_path):
    take_directory(tmp_path, OLD)
    with (tmp_path / WRITERS).open("a") as file:
        file.write("\nhere:2:n")
    for act in (take_directory, require_directory):
        with pytest.raises(DirectoryTaken, match="here:2:n has taken its place"):
            act(tmp_path, OLD)
    take_directory(tmp_path, NEW)
    require_directory(tmp_path, NEW)


def test_a_directory_that_somebody_has_removed_is_taken_again(tmp_path):
    root = tmp_path / "versions"
    require_directory(root, OLD)
    assert (root / WRITERS).read_text().split() == [OLD]
