"""The routes of the rollout buffer: tokens, leases, a bound, queries, a new beginning, bad requests."""

import json
import math
import re
import threading

import httpx
import orjson
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_plugins.rollout_buffer import buffer as module
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, create_app
from slime_plugins.rollout_buffer.client import BufferClient
from slime_plugins.rollout_buffer.generator import generator_of
from tests.each import hold_each
from tests.serving import served

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PLAIN = {"uid": "1", "instance_id": "a", "messages": MESSAGES, "reward": 1.0}
OF_TOKENS = PLAIN | {
    **dict(messages=[], tokens=[5, 6, 7, 8], response_length=3, loss_mask=[1, 0, 1]),
    **dict(rollout_log_probs=[-0.1, 0.0, -1e-17], version_spans=[["3", 1], [None, 1], ["4", 1]]),
    **dict(status="truncated", task_type="code", extra_info={"none": None, "text": "\u00e9\n"}),
}


@pytest.fixture
def client(tmp_path):
    buffer = RolloutBuffer(1, file=tmp_path / "b.sqlite", max_waiting=3)
    yield TestClient(create_app(buffer), raise_server_exceptions=False)
    buffer.close()


def asked(client, path, status=200, /, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_what_is_known_of_tokens_comes_out_as_it_went_in(client):
    asked(client, "/buffer/write", **OF_TOKENS)
    asked(client, "/buffer/write", **PLAIN | {"uid": "2"})
    first, second = asked(client, "/get_rollout_data")["data"]["data"]
    assert first == OF_TOKENS
    assert second == PLAIN | {"uid": "2", "extra_info": {}}


def test_a_field_that_nobody_reads_is_refused_by_name(client):
    asked(client, "/buffer/write", **PLAIN)
    for path, body in (
        ("/buffer/write", PLAIN | {"uid": "2", "loss_masks": [1]}),
        ("/get_rollout_data", {"leese": "x"}),
        ("/buffer/acknowledge", {"leases": ["x"], "lease": "x"}),
    ):
        (wrong,) = asked(client, path, 422, **body)["detail"]
        assert wrong["type"] == "extra_forbidden" and wrong["loc"][0] in {"loss_masks", "leese", "lease"}
    (row,) = asked(client, "/get_rollout_data")["data"]["data"]
    assert row["uid"] == PLAIN["uid"]


def test_what_disagrees_about_the_response_is_refused_by_name(client):
    def refused(row):
        own, word = row[1]
        body = {key: value for key, value in (OF_TOKENS | own).items() if value is not Ellipsis}
        answer = asked(client, "/buffer/write", 422, **body)
        assert word in str(answer["detail"]), answer

    rows = {
        "no tokens": (
            {"tokens": ...},
            "response_length, loss_mask, rollout_log_probs, version_spans: without tokens",
        ),
        "nothing": (dict.fromkeys(set(OF_TOKENS) - set(PLAIN), ...), "messages: none, and no tokens"),
        "no length": ({"response_length": ...}, "response_length None of 4 tokens"),
        "too long": ({"response_length": 5}, "response_length 5 of 4 tokens"),
        "mask": ({"loss_mask": [1, 1]}, "loss_mask: of 2 tokens (wanted: response_length 3)"),
        "mask of others": ({"loss_mask": [1, 0, 2]}, "loss_mask"),
        "log-probs": ({"rollout_log_probs": [0.0] * 4}, "rollout_log_probs: of 4 tokens"),
        "versions": ({"version_spans": [["1", 2]]}, "version_spans: of 2 tokens"),
        "negative": ({"tokens": [-1, 2, 3, 4]}, "tokens"),
        "status": ({"status": "odd"}, "status"),
    }
    hold_each(rows.items(), refused, lambda row: row[0])


def test_leases_over_http(client):
    for uid in "12":
        asked(client, "/buffer/write", **PLAIN | {"uid": uid, "instance_id": uid})
    lease = {"lease": "x", "lease_s": 600}
    first = asked(client, "/get_rollout_data", max_groups=1, **lease)
    assert [row["uid"] for row in first["data"]["data"]] == ["1"]
    assert asked(client, "/get_rollout_data", max_groups=1, **lease) == first
    assert asked(client, "/buffer/acknowledge", leases=["x"])["success"]
    assert "lease x: acknowledged already" in asked(client, "/get_rollout_data", 409, **lease)["detail"]
    assert "lease y: it ran out" in asked(client, "/buffer/acknowledge", 409, leases=["y"])["detail"]
    status = client.get("/buffer/status").json()["data"]
    assert status["waiting"] == 1 and status["groups"]["complete"] == status["groups"]["acknowledged"] == 1
    rows = asked(client, "/buffer/query", min_reward=0.5)["data"]["rows"]
    assert [(row["item"]["uid"], row["state"]) for row in rows] == [("2", "complete"), ("1", "acknowledged")]
    assert "extra_forbidden" in str(asked(client, "/buffer/query", 422, min_rewrad=1)["detail"])


def test_another_trajectory_under_a_uid_is_refused(client):
    asked(client, "/buffer/write", **PLAIN)
    assert asked(client, "/buffer/write", **PLAIN)["message"] == "1 is here already"
    answer = asked(client, "/buffer/write", 409, **PLAIN | {"reward": 0})
    assert "uid 1: another trajectory" in answer["detail"]


def test_a_writer_waits_while_too_many_wait_and_gives_up_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0)
    buffer = RolloutBuffer(1, file=tmp_path / "b.sqlite", max_waiting=1)
    with served(create_app(buffer)) as port:
        url = f"http://127.0.0.1:{port}"
        full = threading.Event()
        patient = BufferClient(url, deadline_s=600)
        assert patient.write(PLAIN) and not patient.write(PLAIN)
        refused = httpx.post(f"{url}/buffer/write", json=PLAIN | {"uid": "2"})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "0"
        with pytest.raises(httpx.HTTPError) as given_up:
            BufferClient(url, deadline_s=0.5).write(PLAIN | {"uid": "2"})
        if not isinstance(given_up.value, httpx.TimeoutException):  # the last try, on a busy machine
            assert re.search(r"HTTP 429: .*1 trajectories wait", str(given_up.value))
        results = []
        thread = threading.Thread(
            target=lambda: (full.set(), results.append(patient.write(PLAIN | {"uid": "2"})))
        )
        thread.start()
        full.wait(600)
        assert [row["uid"] for row in patient.fetch()] == ["1"]
        thread.join()
        assert results == [True] and [row["uid"] for row in patient.fetch()] == ["2"]
        assert patient.fetch() == []
    buffer.close()


