"""Engines of others: followers bring them what the trainer published, or they keep what they have."""

import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from fastapi.responses import JSONResponse

from slime.utils.types import EngineEndpoint
from slime.weight_sync import follower as followers
from slime.weight_sync.follower import EngineFollower, Replaced
from slime.weight_sync.transports import delta
from slime.weight_sync.versions.board import (
    FOLLOWERS,
    PUBLISHED,
    Board,
    Follower,
    Published,
    edition_of,
    name_of,
)
from slime.weight_sync.versions.manifest import VersionManifest, directory_of
from tests.weight_sync.test_delta import Trainer, args_of, kinds, machines, require_equal
from tests.weight_sync.test_disk import group  # noqa: F401

GIVEN_UP_S = 120


@pytest.fixture
def root(tmp_path):
    return tmp_path / "versions"


@pytest.fixture
def engines(tmp_path):
    with machines(tmp_path) as start:
        yield start


@pytest.fixture
def args(tmp_path, root):
    args = args_of(tmp_path, root)
    args.update_weight_local_checkpoint_dir = None
    args.rollout_external = True
    return args


@pytest.fixture
def outside(args):
    """A run that has no engines, and publishes for those of others."""
    args.rollout_external, args.publish_weights = False, True
    return args


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(followers, "_TRY_AGAIN_S", 0.0)


def follower_of(engine, root, name="f", **options):
    endpoint = EngineEndpoint(engine.url, None, 1, None)
    return EngineFollower(str(root), endpoint, engine.local, name, **{"home": str(engine.local), **options})


@contextmanager
def following(*followers):
    """Looks again and again while the body runs; what is there at its end is as after a kill."""
    ended, failures = threading.Event(), []

    def follow(follower):
        try:
            while not ended.is_set():
                follower.step()
                ended.wait(0.005)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(one,)) for one in followers]
    for one, thread in zip(followers, threads, strict=True):
        one._presence._ended.clear()
        one.__enter__()
        thread.start()
    deadline = time.monotonic() + GIVEN_UP_S
    while not all(one._is_told for one in followers) and not failures:  # nobody waits for who only joins
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield
    finally:
        ended.set()
        for one, thread in zip(followers, threads, strict=True):
            thread.join(GIVEN_UP_S)
            one._presence._ended.set()
        assert not failures


def come(follower):
    """In place of one that was killed, and without a heart-beat."""
    follower._presence._come()
    return follower


def names_in(root):
    return sorted(name_of(key) for key in Board(str(root)).followers())


def note_of(root, name):
    (found,) = [one for key, one in Board(str(root)).followers().items() if name_of(key) == name]
    return found


class Alone(Trainer):
    """Has no engines; what it publishes is held against its weights by who reads it."""

    def __init__(self, args):
        super().__init__(args)

    def step(self):
        self.source.train()
        self.version += 1
        return self.update.run(self.version)


def test_each_engine_has_what_the_trainer_published_and_the_trainer_asks_it_for_its_version_alone(
    args, engines, root
):
    first, second = engines(), engines()
    trainer = Trainer(args, first, second)
    with following(follower_of(first, root, "a"), follower_of(second, root, "b")):
        for _ in range(4):
            report = trainer.step()
    assert kinds(root) == {1: True, 2: False, 3: False, 4: False}
    assert first.paths == ["pause_generation", "update_weights_from_disk", "continue_generation"] * 4
    assert 0 < report.density < 1 and report.pause > 0
    assert first.seen("pause_generation") == [{"mode": "abort"}] * 4
    assert names_in(root) == ["a", "b"]


def test_the_base_moves_on_only_when_every_engine_has_confirmed(args, engines, root):
    """One has loaded what the other one refused; the number is given again, to other weights."""
    first, second = engines(), engines()
    trainer = Trainer(args, first, second)
    with following(follower_of(first, root, "a"), follower_of(second, root, "b")):
        trainer.step()
        second.answers["update_weights_from_disk"] = JSONResponse({"success": False}, status_code=400)
        with pytest.raises(RuntimeError, match=r"its follower could not commit version 2: .*HTTP 400"):
            trainer.step()
        assert second.weight_version == "1" and second.paths.count("continue_generation") == 1
        second.answers["update_weights_from_disk"] = second.load
        trainer.connect(first, second)
        trainer.version = 1
        trainer.step()
        assert VersionManifest.read(root / "weight_v000002").base.version == 1
        trainer.step()
        assert VersionManifest.read(root / "weight_v000003").base.version == 2


