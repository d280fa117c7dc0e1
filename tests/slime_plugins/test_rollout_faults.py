"""The rollout buffer beside other processes, under code that fails, and with what no answer could hold."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, suppress

import httpx
import numpy
import orjson
import pytest
from fastapi.testclient import TestClient

from slime_plugins.rollout_buffer import answers
from slime_plugins.rollout_buffer import buffer as module
from slime_plugins.rollout_buffer import client as clients
from slime_plugins.rollout_buffer import service as services
from slime_plugins.rollout_buffer.client import BufferClient
from slime_plugins.rollout_buffer.commits import Closed, Commits
from slime_plugins.rollout_buffer.generator import generator_of
from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator
from slime_plugins.rollout_buffer.pool import ExperiencePool, Query
from slime_plugins.rollout_buffer.runs import RUNNING
from slime_plugins.rollout_buffer.service import RolloutBuffer
from slime_plugins.rollout_buffer.store import LeaseLost, Store
from slime_plugins.rollout_buffer.trajectory import Start

HANGS_S = 300
"""Bounds a hang."""
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def item(uid, group="a", **own):
    return {
        **dict(uid=uid, instance_id=group, messages=MESSAGES, reward=1.0, extra_info={}),
        **own,
    }


@pytest.fixture
def file(tmp_path):
    return tmp_path / "b.sqlite"


@pytest.fixture
def client(file):
    buffer = RolloutBuffer(1, file=file)
    yield TestClient(module.create_app(buffer), raise_server_exceptions=False)
    buffer.close()


@pytest.fixture
def math(monkeypatch):
    """The generator of mathematics, which ends when the test does."""
    found, done = generator_of("math"), threading.Event()
    monkeypatch.setattr(found, "run_rollout", lambda data: done.wait(HANGS_S))
    yield found
    done.set()


COUNT = (
    "import sqlite3; c = sqlite3.connect({!r}); print(*c.execute('SELECT COUNT(*) FROM items').fetchone())"
)


def counted_by_another_process(file):
    code = COUNT.format(str(file)) + "; c.close()"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def test_another_process_that_closes_the_file_leaves_the_log_to_those_that_have_it(file):
    """The locks of a process end when it closes any descriptor of the file."""
    with closing(Store(file)) as store, closing(ExperiencePool(file)):
        store.begin_run("math", 1)
        for number in range(1, 4):
            store.add(item(str(number)), 1)
            assert counted_by_another_process(file) == number


@contextmanager
def held_by_another_process(file):
    code = "import fcntl; f = open({!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code.format(f"{file}.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.kill()


def test_a_second_service_on_a_file_is_refused_and_leaves_its_generator_alone(file, capsys):
    with closing(Store(file)) as store:
        store.begin_run("math", 2, RUNNING)
        with held_by_another_process(file):
            with pytest.raises(SystemExit):
                module.main(["--file", str(file)])
            assert store.current().generator == RUNNING
    assert "b.sqlite: another process serves it" in capsys.readouterr().err
    RolloutBuffer(file=file).close()


def test_a_change_that_exits_ends_nothing_else(file):
    with closing(Store(file)) as store:
        store.begin_run("math", 1)
        commits = Commits(store)
        with pytest.raises(RuntimeError, match=r"ended by SystemExit\(3\)"):
            commits.submit(lambda: sys.exit(3)).result(HANGS_S)
        assert commits.submit(lambda: store.add(item("1"))).result(HANGS_S).new
        commits.close()
        with pytest.raises(Closed):
            commits.submit(lambda: store.add(item("2")))


def test_a_lease_of_an_earlier_start_is_lost_whatever_is_kept(file):
    for keep in (None, 0):
        with closing(Store(file, keep=keep)) as store:
            store.begin_run("math", 1)
            store.add(item("1"), 1)
            assert store.take(None, "x", 600)
            store.begin_run("math", 1)
            with pytest.raises(LeaseLost, match="lease x"):
                store.acknowledge(["x"])


def test_what_is_given_out_at_once_is_bounded_and_the_rest_comes_next(file, monkeypatch):
    with closing(Store(file)) as store, closing(ExperiencePool(file)) as pool:
        store.begin_run("math", 1)
        for uid in "12345":
            store.add(item(uid, uid), 1)
        size = len(orjson.dumps(item("1", "1")))
        monkeypatch.setattr(answers, "GROUP_BYTES", 2 * size)
        monkeypatch.setattr(answers, "ROW_BYTES", 2 * size)
        assert list(store.take(None, "x", 600)) == ["1", "2"] == list(store.take(None, "x", 600))
        assert list(store.take()) == ["3", "4"] and list(store.take()) == ["5"]
        assert [row["id"] for row in pool.find(Query())] == [5, 4]
        assert [row["id"] for row in pool.find(Query(before=4))] == [3, 2]
        monkeypatch.setattr(answers, "ROW_BYTES", 1)
        assert [row["id"] for row in pool.find(Query())] == [5]
        monkeypatch.setattr(answers, "GROUP_BYTES", 1)
        store.acknowledge(["x"])
        store.add(item("6"), 1)
        assert list(store.take()) == ["a"]


def test_what_was_taken_comes_out_however_deep_or_large(client):
    taken = 0
    for levels in range(200, 260):
        deep = {}
        for _ in range(levels):
            deep = {"x": deep}
        answer = client.post("/buffer/write", json=item(str(levels), extra_info=deep))
        assert answer.status_code in (200, 422)
        taken += answer.status_code == 200
    assert taken > 40
    for reward, status in ((3e38, 200), (-3e38, 200), (3.4e38, 200), (1.7e308, 422), (3.5e38, 422)):
        answer = client.post("/buffer/write", json=item(f"r{reward}", reward=reward))
        assert answer.status_code == status, reward
    assert len(client.post("/buffer/query", json={"limit": 1000}).json()["data"]["rows"]) == taken + 3
    assert len(client.post("/get_rollout_data").json()["data"]["data"]) == taken + 3


def test_groups_of_which_no_answer_can_be_made_are_not_given(client, math, monkeypatch):
    said = [numpy.float64(0.5), object()]
    monkeypatch.setattr(math, "get_group_data_meta_info", lambda groups: {"x": said.pop()}, raising=False)
    client.post("/start_rollout", json={"task_type": "math", "num_repeat_per_sample": 1})
    client.post("/buffer/write", json=item("1"))
    assert client.post("/get_rollout_data").status_code == 500
    answer = client.post("/get_rollout_data").json()["data"]
    assert answer["meta_info"] == {"x": 0.5} and [row["uid"] for row in answer["data"]] == ["1"]


def test_payloads_with_numbers_as_names_and_names_as_numbers_are_served(client, math, tmp_path):
    """As programs for slime's own buffer send them."""
    assert client.post("/buffer/write", json=item(1, 7)).status_code == 200
    (row,) = client.post("/get_rollout_data", json={}).json()["data"]["data"]
    assert (row["uid"], row["instance_id"]) == ("1", "7")
    start = {"task_type": "math", "num_repeat_per_sample": "2", "num_process": "3"}
    assert client.post("/start_rollout", json=start).json()["success"]
    assert client.post("/start_rollout", json=start | {"num_repeat_per_sample": 2**63}).status_code == 422
    (tmp_path / "empty").touch()
    BaseGenerator(start | {"input_file": tmp_path / "empty", **dict.fromkeys(URLS, "http://x")}).run()