def test_a_service_that_begins_again_goes_on_and_its_generator_with_what_is_missing(tmp_path, monkeypatch):
    told, done = [], threading.Event()

    def run_rollout(data):
        told.append(data)
        done.wait(600)

    monkeypatch.setattr(generator_of("math"), "run_rollout", run_rollout)
    start = {"task_type": "math", "num_repeat_per_sample": 2, "own": 1}
    first = RolloutBuffer(file=tmp_path / "b.sqlite", api_key="k")
    client = TestClient(create_app(first))
    asked(client, "/start_rollout", **start)
    asked(client, "/buffer/write", **PLAIN)
    first.close()  # and its generator with its process

    second = RolloutBuffer(file=tmp_path / "b.sqlite")
    client = TestClient(create_app(second))
    answer = asked(client, "/get_rollout_data")
    assert answer["data"] == {"failed": True, "stopped": True}
    assert "ended with the service's process" in answer["message"]
    other = start | {"resume": True, "num_repeat_per_sample": 3}
    assert "the queue is of math in groups of 2" in asked(client, "/start_rollout", 400, **other)["detail"]
    asked(client, "/start_rollout", **start, resume=True)
    assert asked(client, "/get_rollout_data")["data"] == {"failed": False, "stopped": False}
    asked(client, "/buffer/write", **PLAIN | {"uid": "2"})
    assert [row["uid"] for row in asked(client, "/get_rollout_data")["data"]["data"]] == ["1", "2"]
    done.set()
    assert [data.pop("own") for data in told] == [1, 1]
    assert told[0]["api_key"] == "k" and told[1]["skip_uids"] == ["1"] and "resume" not in told[1]
    second.close()


def test_a_service_that_begins_again_asks_the_run_what_it_wants_of_programs_elsewhere(tmp_path):
    start = {"task_type": "outside", "num_repeat_per_sample": 2, "remote_engine_url": "http://e"}
    first = RolloutBuffer(file=tmp_path / "b.sqlite")
    client = TestClient(create_app(first))
    asked(client, "/start_rollout", **start)
    asked(client, "/buffer/write", **PLAIN)
    first._running.join()
    assert asked(client, "/get_rollout_data")["data"] == {"failed": False, "stopped": False}
    first.close()

    second = RolloutBuffer(file=tmp_path / "b.sqlite")
    client = TestClient(create_app(second))
    assert asked(client, "/get_rollout_data")["data"] == {"failed": True, "stopped": True}
    asked(client, "/start_rollout", **start, resume=True)
    told = client.get("/buffer/status").json()["data"]
    assert told["asked"]["remote_engine_url"] == "http://e" and told["waiting"] == 1
    second.close()