def test_an_engine_that_says_it_serves_something_else_has_not_confirmed(args, engines, root, monkeypatch):
    engine = engines()
    trainer = Trainer(args, engine)
    engine.answers["model_info"] = {"weight_version": "0"}
    with (
        following(follower_of(engine, root)),
        pytest.raises(
            RuntimeError, match=r"could not commit version 1: .*serves weight version '0' \(wanted: '1'"
        ),
    ):
        trainer.step()


def test_an_engine_for_which_nothing_follows_is_named_with_what_to_do(args, engines, root, monkeypatch):
    engine = engines()
    trainer = Trainer(args, engine)
    monkeypatch.setattr(trainer.update._routes[0].transports[0], "_limit_s", 0.0)
    told = f"nothing follows for it .*slime weights follow {root} --engine ... --known-as {engine.url}"
    with pytest.raises(RuntimeError, match=told):
        trainer.step()
    silent = Follower(engine.url)
    Board(str(root)).tell("silent.00000000", silent)
    trainer.connect(engine)
    with pytest.raises(RuntimeError, match=r"was not confirmed within 0 s \(see what its"):
        trainer.step()


def test_what_a_follower_says_is_not_enough_where_its_engine_says_something_else(
    args, engines, root, monkeypatch
):
    """An engine may have been started again since."""
    engine = engines()
    trainer = Trainer(args, engine)
    transport = trainer.update._routes[0].transports[0]

    def confirm():
        told = Follower(engine.url, *transport._published.link)
        Board(str(root)).tell("f.00000000", told)

    monkeypatch.setattr(transport, "_tell_written", confirm)
    monkeypatch.setattr(transport, "_limit_s", 0.0)
    with pytest.raises(RuntimeError, match=r"was not confirmed within 0 s \(see what its"):
        trainer.step()


@pytest.mark.parametrize(("one", "other"), [("a", "z"), ("z", "a")])
def test_a_note_that_a_killed_follower_left_does_not_hide_the_one_that_came_after_it(
    args, engines, one, other
):
    engine, published = engines(), Published(1, "s", 1, "t")
    transport = Trainer(args, engine).update._routes[0].transports[0]
    left, has = Follower(engine.url, 7, "of an earlier run"), Follower(engine.url, 1, "s")
    failed = Follower(engine.url, failed=edition_of(published), stage="commit")
    for first, second in ((left, has), (left, failed), (has, failed)):
        found = transport._own(dict(sorted([(one, first), (other, second)])), published)
        assert [*found.values()] == [second]


def test_an_engine_may_have_another_address_for_trainers(args, engines, root):
    engine = engines()
    engine.url_of_trainers = f"http://localhost:{engine.port}"
    trainer = Trainer(args)
    trainer.update.connect([EngineEndpoint(engine.url_of_trainers, None, 1, None)])
    with following(follower_of(engine, root, known_as=engine.url_of_trainers)):
        trainer.step()
    require_equal(engine.loaded, trainer.source.weights)


@pytest.mark.parametrize("damage", ["link", "bytes"])
def test_changes_that_a_follower_cannot_use_come_whole_before_its_engine_stops(
    args, engines, root, damage, caplog, monkeypatch
):
    engine = engines()
    trainer = Trainer(args, engine)
    transport = trainer.update._routes[0].transports[0]
    follower = follower_of(engine, root)
    with following(follower):
        trainer.step()
    if damage == "link":
        shutil.rmtree(engine.local)
        shutil.rmtree(directory_of(root, 1))

    def spoil():
        version = directory_of(root, 2)
        if damage == "bytes" and VersionManifest.read(version).base is not None:
            (file,) = version.glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 8
            file.write_bytes(data)

    monkeypatch.setattr(transport, "_tell_written", spoil)
    trainer.source.weights["a"].view(-1).view(torch.uint8)[5] ^= 1
    monkeypatch.setattr(trainer.source, "train", lambda: None)
    before = len(engine.paths)
    with following(follower):
        trainer.step()
    assert kinds(root)[2] and "version 2 comes whole: f: " in caplog.text
    assert engine.paths[before:] == ["pause_generation", "update_weights_from_disk", "continue_generation"]


