"""Followers that die, break or are late, and engines that take nothing: what others lose by them."""
# ruff: noqa: F811 (fixtures of another file)

import time

import pytest
from fastapi.responses import JSONResponse

from slime.weight_sync import follower as follower_module
from slime.weight_sync.follower import EngineFollower
from slime.weight_sync.transports import followers as known
from slime.weight_sync.transports.followers import WHOLE_IN_A_ROW
from slime.weight_sync.versions import pulse
from slime.weight_sync.versions.board import JOINS, Board, Follower
from slime.weight_sync.versions.manifest import MANIFEST, VersionManifest
from slime.weight_sync.versions.pulse import SILENT_S
from tests.weight_sync.test_delta import Trainer, kinds, require_equal
from tests.weight_sync.test_disk import group  # noqa: F401
from tests.weight_sync.test_followed import (  # noqa: F401
    GIVEN_UP_S,
    Alone,
    args,
    at_once,
    come,
    engines,
    follower_of,
    following,
    names_in,
    note_of,
    outside,
    root,
)
from tests.weight_sync.test_presence import Clock


def transport_of(trainer):
    return trainer.update._routes[0].transports[0]


def test_a_follower_that_was_killed_for_good_holds_a_version_until_it_is_silent(
    outside, engines, root, monkeypatch, caplog
):
    trainer, engine = Alone(outside), engines()
    monkeypatch.setattr(transport_of(trainer), "_require_followers", None)  # at its deadline
    with following(follower_of(engine, root)):
        trainer.step()
    monkeypatch.setattr(pulse, "time", Clock(step=SILENT_S / 4))
    trainer.step()
    assert f"follower f of engine {engine.url} is gone: no heart-beat for 15 s" in caplog.text
    assert engine.weight_version == "1" and names_in(root) == [] and kinds(root) == {1: True, 2: False}
    monkeypatch.setattr(pulse, "time", time)
    back = come(follower_of(engine, root))
    assert back.step().version == 2
    require_equal(engine.loaded, trainer.source.weights)
    with following(back):
        trainer.step()
        assert engine.weight_version == "3"  # it is waited for again


def test_an_engine_of_the_run_whose_follower_is_gone_is_named(args, engines, root, monkeypatch, caplog):
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, root)):
        trainer.step()
    monkeypatch.setattr(pulse, "time", Clock(step=SILENT_S / 4))
    clock = Clock(step=known.BACK_S)
    monkeypatch.setattr(known, "time", clock)
    told = f"engine {engine.url}: its follower f is gone, and none has come within 120 s"
    with pytest.raises(RuntimeError, match=told):
        trainer.step()
    monkeypatch.setattr(pulse, "time", time)
    trainer.connect(engine)
    with following(follower_of(engine, root)):
        trainer.step()


@pytest.fixture
def no_changes(monkeypatch):
    """A set of names of followers that can make no use of changes."""
    broken, staged = set(), EngineFollower._staged

    def stage(self, source, published):
        if self._presence._name in broken:
            path = f"{source}/weight_v{published.version:06d}"
            if VersionManifest.read(type(self._local)(path)).base is not None:
                raise OSError("no space left")
        return staged(self, source, published)

    monkeypatch.setattr(EngineFollower, "_staged", stage)
    return broken


def test_one_follower_that_can_use_no_changes_is_set_aside_by_name(
    outside, engines, root, no_changes, caplog
):
    trainer, good, bad = Alone(outside), engines(), engines()
    others = follower_of(good, root, "good"), follower_of(bad, root, "bad")
    with following(*others):
        trainer.step()
        no_changes.add("bad")
        for _ in range(WHOLE_IN_A_ROW):
            trainer.step()
            assert good.weight_version == bad.weight_version == str(trainer.version)
        assert kinds(root) == {4: True} and "set aside" not in caplog.text
        for _ in range(3):
            trainer.step()
            assert good.weight_version == str(trainer.version) and bad.weight_version == "4"
        assert kinds(root) == {4: True, 5: False, 6: False, 7: False}
        told = f"follower bad of engine {bad.url} is set aside: 3 versions in a row came whole for it"
        assert caplog.text.count(told) == 1 and "no space left" in caplog.text
        no_changes.clear()
        deadline = time.monotonic() + GIVEN_UP_S
        while bad.weight_version != "7":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        trainer.step()
        assert bad.weight_version == "8"
        no_changes.add("bad")
        trainer.step()
        assert kinds(root) == {9: True} and bad.weight_version == "9"
    require_equal(bad.loaded, trainer.source.weights)


def test_the_follower_of_an_engine_of_the_run_is_never_set_aside(args, engines, root, no_changes):
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, root)):
        trainer.step()
        no_changes.add("f")
        for _ in range(WHOLE_IN_A_ROW + 2):
            trainer.step()


def test_what_a_follower_tells_while_it_is_left_behind_stays(outside, engines, root, monkeypatch, caplog):
    trainer, engine = Alone(outside), engines()
    transport, follower = transport_of(trainer), follower_of(engine, root)
    follower.step()
    leave = transport._followers.leave_behind

    def late(notes, published):
        assert follower.step().version == published.version
        leave(notes, published)

    monkeypatch.setattr(transport._followers, "leave_behind", late)
    monkeypatch.setattr(transport, "_limit_s", 0.0)
    trainer.step()
    assert "follower f stays behind version 1" in caplog.text and note_of(root, "f").version == 1
    monkeypatch.undo()
    with following(follower):
        trainer.step()
        assert engine.weight_version == "2"


