"""Which followers live, and which one has an engine, a name or a directory."""

import threading
import time

import pytest

from slime.processes.exclusive import DirectoryUnusable
from slime.weight_sync import presence
from slime.weight_sync.presence import Presence, Taken
from slime.weight_sync.versions import pulse
from slime.weight_sync.versions.board import FOLLOWERS, Board, Follower, name_of
from slime.weight_sync.versions.home import home_of
from slime.weight_sync.versions.pulse import SILENT_S, Pulse

GIVEN_UP_S = 120
ENGINE = "http://127.0.0.1:30000"


class Clock:
    """A clock that a test moves, or that moves by itself each time that it is read."""

    def __init__(self, step=0.0):
        self.now, self.step = time.monotonic(), step

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_S", 0.005)
    monkeypatch.setattr(presence, "_LOOK_AGAIN_S", 0.005)
    monkeypatch.setattr(presence, "_BACK_OFF_S", 0.05)


@pytest.fixture
def board(tmp_path):
    return Board(str(tmp_path / "versions"))


@pytest.fixture
def come(board):
    """A function that makes a follower, which leaves at the end."""
    there = []

    def start(name, engine=ENGINE, home=""):
        one = Presence(board, name, engine, home, Follower(engine))
        one.__enter__()
        there.append(one)
        return one

    yield start
    for one in there:
        one.__exit__(None, None, None)


def names(board):
    return sorted(name_of(key) for key in board.followers())


def kill(one):
    """What it has written stays as it is."""
    one._ended.set()
    one._beating.join(GIVEN_UP_S)


def wait_until(condition):
    """Returns what it is, once it is something."""
    deadline = time.monotonic() + GIVEN_UP_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def note_of(one, board):
    return wait_until(lambda: board.followers().get(one.key))  # it may be being written


def require_beating(one, board):
    beat = note_of(one, board).beat
    wait_until(lambda: note_of(one, board).beat > beat)


def take_away(one, board):
    """Removes the note as a trainer does that takes it for gone, until no beat comes after that."""
    wait_until(lambda: board.forget(one.key) or one._is_lost)


def test_a_note_that_does_not_change_is_of_one_that_is_gone(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    known = Pulse()
    told = lambda beat: Follower(ENGINE, beat=beat)
    assert known.silent({"a": told(7), "b": told(1), "torn": None}) == set()
    clock.now += SILENT_S / 2
    assert known.silent({"a": told(7), "b": told(2), "torn": None}) == set()
    clock.now += SILENT_S / 2
    assert known.silent({"a": told(7), "b": told(2), "torn": None}) == {"a", "torn"}
    clock.now += SILENT_S / 2
    # One that was started again counts from the start.
    assert known.silent({"a": told(0), "b": told(2)}) == {"b"}
    assert known.silent({"b": told(2)}) == {"b"}
    assert known.silent({}) == known.silent({"b": told(2)}) == set()


def test_a_note_that_is_being_written_after_nobody_looked_for_long_is_of_one_that_lives(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    known = Pulse()
    assert known.silent({"a": Follower(ENGINE, beat=7)}) == set()
    clock.now += 20 * SILENT_S
    assert known.silent({"a": None}) == set()
    clock.now += SILENT_S
    assert known.silent({"a": None}) == {"a"}  # it was killed meanwhile


def test_a_directory_has_one_follower_and_gives_it_the_same_name_again(tmp_path):
    with home_of(tmp_path / "a") as first, home_of(tmp_path / "b") as other:
        assert first != other
        with (
            pytest.raises(DirectoryUnusable, match=rf"--local-checkpoint-dir {tmp_path}/a: in use by"),
            home_of(tmp_path / "a"),
        ):
            pass
    with home_of(tmp_path / "a") as again:
        assert again == first


def test_an_engine_has_one_follower(come, board):
    come("first")
    with pytest.raises(Taken, match=rf"engine {ENGINE}/: follower first gives it weights"):
        come("second", f"{ENGINE}/")
    come("third", "http://127.0.0.1:30001")
    assert names(board) == ["first", "third"]


def test_a_name_has_one_follower(come):
    come("f")
    with pytest.raises(Taken, match=r"another follower is called f \(wanted: another --name"):
        come("f", "http://127.0.0.1:30001")


def test_an_address_of_the_host_itself_is_another_engine_on_another_host(come, monkeypatch):
    come("here")
    monkeypatch.setattr(presence, "machine", lambda: "elsewhere")
    come("there")
    come("one", "http://engine:1")
    with pytest.raises(Taken):
        come("two", "http://engine:1")


def test_one_that_is_gone_has_nothing_any_more(come, board, monkeypatch):
    kill(come("old"))
    kill(come("f", "http://127.0.0.1:30001"))
    monkeypatch.setattr(pulse, "time", Clock(step=SILENT_S / 4))
    kill(come("new"))  # or its note might be found while it is being written, time after time
    assert names(board) == ["f", "new"]
    come("f", "http://127.0.0.1:30001")
    assert names(board) == ["f", "new"]


def test_one_that_was_killed_comes_again_at_once_by_its_directory(come, board, monkeypatch):
    kill(come("f", home="of-a-directory"))
    monkeypatch.setattr(Presence, "_taken", None)
    monkeypatch.setattr(pulse, "time", Clock())  # nobody is found to be gone
    come("f", home="of-a-directory")
    assert names(board) == ["f"]


def test_of_two_that_come_at_once_one_stays(board, monkeypatch):
    both, look = threading.Barrier(2), Presence._require_none
    first = threading.local()

    def meet(self):
        look(self)
        if not hasattr(first, "met"):
            first.met = True
            both.wait(GIVEN_UP_S)

    monkeypatch.setattr(Presence, "_require_none", meet)
    for _ in range(5):
        there, refused = [], []

        def enter(name, there=there, refused=refused):
            one = Presence(board, name, ENGINE, "", Follower(ENGINE))
            try:
                there.append(one.__enter__())
            except Taken as error:
                refused.append(str(error))

        threads = [threading.Thread(target=enter, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVEN_UP_S)
        assert len(there) == len(refused) == 1
        assert names(board) == [there[0]._name]
        there[0].__exit__(None, None, None)
        assert names(board) == []


def test_one_that_was_taken_for_gone_comes_again_unless_another_has_come(come, board):
    one = come("f")
    one.tell(Follower(ENGINE, 3, "s"))
    take_away(one, board)
    assert names(board) == []
    one.require()
    assert note_of(one, board).version == 3
    require_beating(one, board)
    take_away(one, board)
    come("g")
    with pytest.raises(Taken, match="follower g gives it weights"):
        one.require()


def test_a_heart_beat_that_fails_is_told_once_and_goes_on(come, board, monkeypatch, caplog):
    one, tell, failures = come("f"), board.tell, []

    def fail(key, note):
        failures.append(note)
        raise OSError("the store is away")

    monkeypatch.setattr(board, "tell", fail)
    wait_until(lambda: len(failures) > 3)
    assert caplog.text.count("heart-beat: the store is away") == 1
    monkeypatch.setattr(board, "tell", tell)
    require_beating(one, board)


def test_one_that_leaves_takes_its_note(come, board, tmp_path):
    one = come("f")
    one.__exit__(None, None, None)
    assert list((tmp_path / "versions" / FOLLOWERS).iterdir()) == []