def test_a_follower_that_was_killed_is_started_again_and_the_update_goes_on(args, engines, root):
    """Its engine loads anew: nobody knows how far the first one came."""
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, root)):
        trainer.step()
    loading = threading.Event()
    engine.answers["pause_generation"] = lambda body: loading.set() or JSONResponse({}, status_code=500)
    step = threading.Thread(target=_keep_failure, args=(trainer, failures := []))
    killed = follower_of(engine, root)
    killed._board.tell = lambda *_: None  # it dies before it says anything
    step.start()
    with following(killed):
        assert loading.wait(GIVEN_UP_S)
    engine.answers["pause_generation"] = {"success": True}
    with following(follower_of(engine, root)):
        step.join(GIVEN_UP_S)
    assert not step.is_alive() and failures == []
    require_equal(engine.loaded, trainer.source.weights)
    loads = len(engine.seen("update_weights_from_disk"))
    follower_of(engine, root).step()
    assert len(engine.seen("update_weights_from_disk")) == loads + 1


class Killed(BaseException):
    """A follower's process ends here."""


class Dying(EngineFollower):
    """Dies when it is about to make its request of this number to the engine."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.left, request = 0, self._client.request

        def counted(*words, **more):
            if not self.left:
                raise Killed
            self.left -= 1
            return request(*words, **more)

        self._client.request = counted


def test_wherever_a_follower_is_killed_its_engine_goes_on_only_with_whole_weights(args, engines, root):
    engine, deaths = engines(), 0
    trainer = Trainer(args, engine)
    for before_death in range(20):
        endpoint = EngineEndpoint(engine.url, None, 1, None)
        dying = come(Dying(str(root), endpoint, engine.local, "f", home=str(engine.local)))
        trainer.source.train()
        trainer.version += 1
        step = threading.Thread(target=trainer.update.run, args=(trainer.version,))
        step.start()
        dying.left = before_death
        try:
            with pytest.raises(Killed):
                _step_until_it_dies(dying, trainer.version)
            deaths += 1
        except pytest.fail.Exception:
            step.join(GIVEN_UP_S)  # it lived to confirm
            assert engine.weight_version == str(trainer.version)
            break
        with following(follower_of(engine, root)):
            step.join(GIVEN_UP_S)
        assert not step.is_alive()
        require_equal(engine.loaded, trainer.source.weights)
    # take, pause, flush, load, continue, and what it says it serves
    assert deaths >= 6
    stopped_with_old = False
    for path in engine.paths:
        stopped_with_old = {"pause_generation": True, "update_weights_from_disk": False}.get(
            path, stopped_with_old
        )
        assert not (path == "continue_generation" and stopped_with_old)


def _step_until_it_dies(follower, version):
    deadline = time.monotonic() + GIVEN_UP_S
    while time.monotonic() < deadline:
        brought = follower.step()
        if brought is not None and brought.version == version:
            return


def _keep_failure(trainer, failures):
    try:
        trainer.step()
    except Exception as error:
        failures.append(error)


def test_an_engine_that_was_started_again_gets_its_weights_back(args, engines, root):
    engine = engines()
    trainer = Trainer(args, engine)
    follower = follower_of(engine, root)
    with following(follower):
        trainer.step()
    assert follower.step() is None
    engine.weight_version, engine.loaded = "default", {}
    assert follower.step().version == 1
    require_equal(engine.loaded, trainer.source.weights)


def test_without_any_follower_the_chain_goes_on_from_what_was_published(outside, engines, root, monkeypatch):
    """One that comes late finds all that it needs, and from then on the next version waits for it."""
    monkeypatch.setattr(delta, "MAX_LINKS", 3)
    trainer = Alone(outside)
    for _ in range(3):
        trainer.step()
    assert kinds(root) == {1: True, 2: False, 3: False}
    assert VersionManifest.read(directory_of(root, 3)).base.version == 2
    engine = engines()
    with following(follower_of(engine, root)):
        deadline = time.monotonic() + GIVEN_UP_S
        while engine.weight_version != "3":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        require_equal(engine.loaded, trainer.source.weights)
        for version in (4, 5):
            trainer.step()
            assert engine.weight_version == str(version)
            require_equal(engine.loaded, trainer.source.weights)
    assert kinds(root) == {4: True, 5: False}


def test_a_follower_of_others_that_does_not_come_is_left_behind_and_comes_later(
    outside, engines, root, monkeypatch, caplog
):
    trainer, engine, late = Alone(outside), engines(), engines()
    follower = follower_of(late, root, "late")
    follower.step()
    with following(follower_of(engine, root, "quick")):
        monkeypatch.setattr(trainer.update._routes[0].transports[0], "_limit_s", 1.0)
        trainer.step()
        assert "follower late stays behind version 1" in caplog.text
        trainer.step()
    follower.step()
    require_equal(late.loaded, trainer.source.weights)
    assert note_of(root, "late").version == 2


def test_a_follower_whose_engine_refuses_does_not_hold_up_engines_of_others(
    outside, engines, root, monkeypatch, caplog
):
    trainer, engine = Alone(outside), engines()
    engine.answers["update_weights_from_disk"] = JSONResponse({"message": "full"}, status_code=400)
    monkeypatch.setattr(
        trainer.update._routes[0].transports[0], "_require_followers", None
    )  # at its deadline
    follower = follower_of(engine, root)
    follower.step()
    with following(follower):
        trainer.step()
        assert "follower f stays behind version 1: engine" in caplog.text
    engine.answers["update_weights_from_disk"] = engine.load
    follower.step()
    require_equal(engine.loaded, trainer.source.weights)


def test_a_folder_that_a_url_names_is_followed_from_trainer_to_trainer(args, engines, root):
    args.update_weight_disk_dir = f"file://{root}"
    engine = engines()
    follower = follower_of(engine, args.update_weight_disk_dir)
    trainer = Trainer(args, engine)
    with following(follower):
        trainer.step()
        trainer.step()
        successor = Trainer(args, engine)  # goes on from a checkpoint: its numbers begin anew
        successor.step()
    require_equal(engine.loaded, successor.source.weights)
    assert engine.weight_version == "1"
    takers = {body["writer"] for body in engine.seen("take_weights")}
    assert len(takers) == 2  # versions of one name never fall
    folders = [path.name for path in root.glob("trainer_*")]
    assert [name[:15] for name in folders] == ["trainer_000002_"]


def test_a_follower_in_whose_place_another_one_has_come_ends(args, engines, root):
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, root)):
        trainer.step()
    engine.answers["take_weights"] = JSONResponse({"message": "b has taken its place"}, status_code=409)
    with pytest.raises(Replaced, match=r"/take_weights: HTTP 409: .*b has taken its place"):
        follower_of(engine, root).step()


def test_what_is_published_is_staged_only_if_it_is_what_was_announced(args, engines, root):
    engine = engines()
    trainer = Trainer(args, engine)
    with following(follower_of(engine, root)):
        trainer.step()
    board = Board(str(root))
    board.publish(str(root), Published(1, "another", 9, "t"))
    before = len(engine.paths)
    assert come(follower_of(engine, root)).step() is None
    assert len(engine.paths) == before
    told = note_of(root, "f")
    assert (told.failed, told.stage) == (
        "t#9",
        "fetch",
    ) and "(wanted: another, as is published)" in told.failure


def test_notes_that_are_none_are_not_there(tmp_path):
    board = Board(str(tmp_path))
    assert board.newest() is None and board.followers() == {}
    for content in ("", "[1]", "{}", '{"version": "1", "state": "s", "edition": 1, "trainer": "t"}'):
        (tmp_path / PUBLISHED).write_text(content)
        assert board.newest() is None
    board.publish(str(tmp_path), Published(1, "s", 1, "t"))
    assert board.newest() == (str(tmp_path), Published(1, "s", 1, "t"))
    board.tell("f.00000000", Follower("http://e:1", 1, "s"))
    (tmp_path / FOLLOWERS / ".hidden").write_text("{}")
    told = '{{"engine": "http://e:1", "version": 1, "state": "s", "pause": {}}}'
    for content in ('{"engine"', "[" * 100_000, *map(told.format, ("NaN", "true", "-1", "1e999", '"1"'))):
        (tmp_path / FOLLOWERS / "torn.00000001").write_text(content)
        known = {"f.00000000": Follower("http://e:1", 1, "s"), "torn.00000001": None}
        assert board.followers() == known, content[:80]
    board.forget("f.00000000")
    assert {*board.followers()} == {"torn.00000001"}
