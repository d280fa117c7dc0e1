"""The file of the rollout buffer: what is written, given out, leased and asked for; against a plain model."""

import sqlite3
import tempfile
import threading
from contextlib import closing, contextmanager
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slime_plugins.rollout_buffer import room, schema
from slime_plugins.rollout_buffer.commits import Commits
from slime_plugins.rollout_buffer.pool import ExperiencePool, Query
from slime_plugins.rollout_buffer.store import BufferFull, LeaseLost, Store, UidTaken

HANGS_S = 300
"""Bounds a hang."""


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def item(uid, group="a", reward=1.0, **own):
    return {"uid": uid, "instance_id": group, "messages": [], "reward": reward, "extra_info": {}, **own}


def uids(groups):
    return {name: [row["uid"] for row in group] for name, group in groups.items()}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with closing(Store(tmp_path / "b.sqlite", clock=clock)) as store:
        store.begin_run("math", 2)
        yield store


def test_a_commit_is_flushed_to_the_disk(store, tmp_path):
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    with closing(sqlite3.connect(tmp_path / "b.sqlite")) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_group_comes_once_it_is_complete_and_what_comes_later_begins_another(store):
    store.add(item("1"), 2)
    assert store.take() == {}
    store.add(item("2"), 2)
    store.add(item("3"), 2)
    assert uids(store.take()) == {"a": ["1", "2", "3"]}
    store.add(item("4"), 2)
    assert store.take() == {}
    assert store.run().waiting == 1


def test_the_same_trajectory_again_counts_once_and_another_one_is_refused(store):
    assert store.add(item("1")).new and not store.add(item("1")).new
    with pytest.raises(UidTaken, match="uid 1: another trajectory"):
        store.add(item("1", reward=0.0))
    assert store.run().waiting == 1
    store.begin_run("math", 2)
    assert store.add(item("1", reward=0.0)).new


def test_an_expired_lease_returns_its_groups_and_an_acknowledged_one_does_not(store, clock):
    for number in range(3):
        store.add(item(str(number), str(number)), 1)
    assert uids(store.take(2, "x", 10)) == {"0": ["0"], "1": ["1"]}
    assert uids(store.take(None, "y", 20)) == {"2": ["2"]}
    assert store.take(None, "z", 10) == {}
    clock.now += 5
    assert list(store.take(5, "x", 10)) == ["0", "1"], "the same name gets the same groups"
    clock.now += 9
    store.acknowledge(["y"])
    store.acknowledge(["y"])
    with pytest.raises(LeaseLost, match="lease y: acknowledged already"):
        store.take(None, "y", 10)
    clock.now += 1
    with pytest.raises(LeaseLost, match="lease x: it ran out"):
        store.acknowledge(["x"])
    assert list(store.take(1, "w", 10)) == ["0"]
    with pytest.raises(LeaseLost, match="lease nobody"):
        store.acknowledge(["w", "nobody"])
    clock.now += 10
    assert list(store.take()) == ["0", "1"], "one lease in vain, and none of them is acknowledged"
    assert store.run().waiting == 0 and store.counts()["acknowledged"] == 3


def test_groups_of_one_instance_are_given_out_one_after_the_other(store, clock):
    store.add(item("1"), 1)
    store.take(None, "x", 10)
    store.add(item("2"), 1)
    clock.now += 10
    assert uids(store.take()) == {"a": ["1"]}
    assert uids(store.take()) == {"a": ["2"]}


def test_a_bound_lets_groups_that_were_begun_be_completed(tmp_path):
    with closing(Store(tmp_path / "b.sqlite", max_waiting=2)) as store:
        store.begin_run("math", 2)
        store.add(item("1", "a"), 2)
        store.add(item("2", "b"), 2)
        with pytest.raises(BufferFull, match="2 trajectories wait"):
            store.add(item("3", "c"), 2)
        assert not store.add(item("1", "a"), 2).new, "one that is here already is no more than here"
        store.add(item("4", "a"), 2)
        with pytest.raises(BufferFull):
            store.add(item("5", "a"), 2)
        store.take(1, "x", 10)
        with pytest.raises(BufferFull):
            store.add(item("3", "c"), 2)
        store.acknowledge(["x"])
        assert store.add(item("3", "c"), 2).new