@pytest.mark.parametrize("at_work", [False, True])
def test_a_run_whose_manager_was_lost_finds_what_was_written_and_another_run_does_not(
    tmp_path, monkeypatch, at_work
):
    """The part of it that starts again knows of no earlier start, and engines have other addresses then."""
    may_end = threading.Event()
    if at_work:
        monkeypatch.setattr(generator_of("outside"), "run_rollout", lambda data: may_end.wait(300))
    service = RolloutBuffer(file=tmp_path / "b.sqlite")
    client, start = TestClient(create_app(service)), {"task_type": "outside", "num_repeat_per_sample": 2}
    asked(client, "/start_rollout", **start, run="one", remote_engine_url="http://e")
    asked(client, "/buffer/write", **PLAIN)
    if not at_work:
        service._running.join()
    asked(client, "/start_rollout", **start, run="one", remote_engine_url="http://f", skip_instance_ids=["x"])
    told = client.get("/buffer/status").json()["data"]
    assert (told["waiting"], told["asked"]["remote_engine_url"]) == (1, "http://f")
    may_end.set()
    service._running.join()
    asked(client, "/start_rollout", **start, run="another", remote_engine_url="http://g")
    assert client.get("/buffer/status").json()["data"]["waiting"] == 0
    service._running.join()
    service.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_manager_that_is_started_again_gets_at_once_what_the_one_before_did_not_acknowledge(
    tmp_path, is_lost
):
    """Also where the service was lost with it; whoever fetches beside the run keeps what it has."""
    start = {"task_type": "outside", "num_repeat_per_sample": 1, "run": "r"}
    service = RolloutBuffer(file=tmp_path / "b.sqlite")
    client = TestClient(create_app(service))
    asked(client, "/start_rollout", **start, holder="one")
    for uid, lease in enumerate(("r.one.1", "r.one.2", "other", "rr.one.1")):
        asked(client, "/buffer/write", **PLAIN | {"uid": f"{uid}", "instance_id": f"{uid}"})
        asked(client, "/get_rollout_data", lease=lease)
    asked(client, "/buffer/acknowledge", leases=["r.one.1"])
    if is_lost:
        service.close()
        service = RolloutBuffer(file=tmp_path / "b.sqlite")
        client = TestClient(create_app(service))
    asked(client, "/start_rollout", **start, holder="two")

    def fetched(lease):
        data = asked(client, "/get_rollout_data", lease=lease)["data"]
        return [row["uid"] for row in data.get("data", [])]

    assert fetched("r.two.1") == ["1"]
    assert "it ran out" in asked(client, "/buffer/acknowledge", 409, leases=["r.one.2"])["detail"]
    asked(client, "/start_rollout", **start, holder="two")
    asked(client, "/start_rollout", **start, holder="two", resume=True)
    assert fetched("r.two.2") == [], "a holder that says again that it starts keeps what it has"
    asked(client, "/buffer/acknowledge", leases=["r.two.1", "other", "rr.one.1"])
    assert client.get("/buffer/status").json()["data"]["waiting"] == 0
    asked(client, "/buffer/write", **PLAIN | {"uid": "9"})
    asked(client, "/start_rollout", 422, **start, holder="a.b")
    asked(client, "/start_rollout", **start | {"run": "s"}, holder="two")
    assert fetched("s.two.1") == [], "another run begins with nothing"
    service.close()


def test_beyond_this_machine_a_key_is_wanted(capsys, tmp_path):
    with pytest.raises(SystemExit):
        module.main(["--host", "0.0.0.0", "--file", str(tmp_path / "b")])
    assert "--host 0.0.0.0: an API key is required beyond loopback" in capsys.readouterr().err
    (tmp_path / "b").write_text("something else " * 100)
    for words, message in (
        (["--file", str(tmp_path / "b")], "is not a database"),
        (["--file", str(tmp_path / "none" / "b")], "No such file or directory"),
        (["--max-waiting", "0"], "--max-waiting 0: wanted at least 1"),
    ):
        with pytest.raises(SystemExit):
            module.main(words)
        assert message in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
PATHS = ("/buffer/write", "/get_rollout_data", "/buffer/acknowledge", "/buffer/query", "/start_rollout")
FIELDS = {
    **OF_TOKENS,
    **dict(lease="x", lease_s=1.0, max_groups=1, leases=["x"], num_repeat_per_sample=1, resume=True),
    **dict(min_reward=0.0, max_age_s=1.0, min_version=1, before=3, limit=5),
}


@st.composite
def bodies(draw):
    """Requests with some fields as they should be, and some as they should not."""
    named = draw(st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON, max_size=3))
    kept = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    return {name: FIELDS[name] for name in kept} | named


def encoded(value):
    """What the standard library makes of it: NaN, numbers of any length, half a surrogate pair."""
    return json.dumps(value).encode()


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), body=bodies().map(encoded) | JSON.map(encoded) | st.binary(max_size=40))
def test_no_request_is_an_error_of_the_service(path, body):
    answer = FUZZED.post(path, content=body)
    assert answer.status_code < 500, (path, body, answer.text)
    orjson.loads(answer.content)


@pytest.fixture(autouse=True, scope="module")
def fuzzed(tmp_path_factory):
    global FUZZED
    buffer = RolloutBuffer(1, file=tmp_path_factory.mktemp("fuzz") / "b.sqlite")
    FUZZED = TestClient(create_app(buffer), raise_server_exceptions=False)
    yield
    buffer.close()


def test_what_no_answer_could_hold_is_not_taken(client):
    for body in (
        encoded(PLAIN | {"extra_info": {"x": math.nan}}),
        encoded(PLAIN | {"messages": [{"content": "\ud800"}]}),
        b'{"uid":' + b"[" * 100_000,
        encoded(PLAIN | {"reward": math.inf}),
        encoded(PLAIN | {"uid": ""}),
        b"",
    ):
        assert client.post("/buffer/write", content=body).status_code == 422, body[:200]
    for body in (b"", b"{}"):
        assert client.post("/get_rollout_data", content=body).json()["message"] == "no group is complete"