URLS = ("remote_engine_url", "remote_buffer_url")
START = Start(task_type="math", num_repeat_per_sample=1)


def ended(buffer):
    buffer._running.join(HANGS_S)
    assert not buffer._running.is_alive()
    return buffer.status().result(HANGS_S)[0].generator


def test_a_generator_that_exits_is_one_that_failed(file, math, monkeypatch):
    monkeypatch.setattr(math, "run_rollout", lambda data: sys.exit("no prompts"))
    with closing(RolloutBuffer(file=file)) as buffer:
        buffer.start(START)
        assert ended(buffer) == "SystemExit: no prompts"


def test_the_end_of_a_generator_is_written_once_the_file_takes_it(file, math, monkeypatch):
    monkeypatch.setattr(math, "run_rollout", lambda data: None)
    monkeypatch.setattr(services, "NOTE_AGAIN_S", 0.0)
    with closing(RolloutBuffer(file=file)) as buffer:
        note, refusals = buffer._store.set_generator, [1, 2]

        def refused(run, state):
            if refusals:
                refusals.pop()
                raise sqlite3.OperationalError("database or disk is full")
            note(run, state)

        monkeypatch.setattr(buffer._store, "set_generator", refused)
        buffer.start(START)
        assert ended(buffer) == "ended" and not refusals


def test_two_starts_at_the_same_time_are_one(file, math, monkeypatch):
    begun, both = [], threading.Barrier(2)

    def together(task_type):
        with suppress(threading.BrokenBarrierError):  # in vain, if one waits for the other
            both.wait(0.5)
        return generator_of(task_type)

    run = math.run_rollout
    monkeypatch.setattr(math, "run_rollout", lambda data: (begun.append(1), run(data)))
    monkeypatch.setattr(services, "generator_of", together)
    with closing(RolloutBuffer(file=file)) as buffer:
        threads = [threading.Thread(target=buffer.start, args=(START,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert buffer.status().result(HANGS_S)[0].id == 2, "the first run is the empty one of a new file"
        assert len(begun) == 1


def test_a_url_that_is_none_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(clients, "_pause", lambda state: pytest.fail("waits"))
    with pytest.raises(httpx.UnsupportedProtocol):
        BufferClient("localhost:8889").write(item("1"))


def test_each_try_has_what_is_left_of_the_deadline():
    left, replies = (
        [],
        [httpx.Response(503, headers={"Retry-After": "0"}), httpx.Response(200, json={"message": ""})],
    )

    def answer(request):
        left.append(request.extensions["timeout"]["read"])
        return replies.pop(0)

    client = BufferClient("http://x", deadline_s=HANGS_S)
    client._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert client.write(item("1"))
    assert HANGS_S >= left[0] > left[1] > 0


def test_an_answer_that_new_weights_cut_off_is_asked_for_again():
    cut, whole = (
        {"finish_reason": reason, "message": {"content": text}}
        for reason, text in (("abort", "4"), ("stop", "42"))
    )
    choices = [cut, cut, whole]
    generator = BaseGenerator(dict.fromkeys(URLS, "http://x"))
    generator.client = httpx.Client(
        transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"choices": [choices.pop(0)]}))
    )
    assert generator.query(MESSAGES[:1], "a")[1:] == [{"role": "assistant", "content": "42"}]
    assert not choices