def test_groups_that_nobody_completes_make_room_for_others_where_no_reader_can(tmp_path, clock, caplog):
    with closing(Store(tmp_path / "b.sqlite", max_waiting=2, clock=clock)) as store:
        store.begin_run("math", 2)
        store.add(item("1", "a"), 2)
        clock.now += room.IDLE_S / 2
        store.add(item("2", "b"), 2)
        clock.now += room.IDLE_S / 2 - 1
        with pytest.raises(BufferFull, match="2 trajectories wait, all of groups that are not complete"):
            store.add(item("3", "c"), 2)
        clock.now += 1
        assert store.add(item("3", "c"), 2).new and "group a is given up" in caplog.text
        assert (store.current().waiting, store.counts()["open"], store.counts()["retired"]) == (2, 2, 1)
        with pytest.raises(BufferFull):
            store.add(item("4", "d"), 2)  # b has had one since
        assert store.add(item("5", "b"), 2).size == 2
        clock.now += 2 * room.IDLE_S
        with pytest.raises(BufferFull, match=r"3 trajectories wait \("):
            store.add(item("4", "d"), 2)  # a reader can make room
        assert uids(store.take()) == {"b": ["2", "5"]} and not store.add(item("1", "a"), 2).new
        assert store.add(item("6", "a"), 2).size == 1 and store.current().waiting == 2


def test_no_group_is_said_to_be_given_up_where_that_makes_no_room(tmp_path, clock, caplog):
    with closing(Store(tmp_path / "b.sqlite", max_waiting=2, clock=clock)) as store:
        store.begin_run("math", 4)
        store.add(item("1", "a"), 4)
        store.add(item("2", "b"), 4)
        clock.now += room.IDLE_S
        store.add(item("3", "b"), 4)
        with pytest.raises(BufferFull):
            store.add(item("4", "c"), 4)  # two of b are left
        assert (store.current().waiting, store.counts()["retired"], caplog.text) == (3, 0, "")
        clock.now += room.IDLE_S
        assert store.add(item("4", "c"), 4).new and caplog.text.count("is given up") == 2


def test_a_start_begins_an_empty_queue_and_ends_leases(store):
    store.add(item("1"), 1)
    store.take(None, "x", 10)
    store.add(item("2", "b"), 1)
    store.begin_run("code", 3, "running")
    assert store.take() == {} and store.run().waiting == 0 and store.run().generator == "running"
    with pytest.raises(LeaseLost):
        store.acknowledge(["x"])
    assert store.counts() == dict.fromkeys(schema.STATES, 0) | {"retired": 2}


def test_old_groups_are_forgotten_but_not_their_uids(tmp_path, clock):
    with closing(Store(tmp_path / "b.sqlite", keep=2)) as store:
        store.begin_run("math", 1)
        for number in range(5):
            store.add(item(str(number), str(number)), 1)
        store.take(4)
        assert store.counts()["acknowledged"] == 2 and store.counts()["forgotten"] == 2
        assert not store.add(item("0", "0"), 1).new
        assert uids(store.take()) == {"4": ["4"]}
        with closing(ExperiencePool(tmp_path / "b.sqlite")) as pool:
            assert [row["item"]["uid"] for row in pool.find(Query())] == ["4", "3"]


def test_an_error_within_a_transaction_undoes_its_part_alone(store):
    with store.transaction():
        store.add(item("1"), 1)
        with pytest.raises(UidTaken), store.transaction():
            store.add(item("2", "b"), 1)
            store.add(item("1", reward=0.0), 1)
    assert list(store.take()) == ["a"]


def test_another_process_sees_what_was_written_and_begins_where_it_ended(store, tmp_path):
    store.add(item("1"), 2)
    with closing(Store(tmp_path / "b.sqlite")) as other:
        other.add(item("2"), 2)
    assert uids(store.take()) == {"a": ["1", "2"]}