def test_one_that_has_only_come_is_not_waited_for(outside, root, monkeypatch, caplog):
    trainer = Alone(outside)
    monkeypatch.setattr(transport_of(trainer), "_require_followers", None)  # at its deadline
    Board(str(root)).tell("f.00000000", Follower("http://e:1", stage=JOINS))
    trainer.step()
    assert names_in(root) == ["f"] and "stays behind" not in caplog.text


def refuse(engine, path, times):
    """The engine refuses so many requests; what it is asked comes back."""
    answer, asked = engine.answers.get(path, {"success": True}), []

    def act(body):
        asked.append(body)
        if len(asked) <= times:
            return JSONResponse({"success": False}, status_code=500)
        return answer(body) if callable(answer) else answer

    engine.answers[path] = act
    return asked


@pytest.fixture
def served(outside, engines, root):
    """A trainer, an engine that has its first version, and the follower of it."""
    trainer, engine = Alone(outside), engines()
    trainer.step()
    follower = come(follower_of(engine, root))
    assert follower.step().version == 1
    follower._presence.__exit__(None, None, None)  # the trainer does not wait for it
    trainer.step()
    return trainer, engine, follower


def test_an_engine_that_refuses_weights_goes_on_with_what_it_had(served):
    trainer, engine, follower = served
    before, asked = engine.loaded, len(engine.paths)
    loads = refuse(engine, "update_weights_from_disk", 1)
    assert follower.step() is None
    assert engine.paths[asked:] == [
        *("pause_generation", "update_weights_from_disk", "update_weights_from_disk"),
        "continue_generation",
    ]
    assert [body["weight_version"] for body in loads] == ["2", "1"]
    require_equal(engine.loaded, before)
    assert engine.weight_version == "1"
    assert follower._note.failure.endswith("; the engine goes on with what it had")
    assert follower.step().version == 2
    require_equal(engine.loaded, trainer.source.weights)


def test_what_it_had_is_there_still_where_all_weights_came(served, outside):
    _, engine, follower = served
    successor = Alone(outside)
    successor.version = 4
    successor.source.train()
    successor.step()
    loads = refuse(engine, "update_weights_from_disk", 1)
    assert follower.step() is None
    assert [body["weight_version"] for body in loads] == ["5", "1"]
    assert follower.step().version == 5
    require_equal(engine.loaded, successor.source.weights)


@pytest.mark.parametrize("path", ["pause_generation", "flush_cache"])
def test_an_engine_that_was_not_touched_goes_on_as_it_is(served, path):
    _, engine, follower = served
    asked = len(engine.paths)
    refuse(engine, path, 1)
    assert follower.step() is None
    assert engine.paths[asked:] == ["pause_generation", "continue_generation"]
    assert follower._note.failure.endswith("; the engine goes on with what it had")
    assert follower.step().version == 2


@pytest.mark.parametrize("loss", ["refused", "gone"])
def test_an_engine_whose_weights_nobody_knows_stands_still_and_is_told_of(served, loss):
    trainer, engine, follower = served
    path = follower._served[0]
    refuse(engine, "update_weights_from_disk", 2 if loss == "refused" else 1)
    if loss == "gone":
        staged = follower._staged
        follower._staged = lambda *words: (staged(*words), (path / MANIFEST).unlink())[0]
    continued = engine.paths.count("continue_generation")
    assert follower.step() is None
    assert engine.paths.count("continue_generation") == continued
    assert "; the engine stands still until it has a version: " in follower._note.failure
    if loss == "gone":
        follower._staged = staged
    assert follower.step().version == 2
    require_equal(engine.loaded, trainer.source.weights)


def test_what_fails_is_tried_again_later_each_time(served, monkeypatch):
    _, engine, follower = served
    monkeypatch.setattr(follower_module, "_TRY_AGAIN_S", 5.0)
    clock = Clock()
    monkeypatch.setattr(follower_module, "time", clock)
    pauses = refuse(engine, "pause_generation", 100)
    tried = []
    for _ in range(200):
        follower.step()
        clock.now += 1.0
        tried.append(len(pauses))
    waits = [tried.count(number) for number in range(1, 6)]
    assert waits == [5, 10, 20, 40, 60]


def test_what_older_weights_computed_goes_once_nothing_is_held_any_more(
    outside, engines, root, monkeypatch, caplog
):
    """Or is told of, if there are requests all the time."""
    trainer, engine = Alone(outside), engines()
    transport_of(trainer)._pause_mode = "in_place"
    clock = Clock()
    monkeypatch.setattr(follower_module, "time", clock)
    follower = come(follower_of(engine, root))
    flushes = lambda: len(engine.seen("flush_cache"))
    busy = JSONResponse({}, status_code=400)
    engine.answers["flush_cache"] = busy
    trainer.step()
    assert follower.step().version == 1 and flushes() == 2
    follower.step()
    assert flushes() == 3
    engine.answers["flush_cache"] = {}
    for _ in range(3):
        follower.step()
        assert flushes() == 4
    engine.answers["flush_cache"] = busy
    transport_of(trainer)._limit_s = 0.0
    trainer.step()
    assert follower.step().version == 2
    clock.now += follower_module.FLUSH_S
    for _ in range(2):
        follower.step()
    assert flushes() == 7 and "has had requests for 60 s: it keeps prefixes of older weights" in caplog.text