def write_foreign(path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE t (x)")


def write_newer(path):
    Store(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 7")


def test_a_file_of_the_version_before_is_read_and_is_of_this_one_then(tmp_path):
    with closing(Store(tmp_path / "b")) as store:
        store.begin_run("math", 1)
        store.add(item("1", "a"), 1)
    with closing(sqlite3.connect(tmp_path / "b")) as other:
        other.execute("ALTER TABLE runs DROP COLUMN owner")
        other.execute("PRAGMA user_version = 1")
    for _ in range(2):
        with closing(Store(tmp_path / "b")) as store:
            assert store.current().owner is None and store.counts()["complete"] == 1
    with closing(sqlite3.connect(tmp_path / "b")) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (2,)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("not a database, " * 100), "file is not a database"),
        (write_foreign, "the file of another program"),
        (write_newer, r"tables are of version 7 \(wanted: at most 2;"),
    ],
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(write, message, tmp_path):
    path = tmp_path / "b.sqlite"
    write(path)
    before = path.read_bytes()
    with pytest.raises(schema.UnknownFile, match=message):
        Store(path)
    assert path.read_bytes() == before


def test_the_pool_is_asked_by_task_reward_age_and_version(store, clock, tmp_path):
    spans = [["4", 2], [None, 1], ["6", 1]]
    store.add(item("1", reward=0.0), 1)
    store.add(item("2", "b", reward=0.5, task_type="code", version_spans=spans), 1)
    store.take()
    clock.now += 100
    store.add(item("3", reward=1.0, version_spans=[["6", 1]]), 1)
    clock.now += 1
    with closing(ExperiencePool(tmp_path / "b.sqlite", clock)) as pool:

        def found(**asked):
            return [row["item"]["uid"] for row in pool.find(Query(**asked))]

        assert found() == ["3", "2", "1"]
        assert found(task_type="math") == ["3", "1"] and found(instance_id="b") == ["2"]
        assert found(min_reward=0.5) == ["3", "2"] and found(max_reward=0.5) == ["2", "1"]
        assert found(max_age_s=1) == ["3"] and found(min_age_s=101) == ["2", "1"]
        assert found(min_version=4) == ["3", "2"] and found(min_version=5) == ["3"]
        assert found(max_version=5) == [] and found(min_version=0, max_version=6) == ["3", "2"]
        assert found(limit=2) == ["3", "2"] and found(before=2, limit=2) == ["1"]
        rows = pool.find(Query())
        assert [row["state"] for row in rows] == ["complete", "acknowledged", "acknowledged"]
        assert rows[1] | {"item": 0} == dict(
            id=2, state="acknowledged", task_type="code", written=1000.0, item=0
        )
        assert rows[1]["item"]["version_spans"] == spans


@contextmanager
def held_up(commits):
    """What is submitted within it is committed together."""
    begun, go_on = threading.Event(), threading.Event()
    commits.submit(lambda: (begun.set(), go_on.wait(HANGS_S)))
    assert begun.wait(HANGS_S)
    yield
    go_on.set()


def test_who_writes_is_told_once_it_is_committed_and_of_its_own_failure_alone(store, tmp_path):
    commits, seen = Commits(store), []
    with closing(ExperiencePool(tmp_path / "b.sqlite")) as pool:
        with held_up(commits):
            futures = [commits.submit(lambda u=uid: store.add(item(*u))) for uid in ("1a", "2a")]
            wrong = commits.submit(lambda: store.add(item("1", "a", 0.0)))
            futures[0].add_done_callback(lambda _: seen.extend(row["id"] for row in pool.find(Query())))
            cancelled = commits.submit(lambda: store.add(item("3")))
            assert cancelled.cancel()
        assert [future.result(HANGS_S).size for future in futures] == [1, 2]
        with pytest.raises(UidTaken):
            wrong.result(HANGS_S)
        commits.close()
        assert seen == [2, 1] and store.current().waiting == 2


def test_all_who_wait_are_told_that_the_file_is_not_written(store):
    commits = Commits(store)
    limit = "PRAGMA max_page_count = {}"  # as a full disk
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(limit.format(pages))
    big = [{"content": "x" * 100_000}]
    futures = [commits.submit(lambda u=uid: store.add(item(u, messages=big))) for uid in "12"]
    for future in futures:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            future.result(HANGS_S)
    commits.submit(lambda: store._connection.execute(limit.format(2**30))).result(HANGS_S)
    assert commits.submit(lambda: store.add(item("1", messages=big))).result(HANGS_S).new
    commits.close()
    assert store.current().waiting == 1


NAMES = st.sampled_from("abc")
MOST = 6


class AgainstAPlainModel(RuleBasedStateMachine):
    """Groups as a list of dicts; the process that holds the file ends between any two steps."""

    @initialize(size=st.integers(1, 3), keep=st.sampled_from([None, 0, 2]))
    def begin(self, size, keep):
        self.folder = tempfile.TemporaryDirectory()
        self.clock, self.size, self.keep = Clock(), size, keep
        self.groups, self.known = [], {}
        self.unflushed = mock.patch.object(schema, "SYNCHRONOUS", "OFF")  # thousands of commits
        self.unflushed.start()
        self._open()
        self.store.begin_run("math", size)

    def _open(self):
        self.store = Store(f"{self.folder.name}/b.sqlite", MOST, self.keep, self.clock)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.unflushed.stop()
            self.folder.cleanup()

    def waiting(self):
        return sum(len(group["uids"]) for group in self.groups if not group["taken"])

    def live(self, group):
        return group["lease"] is not None and group["until"] > self.clock.now

    @rule()
    def restart(self):
        self.store.close()
        self._open()

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(number=st.integers(0, 30), name=NAMES, reward=st.sampled_from([0.0, 1.0]))
    def add(self, number, name, reward):
        uid = str(number)
        wanted = item(uid, name, reward)
        given = [g for g in self.groups if g["name"] == name and not g["closed"]]
        try:
            added = self.store.add(wanted, self.size)
        except UidTaken:
            assert self.known[uid] != wanted
        except BufferFull:
            assert uid not in self.known and self.waiting() >= MOST
            assert not given or len(given[0]["uids"]) >= self.size
        else:
            assert added.new == (uid not in self.known)
            if not added.new:
                assert self.known[uid] == wanted or self.keep is not None
                return
            assert self.waiting() < MOST or len(given[0]["uids"]) < self.size
            self.known[uid] = wanted
            if not given:
                given = [dict(name=name, uids=[], closed=False, taken=False, lease=None, until=0.0)]
                self.groups += given
            given[0]["uids"].append(uid)

    def ready(self, most):
        found = {}
        for group in self.groups:
            complete = len(group["uids"]) >= self.size and not group["taken"] and not self.live(group)
            if complete:
                found.setdefault(group["name"], group)
        return list(found.values())[:most]

    @rule(most=st.sampled_from([None, 1, 2]))
    def take(self, most):
        expected = self.ready(most)
        assert uids(self.store.take(most)) == {g["name"]: g["uids"] for g in expected}
        for group in expected:
            group.update(taken=True, closed=True, lease=None)

    @rule(most=st.sampled_from([None, 1, 2]), lease=st.sampled_from("xyz"), seconds=st.integers(1, 15))
    def lease(self, most, lease, seconds):
        named = [g for g in self.groups if g["lease"] == lease]
        held = [g for g in named if self.live(g) and not g["taken"]]
        try:
            given = self.store.take(most, lease, seconds)
        except LeaseLost:
            assert not held and any(g["taken"] for g in named)
            return
        assert held or not any(g["taken"] for g in named)
        expected = held or self.ready(most)
        assert uids(given) == {g["name"]: g["uids"] for g in expected}
        for group in expected:
            group.update(lease=lease, until=self.clock.now + seconds, closed=True)

    @rule(lease=st.sampled_from("xyz"))
    def acknowledge(self, lease):
        named = [g for g in self.groups if g["lease"] == lease]
        held = [g for g in named if self.live(g) and not g["taken"]]
        try:
            self.store.acknowledge([lease])
        except LeaseLost:
            assert not held and not any(g["taken"] for g in named)
        else:
            assert held or any(g["taken"] for g in named)
            for group in held:
                group["taken"] = True

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def it_counts_what_waits(self):
        assert self.store.run().waiting == self.waiting()


TestAgainstAPlainModel = AgainstAPlainModel.TestCase
TestAgainstAPlainModel.settings = settings(max_examples=50, stateful_step_count=40)
